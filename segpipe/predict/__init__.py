"""Class ids for any images and videos, from a run or an exported folder, written to files that name their model."""
