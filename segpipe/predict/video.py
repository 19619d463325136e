"""Predictions of a video, frame by frame: an MP4 file of overlays, and the masks of its frames."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe.errors import ConfigError, DataError
from segpipe.files import sha256, to_json
from segpipe.predict.outputs import Outputs
from segpipe.predict.sources import Input
from segpipe.predict.stamp import Stamp, mp4_box, picture_png, put, unwritable

FALLBACK_FPS = 25.0
MISSING_SHARE, MISSING_FRAMES = (
    0.01,
    2,
)  # a header may promise that many frames too many without any damage
CODEC = "mp4v"  # MPEG-4 part 2, which every build of OpenCV can write
os.environ.setdefault(
    "OPENCV_FFMPEG_LOGLEVEL", "-8"
)  # its messages about a damaged file; ours names the file


class Clip(NamedTuple):
    """What the header of a video says."""

    height: int
    width: int
    fps: float
    frames: int  # 0: the header does not say


def probe(path: Path) -> Clip:
    """Header of a video. Raises DataError when it cannot be opened, or has no frame."""
    with _opened(path) as capture:
        done, first = capture.read()
        if not done:
            raise DataError(
                f"{path} has no frame that OpenCV can decode. Convert it, for example to H.264 in MP4."
            )
        fps = float(capture.get(cv2.CAP_PROP_FPS))
        frames = capture.get(cv2.CAP_PROP_FRAME_COUNT)
        return Clip(
            first.shape[0],
            first.shape[1],
            fps if math.isfinite(fps) and 0 < fps <= 1000 else FALLBACK_FPS,
            int(frames) if math.isfinite(frames) and frames > 0 else 0,
        )


def read_frames(path: Path) -> Iterator[NDArray[np.uint8]]:
    """RGB frames uint8 (H, W, 3), upright. Raises DataError when the video cannot be opened or its size changes."""
    with _opened(path) as capture:
        size: tuple[int, ...] = ()
        while True:
            done, frame = capture.read()
            if not done:
                return
            if frame.shape != (size or frame.shape):
                raise DataError(
                    f"{path} changes its size from {size[:2]} to {frame.shape[:2]} (height, width)."
                )
            size = frame.shape
            yield np.ascontiguousarray(frame[..., ::-1], np.uint8)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[cv2.VideoCapture]:
    if not os.access(path, os.R_OK):
        raise DataError(
            f"{path} cannot be read: {'permission denied' if path.exists() else 'no such file'}."
        )
    level = cv2.utils.logging.setLogLevel(
        cv2.utils.logging.LOG_LEVEL_ERROR
    )  # its warnings name no file
    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
    cv2.utils.logging.setLogLevel(level)
    try:
        if not capture.isOpened():
            raise DataError(
                f"{path} cannot be opened as a video. It is truncated, or no video. Copy it again."
            )
        yield capture
    finally:
        capture.release()


class Film:
    """An MP4 file in the making, of frames of one size. Odd sizes grow by a row or a column.

    The format has half the resolution for color, so its sides are even; OpenCV would drop the last row or column.
    """

    def __init__(self, path: Path, clip: Clip) -> None:
        self.path = path
        self.frames = 0
        self.size = (clip.height + clip.height % 2, clip.width + clip.width % 2)
        self._aside = path.with_name(
            f".{path.name}.tmp.mp4"
        )  # OpenCV chooses the format by the suffix
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._aside.write_bytes(b"")  # gives a reason, which OpenCV does not
        except OSError as error:
            raise unwritable(path, error) from error
        self._writer = cv2.VideoWriter(
            str(self._aside), cv2.VideoWriter.fourcc(*CODEC), clip.fps, self.size[::-1]
        )
        if not self._writer.isOpened():
            self.discard()
            raise ConfigError(
                f"{path} cannot be written as a video of {self.size[0]}x{self.size[1]} at {clip.fps:g} frames per "
                f"second. Set overlay=false frames=true for the masks of the frames alone."
            )

    def add(self, frame: NDArray[np.uint8]) -> None:
        """Append an RGB frame."""
        down, right = self.size[0] - frame.shape[0], self.size[1] - frame.shape[1]
        padded = np.pad(frame, ((0, down), (0, right), (0, 0)), mode="edge")
        self._writer.write(np.ascontiguousarray(padded[..., ::-1]))
        self.frames += 1

    def finish(self, path: Path, stamp: Stamp) -> None:
        """Put the file at `path`. Raises ConfigError unless all frames are in it: OpenCV tells of no full disk."""
        self._writer.release()
        try:
            found = probe(self._aside).frames
        except DataError:
            found = 0
        if found != self.frames:
            raise ConfigError(
                f"{path} would hold {found} of {self.frames} frames. The disk is full, or OpenCV cannot write this "
                f"size. Choose another out=."
            )
        try:
            with self._aside.open("ab") as file:
                file.write(mp4_box(stamp))
            os.replace(self._aside, path)
        except OSError as error:
            raise unwritable(path, error) from error

    def discard(self) -> None:
        """Remove what was not finished."""
        if hasattr(self, "_writer"):
            self._writer.release()
        with contextlib.suppress(OSError):
            self._aside.unlink(missing_ok=True)


def write_video(
    outputs: Outputs, source: Input, clip: Clip, batch: int, advance: Callable[[], None]
) -> Stamp:
    """Predict all frames of a video; the stamp of its files, with results. Calls `advance` after each frame.

    Raises DataError when the video breaks off; the overlays up to there are kept as NAME.partial.mp4.
    """
    stamp = outputs.stamp(source, sha256(source.path))
    film = Film(outputs.picture(source), clip) if outputs.overlay else None
    results: dict[str, Any] = {
        "size": [clip.height, clip.width],
        "frames": 0,
        "fps": clip.fps,
    }
    results["pixels"] = [0] * len(outputs.predictor.names)
    try:
        fault = _answer_frames(outputs, source, stamp, film, results, batch, advance)
        if not fault and clip.frames - results["frames"] > max(
            MISSING_FRAMES, clip.frames * MISSING_SHARE
        ):
            fault = f"{source.path} breaks off: {results['frames']} of {clip.frames} frames could be decoded."
        if fault:
            raise DataError(
                f"{fault} {_keep(outputs, source, film, stamp | results)}Copy or convert the video again."
            )
        if film is not None:
            if outputs.legend:
                put(
                    outputs.picture(source, ".legend.png"),
                    picture_png(outputs.key(results["pixels"]), stamp),
                )
            film.finish(film.path, outputs.of_picture(stamp) | results)
        if outputs.frames:
            put(outputs.mask(source), to_json(stamp | results))
    finally:
        if film is not None:
            film.discard()
    return stamp | results


def _keep(outputs: Outputs, source: Input, film: Film | None, stamp: Stamp) -> str:
    """Keep the overlays of a video that breaks off; a sentence that says where."""
    if film is None or not film.frames:
        return ""
    path = outputs.picture(source, ".partial.mp4")
    film.finish(path, stamp | {"partial": True})
    return f"The overlays up to there are in {path}. "


def _answer_frames(
    outputs: Outputs,
    source: Input,
    stamp: Stamp,
    film: Film | None,
    results: dict[str, Any],
    batch: int,
    advance: Callable[[], None],
) -> str:
    """Predict the frames, count them and their pixels in `results`; why it ended before the end, or nothing."""
    frames = read_frames(source.path)
    try:
        while images := list(itertools.islice(frames, batch)):
            for image, ids in zip(
                images, outputs.predictor.answer(images), strict=True
            ):
                if outputs.frames:
                    outputs.write_mask(
                        outputs.frame(source, results["frames"]), ids, stamp
                    )
                if film is not None:
                    film.add(outputs.blended(image, ids, with_legend=False))
                results["frames"] += 1
                results["pixels"] = [
                    sum(pair)
                    for pair in zip(results["pixels"], outputs.count(ids), strict=True)
                ]
                advance()
    except DataError as error:
        return str(error)
    return ""
