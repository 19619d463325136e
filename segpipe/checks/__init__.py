"""What a network, a loss, a data set and a transform must keep, ours and those of the user: one contract each."""
