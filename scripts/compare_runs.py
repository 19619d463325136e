"""`segpipe compare` from a clone: python scripts/compare_runs.py key=value. Exit codes: docs/exit-codes.md."""

import sys

from segpipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
