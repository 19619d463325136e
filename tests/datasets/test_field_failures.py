"""What users of other trainers report as nan, or as masks that learn nothing: the doctor names it, with the fix.

Threads: mmseg 964, 1304, 1601, 1609, 2081, 2245; PaddleSeg 1618, 2298; smp 366.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from runs import write_camvid
from segpipe.cli.main import main as segpipe

TWO = "names: [floor, person]\n"
THREE = "names: [floor, shelf, person]\n"
SIZE = (64, 96)
Mask = Callable[[int], np.ndarray]


def stripes(*values: int) -> Mask:
    mask = np.repeat(np.array(values, np.uint8), 96 // len(values))
    return lambda number: np.tile(mask, (64, 1))


def colored(number: int) -> np.ndarray:
    return np.stack([stripes(0, 128, 192)(number)] * 2 + [stripes(7, 1, 9)(number)], 2)


def transparent(number: int) -> np.ndarray:
    return np.dstack([colored(number), stripes(0, 255, 255)(number)])


def first_ignored(number: int) -> np.ndarray:
    return stripes(0, 1, 2)(number) if number else np.full(SIZE, 255, np.uint8)


def one_binary(number: int) -> np.ndarray:
    return stripes(0, 255)(number) if number == 7 else stripes(0, 1, 2)(number)


def few_pixels(number: int) -> np.ndarray:
    mask = stripes(0, 1)(number)
    mask[0, :4] = 2  # of 6,144
    return mask


def write(
    root: Path, mask: Mask, table: str, *, same: bool = False, number: int = 3
) -> None:
    draws = np.random.Generator(np.random.Philox(0))
    for place in range(number):
        image = draws.integers(0, 256, (*SIZE, 3), np.uint8)
        for split in ("train", "val"):
            for kind in ("images", "masks"):
                (root / kind / split).mkdir(parents=True, exist_ok=True)
            shown = image if same else np.roll(image, len(split), 1)
            cv2.imwrite(str(root / f"images/{split}/f{place}.png"), shown)
            cv2.imwrite(str(root / f"masks/{split}/f{place}.png"), mask(place))
    if table:
        (root / "classes.yaml").write_text(table)


# Masks, class table, exit code, and parts of what is said.
CASES: dict[str, tuple[Mask, str, int, tuple[str, ...]]] = {
    "masks 0 and 255, of which 255 is ignored": (
        stripes(0, 255),
        TWO,
        2,
        (
            "floor is the only class that occurs",
            "`ids: {0: floor, 255: person}` and `ignore: []`",
        ),
    ),
    "masks 0 and 255 without a table": (
        stripes(0, 255),
        "",
        2,
        ("255: class255", "ignore: []"),
    ),
    "0 is background, and ids start at 1 (reduce_zero_label)": (
        stripes(0, 1, 2, 3),
        THREE,
        2,
        (
            "has id 3",
            "`ids: {1: floor, 2: shelf, 3: person}` and `ignore: [0, 255]`",
            "The same in 5 more",
        ),
    ),
    "0 is unlabelled, but not in the table": (
        stripes(0, 1, 2, 3),
        f"{THREE}ids: {{1: floor, 2: shelf, 3: person}}\n",
        2,
        ("has id 0", "If 0 means unlabelled: `ignore: [0, 255]`"),
    ),
    "the ignored id is not 255": (
        stripes(0, 1, 2, 254),
        THREE,
        2,
        ("has id 254", "If 254 means unlabelled: `ignore: [254, 255]`"),
    ),
    "ids beyond the table": (
        stripes(0, 1, 2, 31),
        THREE,
        2,
        ("has id 31", "table has 0-2, 255", "extend the table"),
    ),
    "the last class never occurs": (
        stripes(0, 1),
        THREE,
        0,
        (
            "no image of train has a pixel of person: such classes cannot be learned",
            "no image of val has a pixel of person: such classes have no IoU",
        ),
    ),
    "names alone, and 0 ignored": (
        stripes(0, 1, 2, 3),
        f"{THREE}ignore: [0, 255]\n",
        2,
        ("id 0 is in ignore, but without ids it is that of floor", "ids: {1: floor"),
    ),
    "colors, and the id 0 ignored": (
        colored,
        f"{THREE}palette: [[7, 0, 0], [1, 128, 128], [9, 192, 192]]\nmasks: colors\nignore: [0]\n",
        2,
        ("id 0 is in ignore", "For masks of colors, write the color: [0, 0, 0]"),
    ),
    "a class of few pixels": (
        few_pixels,
        THREE,
        0,
        (
            "less than 0.1% of the labelled pixels of train are person",
            "augment.rare_crop, data.balance",
        ),
    ),
    "masks of colors": (
        colored,
        THREE,
        2,
        ("holds colors, such as (7, 0, 0)", "Set `masks: colors`"),
    ),
    "a color beyond the table": (
        colored,
        f"{THREE}palette: [[7, 0, 0], [1, 128, 128], [0, 0, 0]]\n",
        2,
        ("the color (9, 192, 192)", "The same in 5 more", "1 problem in"),
    ),
    "transparent pixels": (
        transparent,
        f"{THREE}palette: [[7, 0, 0], [1, 128, 128], [9, 192, 192]]\n",
        2,
        ("2048 transparent pixels", "The same in 5 more"),
    ),
    "an image of ignored pixels": (
        first_ignored,
        THREE,
        0,
        (
            "1 of the 3 images of train have no labelled pixel, such as f0",
            "1 of the 3 images of val",
        ),
    ),
}


def said(capsys: pytest.CaptureFixture[str], expected: int, *settings: str) -> str:
    code = segpipe(["doctor", "augment.crop_size=[64,64]", *settings])
    out = capsys.readouterr()
    assert code == expected, out
    return " ".join(f"{out.out} {out.err}".split())


@pytest.mark.parametrize("name", CASES)
def test_the_doctor_names_it_with_the_fix(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mask, table, code, parts = CASES[name]
    write(tmp_path, mask, table)
    text = said(capsys, code, "data=folder", f"data.root={tmp_path}")
    for part in parts:
        assert part in text
    assert text.count("less than 0.1%") <= 1, "of train alone"


def test_a_sound_set_has_none_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control; and the fixes that the doctor proposes are such sets."""
    for place, mask, table in (
        ("three", stripes(0, 1, 2, 255), THREE),
        ("object", stripes(0, 255), f"{TWO}ids: {{0: floor, 255: person}}\nignore: []"),
        (
            "zero",
            stripes(0, 1, 2, 3),
            f"{THREE}ids: {{1: floor, 2: shelf, 3: person}}\nignore: [0, 255]",
        ),
        ("other", stripes(0, 1, 2, 254), f"{THREE}ignore: [254, 255]"),
    ):
        write(tmp_path / place, mask, table)
        text = said(capsys, 0, "data=folder", f"data.root={tmp_path / place}")
        assert "pixel" not in text.replace("% of pixels", "")


def test_the_same_images_in_training_and_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, stripes(0, 1, 2), THREE, same=True)
    text = said(capsys, 2, "data=folder", f"data.root={tmp_path}")
    assert "3 of the images of split val are training images, byte for byte" in text


@pytest.mark.parametrize(
    ("mask", "part"),
    [
        (stripes(*range(32)), "has ids 12, 13, 14"),
        (colored, "For CamVid's 32 colors, set data=camvid32"),
    ],
)
def test_camvid_of_32_classes_is_not_that_of_12(
    mask: Mask, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_camvid(tmp_path, size=SIZE)
    for path in tmp_path.glob("*annot/*.png"):
        cv2.imwrite(str(path), mask(0))
    text = said(capsys, 2, "data=camvid", f"data.root={tmp_path}")
    assert part in text


def test_one_black_and_white_mask_among_others_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, one_binary, THREE, number=20)
    settings = ("data=folder", f"data.root={tmp_path}", "data.workers=0")
    text = said(capsys, 0, *settings)
    assert "1 of the 20 masks of train, such as that of f7, hold one class and" in text
    write(tmp_path, stripes(0, 1, 255), THREE, number=20)  # the control: a car bonnet
    assert "black-and-white" not in said(capsys, 0, *settings)
