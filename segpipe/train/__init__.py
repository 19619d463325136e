"""One update, the loop around it, and what it changes."""
