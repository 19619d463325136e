"""Splits by sequence, proposed class tables, and the commands `segpipe split` and `segpipe doctor` around them."""

from __future__ import annotations

import os
from collections import Counter
from errno import ENOSPC
from pathlib import Path

import cv2
import numpy as np
import pytest

from segpipe.cli.main import main as segpipe
from segpipe.data.catalog import load_masks, mask_table
from segpipe.data.masks import read_target, settled
from segpipe.data.pairs import scan
from segpipe.data.samples import check_labelled, open_samples
from segpipe.datasets.division import divide, shared_sequences
from segpipe.datasets.proposal import propose
from segpipe.errors import DataError
from segpipe.settings.groups import DataConfig

DRIVES = {"north": 40, "south": 25, "east": 10, "west": 15, "ring": 10}
NAMES = [
    f"{drive}_{number:04d}"
    for drive, count in DRIVES.items()
    for number in range(count)
]


def drives(chosen: list[bool], side: bool) -> set[str]:
    return {
        name.partition("_")[0]
        for name, of_val in zip(NAMES, chosen, strict=True)
        if of_val == side
    }


@pytest.mark.parametrize("seed", range(5))
def test_sequences_stay_whole_and_the_share_is_near(seed: int) -> None:
    chosen = divide(NAMES, val=0.2, by="sequence", seed=seed)
    assert not drives(chosen, True) & drives(chosen, False)
    assert sum(chosen) == 20, "10 + 10 is nearer to 20 % of 100 than 15 or 25"
    assert chosen == divide(NAMES, val=0.2, by="sequence", seed=seed)
    sides = [
        [n for n, v in zip(NAMES, chosen, strict=True) if v == side] for side in (0, 1)
    ]
    assert shared_sequences(*sides, "") == {}
    assert "0" in shared_sequences(*sides, "_([0-9])"), "data.sequence is another rule"


def test_another_seed_makes_another_choice() -> None:
    names = [f"{drive:03d}_{number}" for drive in range(50) for number in range(2)]
    first, second = (
        divide(names, val=0.2, by="sequence", seed=seed) for seed in (0, 1)
    )
    assert sum(first) == sum(second) == 20
    assert first != second
    assert divide(names, val=0.2, by="image", seed=0) != divide(
        names, val=0.2, by="image", seed=1
    )


def test_classes_weigh_in_the_choice() -> None:
    """Only two drives show class 1. Without pixels, any two of ten are as good; with them, one goes to each side."""
    names = [
        f"{drive}{number:02d}"
        for drive in ("a_", "b_", "c_", "d_", "e_", "f_", "g_", "h_", "i_", "j_")
        for number in range(10)
    ]
    rare = np.array([[90, 10 * (name[0] in "af")] for name in names])
    for seed in range(4):
        chosen = divide(names, val=0.2, by="sequence", seed=seed, pixels=rare)
        assert (
            sum(rare[index, 1] for index, of_val in enumerate(chosen) if of_val) == 100
        )
        assert sum(chosen) == 20
    without = [divide(names, val=0.2, by="sequence", seed=seed) for seed in range(4)]
    assert any(
        sum(rare[i, 1] for i, of_val in enumerate(each) if of_val) != 100
        for each in without
    ), "the control"


def test_a_class_on_both_sides_counts_more_than_the_share() -> None:
    """Only the two long drives show class 19 of 20; without them, the share of images would be 0.2."""
    drives = {"a": 30, "b": 30, "c": 10, "d": 10, "e": 10, "f": 10}
    names = [f"{name}_{k:02d}" for name, count in drives.items() for k in range(count)]
    pixels = np.full((len(names), 20), 10)
    pixels[60:, 19] = 0
    chosen = divide(names, val=0.2, by="sequence", seed=0, pixels=pixels)
    assert sum(pixels[index, 19] for index, of_val in enumerate(chosen) if of_val) > 0
    assert sum(chosen) == 30


def test_the_tail_is_the_last_frames_by_number() -> None:
    names = [f"x_{number}" for number in range(1, 11)] + ["y_7"]
    chosen = divide(names, val=0.2, by="tail", seed=0)
    assert [name for name, of_val in zip(names, chosen, strict=True) if of_val] == [
        "x_9",
        "x_10",
    ]


@pytest.mark.parametrize(
    ("number", "val", "last"), [(100, 0.07, 7), (10, 0.11, 2), (2, 0.6, 1)]
)
def test_the_tail_is_rounded_up_and_never_the_whole_sequence(
    number: int, val: float, last: int
) -> None:
    """As floats, 0.07 * 100 is more than 7."""
    names = [f"x_{place:03d}" for place in range(number)]
    chosen = divide(names, val=val, by="tail", seed=0)
    assert chosen == [place >= number - last for place in range(number)]


def test_copies_of_one_image_stay_together() -> None:
    names = [
        f"photo{number}_jpg.rf.{copy}"
        for number in range(20)
        for copy in ("a1", "b2", "c3")
    ]
    for by in ("image", "sequence", "tail"):
        pattern = r"photo\d+" if by == "sequence" else ""
        chosen = divide(names, val=0.2, by=by, seed=3, pattern=pattern)
        assert set(
            Counter(
                n.partition(".")[0] for n, v in zip(names, chosen, strict=True) if v
            ).values()
        ) == {3}
    assert sum(chosen) == 12


@pytest.mark.parametrize("by", ["sequence", "image"])
def test_a_single_sequence_is_refused_with_the_ways_on(by: str) -> None:
    names = [f"frame{number}" for number in range(9)] if by == "sequence" else ["a"]
    with pytest.raises(DataError, match=r"belong to one .*by=tail.*by=image.*pattern="):
        divide(names, val=0.2, by=by, seed=0)
    with pytest.raises(DataError, match="no sequence with two"):
        divide(["a", "b"], val=0.5, by="tail", seed=0)


def flat(root: Path, masks: dict[str, np.ndarray]) -> str:
    for number, (name, mask) in enumerate(masks.items()):  # no two images alike
        for kind, pixels in (
            ("images", np.full((*mask.shape[:2], 3), number, np.uint8)),
            ("masks", mask),
        ):
            (root / kind).mkdir(exist_ok=True, parents=True)
            cv2.imwrite(str(root / kind / f"{name}.png"), pixels)
    return f"data.root={root}"


def mask_of(*values: int) -> np.ndarray:
    return np.repeat(np.array(values, np.uint8), 4).reshape(len(values), 4)


def test_a_newcomer_gets_from_masks_to_a_checked_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = flat(
        tmp_path,
        {
            f"{drive}_{n}": mask_of(0, n % 2 * 5, 9, 255)
            for drive in "abcde"
            for n in range(4)
        },
    )
    assert segpipe(["doctor", "data=folder", root]) == 2
    text = capsys.readouterr().out
    assert (
        "If 255 is a class: add it to names (and palette), list all ids, as in" in text
    )
    for part in ("- class5  # id 5: ", "in 10 masks", "9: class9", "write=true"):
        assert part in text
    assert not (tmp_path / "classes.yaml").exists()
    assert segpipe(["doctor", "data=folder", root, "write=true"]) == 0
    text = capsys.readouterr().out
    assert f"Wrote this table to {tmp_path}/classes.yaml." in text
    assert (
        f"is not divided into train and val yet, so nothing else was checked. Next: `segpipe split {root} val=0.2`"
        in text
    )
    assert "problem" not in text
    assert "Correct" not in text
    unpaired = tmp_path / "images/f_0.png"
    unpaired.write_bytes((tmp_path / "images/a_0.png").read_bytes())
    assert segpipe(["doctor", "data=folder", root]) == 2
    text = capsys.readouterr().out
    assert f"{tmp_path}/masks/f_0.png. Draw it, or remove the image." in text
    assert "Correct these first." in text
    assert "is not divided" in text
    unpaired.unlink()
    (tmp_path / "training.txt").touch()
    assert segpipe(["doctor", "data=folder", root]) == 2
    assert "The lists that exist are training.txt" in capsys.readouterr().out
    (tmp_path / "training.txt").unlink()
    assert segpipe(["split", root, "val=0.4"]) == 0
    text = capsys.readouterr().out
    assert "train.txt: 12 images (60.0%) of 3 sequences" in text
    assert "sequences stay whole" not in text
    assert "val, % of pixels" in text
    assert segpipe(["split", root, "val=0.28", "replace=true"]) == 0
    assert "val has 20% of the images, not 28%: sequences" in capsys.readouterr().out
    lists = [
        (tmp_path / f"{split}.txt").read_text().split() for split in ("train", "val")
    ]
    assert sorted(lists[0] + lists[1]) == sorted(
        path.stem for path in (tmp_path / "masks").iterdir()
    )
    assert segpipe(["doctor", "data=folder", root]) == 0
    assert "in both training" not in capsys.readouterr().out
    assert segpipe(["split", root]) == 2
    assert "Set replace=true" in capsys.readouterr().err
    assert segpipe(["split", root, "by=tail", "val=0.1", "replace=true"]) == 0
    assert segpipe(["doctor", "data=folder", root]) == 0
    text = capsys.readouterr().out
    assert "sequences stay whole" not in text
    assert (
        "Warning: 5 sequences in both training and validation: a (3 and 1 images)"
        in text
    )
    assert segpipe(["doctor", "data=folder", root, 'data.sequence="_(.)"']) == 0
    assert "in both training" not in capsys.readouterr().out, (
        "by the number, the last of each drive is a sequence"
    )


def test_a_full_disk_is_named_and_holds_no_empty_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = flat(tmp_path, {f"{drive}_0": mask_of(0, 1) for drive in "ab"})

    def full(*paths: Path) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    assert segpipe(["doctor", "data=folder", root, "write=true"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path}/classes.yaml could not be written: No space")
    assert said.endswith("then repeat the command.\n"), "of trainings it says nothing"
    assert not list(tmp_path.glob("*classes.yaml*"))


def test_commands_that_are_printed_can_be_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For folders whose names a shell would divide."""
    folder = tmp_path / "my photos (2)"
    root = flat(folder, {f"{drive}_0": mask_of(0, 1) for drive in "ab"})
    assert segpipe(["doctor", "data=folder", root, "write=true"]) == 0
    said = capsys.readouterr().out
    assert f"`segpipe split '{root}' val=0.2`" in said
    assert f"`segpipe doctor data=folder '{root}'`" in said
    data = DataConfig(name="folder", root=str(folder), masks="masks (old)")
    (folder / "masks").rename(folder / data.masks)
    [fault] = scan(data, "train").faults
    assert f"`segpipe split '{root}' 'data.masks=masks (old)'`" in fault
    (folder / "classes.yaml").unlink()
    with pytest.raises(DataError, match=r"classes\.yaml does not exist") as caught:
        mask_table(data)
    said = f"`segpipe doctor data=folder '{root}' 'data.masks=masks (old)'`"
    assert said in str(caught.value)


def test_split_refuses_folders_that_are_divided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for images, masks in (
        ("train/images", "train/masks"),
        ("images/train", "masks/train"),
    ):
        (tmp_path / images).mkdir(parents=True)
        assert segpipe(["split", f"data.root={tmp_path}"]) == 2
        said = capsys.readouterr().err
        assert "already divided into splits" in said
        assert f"data.images={images} data.masks={masks}." in said
    assert segpipe(["split", "data.root=/no/where"]) == 2


def test_doctor_of_a_folder_without_images_does_not_suggest_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos").mkdir()
    assert segpipe(["doctor", "data=folder", f"data.root={tmp_path}"]) == 2
    said = capsys.readouterr().out
    assert said.startswith(
        f"{tmp_path}/images does not exist. {tmp_path} holds photos."
    )
    assert "`segpipe doctor" not in said


def test_doctor_writes_no_page_about_masks_that_it_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Headers do not show the id, so the check of labels meets it first."""
    root = flat(tmp_path, {f"{drive}_0": mask_of(0, ord(drive) - 97) for drive in "ab"})
    (tmp_path / "classes.yaml").write_text("names: [x]\n")
    for split, name in (("train", "a_0"), ("val", "b_0")):
        (tmp_path / f"{split}.txt").write_text(f"{name}\n")
    out = tmp_path / "page.html"
    words = ["doctor", "data=folder", root, "data.verify=headers", f"out={out}"]
    assert segpipe(words) == 2
    assert "b_0.png has id 1" in "".join(capsys.readouterr())
    assert not out.exists()


def test_doctor_prints_some_of_many_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = flat(tmp_path, {f"a_{n}": mask_of(0, 1) for n in range(30)})
    (tmp_path / "classes.yaml").write_text("names: [x]\n")
    for split in ("train", "val"):
        (tmp_path / f"{split}.txt").write_text("".join(f"a_{n}\n" for n in range(30)))
    assert segpipe(["doctor", "data=folder", root]) == 2
    text = capsys.readouterr().out
    assert text.count("has id 1") == 1
    assert "The same in 29 more: " in text
    assert "/a_1.png, " in text
    assert " and 26 more." in text
    assert "1 problem in" in text
    assert segpipe(["doctor", "data=folder", root, "lines=0"]) == 2
    assert capsys.readouterr().out.count("has id 1") == 30
    for path in [*(tmp_path / "masks").iterdir()][:25]:
        path.unlink()
    assert segpipe(["doctor", "data=folder", root]) == 2
    text = capsys.readouterr().out
    assert text.count("has no mask") == 20
    assert "... and 6 more; lines=0 prints all" in text, "each once"


def proposal(tmp_path: Path, masks: list[np.ndarray]) -> tuple[list[str], str]:
    paths = [str(tmp_path / f"{place}.png") for place in range(len(masks))]
    for path, mask in zip(paths, masks, strict=True):
        cv2.imwrite(path, mask[..., ::-1] if mask.ndim == 3 else mask)
    return paths, propose(paths)


COLORS = np.array([[0, 0, 0], [128, 64, 128], [70, 70, 70], [220, 20, 60]], np.uint8)
COLORED = np.array([[[128, 0, 0], [0, 0, 0]], [[0, 128, 0], [0, 0, 0]]], np.uint8)
PROPOSED = {
    "train ids": ([mask_of(0, 1, 2)], [0, 1, 2]),
    "ids with gaps": ([mask_of(7, 11), mask_of(7, 255)], [[0, 1], [0, 255]]),
    "black and white": ([mask_of(0, 255)], [0, 1]),
    "colors, one file black": (
        [COLORED, COLORED * 0],
        [[[2, 0], [1, 0]], [[0, 0], [0, 0]]],
    ),
    "ids in three channels": (
        [np.dstack([mask_of(3, 4)] * 3), mask_of(4, 4)],
        [[0, 1], [1, 1]],
    ),
}


@pytest.mark.parametrize("name", PROPOSED)
def test_a_proposed_table_reads_its_masks(tmp_path: Path, name: str) -> None:
    masks, wanted = PROPOSED[name]
    paths, text = proposal(tmp_path, masks)
    (tmp_path / "classes.yaml").write_text(text)
    table = settled(load_masks(tmp_path / "classes.yaml"), paths)
    found = [read_target(table, path) for path in paths]
    if name.startswith("colors"):
        assert [each.tolist() for each in found] == wanted
        assert "color (128, 0, 0): 12.50 % of the pixels, in 1 masks" in text
    else:
        rows = [each[:, 0].tolist() for each in found]
        assert rows == (wanted if isinstance(wanted[0], list) else [wanted])


@pytest.mark.parametrize(("number", "warned"), [(30, False), (200, True)])
def test_many_ids_get_a_warning(tmp_path: Path, number: int, warned: bool) -> None:
    """Masks that were resized with interpolation or stored as JPEG hold that many."""
    _, text = proposal(tmp_path, [np.arange(number, dtype=np.uint8)[None]])
    assert ("resized with interpolation" in text) == warned
    (tmp_path / "classes.yaml").write_text(text)
    assert load_masks(tmp_path / "classes.yaml").classes.num_classes == number


@pytest.mark.parametrize("ids", [(0,), (5, 255), (255,)])
def test_masks_of_one_id_get_no_table(tmp_path: Path, ids: tuple[int, ...]) -> None:
    with pytest.raises(
        DataError,
        match=f"all 2 masks hold only {' and '.join(map(str, ids))}, .*exported",
    ):
        proposal(tmp_path, [mask_of(*ids)] * 2)


def test_training_of_one_class_is_refused_and_named_by_the_doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = flat(
        tmp_path, {f"{drive}_1": np.zeros((64, 96), np.uint8) for drive in "abc"}
    )
    (tmp_path / "train.txt").write_text("a_1\nb_1\n")
    (tmp_path / "val.txt").write_text("c_1\n")
    options = ["data=folder", root, "augment.crop_size=[64,64]"]
    for names, said in (
        ("[x, y]", "x is the only class that occurs"),
        ("[x]", "x is the only class that occurs"),
    ):
        (tmp_path / "classes.yaml").write_text(f"names: {names}\n")
        assert segpipe(["doctor", *options]) == 2
        found = capsys.readouterr().out
        assert f"{said} in the masks of the 2 training images" in found
        assert "1 problem in" in found
        with pytest.raises(DataError, match=said):
            check_labelled(
                open_samples(DataConfig(name="folder", root=str(tmp_path)), "train", 0)
            )
    (tmp_path / "classes.yaml").write_text("names: [x, y]\n")
    cv2.imwrite(str(tmp_path / "masks/b_1.png"), np.tri(64, 96, dtype=np.uint8))
    assert segpipe(["doctor", *options]) == 0
    check_labelled(
        open_samples(DataConfig(name="folder", root=str(tmp_path)), "train", 0)
    )


def test_doctor_names_what_keeps_a_folder_from_being_divided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It called for `segpipe split`, which refused the folder; the commands that it prints keep given folders."""
    root = flat(tmp_path, {f"{drive}_0": mask_of(0, 0, 5, 5) for drive in "abc"})
    for mask in (tmp_path / "masks").iterdir():
        mask.rename(mask.with_stem(f"{mask.stem}_v2"))
    command = ["doctor", "data=folder", root, "write=true"]
    assert segpipe(command) == 2
    text = capsys.readouterr().out
    assert "a_0 needs a mask of the same name" in text
    assert "segpipe split" not in text
    given = "data.masks=masks/*_v2"
    assert segpipe([*command, given]) == 0
    assert f"`segpipe split {root} '{given}' val=0.2`" in capsys.readouterr().out
    assert segpipe(["split", root, given]) == 0
    assert segpipe(["doctor", "data=folder", root, given, "data.workers=0"]) == 0


def test_masks_that_all_are_jpeg_are_told_with_the_missing_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = flat(tmp_path, {f"{drive}_0": mask_of(0, 0, 5, 5) for drive in "abc"})
    for mask in (tmp_path / "masks").iterdir():
        cv2.imwrite(str(mask.with_suffix(".jpg")), cv2.imread(str(mask)))
        mask.unlink()
    out = tmp_path / "doctor.html"
    assert segpipe(["doctor", "data=folder", root, f"out={out}"]) == 2
    text = capsys.readouterr().out
    assert "a_0.jpg cannot be a mask: it holds JPEG, which is lossy" in text
    assert f"{out} was not written: it needs classes.yaml." in text


def test_no_table_is_proposed_for_what_are_no_classes(tmp_path: Path) -> None:
    noise = np.random.Generator(np.random.Philox(1)).integers(
        0, 256, (32, 32, 3), np.uint8
    )
    with pytest.raises(
        DataError,
        match=r"10\d\d different colors, too many .*/1.png alone holds 10\d\d\..*interpolation",
    ):
        proposal(tmp_path, [COLORED, noise])
    with pytest.raises(
        DataError, match=r"the masks hold colors \(.*0.png\) and ids \(.*1.png\)"
    ):
        proposal(tmp_path, [COLORED, mask_of(0, 1)])


def test_a_table_is_proposed_from_the_masks_that_can_be_read(tmp_path: Path) -> None:
    paths, whole = proposal(tmp_path, [mask_of(0, 1)] * 2)
    Path(paths[0]).write_bytes(b"")
    text = propose(paths)
    assert text.startswith("# Proposed from 1 masks.")
    assert "\n# 1 more cannot" in text
    assert text.count("- class") == whole.count("- class") == 2
    Path(paths[1]).write_bytes(b"")
    with pytest.raises(DataError, match=r"0\.png is empty"):
        propose(paths)


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".CSV"])
def test_images_of_a_test_list_are_in_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    root = flat(
        tmp_path, {f"{drive}_{n}": mask_of(n) for drive in "ab" for n in (0, 1)}
    )
    listing = (tmp_path / "test").with_suffix(suffix.lower())
    lines = {
        ".txt": "a_1\n",
        ".csv": "image,mask\nimages/a_1.png,masks/a_1.png\n",
        # Found below another name of the folder.
        ".CSV": f"image,mask\n{tmp_path}/link/images/a_1.png,{tmp_path}/masks/a_1.png\n",
    }
    (tmp_path / "link").symlink_to(tmp_path)
    listing.write_text(lines[suffix])
    assert segpipe(["split", root, "val=0.3", "by=image"]) == 0
    assert "1 images of the test split are left out" in capsys.readouterr().out
    lists = [tmp_path / f"{split}.txt" for split in ("train", "val")]
    names = [name for path in lists for name in path.read_text().split()]
    assert sorted(names) == ["a_0", "b_0", "b_1"]
    for path in lists:
        path.unlink()
    listing.write_text(lines[suffix].replace("a_1", "c_1"))
    assert segpipe(["split", root, "val=0.3", "by=image"]) == 2
    assert "c_1" in capsys.readouterr().err
    assert not lists[0].exists(), "a list that names no image keeps none out"
