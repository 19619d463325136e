"""`segpipe predict` from a clone: python scripts/predict.py key=value. Exit codes: docs/exit-codes.md."""

import sys

from segpipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["predict", *sys.argv[1:]]))
