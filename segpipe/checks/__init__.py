"""Contracts that networks, losses, data sets and transforms must keep, ours and the user's."""
