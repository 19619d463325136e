"""Class tables: exact maps, and errors that name file, id and remedy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tables import CAMVID

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import STREET, ClassTable, load_masks, mask_table, missing
from segpipe.data.masks import target_of_ids
from segpipe.errors import DataError
from segpipe.settings.groups import DataConfig

YAML = """
name: warehouse
names: [floor, shelf, person]
palette: [[128, 64, 128], [70, 70, 70], [220, 20, 60]]
ids: {7: floor, 8: floor, 11: shelf, 24: person}
ignore: [0, 255]
"""


def table_file(tmp_path: Path, text: str = YAML) -> Path:
    path = tmp_path / "classes.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("table", [CAMVID, STREET])
def test_tables_are_consistent(table: ClassTable) -> None:
    assert (
        len(set(table.names))
        == len(table.names)
        == len(table.palette)
        == len(set(table.palette))
    )
    assert set(table.train_ids.values()) - {IGNORE_INDEX} == set(
        range(table.num_classes)
    )
    assert table.lut.dtype == np.uint8
    assert table.lut.shape == table.known.shape == (65536,)
    assert {
        raw: int(table.lut[raw]) for raw in np.flatnonzero(table.known)
    } == table.train_ids


def test_camvid_has_eleven_classes_and_void() -> None:
    assert CAMVID.num_classes == 11
    assert CAMVID.names[3] == "road"
    assert CAMVID.train_ids[3] == 3
    assert CAMVID.train_ids[11] == IGNORE_INDEX


def test_target_maps_every_id_exactly(tmp_path: Path) -> None:
    table = load_masks(table_file(tmp_path)).classes
    mask = np.array([[7, 8, 11], [24, 0, 255]], np.uint8)
    assert target_of_ids(table, mask, "x.png").tolist() == [[0, 0, 1], [2, 255, 255]]
    assert (table.name, table.num_classes, table.palette[2]) == (
        "warehouse",
        3,
        (220, 20, 60),
    )


def test_unknown_id_names_file_id_table_and_remedy() -> None:
    mask = np.zeros((4, 5), np.uint8)
    mask[2, 3] = 34
    with pytest.raises(DataError) as caught:
        target_of_ids(CAMVID, mask, "lindau_000003.png")
    for part in (
        "lindau_000003.png",
        "id 34",
        "row 2, column 3",
        "camvid table has 0-11",
        "extend the table",
    ):
        assert part in str(caught.value)


def test_every_unknown_id_is_found(tmp_path: Path) -> None:
    table = load_masks(table_file(tmp_path)).classes
    for raw in range(256):
        mask = np.full((1, 1), raw, np.uint8)
        if table.known[raw]:
            target_of_ids(table, mask, "x.png")
        else:
            with pytest.raises(DataError, match=rf"id {raw} "):
                target_of_ids(table, mask, "x.png")


def test_ids_and_ignore_have_defaults(tmp_path: Path) -> None:
    text = "names: [a, b]\npalette: [[0, 0, 0], [1, 1, 1]]\n"
    table = load_masks(table_file(tmp_path, text)).classes
    assert table.train_ids == {0: 0, 1: 1, 255: 255}
    assert table.name == tmp_path.name


def test_colors_that_are_made_up_can_be_told_apart(tmp_path: Path) -> None:
    """Those of classes 8 and 152 differed by 1."""
    for num, least in ((40, 35), (255, 18)):
        names = [f"c{place}" for place in range(num)]
        table = load_masks(table_file(tmp_path, f"names: [{', '.join(names)}]\n"))
        colors = np.array(table.classes.palette, float)
        apart = np.linalg.norm(colors[:, None] - colors, axis=2)
        assert apart[np.triu_indices(num, 1)].min() > least


def test_names_may_be_numbers(tmp_path: Path) -> None:
    text = "names: [1, 2]\nids: {7: 1, 8: 2}\n"
    table = load_masks(table_file(tmp_path, text)).classes
    assert table.names == ("1", "2")
    assert table.train_ids == {7: 0, 8: 1, 255: 255}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ids:", "idz:", "key = idz is not one of .* Did you mean ids"),
        ("names: [floor, shelf, person]", "names: []", r"names has \[\]"),
        (
            "names: [floor, shelf, person]",
            "names: [floor, shelf, floor]",
            "names has floor twice",
        ),
        ("names: [floor, shelf, person]", 'names: [1, "1"]', "names has 1 twice"),
        (
            "names: [floor, shelf, person]",
            "names: [floor, no, person]",
            "names has False, .* quote it",
        ),
        (
            "names: [floor, shelf, person]",
            "names: [floor, ~, person]",
            "names has None, .* quote it",
        ),
        ("[70, 70, 70], ", "", "palette = 2 colors, but 3"),
        ("[70, 70, 70]", "[70, 70]", r"palette = \[70, 70\]"),
        ("[70, 70, 70]", "[70, 70, 256]", r"palette = "),
        (
            "24: person",
            "24: persn",
            r"ids\[24\]: 'persn' is not one of names. Did you mean person",
        ),
        ("24: person", "70000: person", "has 70000"),
        ("24: person", "24: floor", "no id in ids maps to person"),
        ("ignore: [0, 255]", "ignore: [7]", "id 7 is in both ids and ignore"),
        ("ignore: [0, 255]", "ignore: [-1]", "ignore has -1"),
        ("ignore: [0, 255]", "ignore: [[0]]", r"ignore has \[0\]"),
        ("ignore: [0, 255]", "ignore: 255", "ignore = 255"),
        ("names: [", "names: [[", "cannot be read as YAML"),
    ],
)
def test_a_wrong_table_is_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in YAML
    path = table_file(tmp_path, YAML.replace(old, new))
    with pytest.raises(DataError, match=message) as caught:
        load_masks(path)
    assert str(path) in str(caught.value)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"classes\.yaml does not exist.*data\.classes"):
        mask_table(DataConfig(name="folder", root=str(tmp_path)))
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(DataError, match="has no keys"):
        load_masks(tmp_path / "list.yaml")


def test_a_file_in_place_of_a_folder_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "images.zip").write_bytes(b"")
    for name, state in (("images.zip", "is a file"), ("images", "does not exist")):
        assert missing(tmp_path / name / "train").startswith(
            f"{tmp_path / name} {state}"
        )
