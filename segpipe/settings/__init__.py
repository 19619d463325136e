"""Every setting with its meaning, its default and its check. Imports no torch."""
