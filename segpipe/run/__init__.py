"""From a checked configuration to a finished run: processes, folder, console, report, tracking."""
