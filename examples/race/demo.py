"""Shows what shared state in an augmentation does to training, and how segpipe finds it: `make race-demo`, under 2 min.

    python examples/race/demo.py [FOLDER]

Trains for a few seconds with the bug and without it. Writes the runs and a picture to FOLDER (runs/race). Exit codes: 0
everything went as described, 1 something did not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import cv2
import numpy as np
import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.race import augment, plain
from segpipe.data.data_set import Samples, SyntheticSamples
from segpipe.errors import ImpureAugmentError
from segpipe.predict.outputs import blend

HERE = Path(__file__).resolve().parent
REFUSED = ImpureAugmentError.exit_code
BUG = (
    "examples/race/augment.py rotates every sample by a random angle. The angle is stored in a module-level object: "
    "one call draws it, the next call uses it. An ordinary trainer, with everything seeded, trains three times:"
)
CHECK = "Before the first step, segpipe checks that every transform is a pure function of sample and key:"
CANARY = (
    "Now without that check. During training, another process of segpipe repeats one sample in {every} (by default one "
    "in 1000; this training is short) and compares it with the network's input:"
)
REPAIR = "Without the bug, each call draws the angle that it uses. The ordinary trainer trains three times:"
FIXED = "And segpipe, with the check and with repeated samples:"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the training runs."""

    num: int = 64  # samples
    size: tuple[int, int] = (96, 192)  # height, width
    crop: tuple[int, int] = (96, 128)
    epochs: int = 2  # of the ordinary trainer
    workers: tuple[int, ...] = (
        2,
        2,
        3,
    )  # of the ordinary trainer's three runs
    steps: int = 12  # of segpipe, 16 samples each
    canary: int = 20


@dataclass(frozen=True)
class Demo:
    """The parts of the demo; each returns whether its result was as expected."""

    console: Console
    start: Callable[
        [list[str]], tuple[int, str]
    ]  # settings of segpipe -> exit code and stderr
    folder: Path
    sizes: Sizes = field(default_factory=Sizes)

    def story(self) -> bool:
        """Whether all parts had the described result."""
        canary = f"augment.canary={self.sizes.canary}"
        self._title("1  An ordinary trainer does not notice", BUG)
        passed = [self._ordinary(augment.racy) > 0]
        self._title("2  segpipe does not start with it", CHECK)
        passed.append(self._segpipe(REFUSED, "refused", "augment.extra=[racy]"))
        self._title("3  The run itself notices", CANARY.format(every=self.sizes.canary))
        passed.append(
            self._segpipe(
                REFUSED, "caught", "augment.extra=[racy]", "augment.check=false", canary
            )
        )
        self._title("4  Without the bug there is no report", REPAIR)
        passed.append(self._ordinary(augment.repaired) == 0)
        self.console.print(FIXED)
        passed.append(self._segpipe(0, "repaired", "augment.extra=[repaired]", canary))
        return all(passed)

    def _title(self, title: str, text: str) -> None:
        self.console.print()
        self.console.print(Panel(text, title=title, title_align="left"))

    def _ordinary(self, change: plain.Augment) -> int:
        """Number of samples that differ between the runs; saves a picture of one."""
        sizes = self.sizes
        samples = SyntheticSamples(0, "train", sizes.num, sizes.size)
        first, *others = [
            plain.train(samples, change, workers=number, epochs=sizes.epochs)
            for number in sizes.workers
        ]
        table = Table(
            "training",
            "workers",
            "errors",
            "last loss",
            "samples that differ from training 1",
        )
        table.add_row("1", str(sizes.workers[0]), "none", f"{first.loss:.6f}", "")
        differing = []
        for number, (workers, run) in enumerate(
            zip(sizes.workers[1:], others, strict=True), 2
        ):
            members = [
                member
                for member in sorted(run.seen)
                if _differ(first.seen[member], run.seen[member])
            ]
            differing += [(number, run, member) for member in members]
            table.add_row(
                str(number),
                str(workers),
                "none",
                f"{run.loss:.6f}",
                f"{len(members)} of {len(run.seen)}",
            )
        self.console.print(table)
        if differing:
            number, run, member = differing[0]
            columns = {
                f"sample {member[1]}": samples.read(member[1]),
                "in training 1": first.seen[member],
                f"in training {number}": run.seen[member],
            }
            self._save(_picture(samples, columns))
        return len(differing)

    def _save(self, picture: augment.Uint8) -> None:
        path = self.folder / "outcomes.png"
        self.folder.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), picture[..., ::-1])
        self.console.print(
            f"One of them, with the same random numbers in each training: {path}",
            soft_wrap=True,
        )

    def _segpipe(self, expected: int, name: str, *changes: str) -> bool:
        """Whether segpipe's training ended with the exit code `expected`."""
        command = f"$ python examples/race/start.py {' '.join(changes)} ..."
        self.console.print(command, style="bold", markup=False, soft_wrap=True)
        code, said = self.start([*self._settings(), f"run.name={name}", *changes])
        text = said if code else "trained to the end"
        self.console.print(
            Text(f"{text}\nexit code {code}", style="red" if code else "green")
        )
        if code != expected:
            self.console.print(
                Text(f"exit code {expected} was expected", style="bold red")
            )
        return code == expected

    def _settings(self) -> list[str]:
        sizes = self.sizes
        size, crop = (
            f"[{height},{width}]" for height, width in (sizes.size, sizes.crop)
        )
        return [
            f"run.root={self.folder}", "run.exists=replace", "data=synthetic", f"data.size={size}",
            f"data.num_train={sizes.num}", "data.num_val=4", f"data.workers={sizes.workers[0]}",
            f"augment.crop_size={crop}", f"train.steps={sizes.steps}", "train.progress=false", "compute.device=cpu",
            "compute.nproc=1", "compute.threads=1", "compute.shards=4", "compute.samples_per_shard=4",
            "export.enabled=false",
        ]  # fmt: skip


def _differ(first: plain.Pair, second: plain.Pair) -> bool:
    return any(not np.array_equal(*parts) for parts in zip(first, second, strict=True))


def _picture(samples: Samples, pairs: dict[str, plain.Pair]) -> augment.Uint8:
    """The pairs side by side: the image, and below it the image blended with its class colors."""
    columns = []
    for caption, (image, target) in pairs.items():
        column = (
            np.vstack([image, blend(image, target, samples.classes.palette)])
            .repeat(2, axis=0)
            .repeat(2, axis=1)
        )
        head = np.full((28, column.shape[1], 3), 255, np.uint8)
        cv2.putText(
            head,
            caption,
            (6, 20),
            cv2.FONT_HERSHEY_SIMPLEX,
            0.55,
            (0, 0, 0),
            1,
            cv2.LINE_AA,
        )
        columns.append(
            np.pad(
                np.vstack([head, column]), ((4, 4), (4, 4), (0, 0)), constant_values=255
            )
        )
    return np.hstack(columns)


def in_a_process(settings: list[str]) -> tuple[int, str]:
    """Exit code and stderr of segpipe, started as from a shell."""
    command = [sys.executable, str(HERE / "start.py"), *settings]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
    return done.returncode, done.stderr.strip()


def main(arguments: list[str]) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=HERE.parents[1] / "runs" / "race",
        help="folder for the runs",
    )
    folder = parser.parse_args(arguments).folder
    console = Console(highlight=False)
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    fine = Demo(console, in_a_process, folder.resolve()).story()
    verdict = (
        "Found at the start and during the run; silent once fixed."
        if fine
        else "Something did not go as described."
    )
    console.print(
        f"\n{verdict} docs/race.md lists what is guaranteed.",
        style="bold green" if fine else "bold red",
    )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
