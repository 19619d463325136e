"""Procedural street scenes: scenes.py composes them, the other modules paint."""
