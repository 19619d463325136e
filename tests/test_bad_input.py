"""Bad input ends with exit code 2 and one line before the first step, and costs no earlier run."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from runs import command, metrics, run, settings, write_camvid
from segpipe import plugins
from segpipe.data.augment import Augmenter
from segpipe.data.catalog import load_masks
from segpipe.data.readers import decoders_heard
from segpipe.datasets.problems import problems
from segpipe.errors import ConfigError, DataError
from segpipe.settings.config import from_mapping
from segpipe.settings.groups import DataConfig

EARLIER = b"the only copy of an earlier run"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A sound data set."""
    return write_camvid(tmp_path / "data")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder that holds an earlier run."""
    path = tmp_path / "runs" / "run"
    path.mkdir(parents=True)
    (path / "last.pt").write_bytes(EARLIER)
    return path


def assert_refused(folder: Path, code: int, text: str, parts: tuple[str, ...]) -> None:
    """Exit code 2, one line that holds all parts, and the earlier run as it was, but for the note of the failure."""
    assert code == 2, text
    assert text.count("\n") == 1, text
    for part in parts:
        assert part in text
    assert {path.name for path in folder.iterdir()} - {"failure.json"} == {"last.pt"}
    assert (folder / "last.pt").read_bytes() == EARLIER


def from_files(root: Path, *changes: str) -> tuple[str, ...]:
    if "data=synthetic" in changes:
        return ("run.exists=replace", *changes)
    return ("run.exists=replace", "data=camvid", f"data.root={root}", *changes)


def remove_mask(root: Path) -> None:
    (root / "trainannot" / "frame03.png").unlink()


def shrink_mask(root: Path) -> None:
    cv2.imwrite(str(root / "valannot" / "frame01.png"), np.zeros((60, 96), np.uint8))


def add_foreign_id(root: Path) -> None:
    mask = np.zeros((72, 96), np.uint8)
    mask[5, 7] = 34
    cv2.imwrite(str(root / "trainannot" / "frame02.png"), mask)


def truncate(root: Path) -> None:
    path = root / "train" / "frame04.png"
    path.write_bytes(path.read_bytes()[:-500])


def damage(root: Path) -> None:
    path = root / "val" / "frame00.png"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(root: Path) -> None:
    for split in ("val", "valannot"):
        for path in (root / split).iterdir():
            path.unlink()


def unlabel(root: Path) -> None:
    for path in (root / "trainannot").iterdir():
        cv2.imwrite(str(path), np.full((72, 96), 11, np.uint8))


def copy_into_training(root: Path) -> None:
    for kind in ("", "annot"):
        (root / f"train{kind}" / "copy.png").write_bytes(
            (root / f"val{kind}" / "frame01.png").read_bytes()
        )


def cut_scan(root: Path) -> None:
    """Of a JPEG, whose end is there: OpenCV decodes the rest to grey."""
    write_jpeg(root)
    path = root / "train" / "frame04.jpg"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + b"\xff\xd9")


def write_jpeg(root: Path) -> None:
    path = root / "train" / "frame04.png"
    cv2.imwrite(str(path.with_suffix(".jpg")), cv2.imread(str(path)))
    path.unlink()


def make_fifos(root: Path) -> None:
    for kind in ("", "annot"):
        os.mkfifo(root / f"train{kind}" / "pipe.png")


def link_devices(root: Path) -> None:
    for kind in ("", "annot"):
        (root / f"train{kind}" / "zero.png").symlink_to("/dev/zero")


def make_huge(root: Path) -> None:
    """Of a header alone: who decodes it would need 1.2 GB."""
    path = root / "train" / "frame04.png"
    content = bytearray(path.read_bytes())
    content[16:24] = (20000).to_bytes(4) * 2
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4)
    path.write_bytes(content)


def name_in_latin1(root: Path) -> None:
    for kind in ("", "annot"):
        folder = os.fsencode(root / f"train{kind}")
        os.rename(folder + b"/frame04.png", folder + b"/stra\xdfe.png")


def link_a_drive(root: Path) -> None:
    """A linked folder is read, not dropped: its image has no mask."""
    (root / "drive").mkdir()
    (root / "train" / "frame04.png").rename(root / "drive" / "frame04.png")
    (root / "train" / "linked").symlink_to(root / "drive")


def rename(root: Path) -> None:
    root.rename(root.with_name("date"))


BAD_FILES: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (rename, ("/data does not exist", "Nearest", "/date", "Set data.root")),
    (remove_mask, ("/train/frame03.png has no mask", "/trainannot/frame03.png")),
    (shrink_mask, ("/val/frame01.png is 72x96", "/valannot/frame01.png is 60x96")),
    (
        add_foreign_id,
        (
            "/trainannot/frame02.png has id 34 (1 pixels, the first at row 5, column 7)",
            "camvid",
        ),
    ),
    (truncate, ("/train/frame04.png is truncated", "Copy it again")),
    (damage, ("/val/frame00.png is damaged", "Copy it again")),
    (empty, ("/val is empty", "no pair of image and mask")),
    (
        unlabel,
        (
            "none of the 8 training images has a labelled pixel (the first is frame00)",
            "Check the masks",
        ),
    ),
    (
        copy_into_training,
        (
            "1 of the images of split val",
            "train/copy.png = ",
            "val/frame01.png",
            "data.allow_overlap",
        ),
    ),
    (
        cut_scan,
        (
            "/train/frame04.jpg is damaged",
            "premature end of data segment",
            "gray",
            "Copy it again",
        ),
    ),
    (make_fifos, ("/train/pipe.png is a folder, a FIFO or a device", "Remove it")),
    (link_devices, ("/train/zero.png is a folder, a FIFO or a device", "Remove it")),
    (
        make_huge,
        (
            "/train/frame04.png is 20000x20000",
            "data.max_pixels = 100000000",
            "Cut it into tiles",
        ),
    ),
    (
        name_in_latin1,
        ("/train/'stra\\udcdfe.png' has a name that is not UTF-8", "Rename it"),
    ),
    (link_a_drive, ("/train/linked/frame04.png has no mask",)),
]


@pytest.mark.parametrize(
    ("spoil", "parts"), BAD_FILES, ids=[spoil.__name__ for spoil, _ in BAD_FILES]
)
def test_bad_files(
    data: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    parts: tuple[str, ...],
) -> None:
    spoil(data)
    code = run(folder, *from_files(data))
    assert_refused(folder, code, capsys.readouterr().err, parts)


def test_sound_files_are_trained_on(data: Path, folder: Path) -> None:
    """The control: with the same settings and nothing spoilt the run goes through, and replaces the earlier one."""
    assert run(folder, *from_files(data, "train.steps=1")) == 0
    assert metrics(folder)
    assert (folder / "last.pt").read_bytes() != EARLIER


def test_jpegs_of_cameras_are_trained_on(
    data: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The control of damaged ones: bytes behind the picture cost no pixel; other words are passed on."""
    write_jpeg(data)
    path = data / "train" / "frame04.jpg"
    path.write_bytes(path.read_bytes()[:-2] + bytes(40) + b"\xff\xd9")
    with decoders_heard():
        os.write(2, b"something else\n")
    assert capfd.readouterr().err == "something else\n"
    assert run(folder, *from_files(data, "train.steps=1")) == 0


BAD_TABLES: list[tuple[str | bytes, tuple[str, ...]]] = [
    ("names: [a, a]", ("names has a twice",)),
    ("names: [a, null, c]", ("names has None", 'quote it, as in ["no"]')),
    ("names: [a, no, c]", ("names has False", 'quote it, as in ["no"]')),
    ("names: [a, 'a ', c]", ("names has 'a ', but printable",)),
    (f"names: {list(range(300))}", ("names has 300, but a list of 1 to 255",)),
    ("names: ['', b, c]", ("names has ''", "printable")),
    ('names: ["a\\tb", b, c]', ("names has 'a\\tb'", "printable")),
    (
        "names: [a, b, c]\nids: {0: a, 1: b, 1: c, 2: c}",
        ("line 2 repeats 1",),
    ),
    (
        "names: [a, b, c]\nids: {0: a, 0: a, 1: b, 2: c}",
        ("line 2 repeats 0",),
    ),
    ("names: [a, b, c]\nnames: [a, b]", ("line 2 repeats names",)),
    ("names: [a, b, c]\nignore: [255, 255]", ("id 255 is in",)),
    (
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(
            f"{one}: &{one} [{', '.join([f'*{before}'] * 9)}]\n"
            for before, one in pairwise("abcdefghij")
        )
        + "names: *j",
        ("key = a is not one of name, names",),
    ),
    ("names: &x [*x, b]", ("names has a list or a map, but words were needed",)),
    (
        "names: [${oc.env:HOME}, b]",
        ("cannot be read as YAML: while parsing a flow sequence line 1",),
    ),
    (
        "!!python/object/apply:os.system ['touch hacked']",
        ("could not determine a constructor",),
    ),
    ("[" * 3000 + "]" * 3000, ("maximum recursion depth",)),
    (
        b"names: [stra\xdfe, b, c]",
        ("cannot be read as YAML: 'utf-8' codec", "byte. Save it as UTF-8."),
    ),
    (b"\0\0", ("cannot be read as YAML",)),
    (" " * (1 << 21), ("it has 2097152 bytes",)),
]


@pytest.mark.parametrize(("content", "parts"), BAD_TABLES, ids=range(len(BAD_TABLES)))
def test_bad_class_tables(
    tmp_path: Path, content: str | bytes, parts: tuple[str, ...]
) -> None:
    path = tmp_path / "classes.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError) as caught:
        load_masks(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    for part in parts:
        assert part in message
    assert DataError.exit_code == 2


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_a_class_table_that_is_no_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "classes.yaml"
    {
        "fifo": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "folder": path.mkdir,
    }[kind]()
    with pytest.raises(
        DataError,
        match=r"classes\.yaml cannot be read as YAML: it is not a regular file",
    ):
        load_masks(path)


BAD_LISTS: list[tuple[str, bytes, tuple[str, ...]]] = [
    (
        "train.txt",
        "straße\n".encode("latin1"),
        ("/train.txt is not UTF-8 text", "Save it as UTF-8"),
    ),
    ("train.txt", "ü\n".encode("utf-16"), ("/train.txt is not UTF-8 text",)),
    ("train.txt", b"y" * 5000, ("/train.txt lists yyyy", "no image has this stem")),
    ("train.txt", b"", ("/train.txt is empty",)),
    (
        "train.csv",
        "image,mask\nä.png,b.png\n".encode("latin1"),
        ("/train.csv is not UTF-8 text",),
    ),
    (
        "train.csv",
        b"image,mask\n" + b"x" * 200_000 + b",b\n",
        ("/train.csv is not a table of images and masks",),
    ),
    (
        "train.csv",
        b"image,mask\n\0.png,b.png\n",
        ("/train.csv, line 2", "does not exist"),
    ),
]


@pytest.mark.parametrize(
    ("name", "content", "parts"), BAD_LISTS, ids=range(len(BAD_LISTS))
)
def test_bad_lists(
    tmp_path: Path, name: str, content: bytes, parts: tuple[str, ...]
) -> None:
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
        cv2.imwrite(str(tmp_path / kind / "one.png"), np.zeros((40, 40), np.uint8))
    (tmp_path / "classes.yaml").write_text("names: [a, b]")
    (tmp_path / name).write_bytes(content)
    data = DataConfig(name="folder", root=str(tmp_path), split="train")
    try:
        found = next(iter(problems(data, ["train"])))
    except DataError as error:
        found = str(error)
    assert "\n" not in found
    assert len(found) < 1000
    for part in parts:
        assert part in found


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def test_a_malicious_checkpoint(
    data: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its code does not run, and the message does not say how it could."""
    torch.save(
        {"format": "segpipe-checkpoint", "x": Malicious(tmp_path / "hacked")},
        folder / "last.pt",
    )
    code = run(folder, *from_files(data, "run.exists=resume"))
    said = capsys.readouterr().err
    assert code == 2
    assert not (tmp_path / "hacked").exists()
    assert "last.pt" in said
    assert "a Python object" in said
    assert "weights_only" not in said
    assert "Traceback" not in said


BAD_SETTINGS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (
        ("model=fast_scn",),
        ("model = fast_scn is not one of", "Did you mean fast_scnn?"),
    ),
    (
        ("model.name='a:b:c'",),
        ("model.name = a:b:c, but the form package.module:Name",),
    ),  # :b: is no picture
    (("model.name=unet",), ("model.name = 'unet' is not one of", "pidnet_s")),
    (("optim.lrr=1",), ("optim.lrr", "Did you mean optim.lr?")),
    (
        ("augment.crop_size=[64,160]",),
        ("crop_size = [64, 160]", "72x96", "'augment.crop_size=[64, 144]'"),
    ),
    (
        ("compute.nproc=3", "compute.shards=4", "compute.mode=ddp"),
        ("compute.shards = 4 cannot be divided among 3", "compute.mode=elastic"),
    ),
    (
        ("compute.nproc=5",),
        ("compute.shards = 2, but there are 5 processes", "compute.shards=5"),
    ),
    (("compute.nproc=many",), ("compute.nproc = ", "many", "auto")),
    (("compute.nproc=0",), ("compute.nproc = ", "auto")),
    (("compute.samples_per_shard=1",), ("compute.samples_per_shard = 1", "2 to 65536")),
    (("data.split=test",), ("/test does not exist", "holds train, trainannot")),
    (
        ("loss.class_weights=[1,2]",),
        ("loss.class_weights has 2 weights", "11 classes", "sky, building, pole"),
    ),
    (
        ("loss.class_weights=[0,0,0,0,0,0,0,0,0,0,0]",),
        ("loss.class_weights has only zeros",),
    ),
    (("optim.lr=1e308",), ("optim.lr = 1e+308", "0 to 3e+38")),
    (
        ("data=synthetic", "data.size=[100000,100000]"),
        ("data.size = [100000, 100000]", "32 to 8192"),
    ),
    (
        ("data=synthetic", "data.num_train=1000000000000"),
        ("data.num_train = 1000000000000", "1 to 10000000"),
    ),
    (("compute.shards=1000000000",), ("compute.shards = 1000000000", "1 to 65536")),
    (("compute.threads=1000000",), ("compute.threads = 1000000", "1 to 1024")),
    (
        ("compute.nproc=1000000",),
        ("compute.shards = 2, but there are 1000000 processes",),
    ),
    (
        ("data.max_pixels=1000",),
        ("/train/frame00.png is 72x96, 6912 pixels", "data.max_pixels = 1000"),
    ),
    (("data.root=",), ("data.root is empty", "Set data.root=FOLDER")),
    (
        ("export.dir=/dev/null/export", "export.enabled=true"),
        ("export.dir = /dev/null/export", "Not a directory"),
    ),
    (
        ("run.exists=keep",),
        ("run.exists = 'keep' is not one of error, resume, replace",),
    ),
    (
        ("run.exists=error",),
        ("already holds", "run.exists=resume", "run.exists=replace"),
    ),
    (
        ("run.exists=resume",),
        ("last.pt (31 bytes) cannot be read", "truncated or foreign"),
    ),
    (
        ("data.workers=8", "data.prefetch=32", "compute.samples_per_shard=65536"),
        ("shared memory", "data.prefetch"),
    ),
]


@pytest.mark.parametrize(
    ("changes", "parts"), BAD_SETTINGS, ids=[changes[0] for changes, _ in BAD_SETTINGS]
)
def test_bad_settings(
    data: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    changes: tuple[str, ...],
    parts: tuple[str, ...],
) -> None:
    code = run(folder, *from_files(data, *changes))
    assert_refused(folder, code, capsys.readouterr().err, parts)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="asks for a GPU that must be missing"
)
@pytest.mark.parametrize("nproc", ["1", "2", "auto"])
def test_missing_gpu(
    data: Path, folder: Path, capsys: pytest.CaptureFixture[str], nproc: str
) -> None:
    code = run(
        folder, *from_files(data, "compute.device=cuda", f"compute.nproc={nproc}")
    )
    assert_refused(
        folder,
        code,
        capsys.readouterr().err,
        ("compute.device = cuda", "compute.device=cpu"),
    )


@pytest.mark.parametrize("where", ["/proc", "a file", "a closed folder"])
def test_unwritable_root(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    root = Path("/proc")
    if where == "a file":
        root = tmp_path / "file"
        root.write_text("")
    elif where == "a closed folder":
        root = tmp_path / "closed"
        root.mkdir(mode=0o555)
        if os.access(root, os.W_OK):
            pytest.skip("the superuser may write everywhere")
    assert run(root / "run") == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    for part in (f"run.root = {root}", "cannot be created", "Set run.root"):
        assert part in text


@pytest.mark.slow
def test_command_line(data: Path, folder: Path) -> None:
    """As a user sees it: one line, no traceback, no process left."""
    truncate(data)
    done = command("train.py", *settings(folder, *from_files(data, "compute.nproc=2")))
    assert done.stdout == ""
    assert_refused(
        folder, done.returncode, done.stderr, ("/train/frame04.png is truncated",)
    )


def test_a_transform_that_raises_is_named_with_its_line(
    project: Callable[[str, str], None],
) -> None:
    project(
        "late.py",
        """
        class Late:
            def __call__(self, image, target, rng):
                raise ValueError("odd")
        """,
    )
    plugins.trust(["late"])
    config = from_mapping({"augment": {"extra": ["late:Late"], "crop_size": [32, 32]}})
    image, target = np.zeros((40, 40, 3), np.uint8), np.zeros((40, 40), np.uint8)
    with pytest.raises(ConfigError, match=r"augment.extra = .*late.py, line 4 .*: odd"):
        Augmenter(config.augment)(image, target, 1)
