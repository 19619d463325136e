"""One command's predictions: sources are found, those that are there are kept, bad ones named, the rest predicted."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from segpipe.data.pairs import SUFFIXES as IMAGES
from segpipe.data.readers import read_image, threaded
from segpipe.disk import sha256
from segpipe.errors import ConfigError, DataError, Interrupted, listed
from segpipe.files import files_below, read_json, to_json
from segpipe.predict.outputs import VIDEOS, Input, Outputs, put, unwritable

if TYPE_CHECKING:
    from segpipe.predict.predictor import Pixels

FORMAT = "segpipe-predictions/4"
SUMMARY = "predictions.json"
AHEAD = 32  # images that are read at once and wait in memory
FALLBACK_FPS = 25.0
# A header may promise that many frames too many without any damage.
MISSING_SHARE, MISSING_FRAMES = 0.01, 2
CODEC = "mp4v"  # MPEG-4 part 2, which every build of OpenCV can write
# No messages of FFmpeg about a damaged file; ours names the file.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")


def find(given: str, out: Path) -> tuple[list[Input], str]:
    """Images and videos of a file, a folder with all below it, or a glob pattern, and a note on what is left out.

    A number is a camera, and what has :// is a stream.

    Sorted by place. Hidden files, files below `out`, and in folders and patterns files with other suffixes are left
    out. Raises DataError when nothing is found, ConfigError when the sources lie in `out`.
    """
    if "://" in given or (given.isdigit() and not Path(given).exists()):
        name = f"camera{given}" if given.isdigit() else "stream"
        return [Input(Path(name), f"{name}.mp4", name, given)], ""
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
        return path, list(map(Path, files_below(path)))
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
        for file in (map(Path, files_below(each)) if each.is_dir() else [each])
    ]
    fixed = next(parent for parent in path.parents if not has_magic(str(parent)))
    return fixed, files


def _is_known(path: Path) -> bool:
    return path.suffix.lower() in (*IMAGES, *VIDEOS)


def names(places: Sequence[str]) -> list[str]:
    """A distinct name for each place: without suffix, or all with it where two would have the same name."""
    bare = [str(PurePosixPath(place).with_suffix("")) for place in places]
    return bare if len(set(bare)) == len(bare) else list(places)


class PredictJob:
    """Predicts sources into a folder, and what it did so far."""

    def __init__(
        self,
        sources: Sequence[Input],
        outputs: Outputs,
        *,
        seconds: float = 0.0,
        replace: bool = False,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self._sources, self._outputs = sources, outputs
        self._seconds = seconds or math.inf  # of live sources
        self._replace = replace
        self._progress = progress
        self.entries: dict[str, dict[str, Any]] = {}  # by place
        self.problems: list[str] = []
        self.kept = 0  # sources that were finished before
        self.answered = 0  # images and frames
        self.took = 0.0  # seconds

    @property
    def pixels(self) -> list[int]:
        """Of each class, over all sources."""
        counts = (entry["pixels"] for entry in self.entries.values())
        return [sum(each) for each in zip(*counts, strict=True)]

    def run(self) -> None:
        """Predict all sources and write predictions.json; what is wrong with single files is in `problems`.

        Raises ConfigError before the first prediction when outputs of another model or other settings are in the way,
        and later when one cannot be written; Interrupted, with all finished files in place, on Ctrl-C.
        """
        todo = self._unfinished()
        self._summarize()  # names the model, should this process be killed
        started = time.perf_counter()
        try:
            self._predict_images([each for each in todo if not each.is_video])
            for source in todo:
                if source.is_video:
                    with self._problems():
                        self._predict_video(source)
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted: {len(self.entries)} of {len(self._sources)} sources are finished. The same command "
                f"goes on with the rest."
            ) from None
        finally:
            self.took = time.perf_counter() - started
            self._summarize()

    @contextlib.contextmanager
    def _problems(self) -> Iterator[None]:
        """What is wrong with one source becomes a problem beside the others."""
        try:
            yield
        except DataError as error:
            self.problems.append(str(error))

    def _unfinished(self) -> list[Input]:
        """Sources that are to be predicted; those that an earlier command finished are entered."""
        before = {} if self._replace else self._before()
        todo = []
        for source in self._sources:
            if source.live:
                todo.append(source)
                continue
            try:
                digest = sha256(source.path)
            except OSError as error:
                problem = f"{source.path} cannot be read: {error.strerror}."
                self.problems.append(problem)
                continue
            entry = before.get(source.place, {})
            paths = [entry[key] for key in ("mask", "overlay") if key in entry]
            whole = all((self._outputs.out / path).exists() for path in paths)
            if whole and entry.get("source_sha256") == digest:
                self.entries[source.place] = entry
                self.kept += 1
            else:
                todo.append(source)
        return todo

    def _before(self) -> dict[str, dict[str, Any]]:
        """What an earlier command with this model and these settings finished, by place."""
        out = self._outputs.out
        try:
            content = read_json(out / SUMMARY)
            is_same = self._head().items() <= content.items()
            known = {each["source"]: each for each in content["predictions"]}
        except (OSError, ValueError, LookupError, AttributeError):
            is_same = not any((out / name).exists() for name in ("masks", "overlays"))
            known = {}
        if not is_same:
            raise ConfigError(
                f"out = {out} holds predictions of another model or other settings. Choose another out=, or overwrite "
                f"them with exists=replace."
            )
        return known

    def _head(self) -> dict[str, Any]:
        """What the predictions depend on besides the sources, as predictions.json has it."""
        head = {"model": self._outputs.predictor.model, "format": FORMAT}
        head["settings"] = self._outputs.settings
        return dict(json.loads(to_json(head)))

    def _predict_images(self, images: Sequence[Input]) -> None:
        for source, digest, image in self._decoded(images):
            with self._problems():
                try:
                    ids, _ = self._outputs.predictor.predict(image)
                except DataError as error:
                    raise DataError(f"{source.path}: {error}") from error
                self._outputs.write_image(source, image, ids)
                self._enter(source, digest, ids.shape, self._outputs.count(ids))
            self._advance()

    def _decoded(self, sources: Sequence[Input]) -> Iterator[tuple[Input, str, Pixels]]:
        """Images with their hash, read ahead by threads, in order; unreadable ones become problems."""
        for start in range(0, len(sources), AHEAD):
            chunk = sources[start : start + AHEAD]
            for source, read in zip(chunk, threaded(_read, chunk), strict=True):
                with self._problems():
                    if isinstance(read, DataError):
                        raise read
                    yield source, *read

    def _predict_video(self, source: Input) -> None:
        """Predict all frames of a video, or of a live source until its time is over or Ctrl-C is pressed.

        Raises DataError when a video breaks off.
        """
        outputs, given = self._outputs, source.live or str(source.path)
        digest = "" if source.live else sha256(source.path)
        fps, frames = frames_per_second(given), read_frames(given)
        pixels = outputs.count(np.zeros(0, np.uint8))
        done = 0
        film: Film | None = None
        size: tuple[int, ...] = ()
        end = time.monotonic() + (self._seconds if source.live else math.inf)
        with contextlib.ExitStack() as held:
            try:
                for image in frames:
                    size = image.shape[:2]
                    if outputs.overlay and film is None:
                        picture = outputs.picture(source)
                        film = held.enter_context(Film(picture, size, fps))
                    ids, _ = outputs.predictor.predict(image)
                    if outputs.frames:
                        path = outputs.mask(source) / f"{done:06}.png"
                        outputs.write_mask(path, ids)
                    if film is not None:
                        film.add(outputs.blended(image, ids))
                    pixels += outputs.count(ids)
                    done += 1
                    self._advance()
                    if time.monotonic() > end:
                        break
            except KeyboardInterrupt:
                if not source.live:
                    raise
            if not done:
                raise DataError(f"{given}: no frame arrived before it was stopped.")
            if film is not None:
                film.finish()
        self._enter(source, digest, size, pixels, frames=done, fps=fps)

    def _advance(self) -> None:
        self.answered += 1
        self._progress(self.answered)

    def _enter(
        self,
        source: Input,
        digest: str,
        size: Sequence[int],
        counts: Any,
        **more: Any,
    ) -> None:
        results = {"height": size[0], "width": size[1], "pixels": counts.tolist()}
        entry = self._outputs.entry(source, digest, **results, **more)
        self.entries[source.place] = entry

    def _summarize(self) -> None:
        """Write predictions.json: everything but times, so that equal predictions give equal bytes."""
        predictor = self._outputs.predictor
        classes = zip(predictor.names, predictor.palette, strict=True)
        content = {
            **self._head(),
            "classes": [
                {"id": train, "name": name, "color": color}
                for train, (name, color) in enumerate(classes)
            ],
            "complete": len(self.entries) == len(self._sources),
            "predictions": [self.entries[place] for place in sorted(self.entries)],
            "problems": self.problems,
        }
        put(self._outputs.out / SUMMARY, to_json(content))


def _read(source: Input) -> tuple[str, Pixels] | DataError:
    try:
        return sha256(source.path), read_image(str(source.path), exif="apply")
    except DataError as error:
        return error


def frames_per_second(path: str | Path) -> float:
    """What the header of a video says, 25 if that cannot be."""
    with _opened(path) as capture:
        fps = float(capture.get(cv2.CAP_PROP_FPS))
        return fps if 0 < fps <= 1000 else FALLBACK_FPS


def read_frames(path: str | Path) -> Iterator[Pixels]:
    """RGB frames uint8 (H, W, 3), upright, of a file, a camera's number or a stream's URL.

    Raises DataError for a video that cannot be opened, or breaks off."""
    with _opened(path) as capture:
        promised = float(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        size: tuple[int, ...] = ()
        number = 0
        while True:
            done, frame = capture.read()
            if not done:
                break
            if frame.shape != (size or frame.shape):
                raise DataError(
                    f"{path} changes its size from {size[:2]} to {frame.shape[:2]} (height, width)."
                )
            size = frame.shape
            number += 1
            yield np.ascontiguousarray(frame[..., ::-1], np.uint8)
    allowed = max(MISSING_FRAMES, promised * MISSING_SHARE)
    if not number or (math.isfinite(promised) and promised - number > allowed):
        raise DataError(
            f"{path} breaks off: {number} of {promised:.0f} frames could be decoded. Copy or convert it again."
        )


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[cv2.VideoCapture]:
    given = str(path)
    # No warnings of OpenCV, which name no file.
    level = cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_ERROR)
    is_camera = given.isdigit()
    capture = cv2.VideoCapture()
    if is_camera:
        capture.open(int(given))
    else:
        capture.open(given, cv2.CAP_FFMPEG)
    cv2.utils.logging.setLogLevel(level)
    try:
        if not capture.isOpened():
            why = "It is truncated, or no video. Copy it again."
            if is_camera or "://" in given:
                why = "Check that it is connected, and that no other program holds it."
            raise DataError(f"{path} cannot be opened as a video. {why}")
        yield capture
    finally:
        capture.release()


class Film:
    """An MP4 file in the making, of frames of one size; a context, after which it is there only if it was finished.

    The format has half the resolution for color, so its sides are even: odd ones grow by a pixel.
    """

    def __init__(self, path: Path, size: Sequence[int], fps: float) -> None:
        self.path = path
        self.frames = 0
        self.size = (size[0] + size[0] % 2, size[1] + size[1] % 2)
        # OpenCV chooses the format by the suffix.
        self._aside = path.with_name(f".{path.name}.tmp.mp4")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._aside.write_bytes(b"")  # gives a reason, which OpenCV does not
        except OSError as error:
            raise unwritable(path, error) from error
        self._writer = cv2.VideoWriter(
            str(self._aside), cv2.VideoWriter.fourcc(*CODEC), fps, self.size[::-1]
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
        written = 0
        with contextlib.suppress(DataError), _opened(self._aside) as capture:
            written = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        if written != self.frames:
            raise ConfigError(
                f"{self.path} would hold {written} of {self.frames} frames. The disk is full, or OpenCV cannot write "
                f"this size. Choose another out=, or set overlay=false frames=true."
            )
        os.replace(self._aside, self.path)
