"""What a reader of a run walks through: modules and moves between files, and how often the data is looked at.

A run of 3 updates on 8 images, in one process. A move is a call from one module of segpipe into another. The steady
update is the third, the first that writes no line of the log.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import measure as measuring

RECIPE = (
    "model=fast_scnn", "data=folder", "data.workers=0", "augment.crop_size=[64,64]",
    "train.steps=3", "train.progress=false", "compute.device=cpu", "compute.shards=2",
    "compute.samples_per_shard=2", "compute.threads=1", "export.enabled=false",
    "optim.warmup_steps=0",
)  # fmt: skip
MOST = {"modules": 70, "moves": 700, "scans": 1, "modules_of_an_update": 28}
SMOKE: dict[str, Any] = {}
ROOM = str(measuring.ROOT / "segpipe")


class Walk:
    """Modules that were entered, and calls from one into another, until an update ends."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.moves = 0
        self.updates: list[tuple[set[str], int]] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if not path.startswith(ROOM):
            return
        if event == "return" and frame.f_code.co_name == "train_step":
            self.updates.append((self.modules, self.moves))
            self.modules, self.moves = set(), 0
        if event != "call" or not frame.f_code.co_flags & CO_OPTIMIZED:
            return  # bodies of modules and classes run when they are imported
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(ROOM):
            caller = caller.f_back
        self.modules.add(path)
        self.moves += caller is not None and caller.f_code.co_filename != path


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Modules and moves before the first update, modules of the third, and reads of files before the first."""
    from benchmarks import frames
    from segpipe.cli.main import main

    reads: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        frames.write(root / "set", 8, size=(64, 128), splits=("train", "val"))
        walk = Walk()

        def opened(event: str, arguments: tuple[Any, ...]) -> None:
            if event in ("open", "os.scandir", "os.listdir") and not walk.updates:
                reads.append(f"{event} {arguments[0]}")

        sys.addaudithook(opened)
        settings = (f"data.root={root / 'set'}", f"run.root={root}", "run.name=trace")
        sys.setprofile(walk)
        try:
            code = main(["train", *RECIPE, *settings])
        finally:
            sys.setprofile(None)
        assert code == 0, f"the run ended with {code}"
        kinds = {
            kind: [
                sum(
                    line.endswith(f"{kind}/{path.parent.name}/{path.name}")
                    for line in reads
                )
                for path in sorted((root / "set" / kind).glob("*/*"))
            ]
            for kind in ("images", "masks")
        }
    (modules, moves), _, (steady, _) = walk.updates
    found = {
        "modules": len(modules),
        "moves": moves,
        "scans": sum(
            line.startswith("os.scandir") and line.endswith("masks/train")
            for line in reads
        ),
        "modules_of_an_update": len(steady),
    }
    return {
        "what": __doc__,
        "machine": measuring.machine(),
        **found,
        "opens_of_each_image": max(kinds["images"]),
        "opens_of_each_mask": max(kinds["masks"]),
        "most": MOST,
        "passed": all(found[name] <= most for name, most in MOST.items()),
    }
