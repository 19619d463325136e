"""A module that is imported in a call alone (`ImportedCurriculum`)."""

calls = 0
