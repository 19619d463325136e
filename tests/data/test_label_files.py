"""Label files as people have them: each is read right, pixel by pixel, or refused with the fix."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from segpipe.data.catalog import MaskTable, load_masks
from segpipe.data.masks import read_target, settled
from segpipe.data.readers import read_header, read_image, read_mask
from segpipe.data.samples import image_sizes, open_samples
from segpipe.datasets.problems import problems
from segpipe.errors import DataError
from segpipe.settings.groups import DataConfig

HEIGHT, WIDTH = 5, 7
TARGET = (
    np.random.Generator(np.random.Philox(5))
    .integers(0, 3, (HEIGHT, WIDTH))
    .astype(np.uint8)
)
TARGET[2, 3], TARGET[0, :3] = 255, (0, 1, 2)
COLORS = {0: (128, 64, 128), 1: (70, 70, 70), 2: (220, 20, 60), 255: (0, 0, 0)}
RAW = {0: 7, 1: 8, 2: 11, 255: 0}

IDS = "names: [floor, shelf, person]\nids: {7: floor, 8: shelf, 11: person}\nignore: [0]\n"
TRAIN_IDS = "names: [floor, shelf, person]\n"
PALETTE = "palette: [[128, 64, 128], [70, 70, 70], [220, 20, 60]]\n"
BOTH = TRAIN_IDS + PALETTE + "ignore: [255, [0, 0, 0]]\n"
WIDE = "names: [floor, shelf, person]\nids: {7: floor, 8: shelf, 40011: person}\nignore: [0]\n"


def mapped(table: dict[int, object], dtype: type = np.uint8) -> np.ndarray:
    """TARGET with each train id replaced."""
    out = np.zeros((*TARGET.shape, *np.shape(table[0])), dtype)
    for train, value in table.items():
        out[train == TARGET] = value
    return out


def rgb() -> np.ndarray:
    return mapped(COLORS)


def grey() -> np.ndarray:
    return mapped(RAW)


def exif(number: int) -> bytes:
    entries = Image.Exif()
    entries[0x0112] = number
    return entries.tobytes()


def encoded(
    pixels: np.ndarray, kind: str = "PNG", mode: str | None = None, **options: object
) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels, mode).save(
        out, kind, **options
    ) if mode else Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


def palette_file(
    kind: str,
    colors: dict[int, tuple[int, int, int]],
    order: dict[int, int],
    **options: object,
) -> bytes:
    """Palette file in which train id t has the index order[t] and the color colors[t]."""
    image = Image.fromarray(mapped(order)).convert("P")
    table = np.zeros((256, 3), np.uint8)
    for train, index in order.items():
        table[index] = colors[train]
    image.putpalette(table[: max(order.values()) + 1].tobytes())
    image.putdata(mapped(order).ravel().tolist())
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4) + kind + body + zlib.crc32(kind + body).to_bytes(4)


def grey_of_16_bits_with_alpha() -> bytes:
    """What neither Pillow nor OpenCV writes."""
    pixels = np.dstack([grey(), np.full((HEIGHT, WIDTH), 65535)]).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 16, 4, 0, 0, 0)
    return (
        encoded(grey())[:8]
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def interlaced(content: bytes) -> bytes:
    """The 8-bit PNG with Adam7 interlacing, which neither Pillow nor OpenCV writes."""
    pixels = np.asarray(Image.open(io.BytesIO(content)))
    steps = [
        (0, 8, 0, 8),
        (0, 8, 4, 8),
        (4, 8, 0, 4),
        (0, 4, 2, 4),
        (2, 4, 0, 2),
        (0, 2, 1, 2),
        (1, 2, 0, 1),
    ]
    rows = b"".join(
        b"".join(b"\0" + row.tobytes() for row in pixels[r::dr, c::dc] if row.size)
        for r, dr, c, dc in steps
    )

    head = content[16:24] + b"\x08" + content[25:28] + b"\1"
    plte = content.find(b"PLTE")
    palette = (
        content[plte - 4 : plte + 8 + int.from_bytes(content[plte - 4 : plte])]
        if plte > 0
        else b""
    )
    return (
        content[:8]
        + chunk(b"IHDR", head)
        + palette
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def with_alpha(alpha: int) -> np.ndarray:
    pixels = np.dstack([rgb(), np.full((HEIGHT, WIDTH), 255, np.uint8)])
    pixels[1, 2, 3] = alpha
    return pixels


def bmp_with_4_bytes() -> bytes:
    return cv2.imencode(".bmp", with_alpha(255)[..., [2, 1, 0, 3]])[1].tobytes()


def bmp_of_two_colors() -> bytes:
    """8 bits per pixel and a palette of black and white, which Pillow reads as 0 everywhere."""
    rows = np.pad((TARGET != 0).astype(np.uint8), ((0, 0), (0, -WIDTH % 4)))[
        ::-1
    ].tobytes()
    info = struct.pack(
        "<IiiHHIIiiII", 40, WIDTH, HEIGHT, 1, 8, 0, len(rows), 0, 0, 2, 0
    )
    head = struct.pack("<IHHI", 14 + 40 + 8 + len(rows), 0, 0, 14 + 40 + 8)
    return b"BM" + head + info + bytes([0, 0, 0, 0, 255, 255, 255, 0]) + rows


def blended() -> np.ndarray:
    large = cv2.resize(rgb(), (WIDTH * 3, HEIGHT * 3), interpolation=cv2.INTER_LINEAR)
    return np.ascontiguousarray(large[:HEIGHT, :WIDTH])


def off_by_one() -> np.ndarray:
    pixels = rgb()
    pixels[3, 4] = (71, 70, 70)
    return pixels


# Ids of the palette files: an index is a train id, or the palette is in an order of its own.
OWN_ORDER = {0: 2, 1: 0, 2: 1, 255: 3}
IN_ORDER = {0: 0, 1: 1, 2: 2, 255: 3}
PAINTED = {0: (9, 8, 7), 1: (250, 0, 0), 2: (0, 250, 0), 255: (255, 255, 255)}
LOSSY = "is lossy"

# Name: content, class table, and either None (read right) or parts of the message.
Case = tuple[Callable[[], bytes], str, tuple[str, ...] | None]
CASES: dict[str, Case] = {
    "png grey ids": (lambda: encoded(grey()), IDS, None),
    "png grey train ids": (lambda: encoded(TARGET), TRAIN_IDS, None),
    "png grey 16 bits": (lambda: encoded(mapped(RAW, np.uint16)), IDS, None),
    "png grey 16 bits, large ids": (
        lambda: encoded(mapped(RAW | {2: 40011}, np.uint16)),
        WIDE,
        None,
    ),
    "png grey interlaced": (lambda: interlaced(encoded(grey())), IDS, None),
    "png grey with opaque alpha": (
        lambda: encoded(np.dstack([grey(), np.full_like(TARGET, 255)]), mode="LA"),
        IDS,
        None,
    ),
    "png grey of 16 bits with alpha": (
        grey_of_16_bits_with_alpha,
        IDS,
        ("cannot be a mask: 16 bits per channel of color",),
    ),
    "png palette, indices are ids": (
        lambda: palette_file("PNG", PAINTED, RAW),
        IDS,
        None,
    ),
    "png palette of 1 bit": (
        lambda: palette_file("PNG", PAINTED, {0: 0, 1: 1, 2: 1, 255: 1}, bits=1),
        "names: [floor, rest]\n",
        None,
    ),
    "png palette of 2 bits": (
        lambda: palette_file("PNG", PAINTED, IN_ORDER, bits=2),
        TRAIN_IDS + "ignore: [3]\n",
        None,
    ),
    "png palette of 4 bits": (
        lambda: palette_file("PNG", PAINTED, RAW, bits=4),
        IDS,
        None,
    ),
    "png palette interlaced": (
        lambda: interlaced(palette_file("PNG", PAINTED, RAW, bits=8)),
        IDS,
        None,
    ),
    "png palette in the order of the table": (
        lambda: palette_file("PNG", COLORS, IN_ORDER),
        BOTH.replace("[255,", "[3, 255,"),
        None,
    ),
    "png palette as an optimizer orders it": (
        lambda: palette_file("PNG", COLORS, OWN_ORDER),
        BOTH,
        (
            "index 0 of its palette is id 0, floor, but its color (70, 70, 70) belongs to shelf",
            "masks: colors",
        ),
    ),
    "png palette, colors declared": (
        lambda: palette_file("PNG", COLORS, OWN_ORDER),
        BOTH + "masks: colors\n",
        None,
    ),
    "png palette, ids declared": (
        lambda: palette_file("PNG", COLORS | {0: COLORS[1], 1: COLORS[0]}, RAW),
        IDS + PALETTE + "masks: ids\n",
        None,
    ),
    "png palette, transparent entry, ids": (
        lambda: palette_file("PNG", PAINTED, RAW, transparency=7),
        IDS,
        None,
    ),
    "png palette, transparent entry, colors": (
        lambda: palette_file("PNG", COLORS, OWN_ORDER, transparency=0),
        BOTH + "masks: colors\n",
        (" transparent pixels, the first", "without an alpha channel"),
    ),
    "png rgb": (lambda: encoded(rgb()), BOTH, None),
    "png rgba, opaque": (lambda: encoded(with_alpha(255)), BOTH, None),
    "png rgba, one pixel transparent": (
        lambda: encoded(with_alpha(254)),
        BOTH,
        (
            "1 transparent pixels, the first at row 1, column 2",
            "without an alpha channel",
        ),
    ),
    "png rgb, further colors of a class": (
        lambda: encoded(mapped(COLORS | {1: (1, 2, 3)})),
        BOTH + "colors: {shelf: [[1, 2, 3]]}\n",
        None,
    ),
    "png rgb, off by one": (
        lambda: encoded(off_by_one()),
        BOTH,
        (
            "color (71, 70, 70) (1 pixels, the first at row 3, column 4)",
            "nearest is (70, 70, 70) of shelf",
        ),
    ),
    "png rgb, resized with interpolation": (
        lambda: encoded(blended()),
        BOTH,
        ("resizing with interpolation",),
    ),
    "png rgb without a palette in the table": (
        lambda: encoded(rgb()),
        TRAIN_IDS,
        (
            "holds colors, such as (128, 64, 128) at row 0, column 0",
            "one color per class (`palette`)",
        ),
    ),
    "png rgb, ids declared": (
        lambda: encoded(rgb()),
        BOTH + "masks: ids\n",
        ("masks = ids", "Set `masks: colors`"),
    ),
    "png rgb of 16 bits": (
        lambda: cv2.imencode(".png", rgb().astype(np.uint16))[1].tobytes(),
        BOTH,
        ("cannot be a mask: 16 bits per channel",),
    ),
    "png ids in three equal channels": (
        lambda: encoded(np.dstack([grey()] * 3)),
        IDS,
        None,
    ),
    "png ids in three equal channels, ids declared": (
        lambda: encoded(np.dstack([TARGET] * 3)),
        BOTH + "masks: ids\n",
        None,
    ),
    "png ids in three equal channels, not declared": (
        lambda: encoded(np.dstack([grey()] * 3)),
        IDS + PALETTE,
        ("the color (7, 7, 7)", "If gray values are ids, set `masks: ids`"),
    ),
    "png grey that means colors": (
        lambda: encoded(mapped({0: 128, 1: 70, 2: 20, 255: 0})),
        TRAIN_IDS
        + "palette: [[128, 128, 128], [70, 70, 70], [20, 20, 20]]\nmasks: colors\nignore: [[0, 0, 0]]\n",
        None,
    ),
    "png unknown id": (
        lambda: encoded(mapped(RAW | {2: 12})),
        IDS,
        ("has id 12", "first at row 0, column 2"),
    ),
    "png unknown id of 16 bits": (
        lambda: encoded(mapped(RAW | {2: 3000}, np.uint16)),
        IDS,
        ("has id 3000", "table has 0, 7-8, 11"),
    ),
    "png truncated": (lambda: encoded(grey())[:-20], IDS, ("is truncated",)),
    "png with an orientation": (
        lambda: encoded(grey(), exif=exif(6)),
        IDS,
        ("mask with an EXIF orientation",),
    ),
    "bmp grey": (lambda: encoded(grey(), "BMP"), IDS, None),
    "bmp palette": (lambda: palette_file("BMP", PAINTED, RAW), IDS, None),
    "bmp palette of two colors": (
        bmp_of_two_colors,
        "names: [floor, rest]\n",
        ("is a black-and-white BMP", "Write it as PNG"),
    ),
    "bmp rgb": (lambda: encoded(rgb(), "BMP"), BOTH, None),
    "bmp rgba": (bmp_with_4_bytes, BOTH, None),
    "bmp of 1 bit": (
        lambda: encoded(TARGET > 0, "BMP"),
        "names: [floor, rest]\n",
        ("is a black-and-white BMP", "Write it as PNG"),
    ),
    "bmp truncated": (lambda: encoded(rgb(), "BMP")[:-5], BOTH, ("is truncated",)),
    "tiff grey": (lambda: encoded(grey(), "TIFF"), IDS, None),
    "tiff grey, lzw": (
        lambda: encoded(grey(), "TIFF", compression="tiff_lzw"),
        IDS,
        None,
    ),
    "tiff grey of 16 bits": (
        lambda: encoded(mapped(RAW | {2: 40011}, np.uint16), "TIFF"),
        WIDE,
        None,
    ),
    "tiff rgb": (
        lambda: encoded(rgb(), "TIFF", compression="tiff_deflate"),
        BOTH,
        None,
    ),
    "tiff palette": (
        lambda: palette_file("TIFF", PAINTED, RAW),
        IDS,
        None,
    ),
    "tiff jpeg": (
        lambda: encoded(rgb(), "TIFF", compression="jpeg"),
        BOTH,
        ("JPEG inside TIFF", LOSSY),
    ),
    "tiff float": (
        lambda: encoded(grey().astype(np.float32), "TIFF"),
        IDS,
        ("mode F (F: floats, I: 32 bits), but gray or RGB", "Write it as PNG"),
    ),
    "tiff of three floats": (
        lambda: bytes(cv2.imencode(".tif", rgb().astype(np.float32))[1]),
        IDS,
        ("or has pixels of a kind", "write it as PNG: gray or RGB with 8 or 16 bits"),
    ),
    "tiff of two pages": (
        lambda: encoded(
            grey(), "TIFF", save_all=True, append_images=[Image.fromarray(grey())]
        ),
        IDS,
        ("several pages",),
    ),
    "png of two frames": (
        lambda: encoded(grey(), save_all=True, append_images=[Image.fromarray(rgb())]),
        IDS,
        ("several pages",),
    ),
    "tiff truncated": (lambda: encoded(grey(), "TIFF")[:-9], IDS, ("is truncated",)),
    "tiff upside down": (
        lambda: encoded(grey(), "TIFF", exif=exif(3)),
        IDS,
        ("has an orientation, which decoders treat differently",),
    ),
    "jpeg": (
        lambda: encoded(grey(), "JPEG"),
        IDS,
        ("cannot be a mask: it holds JPEG", LOSSY, "as PNG"),
    ),
    "webp": (
        lambda: encoded(rgb(), "WEBP", lossless=True),
        BOTH,
        ("cannot be a mask: it holds WebP",),
    ),
    "gif": (
        lambda: palette_file("GIF", PAINTED, RAW),
        IDS,
        ("neither PNG nor JPEG, BMP, TIFF, WebP",),
    ),
}
WANTED = {
    "png palette of 1 bit": np.where(TARGET == 0, 0, 1),
    "png palette in the order of the table": TARGET,
}


def table_of(folder: Path, text: str) -> MaskTable:
    (folder / "classes.yaml").write_text(text)
    return load_masks(folder / "classes.yaml")


@pytest.mark.parametrize("name", CASES)
def test_a_label_file_is_read_right_or_refused_with_the_fix(
    tmp_path: Path, name: str
) -> None:
    draw, text, message = CASES[name]
    path = str(tmp_path / "mask.png")  # the content counts, not the suffix
    Path(path).write_bytes(draw())
    if message is None:
        table = settled(table_of(tmp_path, text), [path])
        found = read_target(table, path)
        assert found.dtype == np.uint8
        assert np.array_equal(found, WANTED.get(name, TARGET))
        assert read_header(path)[:2] == (HEIGHT, WIDTH)
        return
    with pytest.raises(DataError) as caught:
        read_target(settled(table_of(tmp_path, text), [path]), path)
    assert path in str(caught.value)
    for part in message:
        assert part in str(caught.value), str(caught.value)


PICTURE = np.random.Generator(np.random.Philox(6)).integers(
    0, 256, (HEIGHT, WIDTH, 3), np.uint8
)
GREY = PICTURE[..., 0]
IMAGES = {
    "grey": (encoded(GREY), np.dstack([GREY] * 3)),
    "grey of 16 bits": (
        encoded(GREY.astype(np.uint16) * 256 + 255),
        np.dstack([GREY] * 3),
    ),
    "rgba": (encoded(np.dstack([PICTURE, GREY])), PICTURE),
    "bmp": (encoded(PICTURE, "BMP"), PICTURE),
    "tiff": (encoded(PICTURE, "TIFF", compression="tiff_lzw"), PICTURE),
    "tiff of 16 bits": (
        encoded(GREY.astype(np.uint16) * 256 + 255, "TIFF"),
        np.dstack([GREY] * 3),
    ),
    "webp": (encoded(PICTURE, "WEBP", lossless=True), PICTURE),
    "webp with exif": (encoded(PICTURE, "WEBP", lossless=True, exif=exif(1)), PICTURE),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_rgb_of_8_bits_and_no_cut_passes(tmp_path: Path, name: str) -> None:
    """But for what Pillow reads right without: two bytes of padding at the end of a BMP."""
    content, wanted = IMAGES[name]
    path = tmp_path / "image.png"
    path.write_bytes(content)
    assert np.array_equal(read_image(str(path)), wanted)
    assert read_header(str(path))[:2] == (HEIGHT, WIDTH)
    padding = 3 * (name == "bmp")
    for length in [*range(0, len(content) - 1, 11), len(content) - 2 - padding]:
        path.write_bytes(content[:length])
        for read in (read_image, read_header):
            if (
                read is read_header
                and content.startswith(b"\x89PNG")
                and length >= len(content) - 4
            ):
                continue
            with pytest.raises(
                DataError, match="is truncated" if length >= 12 else "is"
            ):
                read(str(path))


def test_a_tiff_of_12_bits_keeps_its_upper_8(tmp_path: Path) -> None:
    """As cameras of inspection write it: two pixels in three bytes, one of 16 bits for Pillow."""
    wide, path = GREY.astype(np.uint16) * 16 + 9, tmp_path / "image.tif"
    bits = np.unpackbits(wide.astype(">u2").view(np.uint8), axis=1)
    bits = bits.reshape(HEIGHT, WIDTH, 16)[..., 4:].reshape(HEIGHT, -1)
    rows = np.packbits(bits, axis=1).tobytes()
    depths = [struct.pack("<HHIHH", 258, 3, 1, depth, 0) for depth in (16, 12)]
    content = encoded(wide, "TIFF").replace(*depths)
    pixels = wide.astype("<u2").tobytes()
    path.write_bytes(content.replace(pixels, rows.ljust(len(pixels))))
    assert read_header(str(path)).bits == 12
    assert np.array_equal(read_image(str(path)), np.dstack([GREY] * 3))


def test_a_tiff_in_which_0_is_white_is_turned_or_refused(tmp_path: Path) -> None:
    """Pillow inverts 8 bits, but not 16."""
    path = tmp_path / "image.tif"
    tags = [struct.pack("<HHIHH", 262, 3, 1, meaning, 0) for meaning in (1, 0)]
    path.write_bytes(encoded(GREY, "TIFF").replace(*tags))
    assert np.array_equal(read_image(str(path)), np.dstack([255 - GREY] * 3))
    path.write_bytes(encoded(GREY.astype(np.uint16), "TIFF").replace(*tags))
    with pytest.raises(DataError, match="has 16-bit gray values in which 0 is white"):
        read_image(str(path))


def test_a_jpeg_is_read_whatever_a_camera_appends(tmp_path: Path) -> None:
    """A preview as a second picture (MPO), or a video."""
    path, jpeg, video = tmp_path / "photo.jpg", encoded(PICTURE, "JPEG"), bytes(200_000)
    path.write_bytes(jpeg)
    wanted = read_image(str(path))
    preview = [Image.fromarray(PICTURE[:3])]
    mpo = encoded(PICTURE, "MPO", save_all=True, append_images=preview)
    for content in (mpo, jpeg + bytes(5000), jpeg + video):
        path.write_bytes(content)
        assert np.array_equal(read_image(str(path)), wanted)
        assert read_header(str(path))[:2] == (HEIGHT, WIDTH)
    for content in (jpeg[:-20], jpeg[:-20] + bytes(5000), jpeg[:-20] + video):
        path.write_bytes(content)
        for read in (read_image, read_header):
            with pytest.raises(DataError, match="is truncated"):
                read(str(path))


def test_a_png_is_read_whatever_an_editor_describes_in_it(tmp_path: Path) -> None:
    """Text and color profiles of megabytes, compressed."""
    plain, path = encoded(grey()), tmp_path / "mask.png"
    large = zlib.compress(bytes(3 << 20))
    for kind in (b"zTXt", b"iCCP"):
        path.write_bytes(plain[:33] + chunk(kind, b"k\0\0" + large) + plain[33:])
        assert np.array_equal(read_mask(str(path)).pixels, grey())
        assert read_image(str(path)).shape == (HEIGHT, WIDTH, 3)


def test_a_png_of_xcode_is_named(tmp_path: Path) -> None:
    """It has a chunk before the header, and pixels that only Apple's decoders read."""
    path, content = tmp_path / "mask.png", encoded(grey())
    path.write_bytes(content[:8] + chunk(b"CgBI", bytes(4)) + content[8:])
    for read in (read_mask, read_image):
        with pytest.raises(DataError, match=r"mask\.png"):
            read(str(path))


def test_a_damaged_png_is_named_with_the_same_words_each_time(tmp_path: Path) -> None:
    path, plain = tmp_path / "mask.png", encoded(grey())
    path.write_bytes(plain[:33] + chunk(b"tEXt", b"k\0v")[:-1] + b"!" + plain[33:])
    with pytest.raises(DataError, match=r"damaged \(cannot identify image file\)"):
        read_mask(str(path))


def turned_set(
    folder: Path, number: int, size: tuple[int, int], mask: np.ndarray, rule: str = ""
) -> DataConfig:
    """One training pair: a photo with an EXIF orientation, stored with `size`, and a mask."""
    for kind in ("images", "masks"):
        (folder / kind / "train").mkdir(parents=True)
    pixels = PICTURE[: size[0], : size[1]]
    (folder / "images/train/a.png").write_bytes(
        encoded(np.ascontiguousarray(pixels), exif=exif(number))
    )
    (folder / "masks/train/a.png").write_bytes(encoded(np.ascontiguousarray(mask)))
    (folder / "classes.yaml").write_text(TRAIN_IDS + rule)
    return DataConfig(name="folder", root=str(folder))


def upright(number: int, pixels: np.ndarray) -> np.ndarray:
    """What OpenCV makes of the orientation, which this project applies itself."""
    content = np.frombuffer(
        encoded(np.ascontiguousarray(pixels), exif=exif(number)), np.uint8
    )
    return np.asarray(cv2.imdecode(content, cv2.IMREAD_COLOR_RGB))


@pytest.mark.parametrize("number", range(1, 9))
def test_the_mask_tells_whether_its_photo_is_turned(
    tmp_path: Path, number: int
) -> None:
    turns = number >= 5
    mask = TARGET.T if turns else TARGET
    data = turned_set(
        tmp_path / "turned",
        number,
        (HEIGHT, WIDTH),
        mask,
        "" if turns else "exif: apply\n",
    )
    samples = open_samples(data, "train", 0)
    assert list(problems(data, ["train"])) == []
    assert np.array_equal(samples.read(0)[0], upright(number, PICTURE))
    assert image_sizes(samples) == {mask.shape: 1}
    stored = turned_set(
        tmp_path / "stored",
        number,
        (HEIGHT, WIDTH),
        TARGET,
        "" if turns else "exif: ignore\n",
    )
    assert np.array_equal(open_samples(stored, "train", 0).read(0)[0], PICTURE)
    assert list(problems(stored, ["train"])) == []


def test_an_orientation_may_come_after_the_pixels(tmp_path: Path) -> None:
    data = turned_set(tmp_path, 6, (HEIGHT, WIDTH), TARGET.T)
    photo = tmp_path / "images/train/a.png"
    content = photo.read_bytes()
    start, end = content.index(b"eXIf") - 4, content.index(b"IDAT") - 4
    tag = content[start:end]
    photo.write_bytes(content[:start] + content[end:-12] + tag + content[-12:])
    assert list(problems(data, ["train"])) == []
    assert np.array_equal(
        open_samples(data, "train", 0).read(0)[0], upright(6, PICTURE)
    )
    photo.write_bytes(encoded(PICTURE, "JPEG", comment=tag))
    assert read_header(str(photo)).orientation == 1, "it belongs to no picture"


@pytest.mark.parametrize(("number", "size"), [(6, (5, 5)), (3, (5, 7)), (2, (5, 7))])
def test_a_photo_that_may_be_turned_or_not_is_refused(
    tmp_path: Path, number: int, size: tuple[int, int]
) -> None:
    mask = TARGET[:, : size[1]]
    data = turned_set(tmp_path / "any", number, size, mask)
    for found in (list(problems(data, ["train"])), [str(fault_of(data))]):
        assert len(found) == 1
        assert (
            f"has the EXIF orientation {number}, but the size of its mask fits both ways"
            in found[0]
        )
    applied = turned_set(tmp_path / "applied", number, size, mask, "exif: apply\n")
    assert np.array_equal(
        open_samples(applied, "train", 0).read(0)[0],
        upright(number, PICTURE[:, : size[1]]),
    )


def fault_of(data: DataConfig) -> DataError:
    with pytest.raises(DataError) as caught:
        open_samples(data, "train", 0).read(0)
    return caught.value


def test_a_set_with_ids_and_colors_is_refused_unless_the_table_decides(
    tmp_path: Path,
) -> None:
    """A grey file among color masks may be black background, not id 0: the two readings differ."""
    text = (
        TRAIN_IDS
        + "palette: [[128, 64, 128], [70, 70, 70], [220, 20, 60]]\nignore: [255, [0, 0, 0]]\n"
    )
    for kind in ("images", "masks"):
        (tmp_path / kind / "train").mkdir(parents=True)
    for name in "ab":
        (tmp_path / f"images/train/{name}.png").write_bytes(encoded(PICTURE))
    (tmp_path / "masks/train/a.png").write_bytes(encoded(rgb()))
    (tmp_path / "masks/train/b.png").write_bytes(encoded(np.zeros_like(TARGET)))
    (tmp_path / "classes.yaml").write_text(text)
    data = DataConfig(name="folder", root=str(tmp_path))
    (found,) = problems(data, ["train"])
    assert "b.png holds ids, but" in found
    assert "a.png holds colors. Set `masks: ids` or `masks: colors`" in found
    with pytest.raises(DataError, match=r"b\.png holds ids"):
        open_samples(data, "train", 0).read(1)
    (tmp_path / "classes.yaml").write_text(text + "masks: colors\n")
    assert list(problems(data, ["train"])) == []
    assert np.array_equal(
        open_samples(data, "train", 0).read(1)[1], np.full_like(TARGET, 255)
    )


def test_damaged_files_end_with_an_error_that_names_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Random bytes of formats without checksums are changed: a file is read, or refused by a DataError."""
    names = ("bmp palette", "bmp rgb", "tiff grey, lzw", "tiff rgb", "webp", "jpeg")
    generator = np.random.Generator(np.random.Philox(8))
    path, refused = tmp_path / "damaged", list[str]()
    for content in (CASES[name][0]() for name in names):
        for _ in range(30):
            damaged = bytearray(content)
            damaged[generator.integers(0, min(len(content), 300))] = generator.choice(
                [0, 1, 255]
            )
            path.write_bytes(damaged)
            for read in (read_header, read_image, read_mask):
                try:
                    read(str(path))
                except DataError as error:
                    refused.append(str(error))
    assert len(refused) > 100
    assert all(str(path) in message for message in refused)
    capfd.readouterr()  # OpenCV says more
