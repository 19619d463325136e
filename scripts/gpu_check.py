"""`segpipe gpu-check` from a clone: python scripts/gpu_check.py key=value. Exit codes: docs/exit-codes.md."""

import sys

from segpipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["gpu-check", *sys.argv[1:]]))
