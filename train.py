"""Train a segmentation network: `python train.py key=value ...` or under torchrun; the same as `segpipe train`."""

import sys

from segpipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
