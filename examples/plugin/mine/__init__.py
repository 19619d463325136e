"""A user's code; segpipe itself is not edited."""
