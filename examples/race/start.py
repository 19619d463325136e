"""train.py with this folder's two transforms registered: `python examples/race/start.py augment.extra=[racy] ...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.race.augment import Racy, Repaired
from segpipe.cli.main import main
from segpipe.data.augment import TRANSFORMS

TRANSFORMS.update(racy=Racy, repaired=Repaired)

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
