"""The record of a run: digests of every step, in files that can be compared row by row."""
