"""Recipes of other projects, written afresh from their papers and documentation, to be measured beside segpipe."""
