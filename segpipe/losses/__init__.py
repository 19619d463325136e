"""Losses as pure functions, one file per term; total.py has the loss of a shard, which training calls."""
