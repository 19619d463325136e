"""Predictions of one command: finds sources, keeps finished ones, reports bad ones and predicts the rest."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path, PurePosixPath
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe.data.pairs import SUFFIXES as IMAGES
from segpipe.data.readers import read_image, threaded
from segpipe.errors import ConfigError, DataError, Interrupted, listed
from segpipe.files import file_sha256, files_below, plain, read_json, to_json
from segpipe.predict.outputs import (
    VIDEOS,
    Input,
    blend,
    put,
    unwritable,
    write_mask,
    write_overlay,
)
from segpipe.runtime.frames import Pixels

if TYPE_CHECKING:
    from segpipe.predict.predictor import Predictor

FORMAT = "segpipe-predictions/4"
SUMMARY = "predictions.json"
AHEAD = 32  # images that are read ahead and held in memory
FALLBACK_FPS = 25.0
# A header may overstate the number of frames by this much in an intact file.
MISSING_SHARE, MISSING_FRAMES = 0.01, 2
CODEC = "mp4v"  # MPEG-4 part 2, which every build of OpenCV can write
# Silences FFmpeg's and OpenCV's messages about damaged files; ours name the file.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_ERROR)


def find(given: str, out: Path) -> tuple[list[Input], str]:
    """Images and videos of a file, a folder (recursive) or a glob pattern, and a note on skipped files.

    A number is a camera, and a source with :// is a stream.

    Sorted by place. Skips hidden files, files below `out`, and files with other suffixes; the note counts only the
    latter. Raises DataError when nothing is found, ConfigError when `out` is the folder of the sources or contains it.
    """
    if "://" in given or (given.isdigit() and not Path(given).exists()):
        name = f"camera{given}" if given.isdigit() else "stream"
        return [Input(Path(name), f"{name}.mp4", name, given)], ""
    root, paths = _paths(given)
    inside, above = out.resolve(), root.resolve()
    if inside in (above, *above.parents):
        raise ConfigError(
            f"out = {out} is the folder of source = {given}, or contains it, so results and sources would be mixed. "
            f"Choose a separate folder, such as out={out / 'predictions'}."
        )
    places: dict[str, Path] = {}
    others: Counter[str] = Counter()
    for path in paths:
        if path.name.startswith(".") or inside in path.resolve().parents:
            continue
        # Reading a FIFO would block forever.
        if path.suffix.lower() in (*IMAGES, *VIDEOS) and not path.is_fifo():
            places[path.relative_to(root).as_posix()] = path
        else:
            others[path.suffix or "no suffix"] += 1
    if not places:
        known = " ".join((*IMAGES, *VIDEOS))
        raise DataError(
            f"source = {given} has no images or videos. Supported suffixes: {known}."
        )
    counts = [f"{times} {suffix}" for suffix, times in others.most_common()]
    note = f"skipped files of other types: {listed(counts)}." if counts else ""
    ordered = sorted(places)
    return [
        Input(places[place], place, name)
        for place, name in zip(ordered, names(ordered), strict=True)
    ], note


def _paths(given: str) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and the files."""
    path = Path(given)
    if path.exists():
        root, matches = path if path.is_dir() else path.parent, [given]
    elif has_magic(given):
        root = next(parent for parent in path.parents if not has_magic(str(parent)))
        matches = glob(given, recursive=True)
    else:
        raise DataError(
            f"source = {given} does not exist. Give a file, a folder, or a pattern in quotes: source='a/*.jpg'."
        )
    return root, [
        Path(file)
        for each in matches
        for file in (files_below(each) if os.path.isdir(each) else [each])
    ]


def names(places: Sequence[str]) -> list[str]:
    """Distinct names for the places: without suffix, or all with it if two would have the same name."""
    bare = [str(PurePosixPath(place).with_suffix("")) for place in places]
    return bare if len(set(bare)) == len(bare) else list(places)


@dataclass
class PredictJob:
    """Predicts sources into a folder, and keeps what it has done so far."""

    sources: Sequence[Input]
    out: Path
    predictor: Predictor
    overlay: bool = True
    alpha: float = 0.5  # of the colors in an overlay
    frames: bool = False  # whether to write masks of video frames
    seconds: float = 0.0  # of live sources; 0: no end
    replace: bool = False
    progress: Callable[[int], None] = lambda done: None
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)  # by place
    problems: list[str] = field(default_factory=list)
    kept: int = 0  # sources that an earlier command finished
    answered: int = 0  # images and frames
    took: float = 0.0  # seconds

    @property
    def pixels(self) -> list[int]:
        """Pixels of each class, over all sources."""
        counts = (entry["pixels"] for entry in self.entries.values())
        return [sum(each) for each in zip(*counts, strict=True)]

    def shares(self, pixels: Sequence[int]) -> dict[str, float]:
        """Share of the pixels by class."""
        total = max(sum(pixels), 1)
        return {
            name: count / total
            for name, count in zip(self.predictor.names, pixels, strict=True)
        }

    def run(self) -> None:
        """Predict all sources and write predictions.json; `problems` collects errors of single files.

        Raises ConfigError before the first prediction when `out` holds outputs of another model or other settings, and
        later when an output cannot be written; Interrupted, with all finished files in place, on Ctrl-C.
        """
        todo = self._unfinished()
        self._summarize()  # records the model in case this process is killed
        started = time.perf_counter()
        try:
            self._predict_images([each for each in todo if not each.is_video])
            for source in todo:
                if source.is_video:
                    with self._problems():
                        self._predict_video(source)
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted: {len(self.entries)} of {len(self.sources)} sources are finished. The same command "
                f"continues with the rest."
            ) from None
        finally:
            self.took = time.perf_counter() - started
            self._summarize()

    @contextmanager
    def _problems(self) -> Iterator[None]:
        """Collects a DataError of one source in `problems`."""
        try:
            yield
        except DataError as error:
            self.problems.append(str(error))

    def _unfinished(self) -> list[Input]:
        """Sources to predict; enters those that an earlier command finished."""
        before = {} if self.replace else self._before()
        todo = []
        for source in self.sources:
            try:
                digest = "" if source.live else file_sha256(source.path)
            except OSError as error:
                self.problems.append(f"{source.path} cannot be read: {error.strerror}.")
                continue
            entry = before.get(source.place, {})
            paths = [entry[key] for key in ("mask", "overlay") if key in entry]
            is_whole = all((self.out / path).exists() for path in paths)
            if digest and entry.get("source_sha256") == digest and is_whole:
                self.entries[source.place] = entry
                self.kept += 1
            else:
                todo.append(source._replace(sha256=digest))
        return todo

    def _before(self) -> dict[str, dict[str, Any]]:
        """Entries that an earlier command with this model and these settings finished, by place."""
        try:
            content = read_json(self.out / SUMMARY)
            is_same = self._head().items() <= content.items()
            known = {each["source"]: each for each in content["predictions"]}
        except (OSError, ValueError, LookupError, AttributeError):
            is_same = not any(
                (self.out / name).exists() for name in ("masks", "overlays")
            )
            known = {}
        if not is_same:
            raise ConfigError(
                f"out = {self.out} holds predictions of another model or other settings. Choose another out=, or "
                "overwrite them with exists=replace."
            )
        return known

    def _head(self) -> dict[str, Any]:
        """Model, format and settings, as in predictions.json: all that predictions depend on besides the sources."""
        head = {
            "model": self.predictor.model,
            "format": FORMAT,
            "settings": {
                **self.predictor.settings,
                "frames": self.frames,
                "overlay": self.overlay,
                "alpha": self.alpha,
            },
        }
        return dict(plain(head))

    def _written(self, source: Input) -> dict[str, str]:
        """Paths below `out` of the mask of a source (of a video: of the folder of its masks) and of its overlay."""
        mask, overlay = f"{source.name}.png", f"{source.name}.jpg"
        if source.is_video:
            mask, overlay = source.place, f"{source.name}.mp4"
        paths = {}
        if self.frames or not source.is_video:
            paths["mask"] = f"masks/{mask}"
        if self.overlay:
            paths["overlay"] = f"overlays/{overlay}"
        return paths

    def _predict_images(self, images: Sequence[Input]) -> None:
        """Predict images in order; threads read ahead."""
        for start in range(0, len(images), AHEAD):
            chunk = images[start : start + AHEAD]
            for source, image in zip(chunk, threaded(_read, chunk), strict=True):
                with self._problems():
                    if isinstance(image, DataError):
                        raise image
                    self._predict_image(source, image)

    def _predict_image(self, source: Input, image: Pixels) -> None:
        ids, paths = self._ids(source, image), self._written(source)
        if self.overlay:
            write_overlay(self.out / paths["overlay"], self._blended(image, ids))
        write_mask(self.out / paths["mask"], ids, self.predictor.palette)
        self._enter(source, ids.shape, self._count(ids))

    def _blended(self, image: Pixels, ids: Pixels) -> Pixels:
        return blend(image, ids, self.predictor.palette, self.alpha)

    def _count(self, ids: Pixels) -> NDArray[np.int64]:
        """Pixels of each class."""
        return np.bincount(ids.ravel(), minlength=len(self.predictor.names))

    def _ids(self, source: Input, image: Pixels) -> Pixels:
        try:
            ids, _ = self.predictor.predict(image)
        except DataError as error:
            raise DataError(f"{source.path}: {error}") from error
        self.answered += 1
        self.progress(self.answered)
        return ids

    def _predict_video(self, source: Input) -> None:
        """Predict all frames of a video, or of a live source until its time is up or Ctrl-C is pressed.

        Raises DataError when a video is truncated.
        """
        # FFmpeg takes what precedes a colon in a bare name, such as 12:30.mp4, for a protocol.
        given = source.live or str(source.path.absolute())
        paths = self._written(source)
        fps = frames_per_second(given)
        pixels: Any = 0
        done = 0
        end = time.monotonic() + (
            self.seconds if source.live and self.seconds else math.inf
        )
        with (
            film(self.out / paths["overlay"], fps) if self.overlay else nullcontext()
        ) as add:
            try:
                for image in read_frames(given):
                    ids = self._ids(source, image)
                    if self.frames:
                        folder = self.out / paths["mask"]
                        if not done:  # an earlier video may have been longer
                            rmtree(folder, ignore_errors=True)
                        write_mask(
                            folder / f"{done:06}.png", ids, self.predictor.palette
                        )
                    if add:
                        add(self._blended(image, ids))
                    pixels = pixels + self._count(ids)
                    done += 1
                    if time.monotonic() > end:
                        break
            except KeyboardInterrupt:
                if not source.live:
                    raise
            except DataError as error:
                if not (source.live and done):
                    raise
                self.problems.append(str(error))
            if not done:
                raise DataError(f"{given}: no frame arrived before it was stopped.")
        self._enter(source, image.shape, pixels, frames=done, fps=fps)

    def _enter(
        self, source: Input, size: Sequence[int], counts: Any, **more: Any
    ) -> None:
        """Add the entry of a finished source to predictions.json. counts: array, pixels of each class."""
        pixels = counts.tolist()
        self.entries[source.place] = {
            "source": source.place,
            "source_sha256": source.sha256,
            "height": size[0],
            "width": size[1],
            "pixels": pixels,
            **more,
            "share": self.shares(pixels),
            **self._written(source),
        }

    def _summarize(self) -> None:
        """Write predictions.json without times, so that equal predictions give equal bytes."""
        classes = zip(self.predictor.names, self.predictor.palette, strict=True)
        content = {
            **self._head(),
            "classes": [
                {"id": train, "name": name, "color": color}
                for train, (name, color) in enumerate(classes)
            ],
            "complete": len(self.entries) == len(self.sources),
            "predictions": [self.entries[place] for place in sorted(self.entries)],
            "problems": self.problems,
        }
        put(self.out / SUMMARY, to_json(content))


def _read(source: Input) -> Pixels | DataError:
    try:
        return read_image(str(source.path), exif="apply")
    except DataError as error:
        return error


def frames_per_second(path: str) -> float:
    """Frame rate from the header of a video; 25 if that is implausible."""
    with _opened(path) as capture:
        fps = capture.get(cv2.CAP_PROP_FPS)
        return fps if 0 < fps <= 1000 else FALLBACK_FPS


def read_frames(path: str) -> Iterator[Pixels]:
    """RGB frames uint8 (H, W, 3), upright, from a file, a camera number or a stream URL.

    Raises DataError for a video that cannot be opened or is truncated, and when a camera or live stream ends."""
    with _opened(path) as capture:
        promised = capture.get(cv2.CAP_PROP_FRAME_COUNT)
        number = 0
        while True:
            done, frame = capture.read()
            if not done:
                break
            number += 1
            yield np.ascontiguousarray(frame[..., ::-1], np.uint8)
    is_endless = promised <= 0 and _is_live(path)
    is_cut = promised - number > max(MISSING_FRAMES, promised * MISSING_SHARE)
    if not number or is_endless or is_cut:
        whole = f" of {promised:.0f}" * (promised > 0)
        raise DataError(f"{path} ended after {number}{whole} frames. {_advice(path)}")


@contextmanager
def _opened(path: str) -> Iterator[cv2.VideoCapture]:
    capture = (
        cv2.VideoCapture(int(path))
        if path.isdigit()
        else cv2.VideoCapture(path, cv2.CAP_FFMPEG)
    )
    try:
        if not capture.isOpened():
            raise DataError(f"{path} cannot be opened as a video. {_advice(path)}")
        yield capture
    finally:
        capture.release()


def _is_live(path: str) -> bool:
    return path.isdigit() or "://" in path


def _advice(path: str) -> str:
    if _is_live(path):
        return "Check that it is connected, and that no other program uses it."
    return "It is truncated, or not a video. Copy or convert it again."


@contextmanager
def film(path: Path, fps: float) -> Iterator[Callable[[Pixels], None]]:
    """Context with a function that appends an RGB frame to an MP4 file; the file appears if the context succeeds.

    The format stores color at half resolution, so height and width are even: odd ones grow by a pixel. Raises
    ConfigError unless all frames are in the file: OpenCV does not report a full disk.
    """
    # OpenCV chooses the container by the suffix.
    aside = path.with_name(f".{path.name}.tmp.mp4")
    writer = cv2.VideoWriter()
    frames = written = 0

    def add(frame: Pixels) -> None:
        nonlocal frames
        height, width, _ = frame.shape
        margins = ((0, height % 2), (0, width % 2), (0, 0))
        padded = np.pad(frame[..., ::-1], margins, mode="edge")
        if not frames:
            writer.open(
                str(aside), cv2.VideoWriter.fourcc(*CODEC), fps, padded.shape[1::-1]
            )
        writer.write(np.ascontiguousarray(padded))
        frames += 1

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(b"")  # its error has a reason, OpenCV's has none
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        yield add
        writer.release()
        with suppress(DataError), _opened(str(aside)) as capture:
            written = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        # Ctrl-C during a write may leave one frame more than was counted.
        if written < frames:
            raise ConfigError(
                f"{path} would hold {written} of {frames} frames. The disk is full, or OpenCV cannot write this size. "
                f"Choose another out=, or set overlay=false frames=true."
            )
        os.replace(aside, path)
    finally:
        writer.release()
        aside.unlink(missing_ok=True)
