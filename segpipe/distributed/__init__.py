"""Processes and the messages between them: the only package that reads RANK or calls torch.distributed."""
