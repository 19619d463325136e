"""Switches that make torch deterministic, and a gate that finds ops without a deterministic CUDA kernel."""
