"""Mixtures: which sets a split holds, classes that become shared ones, and faults that name the entry."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

from runs import DIGESTS, run
from segpipe.cli.main import main as segpipe
from segpipe.data.catalog import ClassTable, mask_table_of
from segpipe.data.data_set import CachedSamples, DataSet, MixedSamples, SubSet
from segpipe.data.samples import (
    _shared_ids,
    absent_root,
    check_labelled,
    class_pixels,
    image_sizes,
    open_samples,
    parts,
)
from segpipe.datasets.problems import problems
from segpipe.errors import DataError
from segpipe.ledger.inputs import hashes_of, inputs_of
from segpipe.settings.groups import DataConfig

TABLES = {
    "town": "names: [road, person, car]\npalette: [[0, 0, 0], [1, 1, 1], [2, 2, 2]]\n",
    "farm": "names: [man, field, road]\npalette: [[0, 0, 0], [1, 1, 1], [2, 2, 2]]\nids: {5: man, 6: field, 7: road}\n",
}
IDS = {"town": [0, 1, 2, 255], "farm": [5, 6, 7, 255]}
MAP = {"man": "person", "field": "ignore"}


def make(root: Path, name: str, num: int, size: tuple[int, int] = (72, 96)) -> str:
    """Folder of a data set; its first training mask has one pixel of each id, in the corner."""
    (root / name).mkdir(parents=True)
    (root / name / "classes.yaml").write_text(TABLES[name])
    for number in range(num):
        split = "val" if number == num - 1 else "train"
        image = np.random.Generator(np.random.Philox(number)).integers(
            0, 256, (*size, 3), np.uint8
        )
        mask = np.full(size, IDS[name][number % 3], np.uint8)
        mask[0, :4] = IDS[name]
        for kind, pixels in (("images", image), ("masks", mask)):
            (root / name / kind / split).mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(root / name / kind / split / f"f{number}.png"), pixels)
    return str(root / name)


@pytest.fixture
def mixed(tmp_path: Path) -> DataConfig:
    town, farm = make(tmp_path, "town", 6), make(tmp_path, "farm", 4)
    return DataConfig(
        mix=[{"root": town, "weight": 3}, {"root": farm, "weight": 1, "map": MAP}]
    )


def changed(data: DataConfig, **change: Any) -> DataConfig:
    """The same mixture with another second entry."""
    return DataConfig(mix=[data.mix[0], {**data.mix[1], **change}])


def weights(samples: DataSet) -> list[tuple[int, float]]:
    return [(len(part.samples), part.weight) for part in samples.parts()]


def test_training_reads_all_sets_with_the_shared_classes(mixed: DataConfig) -> None:
    samples = open_samples(mixed, "train", 0)
    assert isinstance(samples, MixedSamples)
    assert samples.classes.names == ("road", "person", "car")
    assert [samples.name(index) for index in range(len(samples))] == [
        *(f"town/f{number}" for number in range(5)), *(f"farm/f{number}" for number in range(3)),
    ]  # fmt: skip
    assert samples.read(0)[1][0, :5].tolist() == [0, 1, 2, 255, 0]
    assert samples.read(5)[1][0, :5].tolist() == [1, 255, 0, 255, 1], (
        "man, field, road, unlabelled; the rest man"
    )
    alone = open_samples(parts(mixed, ["train"])[1][0], "train", 0)
    for index in range(3):
        assert np.array_equal(samples.read(5 + index)[0], alone.read(index)[0])
    assert weights(samples) == [(5, 3), (3, 1)]
    assert image_sizes(samples) == {(72, 96): 8}
    assert class_pixels(samples).sum() == sum(
        (samples.read(index)[1] != 255).sum() for index in range(8)
    )
    assert len(CachedSamples(samples, 1)) == 8


def test_validation_reads_the_main_set(mixed: DataConfig) -> None:
    val = open_samples(mixed, "val", 0)
    assert ([val.name(index) for index in range(len(val))], val.classes.name) == (
        ["f5"],
        "town",
    )
    farm = DataConfig(
        name="folder",
        root=mixed.mix[1]["root"],
        mix=[{"root": mixed.mix[0]["root"], "map": {"person": "man", "car": "ignore"}}],
    )
    assert open_samples(farm, "val", 0).classes.names == ("man", "field", "road")
    assert open_samples(farm, "train", 0).read(0)[1][0, :5].tolist() == [
        2,
        0,
        255,
        255,
        2,
    ]


def test_an_entry_without_a_root_is_the_main_set(mixed: DataConfig) -> None:
    ignored = ("lane_mark", "sidewalk", "building", "vegetation", "pole", "sign", "sky")
    names = {
        **dict.fromkeys(ignored, "ignore"),
        "vehicle": "car",
        "pedestrian": "person",
    }
    entries: list[dict[str, Any]] = [{}, {"name": "synthetic", "map": names}]
    samples = open_samples(
        DataConfig(name="folder", root=mixed.mix[0]["root"], mix=entries, num_train=7),
        "train",
        0,
    )
    assert weights(samples) == [(5, 5.0), (7, 7.0)], (
        "without weights, by the number of images"
    )
    assert samples.name(5) == "synthetic/train_000000"


def test_names_of_folders_may_repeat(tmp_path: Path, mixed: DataConfig) -> None:
    other = make(tmp_path / "old", "town", 3)
    samples = open_samples(
        DataConfig(mix=[mixed.mix[0], {"root": other, "weight": 1}]), "train", 0
    )
    assert (samples.name(0), samples.name(5)) == ("town/f0", "town#1/f0")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"map": {}}, ["data.mix[1] (farm) has 2 classes that", "town lacks", "{man: ignore, field: ignore}"]),
        ({"map": {**MAP, "mann": "person"}}, ["data.mix[1].map names the class 'mann'", "Did you mean man?"]),
        ({"map": {**MAP, "man": "persson"}}, ["data.mix[1].map maps man to 'persson'", "Did you mean person?"]),
    ],
)  # fmt: skip
def test_classes_without_a_place_are_refused(
    mixed: DataConfig, change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(DataError) as caught:
        open_samples(changed(mixed, **change), "train", 0)
    assert all(word in str(caught.value) for word in words), caught.value


def table_of(names: list[str]) -> ClassTable:
    return mask_table_of({"names": names}, "shared").classes


def test_a_proposed_map_has_only_names_that_mean_the_same() -> None:
    """It is made to be pasted: a ball is no wall, and grass no glass."""
    shared = ["wall", "glass", "Traffic light", "C++", "lane-1", "lane1"]
    own = ["ball", "grass", "traffic_lights", "c", "lane 1"]
    samples: Any = SimpleNamespace(classes=table_of(own))
    part = SubSet("b", samples, 1.0, "data.mix[1]")
    proposed = r"ball: ignore, grass: ignore, traffic_lights: Traffic light, c: ignore, lane 1: ignore\}"
    with pytest.raises(DataError, match=proposed):
        _shared_ids(part, {}, table_of(shared))


def test_problems_and_hashes_cover_all_sets(mixed: DataConfig) -> None:
    assert list(problems(mixed, ["train", "val"])) == []
    before = hashes_of(
        inputs_of([open_samples(mixed, split, 0) for split in ["train", "val"]])
    )
    assert len(before) == 2 * (6 + 3) + 3
    assert {
        "data.mix[0]/masks/train/f0.png",
        "data.mix[1]/classes.yaml",
        "masks/val/f5.png",
    } <= set(before)
    farm = Path(mixed.mix[1]["root"])
    cv2.imwrite(str(farm / "masks/train/f0.png"), np.full((72, 96), 9, np.uint8))
    assert [text for text in problems(mixed, ["train", "val"]) if "has id 9" in text]
    after = hashes_of(
        inputs_of([open_samples(mixed, split, 0) for split in ["train", "val"]])
    )
    assert [name for name in before if before[name] != after[name]] == [
        "data.mix[1]/masks/train/f0.png"
    ]
    assert absent_root(mixed) == ""
    farm.rename(farm.with_name("gone"))
    assert absent_root(mixed) == str(farm)


def test_doctor_shows_each_set(
    mixed: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert segpipe(["doctor", on_the_command_line(mixed.mix)]) == 0
    text = capsys.readouterr().out
    for part in (
        "train: town: 5 images",
        "train: farm: 3 images",
        "val: 1 images",
        "classes of town",
    ):
        assert part in text


def test_a_set_without_a_label_is_refused(mixed: DataConfig) -> None:
    check_labelled(open_samples(mixed, "train", 0))
    for path in Path(mixed.mix[1]["root"]).glob("masks/train/*.png"):
        cv2.imwrite(
            str(path), np.full((72, 96), 6, np.uint8)
        )  # field, which the map ignores
    with pytest.raises(
        DataError,
        match=r"none of the 3 training images has a labelled pixel \(the first is farm/f0\)",
    ):
        check_labelled(open_samples(mixed, "train", 0))


def results(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "result.json").read_text())
    return {name: content[name] for name in DIGESTS}


def on_the_command_line(entries: list[dict[str, Any]]) -> str:
    """Hydra takes no quotes around keys."""
    return f"data.mix={json.dumps(entries)}".replace('"', "")


def test_a_balanced_mixture_trains_the_same_in_any_layout(
    tmp_path: Path, mixed: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resumed after step 1 with another number of workers; masks are counted again, and an edited one is refused."""
    settings = (
        on_the_command_line(mixed.mix), "data.balance=1", "augment.rare_crop=0.5", "loss.class_weights=sqrt",
        "compute.shards=1", "checkpoint.keep_every=1", "train.steps=2", "augment.crop_size=[64,64]",
    )  # fmt: skip
    folder = tmp_path / "run"
    assert run(folder, *settings) == 0
    whole = results(folder)
    for name in ("last.pt", "best.pt", "step_000002.pt", "result.json"):
        (folder / name).unlink(missing_ok=True)
    assert run(folder, *settings, "run.exists=resume", "data.workers=1") == 0
    assert results(folder) == whole
    mask = Path(mixed.mix[1]["root"]) / "masks" / "train" / "f0.png"
    cv2.imwrite(str(mask), np.full((72, 96), 7, np.uint8))
    capsys.readouterr()
    assert run(folder, *settings, "run.exists=resume") == DataError.exit_code
    assert "masks/train/f0.png was altered" in capsys.readouterr().err


def test_balanced_sequences_train_the_same_in_any_layout(
    tmp_path: Path, mixed: DataConfig
) -> None:
    """Resumed after step 1; control: other weights than in the plain order."""
    settings = (
        on_the_command_line(mixed.mix), "data.sequence='f[012]?'", "compute.shards=2", "checkpoint.keep_every=1",
        "train.steps=2", "augment.crop_size=[64,64]", "loss.class_weights=log1.10",
    )  # fmt: skip
    folder, even = tmp_path / "run", "data.balance_by=sequence"
    assert run(tmp_path / "plain", *settings) == 0
    assert run(folder, *settings, even) == 0
    whole = results(folder)
    assert whole != results(tmp_path / "plain")
    for name in ("last.pt", "best.pt", "step_000002.pt", "result.json"):
        (folder / name).unlink(missing_ok=True)
    again = (*settings, even, "run.exists=resume", "data.workers=1")
    assert run(folder, *again) == 0
    assert results(folder) == whole


def drives(tmp_path: Path, name: str) -> str:
    """Two drives, with frames of both in each split."""
    root = tmp_path / name
    for number, frame in enumerate(("d0_01", "d1_01", "d0_02", "d1_02", "d0_03")):
        image = np.random.default_rng(number + 10 * len(name)).integers(
            0, 256, (72, 96, 3), np.uint8
        )
        mask = np.full((72, 96), number % 2, np.uint8)
        for kind, pixels in (("images", image), ("masks", mask)):
            folder = root / kind / ("train" if number < 2 else "val")
            folder.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(folder / f"{frame}.png"), pixels)
    (root / "classes.yaml").write_text("names: [a, b]\npalette: [[0,0,0], [1,1,1]]\n")
    return str(root)


def test_sequences_of_a_mixture_are_those_of_its_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its samples have the set's name before their own."""
    roots = [drives(tmp_path, name) for name in ("ours", "theirs")]
    mix = f"data.mix=[{{root: {roots[0]}}}, {{root: {roots[1]}}}]"
    of_start = 'data.sequence="^(d[0-9])"'
    data = ("data=folder", mix, of_start, "augment.crop_size=[64,64]")
    folder = tmp_path / "run"
    balanced = ("data.balance_by=sequence", "train.steps=1", "compute.shards=1")
    assert run(folder, *data, *balanced) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "sequences that are also in training (d0, d1)" in said
    found = json.loads((folder / "result.json").read_text())["sequences"]
    assert {name: each["in_training"] for name, each in found.items()} == {
        "d0": True,
        "d1": True,
    }
    assert segpipe(["doctor", *data, "data.workers=0"]) == 0
    assert "2 sequences in both training and validation" in capsys.readouterr().out


def test_the_first_set_of_a_mixture_stands_for_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not the current folder, in which other data may lie."""
    roots = [drives(tmp_path, name) for name in ("ours", "theirs")]
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    mix = f"data.mix=[{{root: {roots[0]}}}, {{root: {roots[1]}}}]"
    data = ("data=folder", mix, "augment.crop_size=[64,64]")
    assert segpipe(["doctor", *data, "data.workers=0", "write=true"]) == 0
    assert not [*here.iterdir()]
    folder = tmp_path / "run"
    assert run(folder, *data, "train.steps=1", "compute.shards=1") == 0
    for kind in ("images", "masks"):
        (tmp_path / "ours" / kind / "val" / "d0_02.png").unlink()
    capsys.readouterr()
    assert segpipe(["evaluate", f"run={folder}", "data.workers=0"]) == 0
    note = json.loads(capsys.readouterr().out)["note"]
    assert "val/d0_02.png is missing" in note
