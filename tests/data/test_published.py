"""Published data sets: a miniature of each in its own layout, drawn from what its publisher says, read through
`data=NAME`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import pytest
from PIL import Image

from segpipe import IGNORE_INDEX
from segpipe.cli.main import main as segpipe
from segpipe.data.catalog import PUBLISHED, published
from segpipe.data.samples import open_samples
from segpipe.errors import DataError
from segpipe.ledger.inputs import hashes_of, inputs_of
from segpipe.settings.compose import compose
from segpipe.settings.groups import FILE_SETS, DataConfig

SIZE = (6, 8)


class Miniature(NamedTuple):
    """A data set of a few images: pairs of paths by split, how the mask is written, and what its values mean.

    A list of values and class names is what the publisher says of some of them, typed here a second time; None is
    a value that is ignored.
    """

    files: dict[str, Sequence[tuple[str, str]]]
    meaning: dict[int | tuple[int, int, int], str | None]
    num_classes: int
    palette: bool = False  # the mask is a PNG with a palette
    lists: dict[str, str] = {}  # noqa: RUF012
    others: Sequence[
        str
    ] = ()  # masks that do not count: of other kinds, or of other splits


def city(kind: str, split: str, name: str) -> tuple[str, str]:
    return (
        f"leftImg8bit/{split}/{name}_leftImg8bit.png",
        f"{kind}/{split}/{name}_{kind}_labelIds.png",
    )


CITY = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light",
    20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car", 27: "truck",
    28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle", 0: None, 4: None, 9: None, 18: None, 29: None, 30: None,
}  # fmt: skip
TRAIN_IDS = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain",
    "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
)  # fmt: skip
RELLIS = "00000/pylon_camera_node{}/frame000104-1581624663_{}"


def rellis(number: int) -> tuple[str, str]:
    return (
        f"{RELLIS.format('', number)}.jpg",
        f"{RELLIS.format('_label_id', number)}.png",
    )


MINIATURES = {
    "cityscapes": Miniature(
        {
            "train": [city("gtFine", "train", "aachen/aachen_000000_000019")],
            "val": [city("gtFine", "val", "lindau/lindau_000000_000019"), city("gtFine", "val", "munster/munster_1_2")],
        },
        CITY,
        19,
        others=["gtFine/val/lindau/lindau_000000_000019_gtFine_instanceIds.png"],
    ),
    "cityscapes_coarse": Miniature(
        {
            "train": [city("gtCoarse", "train", "aachen/aachen_000000_000019")],
            "val": [city("gtCoarse", "val", "lindau/lindau_000000_000019")],
            "train_extra": [city("gtCoarse", "train_extra", "troisdorf/troisdorf_000000_000073")],
        },
        CITY,
        19,
    ),
    "ade20k": Miniature(
        {
            "train": [("images/training/ADE_train_00000001.jpg", "annotations/training/ADE_train_00000001.png")],
            "val": [("images/validation/ADE_val_00000001.jpg", "annotations/validation/ADE_val_00000001.png")],
        },
        {0: None, 1: "wall", 13: "person", 21: "car", 66: "toilet", 90: "television", 131: "screen", 150: "flag"},
        150,
    ),
    "voc": Miniature(
        {
            "train": [("JPEGImages/2007_000032.jpg", "SegmentationClass/2007_000032.png")],
            "val": [("JPEGImages/2007_000033.jpg", "SegmentationClass/2007_000033.png")],
        },
        {0: "background", 1: "aeroplane", 7: "car", 15: "person", 20: "tvmonitor", 255: None},
        21,
        palette=True,
        lists={f"ImageSets/Segmentation/{split}.txt": f"2007_00003{n}\n" for split, n in (("train", 2), ("val", 3))},
    ),
    "vistas": Miniature(
        {
            "train": [("training/images/a-1.jpg", "training/v1.2/labels/a-1.png")],
            "val": [("validation/images/b-2.jpg", "validation/v1.2/labels/b-2.png")],
        },
        {0: "Bird", 13: "Road", 27: "Sky", 45: "Pole", 48: "Traffic Light", 55: "Car", 64: "Ego Vehicle", 65: None},
        65,
        palette=True,
        others=["training/v2.0/labels/a-1.png"],
    ),
    "bdd100k": Miniature(
        {
            "train": [("images/10k/train/0004a4c0.jpg", "labels/sem_seg/masks/train/0004a4c0.png")],
            "val": [("images/10k/val/7d06fefd.jpg", "labels/sem_seg/masks/val/7d06fefd.png")],
        },
        {**dict(enumerate(TRAIN_IDS)), 255: None},
        19,
        others=["labels/sem_seg/colormaps/train/0004a4c0.png"],
    ),
    "rugd": Miniature(
        {
            split: [
                (f"RUGD_frames-with-annotations/{drive}/{drive}_1.png", f"RUGD_annotations/{drive}/{drive}_1.png")
                for drive in drives
            ]
            for split, drives in {"train": ["trail"], "val": ["park-8", "trail-5"], "test": ["creek"]}.items()
        },
        {(108, 64, 20): "dirt", (0, 102, 0): "grass", (101, 101, 11): "concrete", (0, 0, 0): None,
         (255, 0, 127): "container/generic-object", (114, 85, 47): "picnic-table", (102, 0, 0): "log"},
        24,
    ),
    "rellis3d": Miniature(
        {"train": [rellis(170)], "val": [rellis(180)], "test": [rellis(190)]},
        {0: None, 1: None, 3: "grass", 4: "tree", 6: "water", 9: "object", 15: "log", 17: "person", 19: "bush",
         23: "concrete", 27: "barrier", 31: "puddle", 33: "mud", 34: "rubble", 29: "grass", 30: "grass", 32: "water"},
        18,
        lists={
            f"{split}.lst": "{} {}\n".format(*rellis(n)) for split, n in (("train", 170), ("val", 180), ("test", 190))
        },
    ),
    "coco_stuff": Miniature(
        {
            "train": [("images/train2017/000000000009.jpg", "annotations/train2017/000000000009.png")],
            "val": [("images/val2017/000000000139.jpg", "annotations/val2017/000000000139.png")],
        },
        {0: "person", 10: "fire hydrant", 12: "stop sign", 24: "giraffe", 26: "backpack", 89: "toothbrush",
         91: "banner", 123: "grass", 168: "tree", 181: "wood", 255: None},
        171,
    ),
    "camvid": Miniature(
        {split: [(f"{split}/0001TP_{n}.png", f"{split}annot/0001TP_{n}.png")] for split, n in
         (("train", "006690"), ("val", "006720"), ("test", "006750"))},
        {0: "sky", 3: "road", 4: "pavement", 10: "bicyclist", 11: None},
        11,
    ),
    "camvid32": Miniature(
        {split: [(f"701_StillsRaw_full/{n}.png", f"LabeledApproved_full/{n}_L.png")] for split, n in
         (("train", "0001TP_006690"), ("val", "Seq05VD_f00000"))},
        {(64, 128, 64): "Animal", (128, 64, 128): "Road", (0, 0, 192): "Sidewalk", (64, 192, 0): "Wall",
         (192, 192, 0): "VegetationMisc", (0, 0, 0): None},
        31,
        lists={"train.txt": "0001TP_006690\n", "val.txt": "Seq05VD_f00000\n"},
    ),
}  # fmt: skip


def draw_mask(
    path: Path, meaning: Sequence[int | tuple[int, int, int]], *, palette: bool
) -> None:
    """A mask whose first pixels, row by row, have these values; the others have the first of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flat = [*meaning, *[meaning[0]] * (SIZE[0] * SIZE[1] - len(meaning))]
    image = Image.fromarray(np.array(flat, np.uint8).reshape(*SIZE, -1).squeeze())
    if palette:
        image.putpalette(
            [
                part
                for index in range(256)
                for part in (index, 255 - index, index * 7 % 256)
            ]
        )
    image.save(path)


def draw(root: Path, small: Miniature) -> None:
    """The miniature below `root`."""
    for pairs in small.files.values():
        for image, mask in pairs:
            draw_mask(root / mask, list(small.meaning), palette=small.palette)
            (root / image).parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(root / image), np.full((*SIZE, 3), 90, np.uint8))
    for name, text in small.lists.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for other in small.others:
        draw_mask(root / other, [77], palette=False)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_set_is_read_as_its_publisher_says(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = MINIATURES[name]
    draw(tmp_path, small)
    data = compose([f"data={name}", f"data.root={tmp_path}"]).data
    assert data.name == name
    for split, pairs in small.files.items():
        samples = open_samples(data, split, 0)
        assert len(samples) == len(pairs)
        assert samples.classes.num_classes == small.num_classes
        names = [*samples.classes.names, *[None] * 256]
        image, target = samples.read(0)
        assert image.shape == (*SIZE, 3)
        found = [names[train] for train in target.ravel().tolist()]
        assert found[: len(small.meaning)] == list(small.meaning.values())
        assert target.max() == IGNORE_INDEX
    listed = {
        path
        for path in hashes_of(inputs_of([open_samples(data, "train", 0)]))
        if path.endswith((".txt", ".lst"))
    }
    assert listed == {path for path in small.lists if "train" in path}


def test_every_set_has_a_file_with_its_source() -> None:
    assert sorted(["folder", *PUBLISHED]) == sorted(FILE_SETS)
    assert sorted(PUBLISHED) == sorted(MINIATURES)
    for name in PUBLISHED:
        entry = published(name)
        assert entry.source
        assert entry.page.startswith("http")
        assert len(set(entry.table.classes.names)) == entry.table.classes.num_classes


@pytest.mark.parametrize("value", [11, 182])
def test_an_id_that_never_occurs_is_an_error(tmp_path: Path, value: int) -> None:
    """COCO-Stuff annotates no street signs (11) and has no label 183."""
    small = MINIATURES["coco_stuff"]
    draw(tmp_path, small)
    draw_mask(tmp_path / small.files["val"][0][1], [value], palette=False)
    with pytest.raises(DataError, match=f"000000000139.png has id {value} "):
        open_samples(DataConfig(name="coco_stuff", root=str(tmp_path)), "val", 0).read(
            0
        )


def test_the_doctor_says_where_a_set_comes_from_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert segpipe(["doctor", "data=voc"]) == 0
    text = capsys.readouterr().out
    for part in ("VOCtrainval_11-May-2012.tar", "host.robots.ox.ac.uk", "JPEGImages"):
        assert part in text
    small = MINIATURES["voc"]
    draw(tmp_path, small)
    arguments = ["doctor", "data=voc", f"data.root={tmp_path}"]
    assert segpipe([*arguments, "data.allow_overlap=true"]) == 0
    assert "train has 1 of 1464 images" in capsys.readouterr().out
    (tmp_path / "ImageSets/Segmentation/val.txt").unlink()
    (tmp_path / "SegmentationClass/2007_000032.png").unlink()
    assert segpipe(arguments) == 2
    text = capsys.readouterr().out
    assert "ImageSets/Segmentation/val.txt is missing; it lists" in text
    assert "SegmentationClass has no masks for the 1 images: 2007_000032 needs" in text
    arguments[2] += "/nowhere"
    assert segpipe(arguments) == 2
    assert "nowhere does not exist" in capsys.readouterr().out


def test_a_table_of_your_own_replaces_the_published_one(tmp_path: Path) -> None:
    draw(tmp_path, MINIATURES["bdd100k"])
    ids = {
        **dict.fromkeys((0, 1, 9), "ground"),
        **{number: "rest" for number in range(19) if number not in (0, 1, 9)},
    }
    (tmp_path / "two.yaml").write_text(
        f"names: [ground, rest]\nids: {ids}\nignore: [255]\n".replace("'", "")
    )
    data = DataConfig(
        name="bdd100k", root=str(tmp_path), classes=str(tmp_path / "two.yaml")
    )
    samples = open_samples(data, "train", 0)
    assert samples.classes.names == ("ground", "rest")
    assert samples.read(0)[1].ravel()[:3].tolist() == [0, 0, 1]
    assert any(
        path.endswith("two.yaml")
        for path in hashes_of(inputs_of([open_samples(data, "train", 0)]))
    )


def test_the_coarse_images_of_cityscapes_join_a_mixture(tmp_path: Path) -> None:
    for name in ("cityscapes", "cityscapes_coarse"):
        draw(tmp_path, MINIATURES[name])
    entry = f"{{name: cityscapes_coarse, root: {tmp_path}, split: train_extra}}"
    data = compose(
        ["data=cityscapes", f"data.root={tmp_path}", f"data.mix=[{{}}, {entry}]"]
    ).data
    samples = open_samples(data, "train", 0)
    assert [
        samples.name(index).rpartition("/")[2][:4] for index in range(len(samples))
    ] == ["aach", "troi"]
    assert samples.classes == published("cityscapes").table.classes
