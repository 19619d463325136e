"""Class ids of any images and videos, from a run or from an exported folder, as files that name their model."""
