"""One command's predictions: sources are found, those that are there are kept, bad ones named, the rest predicted."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from glob import glob, has_magic
from itertools import groupby, islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np

from segpipe.data.folders import SUFFIXES as IMAGES
from segpipe.data.readers import read_image
from segpipe.errors import ConfigError, DataError, Interrupted, listed
from segpipe.files import files_below, sha256, to_json
from segpipe.predict.outputs import (
    FORMAT,
    VIDEOS,
    Input,
    Outputs,
    Stamp,
    put,
    read_stamp,
    unwritable,
)

if TYPE_CHECKING:
    from segpipe.predict.predictor import Pixels

SUMMARY = "predictions.json"
READERS, AHEAD = 4, 8  # threads that read images, and images that wait in memory
FALLBACK_FPS = 25.0
# A header may promise that many frames too many without any damage.
MISSING_SHARE, MISSING_FRAMES = 0.01, 2
CODEC = "mp4v"  # MPEG-4 part 2, which every build of OpenCV can write
# No messages of FFmpeg about a damaged file; ours names the file.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")


def find(given: str, out: Path) -> tuple[list[Input], str]:
    """Images and videos of a file, a folder with all below it, or a glob pattern, and a note on what is left out.

    Sorted by place. Hidden files, files below `out`, and in folders and patterns files with other suffixes are left
    out. Raises DataError when nothing is found, ConfigError when the sources lie in `out`.
    """
    root, paths = _paths(given)
    inside, above = out.resolve(), root.resolve()
    if inside in (above, *above.parents):
        raise ConfigError(
            f"out = {out} is the folder of source = {given}, or lies above it, so results and sources would be mixed. "
            f"Choose a folder of its own, such as out={out / 'predictions'}."
        )
    visible = [
        path
        for path in paths
        if not path.name.startswith(".") and inside not in path.resolve().parents
    ]
    places = {
        path.relative_to(root).as_posix(): path for path in filter(_is_known, visible)
    }
    if not places:
        known = " ".join((*IMAGES, *VIDEOS))
        raise DataError(
            f"source = {given} holds no image and no video. Files with these suffixes are read: {known}."
        )
    others = Counter(
        path.suffix or "no suffix" for path in visible if not _is_known(path)
    )
    counts = [f"{times} {suffix}" for suffix, times in others.most_common()]
    note = f"files of other types were left out: {listed(counts)}." if counts else ""
    ordered = sorted(places)
    named = zip(ordered, names(ordered), strict=True)
    return [Input(places[place], place, name) for place, name in named], note


def _paths(given: str) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and the files."""
    path = Path(given)
    if path.is_dir():
        return path, list(files_below(path))
    if path.exists():
        if not _is_known(path):
            raise DataError(
                f"source = {given}: the suffix {path.suffix or '(none)'} is not one of an image or a video."
            )
        return path.parent, [path]
    if not has_magic(given):
        raise DataError(
            f"source = {given} does not exist. Give a file, a folder, or a pattern in quotes: source='a/*.jpg'."
        )
    matches = map(Path, glob(given, recursive=True))
    files = [
        file
        for each in matches
        for file in (files_below(each) if each.is_dir() else [each])
    ]
    fixed = next(parent for parent in path.parents if not has_magic(str(parent)))
    return fixed, files


def _is_known(path: Path) -> bool:
    return path.suffix.lower() in (*IMAGES, *VIDEOS)


def names(places: Sequence[str]) -> list[str]:
    """A distinct name for each place: without suffix, or all with it where two would have the same name."""
    bare = [str(PurePosixPath(place).with_suffix("")) for place in places]
    return bare if len(set(bare)) == len(bare) else list(places)


@dataclass
class Predictions:
    """What a command did."""

    entries: dict[str, dict[str, Any]]  # of finished sources, by place
    pixels: list[int]  # of each class, over all of them
    problems: list[str] = field(default_factory=list)
    kept: int = 0  # sources that were finished before
    answered: int = 0  # images and frames
    seconds: float = 0.0


class PredictJob:
    """Predicts sources into a folder."""

    def __init__(
        self,
        sources: Sequence[Input],
        outputs: Outputs,
        *,
        batch: int = 1,
        replace: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._sources, self._outputs = sources, outputs
        self._batch, self._replace = batch, replace
        self._progress = progress
        self._total = 0  # images and frames
        self._done = Predictions({}, [0] * len(outputs.predictor.names))

    def run(self) -> Predictions:
        """Predict all sources and write predictions.json; problems of single files are in the result.

        Raises ConfigError before the first prediction when outputs of another model or other settings are in the way,
        and later when one cannot be written; Interrupted, with all finished files in place, on Ctrl-C.
        """
        done = self._done
        todo = self._unfinished()
        images = [source for source in todo if not source.is_video]
        clips = {}
        for source in todo:
            if source.is_video:
                with self._problems():
                    clips[source] = probe(source.path)
        self._total = len(images) + sum(clip.frames for clip in clips.values())
        started = time.perf_counter()
        try:
            self._predict_images(images)
            for source, clip in clips.items():
                with self._problems():
                    self._enter(source, self._predict_video(source, clip))
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted: {len(done.entries)} of {len(self._sources)} sources are finished. The same command "
                f"goes on with the rest."
            ) from None
        finally:
            done.seconds = time.perf_counter() - started
            self._summarize()
        return done

    @contextlib.contextmanager
    def _problems(self) -> Iterator[None]:
        """What is wrong with one source becomes a problem beside the others."""
        try:
            yield
        except DataError as error:
            self._done.problems.append(str(error))

    def _unfinished(self) -> list[Input]:
        """Sources that are to be predicted; those with all outputs in place are entered."""
        todo, blocked = [], []
        for source in self._sources:
            path = self._outputs.mask(source)
            try:
                changed = self._outputs.differences(source)
            except OSError as error:
                problem = f"{source.path} cannot be read: {error.strerror}."
                self._done.problems.append(problem)
                continue
            if changed == []:
                self._done.kept += 1
                self._enter(source, read_stamp(path))
                continue
            todo.append(source)
            if changed:
                name = path.relative_to(self._outputs.out)
                blocked.append(f"{name} ({', '.join(changed)})")
        if blocked and not self._replace:
            raise ConfigError(
                f"out = {self._outputs.out} holds {len(blocked)} files of another model, source or setting: "
                f"{'; '.join(blocked[:3])}. Choose another out=, or overwrite them with exists=replace."
            )
        return todo

    def _predict_images(self, images: Sequence[Input]) -> None:
        decoded = groupby(self._decoded(images), key=lambda each: np.shape(each[2]))
        for _, same_size in decoded:
            while batch := list(islice(same_size, self._batch)):
                pixels = [each for _, _, each in batch]
                answers = self._outputs.predictor.segment(pixels)
                for (source, digest, image), ids in zip(batch, answers, strict=True):
                    with self._problems():
                        stamp = self._outputs.write_image(source, digest, image, ids)
                        self._enter(source, stamp)
                    self._advance()

    def _decoded(self, sources: Sequence[Input]) -> Iterator[tuple[Input, str, Pixels]]:
        """Images with their hash, read ahead by threads, in order; unreadable ones become problems."""
        rest = iter(sources)
        waiting: list[tuple[Input, Future[tuple[str, Pixels]]]] = []
        with ThreadPoolExecutor(READERS) as pool:
            try:
                while True:
                    for source in islice(rest, AHEAD - len(waiting)):
                        waiting.append((source, pool.submit(self._read, source)))
                    if not waiting:
                        return
                    source, future = waiting.pop(0)
                    with self._problems():
                        digest, pixels = future.result()
                        yield source, digest, pixels
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, source: Input) -> tuple[str, Pixels]:
        upright = self._outputs.upright
        pixels = read_image(str(source.path), exif="apply" if upright else "ignore")
        return sha256(source.path), pixels

    def _predict_video(self, source: Input, clip: Clip) -> Stamp:
        """Predict all frames of a video; its stamp, with results. Raises DataError when it breaks off."""
        outputs = self._outputs
        stamp = outputs.stamp(source, sha256(source.path))
        frames = read_frames(source.path)
        pixels = np.zeros(len(outputs.predictor.names), np.int64)
        done = 0
        film = Film(outputs.picture(source), clip) if outputs.overlay else None
        with film or contextlib.nullcontext():
            while images := list(islice(frames, self._batch)):
                answers = outputs.predictor.segment(images)
                for image, ids in zip(images, answers, strict=True):
                    if outputs.frames:
                        path = outputs.mask(source).with_name(f"{done:06}.png")
                        outputs.write_mask(path, ids, stamp)
                    if film is not None:
                        film.add(outputs.blended(image, ids))
                    pixels += outputs.count(ids)
                    done += 1
                    self._advance()
            if clip.frames - done > max(MISSING_FRAMES, clip.frames * MISSING_SHARE):
                raise DataError(
                    f"{source.path} breaks off: {done} of {clip.frames} frames could be decoded. Copy or convert it "
                    f"again."
                )
            if film is not None:
                film.finish()
        results = {"size": [clip.height, clip.width], "frames": done, "fps": clip.fps}
        stamp |= {**results, "pixels": pixels.tolist()}
        put(outputs.mask(source), to_json(stamp))
        return stamp

    def _advance(self) -> None:
        self._done.answered += 1
        self._progress(self._done.answered, max(self._total, self._done.answered))

    def _enter(self, source: Input, stamp: Stamp) -> None:
        self._done.entries[source.place] = self._outputs.entry(source, stamp)
        pairs = zip(self._done.pixels, stamp["pixels"], strict=True)
        self._done.pixels = [before + now for before, now in pairs]

    def _summarize(self) -> None:
        """Write predictions.json: everything but times, so that equal predictions give equal bytes."""
        done, predictor = self._done, self._outputs.predictor
        classes = zip(predictor.names, predictor.palette, strict=True)
        content = {
            "format": FORMAT,
            "model": predictor.model,
            "settings": self._outputs.settings,
            "classes": [
                {"id": train, "name": name, "color": color}
                for train, (name, color) in enumerate(classes)
            ],
            "complete": len(done.entries) == len(self._sources),
            "share": self._outputs.shares(done.pixels),
            "predictions": [done.entries[place] for place in sorted(done.entries)],
            "problems": done.problems,
        }
        put(self._outputs.out / SUMMARY, to_json(content))


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
        height, width, _ = first.shape
        known = math.isfinite(frames) and frames > 0
        fps = fps if 0 < fps <= 1000 else FALLBACK_FPS
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
            written = probe(self._aside).frames
        except DataError:
            written = 0
        if written != self.frames:
            raise ConfigError(
                f"{self.path} would hold {written} of {self.frames} frames. The disk is full, or OpenCV cannot write "
                f"this size. Choose another out=, or set overlay=false frames=true."
            )
        os.replace(self._aside, self.path)
