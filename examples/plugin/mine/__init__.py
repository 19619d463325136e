"""Code of a user: nothing of segpipe is edited."""
