"""Checks that a finished run is what it claims to be: its files against each other, and replays of parts of it."""
