"""Peers' recipes, written afresh."""
