"""Checks that a finished run is what it claims to be: compares its files with each other, and replays parts of it."""
