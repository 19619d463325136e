"""The demonstration of `make race-demo` at its smallest: it comes as told, and says so when it does not."""

from __future__ import annotations

import contextlib
import io
import random
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
from rich.console import Console

from examples.race import augment, plain
from examples.race.demo import Demo, Sizes
from impure import Noise
from runs import run
from segpipe.data.augment import TRANSFORMS

SMALL = Sizes(num=16, size=(64, 96), crop=(64, 64), epochs=2, steps=3, canary=2)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.mark.slow
def test_it_comes_as_told(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unnoticed by an ordinary trainer, refused at the start, caught in the run; and quiet once repaired."""
    for name, kind in (("racy", augment.Racy), ("repaired", augment.Repaired)):
        monkeypatch.setitem(TRANSFORMS, name, kind)

    def start(settings: list[str]) -> tuple[int, str]:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = run(tmp_path / "run", "augment.check=true", *settings)
        return code, said.getvalue().strip()

    assert Demo(console, start, tmp_path, SMALL).story()
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert told.count("exit code 8") == 2
    assert told.count("exit code 0") == 1
    assert "racy (Racy), probe '" in told
    assert "augmented again under the same key" in told
    # With the mistake, as many samples differ as it happens: only what is told once repaired is counted.
    assert (
        len(
            re.findall(
                r"\b0 of 32\b", told[told.index("Without the bug there is no report") :]
            )
        )
        == 2
    )
    assert not (tmp_path / "refused").exists()
    assert not (tmp_path / "caught" / "result.json").exists()
    assert (tmp_path / "repaired" / "result.json").exists()
    assert cv2.imread(str(tmp_path / "outcomes.png")).shape == (
        28 + 2 * 2 * 64 + 8,
        3 * (2 * 96 + 8),
        3,
    )


def test_what_does_not_come_as_told_is_said(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a trainer that always sees the same, and a segpipe that lets everything pass."""
    monkeypatch.setattr(plain, "train", lambda *_, **__: plain.Trained())
    assert not Demo(console, lambda settings: (0, ""), tmp_path, SMALL).story()
    assert console.file.getvalue().count("exit code 8 was expected") == 2  # type: ignore[attr-defined]


def test_the_mistake_is_in_the_order_of_calls_alone() -> None:
    """Each call turns by what the one before has drawn; repaired, by what it draws itself."""
    sample = Noise().read(0)

    def angles(change: plain.Augment) -> list[float]:
        """Those of five calls, found again among all that were drawn."""
        drawn = [
            0.0,
            *(
                random.Random(seed).uniform(-augment.LARGEST, augment.LARGEST)
                for seed in range(5)
            ),
        ]
        turned = {
            augment.turned(sample[0], angle, smooth=True).tobytes(): angle
            for angle in drawn
        }
        return [
            drawn.index(turned[change(*sample, random.Random(seed))[0].tobytes()])
            for seed in range(5)
        ]

    augment.AUGMENTOR.angle = 0.0
    assert angles(augment.racy) == [0, 1, 2, 3, 4]
    assert angles(augment.repaired) == [1, 2, 3, 4, 5]
    assert not np.array_equal(augment.repaired(*sample, random.Random(0))[1], sample[1])
