"""What a run recorded: digests of every step, in files that compare row by row."""
