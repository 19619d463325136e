"""`segpipe export` from a clone: python scripts/export.py key=value. Exit codes: docs/exit-codes.md."""

import sys

from segpipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
