"""`python -m segpipe COMMAND ...`, the same as `segpipe COMMAND ...`."""

import sys

from segpipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
