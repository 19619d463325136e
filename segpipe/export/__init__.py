"""Exports a trained network to files that provably compute what it computes, or to nothing."""
