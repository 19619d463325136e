"""Losses as pure functions: pixelwise.py has the terms, total.py the loss of a shard, which training calls."""
