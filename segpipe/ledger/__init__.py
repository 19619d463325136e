"""Digests of every step on disk: what a run writes, how it is read, where two of them part."""
