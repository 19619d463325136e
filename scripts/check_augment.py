"""`segpipe check-augment` from a clone: python scripts/check_augment.py key=value. Exit codes: docs/exit-codes.md."""

import sys

from segpipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["check-augment", *sys.argv[1:]]))
