"""Switches that make torch deterministic, and the gate that finds ops without a deterministic form on CUDA."""
