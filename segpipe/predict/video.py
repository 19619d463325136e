"""Predictions of a video, frame by frame: an MP4 file of overlays, and the masks of its frames."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np

from segpipe.errors import ConfigError, DataError
from segpipe.files import sha256, to_json
from segpipe.predict.outputs import Outputs, Stamp, put, unwritable
from segpipe.predict.sources import Input

if TYPE_CHECKING:
    from segpipe.predict.predictor import Pixels

FALLBACK_FPS = 25.0
# A header may promise that many frames too many without any damage.
MISSING_SHARE, MISSING_FRAMES = 0.01, 2
CODEC = "mp4v"  # MPEG-4 part 2, which every build of OpenCV can write
# No messages of FFmpeg about a damaged file; ours names the file.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")


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
        frames = float(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        if not 0 < fps <= 1000:
            fps = FALLBACK_FPS
        known = math.isfinite(frames) and frames > 0
        height, width, _ = first.shape
        return Clip(height, width, fps, int(frames) if known else 0)


def read_frames(path: Path) -> Iterator[Pixels]:
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
    # No warnings of OpenCV, which name no file.
    level = cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_ERROR)
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
    """An MP4 file in the making, of frames of one size; a context, after which it is there only if it was finished.

    The format has half the resolution for color, so its sides are even: odd ones grow by a pixel.
    """

    def __init__(self, path: Path, clip: Clip) -> None:
        self.path = path
        self.frames = 0
        self.size = (clip.height + clip.height % 2, clip.width + clip.width % 2)
        # OpenCV chooses the format by the suffix.
        self._aside = path.with_name(f".{path.name}.tmp.mp4")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._aside.write_bytes(b"")  # gives a reason, which OpenCV does not
        except OSError as error:
            raise unwritable(path, error) from error
        self._writer = cv2.VideoWriter(
            str(self._aside), cv2.VideoWriter.fourcc(*CODEC), clip.fps, self.size[::-1]
        )

    def __enter__(self) -> Film:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.release()
        self._aside.unlink(missing_ok=True)

    def add(self, frame: Pixels) -> None:
        """Append an RGB frame."""
        down, right = self.size[0] - frame.shape[0], self.size[1] - frame.shape[1]
        padded = np.pad(frame, ((0, down), (0, right), (0, 0)), mode="edge")
        self._writer.write(np.ascontiguousarray(padded[..., ::-1]))
        self.frames += 1

    def finish(self) -> None:
        """Put the file in place. Raises ConfigError unless all frames are in it: OpenCV tells of no full disk."""
        self._writer.release()
        try:
            found = probe(self._aside).frames
        except DataError:
            found = 0
        if found != self.frames:
            raise ConfigError(
                f"{self.path} would hold {found} of {self.frames} frames. The disk is full, or OpenCV cannot write "
                f"this size. Choose another out=, or set overlay=false frames=true."
            )
        os.replace(self._aside, self.path)


def write_video(
    outputs: Outputs, source: Input, clip: Clip, batch: int, advance: Callable[[], None]
) -> Stamp:
    """Predict all frames of a video; its stamp, with results. Calls `advance` after each frame.

    Raises DataError when the video breaks off.
    """
    stamp = outputs.stamp(source, sha256(source.path))
    frames = read_frames(source.path)
    pixels = np.zeros(len(outputs.predictor.names), np.int64)
    done = 0
    with contextlib.ExitStack() as stack:
        film = None
        if outputs.overlay:
            film = stack.enter_context(Film(outputs.picture(source), clip))
        while images := list(itertools.islice(frames, batch)):
            found = outputs.predictor.segment(images)
            for image, ids in zip(images, found, strict=True):
                if outputs.frames:
                    outputs.write_mask(outputs.frame(source, done), ids, stamp)
                if film is not None:
                    film.add(outputs.blended(image, ids))
                pixels += outputs.count(ids)
                done += 1
                advance()
        if clip.frames - done > max(MISSING_FRAMES, clip.frames * MISSING_SHARE):
            raise DataError(
                f"{source.path} breaks off: {done} of {clip.frames} frames could be decoded. Copy or convert it again."
            )
        if film is not None:
            film.finish()
    results = {"size": [clip.height, clip.width], "frames": done, "fps": clip.fps}
    stamp |= results | {"pixels": pixels.tolist()}
    if outputs.overlay and outputs.legend:
        outputs.write_legend(source, stamp["pixels"])
    put(outputs.mask(source), to_json(stamp))
    return stamp
