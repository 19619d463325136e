"""`segpipe verify` from a clone: python scripts/verify.py key=value. Exit codes: docs/exit-codes.md."""

import sys

from segpipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["verify", *sys.argv[1:]]))
