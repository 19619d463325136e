"""100 corrupted pairs through reader, pack and doctor: an error that names the file, or the right pixels.

Bits are flipped in PNG alone: JPEG, BMP, TIFF and WebP have no checksums, so that a changed pixel is just another pixel
(inputs.json holds a SHA-256 of every file). Those formats are cut and overwritten where their structure tells.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from segpipe.cli.main import main as segpipe
from segpipe.data.catalog import load_masks
from segpipe.data.data_set import FileSamples
from segpipe.data.facts import Facts
from segpipe.data.pack import Pack
from segpipe.data.pairs import Pair
from segpipe.errors import DataError

NUMBER = 100
SIZE = (40, 48)
DRAWS = np.random.Generator(np.random.Philox(13))
PHOTO = DRAWS.integers(0, 256, (*SIZE, 3), np.uint8)
TARGET = DRAWS.integers(0, 3, SIZE).astype(np.uint8)
CLASSES = "names: [floor, shelf, person]\nmasks: ids\n"
Change = Callable[[bytes, np.random.Generator], bytes]


class Case(NamedTuple):
    """A pair of files; `image` and `target` are what may come out of it, if anything does."""

    kind: str
    files: tuple[bytes, bytes]
    image: np.ndarray
    target: np.ndarray
    refused: bool  # nothing may come out


def encoded(
    pixels: np.ndarray, kind: str = "PNG", mode: str = "", **options: object
) -> bytes:
    out = io.BytesIO()
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(out, kind, **options)
    return out.getvalue()


def flipped(content: bytes, draws: np.random.Generator) -> bytes:
    changed = bytearray(content)
    for place in draws.integers(0, len(content), draws.integers(1, 4)):
        changed[place] ^= 1 << draws.integers(0, 8)
    return bytes(changed)


def cut(content: bytes, draws: np.random.Generator) -> bytes:
    return content[: draws.integers(0, len(content) - 1)]


def zeroed(content: bytes, draws: np.random.Generator) -> bytes:
    start = int(draws.integers(0, len(content) - 20))
    return content[:start] + bytes(20) + content[start + 20 :]


def headless(content: bytes, draws: np.random.Generator) -> bytes:
    return bytes(int(draws.integers(4, 16))) + content[16:]


def emptied(content: bytes, draws: np.random.Generator) -> bytes:
    return bytes(
        int(draws.integers(0, 2)) * 300
    )  # nothing, or a file of zeros as a full disk leaves it


def longer(content: bytes, draws: np.random.Generator) -> bytes:
    return content + draws.bytes(30)


CHANGES: dict[str, Change] = {
    change.__name__: change for change in (flipped, cut, zeroed, emptied, longer)
}
PHOTO_GREY = np.asarray(Image.fromarray(PHOTO).convert("L"))
GREY_RGB = np.dstack([PHOTO_GREY] * 3)
WIDE = TARGET.astype(np.uint16)
# Other modes than the data set has, and what is right: None if they must be refused.
PHOTO_MODES: dict[str, tuple[bytes, np.ndarray]] = {
    "grey": (encoded(PHOTO_GREY), GREY_RGB),
    "grey of 16 bits": (encoded(PHOTO_GREY.astype(np.uint16) * 257), GREY_RGB),
    "rgba": (encoded(np.dstack([PHOTO, PHOTO_GREY])), PHOTO),
    "bmp": (encoded(PHOTO, "BMP"), PHOTO),
    "tiff": (encoded(PHOTO, "TIFF"), PHOTO),
}
MASK_MODES: dict[str, tuple[bytes, np.ndarray | None]] = {
    "equal channels": (encoded(np.dstack([TARGET] * 3)), TARGET),
    "16 bits": (encoded(WIDE), TARGET),
    "16 bits, shifted": (encoded(WIDE * 256), None),
    "colors": (encoded(PHOTO), None),
    "jpeg": (encoded(TARGET * 80, "JPEG"), None),
    "inverted": (encoded(255 - TARGET), None),
    "transparent": (encoded(np.dstack([TARGET] * 3 + [TARGET * 100])), None),
    "another size": (encoded(TARGET.T.copy()), None),
    "1 bit": (
        encoded((TARGET > 0).astype(np.uint8) * 255, mode="1"),
        (TARGET > 0).astype(np.uint8),
    ),
}


def case(number: int) -> Case:
    """Corruption `number` of NUMBER: its kind goes round, its places are drawn."""
    draws = np.random.Generator(np.random.Philox(number))
    photo, mask = encoded(PHOTO), encoded(TARGET)
    kind, of_mask = number // 2 % 7, bool(number % 2)
    if kind < len(CHANGES):
        name, change = list(CHANGES.items())[kind]
        files = (
            (photo, change(mask, draws)) if of_mask else (change(photo, draws), mask)
        )
        return Case(name, files, PHOTO, TARGET, refused=name in ("cut", "emptied"))
    if kind == 5 and not of_mask:  # a JPEG, whose structure alone can tell
        name, change = (("cut jpeg", cut), ("headless jpeg", headless))[
            number // 14 % 2
        ]
        return Case(
            name,
            (change(encoded(PHOTO, "JPEG"), draws), mask),
            PHOTO,
            TARGET,
            refused=True,
        )
    if of_mask:
        name, (content, right) = list(MASK_MODES.items())[
            (number // 14 + 5 * (kind - 5)) % len(MASK_MODES)
        ]
        wanted = TARGET if right is None else right
        return Case(
            f"mask: {name}", (photo, content), PHOTO, wanted, refused=right is None
        )
    name, (content, image) = list(PHOTO_MODES.items())[number // 14 % len(PHOTO_MODES)]
    return Case(f"photo: {name}", (content, mask), image, TARGET, refused=False)


CASES = [case(number) for number in range(NUMBER)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them as one data set."""
    root = tmp_path_factory.mktemp("corrupted")
    for kind in ("images", "masks"):
        (root / kind / "train").mkdir(parents=True)
    for number, one in enumerate(CASES):
        for kind, content in zip(("images", "masks"), one.files, strict=True):
            (root / f"{kind}/train/n{number:03d}.png").write_bytes(content)
    (root / "classes.yaml").write_text(CLASSES)
    return root


def read(
    root: Path, number: int, pack: Pack | None = None
) -> tuple[np.ndarray, np.ndarray]:
    image, mask = (
        str(root / f"{kind}/train/n{number:03d}.png") for kind in ("images", "masks")
    )
    return FileSamples(
        load_masks(root / "classes.yaml"),
        (Pair(f"n{number:03d}", image, mask),),
        Facts(str(root)),
        pack,
    ).read(0)


def refusal(root: Path, number: int, pack: Pack | None = None) -> str | None:
    """What is said against a pair, which must name the file; None if its pixels come out, which must be right."""
    one, said = CASES[number], ""
    try:
        image, target = read(root, number, pack)
    except DataError as error:
        said = str(error)
    if said:
        assert f"n{number:03d}.png" in said
        return said
    assert not one.refused
    assert np.array_equal(image, one.image)
    assert np.array_equal(target, one.target)
    return None


@pytest.mark.parametrize(
    "number", range(NUMBER), ids=[f"{n}-{one.kind}" for n, one in enumerate(CASES)]
)
def test_the_reader_names_the_file_or_reads_it_right(folder: Path, number: int) -> None:
    refusal(folder, number)


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Callable[[], Pack]:
    """The pack of what can be read, as each new process opens it."""

    def opened() -> Pack:
        return Pack(str(tmp_path / "pack"), "")

    pack = opened()
    said = [refusal(folder, number, pack) for number in range(NUMBER)]
    assert said == [refusal(folder, number) for number in range(NUMBER)], (
        "as without a pack"
    )
    assert pack.use()["added"] == said.count(None) > NUMBER // 4
    return opened


def test_a_pack_delivers_what_the_reader_does(
    folder: Path, packed: Callable[[], Pack]
) -> None:
    pack = packed()
    said = [refusal(folder, number, pack) for number in range(NUMBER)]
    assert pack.use() == {"intact": said.count(None)}, (
        "all that can be read comes from the pack"
    )


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_corrupted_pack_delivers_the_pixels_of_the_files(
    folder: Path,
    packed: Callable[[], Pack],
    change: Change,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = min(Path(packed().folder).iterdir())
    content = path.read_bytes()
    for seed in range(3):
        path.write_bytes(
            change(content, np.random.Generator(np.random.Philox([seed, 7])))
        )
        pack = packed()
        said = [refusal(folder, number, pack) for number in range(NUMBER)]
        assert pack.use().total() == said.count(None)
        assert (
            "Reading it from its files and packing it again" in capfd.readouterr().err
        )


def test_the_doctor_names_each_file_that_the_reader_refuses(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    unread = {
        f"n{number:03d}"
        for number in range(NUMBER)
        if refusal(folder, number) is not None
    }
    assert NUMBER // 2 < len(unread) < NUMBER
    page = folder / "doctor.html"
    settings = (
        "data.split=train",
        "data.workers=0",
        "lines=0",
        "augment.crop_size=[32,32]",
        f"out={page}",
    )
    assert segpipe(["doctor", "data=folder", f"data.root={folder}", *settings]) == 2
    text = capfd.readouterr().out
    named = {
        f"n{number:03d}" for number in range(NUMBER) if f"/n{number:03d}.png" in text
    }
    assert named == unread
    assert f'<dd class="bad">{len(unread)}</dd>' in page.read_text()


def test_the_command_names_a_file_that_cannot_be_packed(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = (
        "data=folder",
        f"data.root={folder}",
        "data.split=train",
        f"data.pack={folder}/other",
    )
    assert segpipe(["pack", *given]) == 2
    text = capfd.readouterr().err
    assert any(
        f"n{number:03d}.png" in text
        for number in range(NUMBER)
        if refusal(folder, number) is not None
    )
