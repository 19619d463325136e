"""Which files belong together: layouts of folders, lists, tables of pairs, endings of names."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from segpipe.data.catalog import missing
from segpipe.data.pairs import scan, scan_undivided
from segpipe.data.samples import open_samples
from segpipe.datasets.problems import problems
from segpipe.errors import ConfigError
from segpipe.ledger.inputs import hashes_of, inputs_of
from segpipe.settings.compose import compose
from segpipe.settings.config import check
from segpipe.settings.groups import DataConfig

PICTURE = cv2.imencode(".png", np.zeros((4, 6, 3), np.uint8))[1].tobytes()
MASK = cv2.imencode(".png", np.zeros((4, 6), np.uint8))[1].tobytes()


def make(root: Path, *names: str) -> DataConfig:
    """Files of one picture each, `mask:` before those that are masks; names with other suffixes hold their name."""
    for name in names:
        path = root / name.removeprefix("mask:")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            MASK
            if name.startswith("mask:")
            else PICTURE
            if path.suffix == ".png"
            else name.encode()
        )
    (root / "classes.yaml").write_text("names: [a]\n")
    return DataConfig(name="folder", root=str(root))


def found(data: DataConfig, split: str = "train") -> list[tuple[str, str, str]]:
    """Name, image and mask of each pair, the files relative to the root."""
    pairs, faults, *_ = scan(data, split)
    assert faults == []
    root = Path(data.root)
    return [
        (
            p.name,
            str(Path(p.image).relative_to(root)),
            str(Path(p.mask).relative_to(root)),
        )
        for p in pairs
    ]


LAYOUTS = {
    "folders of splits": (["images/train/a.png", "mask:masks/train/a.png"], "a"),
    "subfolders": (["images/train/x/a.png", "mask:masks/train/x/a.png"], "x/a"),
    "labels": (["images/train/a.png", "mask:labels/train/a.png"], "a"),
    "annotations": (["imgs/train/a.png", "mask:annotations/train/a.png"], "a"),
    "splits first": (["train/images/a.png", "mask:train/masks/a.png"], "a"),
    "splits first, labels": (["train/images/a.png", "mask:train/labels/a.png"], "a"),
    "mask ending": (["images/train/a.png", "mask:masks/train/a_mask.png"], "a"),
    "DeepGlobe": (["images/train/7_sat.png", "mask:masks/train/7_mask.png"], "7_sat"),
    "CamVid's _L": (
        ["images/train/0016E5_1.png", "mask:masks/train/0016E5_1_L.png"],
        "0016E5_1",
    ),
    "Cityscapes": (
        [
            "leftImg8bit/train/bonn/b_1_leftImg8bit.png",
            "mask:gtFine/train/bonn/b_1_gtFine_labelIds.png",
            "gtFine/train/bonn/b_1_gtFine_color.png",
            "mask:gtFine/train/bonn/b_1_gtFine_instanceIds.png",
        ],
        "bonn/b_1_leftImg8bit",
    ),
    "a preview beside the mask": (
        ["images/train/a.png", "mask:masks/train/a.png", "masks/train/a.jpg"],
        "a",
    ),
    "one folder for a split": (["train/a.png", "mask:train/a_mask.png"], "a"),
    "Supervisely": (["images/train/a.jpg", "mask:masks/train/a.jpg.png"], "a"),
    "one folder, by suffix": (["train/a.jpg", "mask:train/a.png"], "a"),
    "hidden files": (
        ["images/train/a.png", "images/train/.x/b.png", "mask:masks/train/a.png"],
        "a",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_found(tmp_path: Path, name: str) -> None:
    files, stem = LAYOUTS[name]
    data = make(tmp_path, *files)
    images = [file for file in files if not file.startswith("mask:")]
    masks = [file.removeprefix("mask:") for file in files if file.startswith("mask:")]
    assert found(data) == [(stem, images[0], masks[0])]
    if images[0].endswith(".jpg"):  # holds no picture here
        return
    assert list(problems(data, ["train"])) == []


def test_one_folder_is_divided_by_lists_and_a_lone_image_is_named(
    tmp_path: Path,
) -> None:
    data = make(tmp_path, "a.png", "mask:a_mask.png", "b.png", "mask:b_mask.png")
    assert "nothing defines split train" in scan(data, "train")[1][0]
    pairs, faults, *_ = scan_undivided(data)
    assert ([pair.name for pair in pairs], faults) == (["a", "b"], [])
    (tmp_path / "train.txt").write_text("a\n")
    assert found(data) == [("a", "a.png", "a_mask.png")]
    make(tmp_path, "c.png")
    (tmp_path / "train.txt").write_text("a\nc\n")
    assert "c.png has no mask" in scan(data, "train")[1][0]


def test_a_table_of_pairs_is_read_and_hashed(tmp_path: Path) -> None:
    data = make(
        tmp_path,
        "photos/b.png",
        "photos/a.png",
        "mask:drawn/one.png",
        "mask:drawn/two.png",
        "mask:train/gt/a.png",
        "mask:train/label/a.png",
    )
    pairs = [
        ("photos/a", "photos/a.png", "drawn/two.png"),
        ("photos/b", "photos/b.png", "drawn/one.png"),
    ]
    tables = (
        "photos/b.png,drawn/one.png\nphotos/a.png,drawn/two.png\n",
        "image,mask\nphotos/b.png,drawn/one.png\n\nphotos/a.png,drawn/two.png\n",
        "\ufeffMask;Note;Image\r\ndrawn/one.png;x;photos/b.png\r\ndrawn/two.png;y;photos/a.png\r\n",
    )
    for text in tables:
        (tmp_path / "train.csv").write_text(text)
        assert found(data) == pairs
    before = hashes_of(inputs_of([open_samples(data, "train", 0)]))
    assert set(before) == {
        "classes.yaml", "train.csv", "photos/a.png", "photos/b.png", "drawn/one.png", "drawn/two.png",
    }  # fmt: skip
    (tmp_path / "train.csv").write_text(
        tables[0].replace("one", "x").replace("two", "one").replace("x.png", "two.png")
    )
    assert (
        hashes_of(inputs_of([open_samples(data, "train", 0)]))["train.csv"]
        != before["train.csv"]
    ), "the same files, paired otherwise"


def test_a_list_holds_stems_or_paths(tmp_path: Path) -> None:
    names = [
        f"{kind}/x/{stem}.png" for stem in "abcd" for kind in ("images", "mask:masks")
    ]
    data = make(tmp_path, *names)
    (tmp_path / "train.txt").write_text(
        "x/a\nx/b.png\nimages/x/c.png\n./images/x/d.png\n"
    )
    assert [name for name, _, _ in found(data)] == ["x/a", "x/b", "x/c", "x/d"]


def test_a_listed_name_may_end_in_a_space(tmp_path: Path) -> None:
    names = [
        f"{kind}/{stem}.png"
        for stem in ("a", "a ")
        for kind in ("images", "mask:masks")
    ]
    data = make(tmp_path, *names)
    for listed in ("a", "a "):
        (tmp_path / "train.txt").write_text(f"{listed}\n")
        assert [name for name, _, _ in found(data)] == [listed]


@pytest.mark.parametrize(
    "listed",
    [
        "Stra\u00dfe/gr\u00fcn",
        "Stra\u00dfe/gru\u0308n",
        "images/Stra\u00dfe/gru\u0308n.png",
    ],
)
def test_two_ways_to_write_an_umlaut_are_one_name(tmp_path: Path, listed: str) -> None:
    data = make(
        tmp_path,
        "images/Stra\u00dfe/gru\u0308n.png",
        "mask:masks/Stra\u00dfe/gr\u00fcn.png",
    )
    (tmp_path / "train.txt").write_text(f"{listed}\n", encoding="utf-8")
    assert [name for name, _, _ in found(data)] == ["Stra\u00dfe/gr\u00fcn"]


def test_settings_name_other_folders(tmp_path: Path) -> None:
    data = make(
        tmp_path,
        "photo/train/a.png",
        "mask:drawn/train/a_v2.png",
        "mask:drawn/train/a_v1.png",
        "mask:masks/train/a.png",
    )
    data.images, data.masks = "photo/SPLIT", "drawn/SPLIT/*_v2.png"
    assert found(data) == [("a", "photo/train/a.png", "drawn/train/a_v2.png")]
    make(tmp_path, "mask:drawn/train/a.jpeg.png")
    data.masks = "drawn/SPLIT/*.jpeg.png"
    assert found(data) == [("a", "photo/train/a.png", "drawn/train/a.jpeg.png")]
    data.images, data.masks = "photo/SPLIT/*.png", "masks/SPLIT/*.png"
    assert found(data) == [("a", "photo/train/a.png", "masks/train/a.png")]
    beside = make(tmp_path / "beside", "train/a.png", "mask:train/a_mask.png")
    beside.images, beside.masks = "train", "train/*_mask"
    assert "nothing defines split train" in scan(beside, "train")[1][0]
    beside.images = ""
    [fault] = scan(beside, "train").faults
    assert fault.startswith(f"{beside.root}/images does not exist.")
    assert "both data.images and data.masks" in fault
    beside.images, beside.masks = "SPLIT", "SPLIT/*_mask"
    assert found(beside) == [("a", "train/a.png", "train/a_mask.png")]
    config = compose(
        [
            f"data.root={tmp_path}",
            "data=folder",
            "data.images=photo/SPLIT",
            "data.masks=x/SPLIT/*_v2.png",
        ]
    )
    assert config.data.masks == "x/SPLIT/*_v2.png"
    check(config, world_size=1)
    with pytest.raises(
        ConfigError, match=r"data\.images is set, but only data sets in files use it"
    ):
        check(compose(["data.images=x"]), world_size=1)


REFUSED = {
    "no split": (
        ["images/a.png", "mask:masks/a.png"],
        ["nothing defines split", "segpipe split data.root="],
    ),
    "no split of drives": (
        ["images/north/a.png", "mask:masks/north/a.png"],
        ["nothing defines split", "`segpipe split data.root="],
    ),
    "other splits": (
        ["images/val/a.png", "mask:masks/val/a.png", "test/a.png"],
        ["images/train does not exist"],
    ),
    "no folder of masks": (["images/train/a.png"], ["/masks does not exist. "]),
    "other splits, each with its two folders": (
        ["valid/images/a.png", "mask:valid/masks/a.png"],
        ["/train does not exist"],
    ),
    "folders of other names": (
        ["photos/a.png", "mask:drawn/a.png"],
        ["images does not exist.", "holds drawn, photos. Set"],
    ),
    "two synonyms in a split": (
        ["train/imgs/a.png", "mask:train/labels/a.png", "mask:train/gt/a.png"],
        ["train has labels and gt, each of which may hold the masks."],
    ),
    "a split of another name": (
        ["images/tain/a.png", "mask:masks/tain/a.png"],
        ["Nearest: ", "images/tain"],
    ),
    "other lists": (
        ["images/a.png", "mask:masks/a.png", "val.txt", "test.csv", "notes.txt"],
        [
            "no train.txt and no train.csv. The lists that exist are test.csv, val.txt: set the split to one of them"
        ],
    ),
    "two synonyms": (
        ["images/train/a.png", "mask:labels/train/a.png", "mask:gt/train/a.png"],
        [
            "labels and gt, each of which may hold the masks. Set both data.images and data.masks, "
            "as FOLDER/SPLIT, SPLIT/FOLDER or FOLDER."
        ],
    ),
    "two endings": (
        [
            "images/train/a.png",
            "mask:masks/train/a_gt.png",
            "mask:masks/train/a_mask.png",
        ],
        [
            "has the masks *_mask and *_gt for the images. Choose with data.masks=FOLDER/SPLIT/*_mask.png"
        ],
    ),
    "two lists": (
        ["images/a.png", "mask:masks/a.png", "train.csv", "train.txt"],
        ["both list split train"],
    ),
    "drawings": (
        ["images/train/a.png", "masks/train/a.json"],
        [
            "has no masks for the 1 images",
            "`segpipe import --help`",
        ],
    ),
    "another ending": (
        ["images/train/a.png", "mask:masks/train/a_v2.png"],
        [
            "no masks for the 1 images: a needs a mask of the same name, but there is a_v2."
        ],
    ),
    "another ending, listed": (
        ["images/a.png", "mask:masks/a_v2.png", "train.txt=a"],
        ["If names of masks have an ending, set data.masks='FOLDER/*ENDING.png'"],
    ),
    "heic": (
        ["images/train/a.heic", "mask:masks/train/a.png"],
        ["a.png has no image"],
    ),
    "row without a file": (
        ["a.png", "train.csv=a.png,b.png"],
        ["train.csv, line 1", "b.png does not exist"],
    ),
    "row without an image": (
        ["mask:b.png", "train.csv=image,mask\n,b.png"],
        ["train.csv, line 2: "],
    ),
    "row with three columns": (
        ["train.csv=a.png,b.png,c"],
        ["line 1: ['a.png', 'b.png', 'c'], but one image and one mask"],
    ),
    "row twice": (
        ["a.png", "mask:b.png", "train.csv=a.png,b.png\na.png,b.png"],
        ["has a 2 times"],
    ),
    "wrong line": (
        ["images/frame1.png", "mask:masks/frame1.png", "train.txt=frame1\nfrme1"],
        ["lists frme1, but no image has this stem."],
    ),
    "another case": (
        ["images/a.PNG", "mask:masks/a.png", "train.txt=images/A.png"],
        ["lists images/A.png, but no image has this stem."],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_paired_is_refused_with_the_fix(
    tmp_path: Path, name: str
) -> None:
    files, parts = REFUSED[name]
    data = make(tmp_path, *(file for file in files if "=" not in file))
    for file in files:
        if "=" in file:
            (tmp_path / file.partition("=")[0]).write_text(file.partition("=")[2])
    faults = scan(data, "train").faults
    for part in parts:
        assert any(part in fault for fault in faults), faults


def test_nothing_is_suggested_for_a_folder_that_is_like_no_other(
    tmp_path: Path,
) -> None:
    for name in ("ext", "images", ".segpipe-cache"):
        (tmp_path / name).mkdir()
    assert missing(tmp_path / "nonexist").startswith(
        f"{tmp_path}/nonexist does not exist. {tmp_path} holds ext, images."
    )
    assert f"Nearest: {tmp_path}/images." in missing(tmp_path / "image")
    assert f"{Path.cwd()} holds " in missing(Path("nonexist"))


def test_names_of_pairs_stay_those_of_the_images(tmp_path: Path) -> None:
    data = make(
        tmp_path,
        *(f"images/train/{n}_img.png" for n in "ba"),
        *(f"mask:masks/train/{n}.png" for n in "ab"),
    )
    samples = open_samples(data, "train", 0)
    assert [samples.name(index) for index in range(2)] == ["a_img", "b_img"]


def test_links_to_folders_are_followed_and_real_folders_come_first(
    tmp_path: Path,
) -> None:
    data = make(
        tmp_path / "set",
        *(f"{kind}/train/z/a.png" for kind in ("images", "mask:masks")),
    )
    make(tmp_path / "disk", "images/b.png", "mask:masks/b.png")
    for kind in ("images", "masks"):
        folder = tmp_path / "set" / kind / "train"
        (folder / "drive").symlink_to(tmp_path / "disk" / kind)
        (folder / "again").symlink_to(folder / "z")
        (folder / "z/loop").symlink_to(folder)
    assert [name for name, _, _ in found(data)] == ["drive/b", "z/a"]
