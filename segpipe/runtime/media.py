"""Images, folders and videos as frames, and pictures of the answers. numpy alone reads .npy and .ppm."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ARRAY, PLAIN = ".npy", ".ppm"  # read by numpy alone
PICTURES = (ARRAY, PLAIN, ".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
VIDEOS = (".mp4", ".avi", ".mkv", ".mov", ".webm", ".m4v", ".mpg")
_PPM = re.compile(rb"P6\s+(?:#.*\n\s*)*(\d+)\s+(\d+)\s+255\s")
_FPS = 25.0  # of a video that does not tell
_MISSING = 0.05  # share of a video's frames that may be missing: some containers estimate their number
Image = NDArray[np.uint8]


class Frame(NamedTuple):
    """A frame uint8 (H, W, 3) RGB, or any array of an .npy; None with a reason where it cannot be read."""

    name: str
    image: Image | None
    problem: str = ""


def files_of(sources: Sequence[Path]) -> list[Path]:
    """Images and videos; of a folder those in it, by name.

    Raises ValueError for what is missing or empty, for a format whose decoder is not installed, and for two files whose
    masks would have one name.
    """
    files: list[Path] = []
    for source in sources:
        inside = (
            sorted(
                path
                for path in source.iterdir()
                if path.suffix.lower() in (*PICTURES, *VIDEOS)
            )
            if (source.is_dir())
            else [source]
        )
        if not inside:
            raise ValueError(
                f"{source} holds no image and no video: {', '.join((*PICTURES, *VIDEOS))} are looked for."
            )
        files += inside
    stems: dict[str, Path] = {}
    for path in files:
        if path.suffix.lower() in VIDEOS:
            _cv2(path)
        elif path.suffix.lower() not in (ARRAY, PLAIN):
            _decoder(path)
        if not path.is_file():
            raise ValueError(f"{path} cannot be read: no such file.")
        other = stems.setdefault(path.stem, path)
        if other != path:
            raise ValueError(
                f"{other} and {path} would both be written to {path.stem}_mask. Run them one by one."
            )
    return files


def require_kept(files: Sequence[Path], out: Path) -> None:
    """Raises ValueError if the pictures of one file would replace another: labels are often called NAME_mask."""
    written = {f"{path.stem}_{kind}" for path in files for kind in ("mask", "overlay")}
    for path in files:
        if path.stem in written and path.parent.resolve() == out.resolve():
            raise ValueError(
                f"{path} would be overwritten by an answer. Choose another folder for --out."
            )


def is_video(path: Path) -> bool:
    """Whether `frames_of` gives many frames."""
    return path.suffix.lower() in VIDEOS


def frames_of(path: Path) -> Iterator[Frame]:
    """The image, or the frames of a video one by one."""
    if not is_video(path):
        try:
            yield Frame(str(path), read_image(path))
        except ValueError as error:
            yield Frame(str(path), None, str(error))
        return
    cv2, number = _cv2(path), 0
    capture = cv2.VideoCapture(str(path))
    claimed = float(
        capture.get(cv2.CAP_PROP_FRAME_COUNT)
    )  # 0 or below, and NaN, where it does not tell
    try:
        while True:
            there, image = capture.read()
            if not there:
                break
            yield Frame(f"{path}:{number}", np.ascontiguousarray(image[..., ::-1]))
            number += 1
    finally:
        capture.release()
    if not number:
        yield Frame(
            str(path),
            None,
            f"{path} cannot be read: no frame of the video can be decoded.",
        )
    elif claimed - number > max(1, _MISSING * claimed):
        yield Frame(
            str(path),
            None,
            f"{path} is damaged: {number} of {claimed:.0f} frames could be decoded.",
        )


def frames_per_second(path: Path) -> float:
    """Of a video; 25 where it does not tell."""
    cv2 = _cv2(path)
    capture = cv2.VideoCapture(str(path))
    found = float(capture.get(cv2.CAP_PROP_FPS))
    capture.release()
    return found if 0 < found < 1000 else _FPS


def read_image(path: Path) -> Image:
    """Image as stored: uint8 (H, W, 3) RGB from a picture, any array from .npy. Raises ValueError with the path."""
    try:
        if path.suffix.lower() == ARRAY:
            return np.asarray(np.load(path, allow_pickle=False))
        if path.suffix.lower() == PLAIN:
            return _read_ppm(path)
        return np.asarray(_decoder(path)(path))
    except Exception as error:  # decoders raise SyntaxError, struct.error and types of their own for damaged files
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error})."
        ) from None


def _read_ppm(path: Path) -> Image:
    content = path.read_bytes()
    head = _PPM.match(content)
    if head is None:
        raise ValueError("a binary PPM (P6) with levels 0 to 255 was needed")
    width, height = int(head[1]), int(head[2])
    pixels = np.frombuffer(content, np.uint8, offset=head.end())
    if pixels.size < height * width * 3:
        raise ValueError(
            f"{pixels.size} bytes of pixels, {height * width * 3} were needed"
        )
    return pixels[: height * width * 3].reshape(height, width, 3)


def _decoder(path: Path) -> Any:
    """A function from a path to an RGB image: Pillow's, or OpenCV's without it."""
    try:
        from PIL import Image as pillow  # noqa: N813
    except ImportError:
        cv2 = _cv2(
            path,
            f"without Pillow or OpenCV only {ARRAY} and {PLAIN} are read; pip install pillow",
        )

        def decode(path: Path) -> Image:
            # As stored, like Pillow and the readers of the training: no EXIF orientation is applied.
            how = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
            image = cv2.imdecode(np.fromfile(path, np.uint8), how)
            if image is None:
                raise ValueError("OpenCV cannot decode it")
            return np.asarray(image[..., ::-1])

        return decode

    def convert(path: Path) -> Image:
        with pillow.open(path) as picture:
            if picture.mode.startswith(
                ("I", "F")
            ):  # convert() would clip 16 bits to white
                raise ValueError(
                    f"it has mode {picture.mode}, but 8 bits per channel were needed"
                )
            return np.asarray(picture.convert("RGB"))

    return convert


def _cv2(
    path: Path,
    otherwise: str = "videos need OpenCV; pip install opencv-python-headless",
) -> Any:
    try:
        import cv2
    except ImportError:
        raise ValueError(f"{path}: {otherwise}.") from None
    return cv2


def write_picture(stem: Path, picture: Image) -> None:
    """Write a PNG with Pillow; without it .ppm for (H, W, 3) and .pgm for (H, W)."""
    try:
        from PIL import Image as pillow  # noqa: N813
    except ImportError:
        suffix, kind = ("ppm", "P6") if picture.ndim == 3 else ("pgm", "P5")
        head = f"{kind}\n{picture.shape[1]} {picture.shape[0]}\n255\n".encode()
        stem.with_name(f"{stem.name}.{suffix}").write_bytes(head + picture.tobytes())
        return
    pillow.fromarray(picture).save(stem.with_name(f"{stem.name}.png"))


def overlay(image: Image, mask: Image, palette: Image) -> Image:
    """Average of the image and its class colors, uint8 (H, W, 3); black instead of a color where there is no answer."""
    colors = np.zeros((256, 3), dtype=np.uint16)
    colors[: len(palette)] = palette
    return ((image.astype(np.uint16) + colors[mask]) // 2).astype(np.uint8)


class OverlayVideo:
    """Writes `path`, an .mp4 of overlays at the speed of `source`, frame by frame; a context."""

    def __init__(self, path: Path, source: Path) -> None:
        self._path, self._source = path, source
        self._writer: Any = None

    def __enter__(self) -> OverlayVideo:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.release()

    def add(self, picture: Image) -> None:
        """Append a frame uint8 (H, W, 3) RGB. Raises ValueError when OpenCV cannot write the file."""
        cv2 = _cv2(self._path)
        if self._writer is None:
            code = cv2.VideoWriter.fourcc(*"mp4v")
            size = (picture.shape[1], picture.shape[0])
            self._writer = cv2.VideoWriter(
                str(self._path), code, frames_per_second(self._source), size
            )
            if not self._writer.isOpened():
                raise ValueError(
                    f"{self._path} cannot be written: this OpenCV has no mp4v encoder."
                )
        self._writer.write(np.ascontiguousarray(picture[..., ::-1]))
