"""Where data comes from: importers of other formats, the doctor's checks, proposals of class tables and splits."""
