"""Preparation of data sets: importers of other formats, the doctor's checks, proposed class tables and splits."""
