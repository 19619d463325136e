"""Processes and what they say to each other: the only room that reads RANK or calls torch.distributed."""
