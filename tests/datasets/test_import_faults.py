"""Importers and labels that they cannot read: the image is left out or its pixels are ignored, and never background."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from segpipe.cli.main import main as segpipe

SIZE = (6, 9)
SQUARE = [[1, 1], [4, 1], [4, 4], [1, 4]]
FLAT = [value for point in SQUARE for value in point]


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*SIZE, 3), 90, np.uint8)).save(path)


def labelme(root: Path, **shapes: list[dict[str, Any]] | None) -> None:
    """Two pictures, a with a good polygon and b with `shapes` too."""
    good = {"label": "car", "points": SQUARE}
    for name, more in {"a": [], **shapes}.items():
        picture(root / f"{name}.png")
        content = {
            "imagePath": f"{name}.png",
            "imageHeight": 6,
            "imageWidth": 9,
            "shapes": [good, *(more or [])],
        }
        (root / f"{name}.json").write_text(json.dumps(content))


def coco(
    root: Path,
    *annotations: dict[str, Any],
    file: str = "annotations/instances_default.json",
) -> Path:
    """Two pictures, a with a good polygon and b with `annotations`."""
    for name in "ab":
        picture(root / f"images/{name}.png")
    images = [
        {"id": place, "file_name": f"{name}.png", "height": 6, "width": 9}
        for place, name in enumerate("ab")
    ]
    good = {"image_id": 0, "category_id": 1, "segmentation": [FLAT]}
    content = {
        "images": images,
        "annotations": [
            good,
            *(
                {"image_id": 1, "category_id": 1, "segmentation": [FLAT]} | a
                for a in annotations
            ),
        ],
        "categories": [{"id": 1, "name": "car"}],
    }
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(json.dumps(content))
    return root / file


def cvat(root: Path, shape: str) -> None:
    """Two pictures, a with a good polygon and b with `shape`."""
    points = ";".join(f"{x},{y}" for x, y in SQUARE)
    images = ""
    for name, inside in (
        ("a", f'<polygon label="car" points="{points}"/>'),
        ("b", shape),
    ):
        picture(root / f"images/{name}.png")
        images += f'<image name="{name}.png" height="6" width="9">{inside}</image>'
    (root / "annotations.xml").write_text(f"<annotations><meta/>{images}</annotations>")


def masks(out: Path) -> list[str]:
    return sorted(path.stem for path in (out / "masks").rglob("*.png"))


def imported(kind: str, source: Path, out: Path, *options: str) -> int:
    return segpipe(["import", kind, f"source={source}", f"out={out}", *options])


LINE = {"label": "lane", "points": SQUARE, "shape_type": "linestrip"}
LEFT_OUT: dict[str, tuple[str, Any, str]] = {
    "labelme line": (
        "labelme",
        lambda root: labelme(root, b=[LINE, LINE]),
        "b.png: a linestrip of lane (4 points) is not supported",
    ),
    "coco box": (
        "coco",
        lambda root: coco(root, {"id": 7, "segmentation": []}),
        "b.png: an area of car is a box without a segmentation",
    ),
    "coco category": (
        "coco",
        lambda root: coco(root, {"id": 7, "category_id": 9}),
        "the category 9, which categories does not list",
    ),
    "cvat line": (
        "cvat",
        lambda root: cvat(root, '<polyline label="lane" points="1,1;2,2"/>'),
        "b.png: a polyline of lane is not supported",
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_an_image_with_a_shape_that_is_not_read_is_left_out(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, draw, message = LEFT_OUT[name]
    draw(tmp_path / "source")
    assert imported(kind, tmp_path / "source", tmp_path / "out") == 2
    assert message in capsys.readouterr().out
    assert imported(kind, tmp_path / "source", tmp_path / "out", "skip=true") == 0
    assert message in capsys.readouterr().out
    assert masks(tmp_path / "out") == ["a"]
    assert "lane" not in (tmp_path / "out/classes.yaml").read_text()


def test_an_image_that_is_left_out_now_loses_its_earlier_mask(tmp_path: Path) -> None:
    labelme(tmp_path / "source", b=[])
    assert imported("labelme", tmp_path / "source", tmp_path / "out") == 0
    labelme(tmp_path / "source", b=[LINE])
    assert imported("labelme", tmp_path / "source", tmp_path / "out", "skip=true") == 0
    assert masks(tmp_path / "out") == ["a"]
    assert not (tmp_path / "out/images/b.png").exists()


def test_labels_that_names_lacks_are_ignored_pixels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labelme(
        tmp_path / "source",
        b=[{"label": "tree", "points": [[6, 0], [9, 0], [9, 6], [6, 6]]}],
    )
    assert (
        imported(
            "labelme", tmp_path / "source", tmp_path / "out", "names=[car]", "skip=true"
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "Add it to names or to ignore; with skip=true, these pixels" in text
    gone = imported("labelme", tmp_path / "source", tmp_path / "bad", "names=[car]")
    assert gone == 2
    assert f"(remove {tmp_path}/bad first if names" in capsys.readouterr().out
    mask = np.asarray(Image.open(tmp_path / "out/masks/b.png"))
    assert (mask[:, 6:] == 255).all()
    assert (mask[1:4, 1:4] == 1).all()


def test_labels_without_an_image_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coco(tmp_path / "coco", {"id": 7, "image_id": 99})
    assert imported("coco", tmp_path / "coco", tmp_path / "out") == 2
    assert (
        "has labels of the image_id 99, which images does not list"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("up", [False, True])
def test_nothing_is_written_beside_an_image_whose_path_leads_outside(
    tmp_path: Path, up: bool
) -> None:
    listing = coco(tmp_path / "source/x", file="a.json")
    photo = tmp_path / "source/photo.png"
    picture(photo)
    content = json.loads(listing.read_text())
    content["images"][1]["file_name"] = "../photo.png" if up else str(photo)
    listing.write_text(json.dumps(content))
    before = photo.read_bytes()
    assert imported("coco", listing, tmp_path / "out") == 0
    assert photo.read_bytes() == before
    assert len(masks(tmp_path / "out")) == 2
    content["images"][1]["height"] = 7
    listing.write_text(json.dumps(content))
    assert imported("coco", listing, tmp_path / "out", "skip=true") == 0
    assert photo.read_bytes() == before


def test_of_two_images_with_one_name_none_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listing = coco(tmp_path / "source", {"id": 7, "image_id": 2})
    content = json.loads(listing.read_text())
    content["images"].append({**content["images"][1], "id": 2, "file_name": "b.jpg"})
    content["annotations"].append(content["annotations"][0] | {"image_id": 1})
    listing.write_text(json.dumps(content))
    picture(tmp_path / "source/images/b.jpg")
    assert imported("coco", listing, tmp_path / "out", "skip=true") == 0
    assert "the set has b 2 times" in capsys.readouterr().out
    assert masks(tmp_path / "out") == ["a"]
    assert not list((tmp_path / "out/images").glob("b.*"))


def square(**changes: Any) -> list[dict[str, Any]]:
    return [{"label": "car", "points": SQUARE} | changes]


def sized(root: Path, **size: Any) -> None:
    labelme(root, b=[])
    (root / "b.json").write_text(
        json.dumps(json.loads((root / "b.json").read_text()) | size)
    )


BROKEN: dict[str, tuple[str, Any, tuple[str, ...], list[str]]] = {
    "coco flat polygon": (
        "coco",
        lambda root: coco(root, {"segmentation": FLAT}),
        ("b.png: an area of car has a segmentation that is not a list of polygons",),
        ["a"],
    ),
    "coco null": (
        "coco",
        lambda root: coco(root, {"segmentation": [[*FLAT[:-1], None]]}),
        ("b.png: an area of car has a corner that is not a finite number",),
        ["a"],
    ),
    "coco runs without size": (
        "coco",
        lambda root: coco(root, {"segmentation": {"counts": "@@@"}}),
        ("b.png: an area of car cannot be read (KeyError('size'))",),
        ["a"],
    ),
    "coco id of text": (
        "coco",
        lambda root: coco(root, {"image_id": "x"}),
        ("instances_default.json is not complete",),
        [],
    ),
    "labelme points of three": (
        "labelme",
        lambda root: labelme(root, b=square(points=[[1, 2, 3], [1, 2, 3]])),
        ("b.json is not complete",),
        ["a"],
    ),
    "labelme without points": (
        "labelme",
        lambda root: labelme(root, b=[{"label": "car"}]),
        ("b.json is not complete (KeyError('points'))",),
        ["a"],
    ),
    "labelme without size": (
        "labelme",
        lambda root: sized(root, imageHeight=None),
        ("b.json is not complete",),
        ["a"],
    ),
    "labelme of no size": (
        "labelme",
        lambda root: sized(root, imageHeight=0),
        ("b.png is 6x9, but its labels are for 0x9",),
        ["a"],
    ),
    "labelme mask": (
        "labelme",
        lambda root: labelme(root, b=square(shape_type="mask", mask="?")),
        ("b.png: an area of car has a mask that is not a PNG",),
        ["a"],
    ),
    "cvat point": (
        "cvat",
        lambda root: cvat(root, '<polygon label="car" points="1,1;2"/>'),
        ("annotations.xml: b.png is not complete",),
        ["a"],
    ),
    "cvat mask": (
        "cvat",
        lambda root: cvat(
            root, '<mask label="car" rle="0,4" left="-1" top="0" width="2" height="2"/>'
        ),
        (
            "b.png: an area of car has a mask of 2x2 at row 0, column -1, outside the image",
        ),
        ["a"],
    ),
    "cvat label": (
        "cvat",
        lambda root: cvat(root, '<polygon points="1,1;2,2;3,1"/>'),
        ("annotations.xml: b.png is not complete (KeyError('label'))",),
        ["a"],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_malformed_file_is_named_and_ends_in_no_traceback(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, draw, parts, left = BROKEN[name]
    draw(tmp_path / "source")
    assert imported(kind, tmp_path / "source", tmp_path / "out", "skip=true") == (
        0 if left else 2
    )
    told = "".join(capsys.readouterr())
    for part in parts:
        assert part in told
    assert masks(tmp_path / "out") == left


def test_skip_is_not_proposed_where_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labelme(tmp_path / "source", a=[LINE])
    for option, wanted in (
        ("false", "or set skip=true"),
        ("true", "no image is left without them"),
    ):
        assert (
            imported("labelme", tmp_path / "source", tmp_path / "out", f"skip={option}")
            == 2
        )
        assert wanted in capsys.readouterr().out


def test_a_file_of_coco_finds_the_images_of_its_own_layout(tmp_path: Path) -> None:
    listing = coco(tmp_path / "source", file="annotations/instances_val2017.json")
    (tmp_path / "source/images").rename(tmp_path / "source/val2017")
    assert imported("coco", listing, tmp_path / "out") == 0
    assert sorted(
        path.relative_to(tmp_path / "out").as_posix()
        for path in (tmp_path / "out").rglob("a.*")
    ) == [
        "images/val/a.png",
        "masks/val/a.png",
    ]


@pytest.mark.parametrize("subset", ["../../x", "/tmp/x", ".."])
def test_nothing_is_written_outside_of_out(
    tmp_path: Path, subset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "deep/er/source"
    cvat(source, "")
    xml = source / "annotations.xml"
    xml.write_text(xml.read_text().replace("<image ", f'<image subset="{subset}" '))
    before = set(tmp_path.rglob("*"))
    assert imported("cvat", source, tmp_path / "deep/er/out", "skip=true") == 2
    assert f"{subset!r} is the name of a split" in "".join(capsys.readouterr())
    new = set(tmp_path.rglob("*")) - before
    assert all(path.is_relative_to(tmp_path / "deep/er/out") for path in new)


def test_a_declared_size_takes_no_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    place = 'left="0" top="0" width="1000000" height="1000000"'
    cvat(source, f'<mask label="car" {place} rle="1000000000000"/>')
    assert imported("cvat", source, tmp_path / "out", "skip=true") == 0
    assert "a mask of 1000000x1000000" in "".join(capsys.readouterr())
    xml = source / "annotations.xml"
    xml.write_text(xml.read_text().replace('height="6"', 'height="1000000"'))
    assert imported("cvat", source, tmp_path / "again", "skip=true") == 2
    assert "is 6x9, but its labels are for 1000000x9" in "".join(capsys.readouterr())


def test_json_that_is_nested_too_deep_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "source" / "a.json"
    path.parent.mkdir()
    path.write_text("[" * 100_000)
    assert imported("labelme", path.parent, tmp_path / "out") == 2
    assert f"{path} cannot be read as JSON" in "".join(capsys.readouterr())
