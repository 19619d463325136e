"""Importers: exports as the tools write them, drawn tiny, and the ids of every pixel that comes out."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from segpipe.cli.commands import IMPORTS
from segpipe.cli.main import main as segpipe
from segpipe.data.catalog import published
from segpipe.data.samples import open_samples
from segpipe.datasets.importers import (
    IMPORTERS,
    coco_counts,
    polygon,
    rectangle,
    runs,
)
from segpipe.datasets.problems import problems
from segpipe.settings.groups import DataConfig

HEIGHT, WIDTH = 6, 9
PICTURE = np.random.Generator(np.random.Philox(7)).integers(
    0, 256, (HEIGHT, WIDTH, 3), np.uint8
)
# A person of 2 x 3 pixels lies on a car of 4 x 6; the rest is background.
CAR, PERSON = (1, 1, 7, 5), (2, 2, 5, 4)  # left, top, right, bottom


def scene(car: int = 1, person: int = 2, background: int = 0) -> np.ndarray:
    target = np.full((HEIGHT, WIDTH), background, np.uint8)
    target[1:5, 1:7], target[2:4, 2:5] = car, person
    return target


def corners(box: tuple[int, int, int, int]) -> list[list[int]]:
    left, top, right, bottom = box
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


def write(path: Path, pixels: np.ndarray | str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(pixels, np.ndarray):
        Image.fromarray(pixels).save(path)
    else:
        path.write_bytes(pixels.encode() if isinstance(pixels, str) else pixels)
    return path


def colored(ids: np.ndarray, colors: dict[int, tuple[int, int, int]]) -> np.ndarray:
    out = np.zeros((*ids.shape, 3), np.uint8)
    for number, color in colors.items():
        out[ids == number] = color
    return out


def voc(root: Path) -> None:
    ids = scene(7, 15)
    ids[0, 0] = 255
    image = Image.fromarray(ids, "P")
    image.putpalette(
        [part for color in published("voc").table.classes.palette for part in color]
        + 705 * [224]
    )
    (root / "VOC2012/SegmentationClass").mkdir(parents=True)
    image.save(root / "VOC2012/SegmentationClass/a.png")
    write(root / "VOC2012/JPEGImages/a.jpg", PICTURE)
    for name in ("train", "trainval"):
        write(root / f"VOC2012/ImageSets/Segmentation/{name}.txt", "a\n")


def voc_of_cvat(root: Path) -> None:
    colors = {0: (0, 0, 0), 1: (10, 20, 30), 2: (200, 0, 0)}
    write(root / "SegmentationClass/a.png", colored(scene(), colors))
    write(root / "JPEGImages/a.png", PICTURE)
    write(root / "ImageSets/Segmentation/default.txt", "a\n")
    write(
        root / "labelmap.txt",
        "# label:color_rgb:parts:actions\nbackground:0,0,0::\ncar:10,20,30::\nperson:200,0,0::\n",
    )


def flat(box: tuple[int, int, int, int]) -> list[int]:
    return [value for point in corners(box) for value in point]


def compressed(area: np.ndarray) -> dict[str, object]:
    """Run lengths by column, as COCO's compressed text; written after maskApi.c."""
    column = area.T.ravel()
    edges = np.flatnonzero(np.diff(np.concatenate(([0], column, [1 - column[-1]]))))
    counts = np.diff(np.concatenate(([0], edges))).tolist()
    text = ""
    for place, count in enumerate(counts):
        number, more = count - (counts[place - 2] if place > 2 else 0), True
        while more:
            bits, number = number & 0x1F, number >> 5
            more = number != (-1 if bits & 0x10 else 0)
            text += chr((bits | (0x20 if more else 0)) + 48)
    return {"size": list(area.shape), "counts": text}


def coco_json(kinds: tuple[str, str]) -> str:
    areas = {
        "car": (scene() > 0).astype(np.uint8),
        "person": (scene() == 2).astype(np.uint8),
    }
    boxes = {"car": CAR, "person": PERSON}
    shapes = []
    for label, kind in zip(("person", "car"), kinds, strict=True):
        column = areas[label].T.ravel()
        edges = [
            *np.flatnonzero(np.diff(np.concatenate(([0], column)))).tolist(),
            column.size,
        ]
        segmentation = {
            "polygon": [flat(boxes[label])],
            "text": compressed(areas[label]),
            "counts": {
                "size": [HEIGHT, WIDTH],
                "counts": np.diff([0, *edges]).tolist(),
            },
        }[kind]
        category = {"car": 3, "person": 9}[label]
        shapes.append(
            {
                "id": 1,
                "image_id": 4,
                "category_id": category,
                "area": 1,  # which tools fill in with that of the box, or leave out
                "segmentation": segmentation,
            }
        )
    categories = [
        {"id": 9, "name": "person"},
        {"id": 3, "name": "car"},
        {"id": 0, "name": "unused"},
    ]
    images = [{"id": 4, "file_name": "a.jpg", "height": HEIGHT, "width": WIDTH}]
    return json.dumps(
        {"images": images, "annotations": shapes, "categories": categories}
    )


def coco_polygons(root: Path) -> None:
    write(
        root / "annotations/instances_val2017.json", coco_json(("polygon", "polygon"))
    )
    write(root / "val2017/a.jpg", PICTURE)


def coco_text(root: Path) -> None:
    write(root / "train/_annotations.coco.json", coco_json(("text", "text")))
    write(root / "train/a.jpg", PICTURE)


def coco_counts_of_a_crowd(root: Path) -> None:
    write(root / "annotations/instances_default.json", coco_json(("polygon", "counts")))
    write(root / "images/default/a.jpg", PICTURE)


def coco_of_all(root: Path) -> None:
    write(root / "annotations/instances_all.json", coco_json(("polygon", "counts")))
    write(root / "images/a.jpg", PICTURE)


def labelme_json(*shapes: dict[str, object]) -> str:
    content = {
        "imagePath": "..\\x\\a.jpg",
        "imageHeight": HEIGHT,
        "imageWidth": WIDTH,
        "shapes": shapes,
    }
    return json.dumps(content)


def labelme(root: Path) -> None:
    part = cv2.imencode(".png", np.full((2, 3), 255, np.uint8))[1].tobytes()
    write(root / "sub/a.jpg", PICTURE)
    write(
        root / "sub/a.json",
        labelme_json(
            {"label": "car", "shape_type": "polygon", "points": corners(CAR)},
            {
                "label": "__ignore__",
                "shape_type": "rectangle",
                "points": [[9, 1], [8, 0]],
            },
            {
                "label": "person",
                "shape_type": "mask",
                "points": [[2, 3], [4, 2]],  # any two opposite corners
                "mask": base64.b64encode(part).decode(),
            },
        ),
    )


def cvat_xml(*shapes: str, size: tuple[int, int] = (HEIGHT, WIDTH)) -> str:
    labels = "".join(
        f"<label><name>{name}</name></label>" for name in ("car", "person", "unused")
    )
    return (
        f"<annotations><meta><task><labels>{labels}</labels></task></meta>"
        f'<image id="0" name="a.jpg" subset="Validation" height="{size[0]}" width="{size[1]}">{"".join(shapes)}</image>'
        "</annotations>"
    )


def cvat(root: Path) -> None:
    points = ";".join(f"{x}.0,{y}.0" for x, y in corners(CAR))
    person = '<mask label="person" rle="0,6" left="2" top="2" width="3" height="2" z_order="1"/>'
    write(
        root / "annotations.xml",
        cvat_xml(
            person, f'<polygon label="car" points="{points}" z_order="0"/>', "<tag/>"
        ),
    )
    write(root / "images/Validation/a.jpg", PICTURE)


VOC = published("voc").table.classes.names
VOC_TARGET = scene(7, 15)
VOC_TARGET[0, 0] = 255
LABELME = scene()
LABELME[0, 8] = 255
THREE = ("background", "car", "person")
# Export: how it is drawn, format, split, name of the image, classes, and the train ids of all pixels.
EXPORTS: dict[
    str, tuple[Callable[[Path], None], str, str, str, tuple[str, ...], np.ndarray]
] = {
    "voc": (voc, "voc", "train", "a", VOC, VOC_TARGET),
    "voc of cvat": (voc_of_cvat, "voc", "", "a", THREE, scene()),
    "coco polygons": (coco_polygons, "coco", "val", "a", THREE, scene()),
    "coco compressed runs": (coco_text, "coco", "train", "a", THREE, scene()),
    "coco runs": (coco_counts_of_a_crowd, "coco", "", "a", THREE, scene()),
    "coco of all images": (coco_of_all, "coco", "", "a", THREE, scene()),
    "coco of roboflow": (coco_text, "roboflow", "train", "a", THREE, scene()),
    "labelme": (labelme, "labelme", "", "sub/a", THREE, LABELME),
    "cvat": (cvat, "cvat", "val", "a", THREE, scene()),
}


def imported(source: Path, out: Path, name: str, *options: str) -> int:
    return segpipe(["import", name, f"source={source}", f"out={out}", *options])


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_becomes_a_data_set(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, kind, split, stem, classes, wanted = EXPORTS[name]
    draw(tmp_path / "source")
    out = tmp_path / "out"
    options = [f"names=[{','.join(VOC)}]"] if name == "voc" else []
    assert imported(tmp_path / "source", out, kind, *options) == 0, capsys.readouterr()
    text = capsys.readouterr().out
    assert (f"segpipe split data.root={out}" in text) == (not split)
    if not split:
        (out / "train.txt").write_text(f"{stem}\n")
    data = DataConfig(name="folder", root=str(out))
    samples = open_samples(data, split or "train", 0)
    assert [samples.name(index) for index in range(len(samples))] == [stem]
    assert samples.classes.names == classes
    image, target = samples.read(0)
    assert np.array_equal(target, wanted)
    assert image.shape == (HEIGHT, WIDTH, 3)
    assert list(problems(data, [split or "train"])) == []


def test_every_format_is_tested_and_declared() -> None:
    assert set(IMPORTS) == set(IMPORTERS) == {kind for _, kind, *_ in EXPORTS.values()}


def test_pixels_outside_may_be_ignored_and_classes_ordered(tmp_path: Path) -> None:
    labelme(tmp_path / "source")
    assert (
        imported(
            tmp_path / "source",
            tmp_path / "a",
            "labelme",
            "background=ignore",
            "names=[person,car]",
        )
        == 0
    )
    (tmp_path / "a/train.txt").write_text("sub/a\n")
    samples = open_samples(
        DataConfig(name="folder", root=str(tmp_path / "a")), "train", 0
    )
    assert samples.classes.names == ("person", "car")
    wanted = scene(1, 0, 255)
    assert np.array_equal(samples.read(0)[1], wanted)


def faulty_labelme(root: Path) -> None:
    labelme(root)
    write(root / "b.png", PICTURE[:4])
    write(root / "b.json", labelme_json().replace("a.jpg", "b.png"))
    write(root / "c.json", labelme_json().replace("a.jpg", "c.png"))
    write(root / "d.png", PICTURE)
    write(
        root / "d.json",
        labelme_json(
            {"label": "car", "shape_type": "point", "points": [[1, 1]]}
        ).replace("a.jpg", "d.png"),
    )
    write(root / "e.json", "{")
    write(root / "f.png", PICTURE)
    circle = {"label": "car", "shape_type": "circle", "points": [[1, 1]]}
    write(root / "f.json", labelme_json(circle).replace("a.jpg", "f.png"))


def test_all_faults_are_told_together_and_nothing_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    faulty_labelme(source)
    assert imported(source, out, "labelme") == 2
    text = capsys.readouterr().out
    for part in (
        "b.png is 4x9, but its labels are for 6x9",
        "c.png has labels, but is not in",
        "d.png: a point of car (1 points) is not supported",
        "e.json cannot be read as JSON",
        "f.png: a circle of car (1 points) is not supported. Draw a polygon.",
        "5 problems",
    ):
        assert part in text
    assert not (out / "classes.yaml").exists()
    for name in "bcef":
        (source / f"{name}.json").unlink()
    (source / "d.json").write_text(labelme_json().replace("a.jpg", "d.png"))
    assert imported(source, out, "labelme") == 0
    faulty_labelme(tmp_path / "again")
    assert (
        imported(tmp_path / "again", tmp_path / "skipped", "labelme", "skip=true") == 0
    )
    masks = (tmp_path / "skipped/masks").rglob("*.png")
    assert [
        path.relative_to(tmp_path / "skipped/masks").as_posix() for path in masks
    ] == ["sub/a.png"]


FAULTY: dict[str, tuple[str, dict[str, str], str]] = {
    "coco boxes": (
        "coco",
        {
            "a.json": coco_json(("polygon", "polygon")).replace(
                '"segmentation"', '"x"'
            ),
            "a.jpg": "",
        },
        "a box without",
    ),
    "coco without images": (
        "coco",
        {"a.json": coco_json(("polygon", "polygon"))},
        "a.jpg has labels, but is not in",
    ),
    "coco with another size": (
        "coco",
        {
            "a.json": coco_json(("counts", "polygon")).replace(
                '"size": [6, 9]', '"size": [9, 6]'
            ),
            "a.jpg": "",
        },
        "an area of person has run lengths for the size [9, 6]",
    ),
    "coco that is none": (
        "coco",
        {"a.json": '{"shapes": []}'},
        "a.json has no 'images', so it does not have this format",
    ),
    "coco with holes": (
        "coco",
        {"a.json": '{"images": [{}], "annotations": [], "categories": []}'},
        "a.json is not complete",
    ),
    "cvat video": (
        "cvat",
        {"annotations.xml": "<annotations><track/></annotations>"},
        "is for a video",
    ),
    "cvat, packed": ("cvat", {"annotations.xml": "PK"}, "and unpack the archive"),
    "cvat rotated box": (
        "cvat",
        {
            "annotations.xml": cvat_xml(
                '<box label="car" xtl="1" ytl="1" xbr="2" ybr="2" rotation="4"/>'
            ),
            "images/a.jpg": "",
        },
        "a rotated box of car is not supported",
    ),
    "cvat line": (
        "cvat",
        {"annotations.xml": cvat_xml('<polyline label="car"/>'), "a.jpg": ""},
        "polyline of car",
    ),
    "roboflow boxes": (
        "roboflow",
        {"train/a.txt": "0 1 1 1 1"},
        "has none of _annotations.coco.json",
    ),
    "voc detection": (
        "voc",
        {"VOC2012/JPEGImages/a.jpg": ""},
        "has no folder SegmentationClass",
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_what_is_no_export_is_refused_with_the_fix(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, files, message = FAULTY[name]
    for file, content in files.items():
        write(tmp_path / "source" / file, content or PICTURE)
    source = tmp_path / "source" / ("a.json" if "a.json" in files else "")
    assert imported(source, tmp_path / "out", kind) == 2
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert not (tmp_path / "out/classes.yaml").exists()


def test_an_interrupted_import_goes_on_and_another_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labelme(tmp_path / "source")
    out = tmp_path / "out"
    assert imported(tmp_path / "source", out, "labelme") == 0
    mask = out / "masks/sub/a.png"
    (out / "classes.yaml").unlink()
    mask.unlink()
    assert imported(tmp_path / "source", out, "labelme") == 0
    assert np.array_equal(cv2.imread(str(mask), cv2.IMREAD_UNCHANGED), LABELME)
    assert imported(tmp_path / "source", out, "labelme", "background=ignore") == 2
    assert "another import, with a different source, names" in capsys.readouterr().err
    assert imported(tmp_path / "source", tmp_path / "source", "labelme") == 2
    assert "is not empty" in capsys.readouterr().err
    assert (out / "images/sub/a.jpg").is_symlink()
    assert (
        imported(tmp_path / "source", tmp_path / "copied", "labelme", "copy=true") == 0
    )
    assert not (tmp_path / "copied/images/sub/a.jpg").is_symlink()


def test_outlines_cover_pixel_centres() -> None:
    size = (HEIGHT, WIDTH)
    assert np.array_equal(polygon(rectangle(*CAR), size), scene() > 0)
    left = polygon([(0, 0), (9, 0), (0, 6)], size)
    right = polygon([(9, 0), (9, 6), (0, 6)], size)
    assert not (left & right).any()
    assert (left | right).all(), "neighbours leave no gap"
    edge = [(3.7, 0), (0.5, 13.5), (2.4, 20)]  # rounds otherwise from its other end
    left = polygon([(0, 0), *edge, (0, 20)], (20, 6))
    right = polygon([(6, 20), *edge[::-1], (6, 0)], (20, 6))
    assert (left ^ right).all()
    assert polygon(rectangle(-5, -5, 50, 50), size).all()
    assert not polygon(rectangle(20, 20, 30, 30), size).any()
    rows, columns = np.indices((40, 40)) + 0.5
    disk = (rows - 20) ** 2 + (columns - 18) ** 2 < 11**2
    turns = np.arange(128) * np.pi / 64
    corners = np.column_stack([18 + 11 * np.cos(turns), 20 + 11 * np.sin(turns)])
    assert (polygon(corners, (40, 40)) != disk).sum() <= 8


def test_of_equal_areas_the_later_is_on_top(tmp_path: Path) -> None:
    content = json.loads(coco_json(("polygon", "polygon")))
    content["annotations"][0]["segmentation"] = [
        flat(CAR)
    ]  # the person's, listed first
    write(tmp_path / "source/annotations/instances_train.json", json.dumps(content))
    write(tmp_path / "source/images/a.jpg", PICTURE)
    assert imported(tmp_path / "source", tmp_path / "out", "coco") == 0
    (mask,) = (tmp_path / "out").glob("masks/**/a.png")
    assert set(np.unique(np.asarray(Image.open(mask)))) == {0, 1}, "no person is seen"


def test_an_area_counts_whole_also_where_a_smaller_one_covers_it(
    tmp_path: Path,
) -> None:
    """A third area, larger than what is seen of the car but smaller than the car, is on top of it."""
    content = json.loads(coco_json(("polygon", "polygon")))
    third = {"id": 3, "image_id": 4, "category_id": 0}
    content["annotations"].append(third | {"segmentation": [flat((1, 1, 6, 5))]})
    write(tmp_path / "source/annotations/instances_train.json", json.dumps(content))
    write(tmp_path / "source/images/a.jpg", PICTURE)
    names = "names=[background,car,person,unused]"
    assert imported(tmp_path / "source", tmp_path / "out", "coco", names) == 0
    (path,) = (tmp_path / "out").glob("masks/**/a.png")
    mask = np.asarray(Image.open(path))
    assert (mask[1, 1], mask[2, 2], mask[1, 6]) == (3, 2, 1)


def test_runs_are_those_of_coco() -> None:
    """The text is what pycocotools 2.0.11 makes of this area."""
    rows = (
        "111000000",
        "010101010",
        "000100000",
        "000000001",
        "001100000",
        "010011011",
    )
    area = np.array([[int(value) for value in row] for row in rows])
    counts = coco_counts("0151N00OO1OO50K02040L000N0")
    assert np.array_equal(runs(counts, (9, 6)).T, area)
    assert compressed(area)["counts"] == "0151N00OO1OO50K02040L000N0"
    large = np.random.Generator(np.random.Philox(2)).random((60, 80)) < 0.01
    counts = coco_counts(str(compressed(large.astype(int))["counts"]))
    assert np.array_equal(runs(counts, (80, 60)).T, large)
    with pytest.raises(ValueError, match="55 pixels, but 6x9"):
        runs([55], (6, 9))


def test_masks_without_a_label_map_need_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    voc(tmp_path / "source")
    assert imported(tmp_path / "source", tmp_path / "out", "voc") == 2
    said = capsys.readouterr().err
    assert "Set names=[...] to the names of the ids" in said
    assert "use data=voc without an import" in said
    assert not (tmp_path / "out").exists()


def test_labels_are_ignored_by_name(tmp_path: Path) -> None:
    voc_of_cvat(tmp_path / "source")
    out = tmp_path / "out"
    assert imported(tmp_path / "source", out, "voc", "ignore=[background]") == 0
    mask = np.asarray(Image.open(out / "masks/a.png"))
    assert np.array_equal(mask, scene(0, 1, 255))
    assert 'names: ["car", "person"]' in (out / "classes.yaml").read_text()
    table = tmp_path / "source/labelmap.txt"
    table.write_text(table.read_text().replace("background", "_background_"))
    for number, ignored in enumerate(
        ("ignore=[_background_]", "ignore=[0,0,0]", "background=ignore")
    ):
        other = tmp_path / f"other{number}"
        assert imported(table.parent, other, "voc", ignored) == 0
        assert np.array_equal(np.asarray(Image.open(other / "masks/a.png")), mask)
    other = tmp_path / "named"
    assert imported(table.parent, other, "voc", "names=[_background_,car,person]") == 0
    whole = np.asarray(Image.open(other / "masks/a.png"))
    assert np.array_equal(whole, scene(1, 2, 0)), "no second background"


def test_an_import_of_ignored_labels_alone_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    voc_of_cvat(tmp_path / "source")
    ignored = ("names=[car]", "ignore=[car,person]", "background=ignore")
    for skipped in ("skip=false", "skip=true"):
        out = tmp_path / skipped
        assert imported(tmp_path / "source", out, "voc", *ignored, skipped) == 2
        assert "all labels are ignored" in capsys.readouterr().out
        assert not (out / "classes.yaml").exists()


@pytest.mark.parametrize("gone", [False, True])
def test_an_import_without_images_does_not_blame_ignored_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gone: bool
) -> None:
    """The image is missing, or the export lists none."""
    said = "a.jpg has labels, but is not in"
    content = json.loads(coco_json(("polygon", "polygon")))
    if not gone:
        content |= {"images": [], "annotations": []}
        said = "no image with labels was found"
    write(tmp_path / "source/annotations/instances_all.json", json.dumps(content))
    assert imported(tmp_path / "source", tmp_path / "out", "coco") == 2
    told = capsys.readouterr().out
    assert said in told
    assert "are ignored" not in told


def test_a_label_that_is_named_and_ignored_is_no_class(tmp_path: Path) -> None:
    """The names of masks of ids are all ids, so that is how to ignore one."""
    voc(tmp_path / "source")
    names = f"names=[{','.join(VOC)}]"
    out = tmp_path / "out"
    ignored = ("ignore=[car]", "background=ignore")
    assert imported(tmp_path / "source", out, "voc", names, *ignored) == 0
    mask = np.asarray(Image.open(next(out.glob("masks/**/a.png"))))
    person = VOC.index("person") - 2
    assert np.array_equal(mask, scene(255, person, 255))
    assert '"background"' not in (out / "classes.yaml").read_text()


def test_labels_are_ignored_by_color(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    voc_of_cvat(tmp_path / "source")
    out = tmp_path / "out"
    assert imported(tmp_path / "source", out, "voc", "ignore=[0,0,0]") == 0
    mask = np.asarray(Image.open(out / "masks/a.png"))
    assert np.array_equal(mask, scene(0, 1, 255))
    assert imported(tmp_path / "source", tmp_path / "no", "voc", "ignore=[1,2,3]") == 2
    assert "ignore = [1, 2, 3] is not the color of a label" in capsys.readouterr().err
    assert imported(tmp_path / "source", tmp_path / "no", "voc", "ignore=[cars]") == 2
    said = capsys.readouterr().err
    assert "ignore = cars, but the labels are background, car, person" in said
    assert "Did you mean car?" in said
    assert not (tmp_path / "no").exists()


def test_an_import_divides_what_has_no_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out of labelme"
    for name in ("a_1", "b_1", "c_1"):
        write(source / f"{name}.png", PICTURE)
        shape = {"label": "car", "shape_type": "polygon", "points": corners(CAR)}
        text = labelme_json(shape).replace("a.jpg", f"{name}.png")
        write(source / f"{name}.json", text)
    assert imported(source, out, "labelme", "val=0.3") == 0
    assert f"segpipe split 'data.root={out}' val=0.3\n" in capsys.readouterr().out
    lists = [(out / f"{split}.txt").read_text().split() for split in ("train", "val")]
    assert [len(names) for names in lists] == [2, 1]
    assert list(problems(DataConfig(name="folder", root=str(out)), ["train"])) == []
    coco_text(tmp_path / "coco")
    assert imported(tmp_path / "coco", tmp_path / "other", "coco", "val=0.3") == 2
    assert "has the splits train. Leave val out." in capsys.readouterr().err
