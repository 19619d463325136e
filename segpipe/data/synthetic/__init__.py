"""Procedural street scenes."""
