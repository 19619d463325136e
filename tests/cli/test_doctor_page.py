"""`segpipe doctor out=PAGE`: each fault that is planted in a data set is on the page, and a sound one shows none."""

from __future__ import annotations

import re
from pathlib import Path

import cv2
import numpy as np
import pytest

from segpipe.cli.main import main as segpipe
from segpipe.data.readers import silent
from segpipe.data.samples import open_samples
from segpipe.datasets.problems import take
from segpipe.settings.groups import DataConfig

SIZE = (96, 128)


def scene(seed: int) -> np.ndarray:
    """A picture of large random blocks, as RGB."""
    small = np.random.Generator(np.random.Philox(seed)).integers(
        0, 256, (12, 16, 3), np.uint8
    )
    return cv2.resize(small, SIZE[::-1], interpolation=cv2.INTER_CUBIC)


def write(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), pixels[..., ::-1] if pixels.ndim == 3 else pixels)


def sound(root: Path) -> Path:
    """Four images for training and two for validation, each of its own drive, of the classes floor and shelf."""
    for split, numbers in (("train", range(4)), ("val", range(4, 6))):
        for number in numbers:
            write(root / f"images/{split}/drive{number}_001.png", scene(number))
            mask = np.zeros(SIZE, np.uint8)
            mask[: 10 * (number + 1)] = 7
            mask[-1] = 255
            write(root / f"masks/{split}/drive{number}_001.png", mask)
    (root / "classes.yaml").write_text(
        "names: [floor, shelf]\npalette: [[200, 0, 0], [0, 200, 0]]\nids: {0: floor, 7: shelf}\nmasks: ids\n"
    )
    return root


def page(root: Path, *changes: str) -> tuple[int, str]:
    out = root / "doctor.html"
    out.unlink(missing_ok=True)
    settings = ("data.workers=0", "augment.crop_size=[64,64]", "compute.threads=1")
    code = segpipe(
        [
            "doctor",
            "data=folder",
            f"data.root={root}",
            f"out={out}",
            *settings,
            *changes,
        ]
    )
    return code, out.read_text() if out.is_file() else ""


def tile(text: str, label: str) -> str:
    """What the head of the page says of something."""
    return re.search(rf"<dt>{label}</dt><dd[^>]*>([^<]*)<", text)[1]  # type: ignore[index]


def test_a_sound_set_shows_no_fault(tmp_path: Path) -> None:
    root = sound(tmp_path)
    assert tile(page(root, 'data.sequence="_(.+)"')[1], "warnings") == "1"
    code, text = page(root)
    assert code == 0
    for label in (
        "problems",
        "warnings",
        "without a label",
    ):
        assert tile(text, label) == "none", label
    assert "A batch as training sees it" in text
    # Image and overlay of samples, of a shard, and of each class.
    assert text.count("data:image/jpeg") == 2 * (4 + 2 + 4 + 2)
    shares = [10 * number * 128 for number in (1, 2, 3, 4)]
    assert (
        f"<td>{100 * sum(shares) / (4 * 95 * 128):.2f}</td><td>4</td>" in text
    )  # shelf, of what is labelled
    assert text.count('class="bar"') == 1 + 2  # narrow screens hide a whole column
    assert "http" not in text.replace("http-equiv", "")
    assert "<script" not in text


def test_proposed_classes_have_a_picture_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the split, since their names are wanted then; the table must be written to be read."""
    for number in range(3):
        mask = np.zeros(SIZE, np.uint8)
        mask[48:] = 7 * (number == 2)
        write(tmp_path / f"images/drive{number}_001.png", scene(number))
        write(tmp_path / f"masks/drive{number}_001.png", mask)
    assert page(tmp_path) == (2, "")
    assert (
        "doctor.html was not written: it needs classes.yaml" in capsys.readouterr().out
    )
    code, text = page(tmp_path, "write=true")
    assert code == 0
    pictures = text.partition("One picture of each class")[2].partition("</section>")[0]
    assert re.findall("<figcaption>(.*?)<", pictures) == ["class0", "class7"]
    assert pictures.count("data:image/jpeg") == 2 * 2


def test_images_that_training_would_refuse_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = sound(tmp_path)
    code, text = page(root, "augment.crop_size=[512,512]")
    refused = "augment.crop_size = [512, 512], but the training images have at most 96x128 pixels (height x width)"
    said = capsys.readouterr().out
    assert code == 0
    assert refused in text
    assert refused in said
    assert tile(text, "problems") == "none"
    assert tile(text, "warnings") == "1"


def test_every_planted_fault_is_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = sound(tmp_path)
    write(root / "masks/train/drive1_001.png", np.full(SIZE, 255, np.uint8))
    darker = cv2.convertScaleAbs(scene(2), alpha=0.8, beta=5)[2:, :-2]
    write(root / "images/val/drive4_001.png", cv2.resize(darker, SIZE[::-1]))
    (root / "images/val/drive5_001.png").write_bytes(
        (root / "images/train/drive3_001.png").read_bytes()
    )
    (root / "images/val/drive5_001.png").rename(root / "images/val/drive0_002.png")
    (root / "masks/val/drive5_001.png").rename(root / "masks/val/drive0_002.png")
    code, text = page(root)
    assert code == 2
    assert "byte for byte" in capsys.readouterr().out
    assert tile(text, "problems") == "1"
    assert tile(text, "warnings") == "2"  # and a mask without a label
    assert "1 sequence in both training and validation: drive0" in text
    assert tile(text, "without a label") == "1"
    assert "drive3_001.png = " in text
    assert ">drive1_001<" in text


def test_a_set_with_broken_files_has_a_page_too(tmp_path: Path) -> None:
    root = sound(tmp_path)
    broken = root / "images/train/drive0_001.png"
    broken.write_bytes(broken.read_bytes()[:-50])
    mask = np.full(SIZE, 255, np.uint8)
    mask[0, :3] = 9
    write(root / "masks/val/drive4_001.png", mask)
    (root / "masks/train/drive2_001.png").unlink()
    code, text = page(root)
    assert code == 2
    assert tile(text, "problems") == "3"
    for part in (
        "drive0_001.png is truncated",
        "drive4_001.png has id 9 (3 pixels",
        "drive2_001.png has no mask",
    ):
        assert part in text
    assert tile(text, "without a label") == "none"  # what id 9 is, nobody knows yet
    assert text.count("no picture: see Problems") == 1  # of the truncated image
    assert "A batch as training sees it" not in text
    for path in root.glob("masks/*/*.png"):
        path.write_bytes(b"")
    code, text = page(root)
    assert code == 2
    assert tile(text, "problems") == "7"  # a mask is missing, and an image is cut


def test_a_mixture_has_a_page(tmp_path: Path) -> None:
    for name in ("a", "b"):
        sound(tmp_path / name)
    entries = ",".join(f"{{root: {tmp_path / name}, weight: 1}}" for name in ("a", "b"))
    out = tmp_path / "page.html"
    settings = (
        "data.workers=0",
        "augment.crop_size=[64,64]",
        "data.allow_overlap=true",
        f"out={out}",
    )
    assert (
        segpipe(
            [
                "doctor",
                "data=folder",
                f"data.root={tmp_path / 'a'}",
                f"data.mix=[{entries}]",
                *settings,
            ]
        )
        == 0
    )
    text = out.read_text()
    assert "train: 8 images" in text
    assert "a/drive0_001" in text


def test_a_census_counts_colors_and_samples_of_any_kind(tmp_path: Path) -> None:
    root = sound(tmp_path)
    (root / "classes.yaml").write_text(
        "names: [floor, shelf]\npalette: [[0, 0, 0], [7, 7, 7]]\nmasks: colors\nignore: [[255, 255, 255]]\n"
    )
    opened = open_samples(DataConfig(name="folder", root=str(root)), "train", 0)
    colors = take("train", opened, silent)
    assert colors.table[:, -1].tolist() == [128] * 4  # white
    assert colors.table[:, 1].tolist() == [10 * number * 128 for number in (1, 2, 3, 4)]
    scenes = open_samples(DataConfig(size=[64, 96], num_train=3), "train", 0)
    painted = take("train", scenes, silent)
    assert painted.table.shape == (3, 11)
    assert painted.table.sum(1).tolist() == [64 * 96] * 3
