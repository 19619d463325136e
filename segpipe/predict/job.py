"""One command's predictions: what is there is kept, what is bad is named, and all the rest is predicted."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from segpipe.data.readers import read_image
from segpipe.errors import ConfigError, DataError, Interrupted
from segpipe.files import sha256, to_json
from segpipe.predict.outputs import FORMAT, Outputs, Stamp, put, read_stamp
from segpipe.predict.sources import Input
from segpipe.predict.video import Clip, probe, write_video

if TYPE_CHECKING:
    from segpipe.predict.predictor import Pixels

SUMMARY = "predictions.json"
READERS, AHEAD = 4, 8  # threads that read images, and images that wait in memory


class Decoded(NamedTuple):
    """An image that was read."""

    source: Input
    sha256: str
    pixels: Pixels


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
        self._found = Predictions({}, [0] * len(outputs.predictor.names))

    def run(self) -> Predictions:
        """Predict all sources and write predictions.json; problems of single files are in the result.

        Raises ConfigError before the first prediction when outputs of another model or other settings are in the way,
        and later when one cannot be written; Interrupted, with all finished files in place, on Ctrl-C.
        """
        found = self._found
        todo = self._unfinished()
        images = [source for source in todo if not source.is_video]
        clips = list(self._probed(source for source in todo if source.is_video))
        self._total = len(images) + sum(clip.frames for _, clip in clips)
        started = time.perf_counter()
        try:
            self._predict_images(images)
            for source, clip in clips:
                self._predict_video(source, clip)
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted: {len(found.entries)} of {len(self._sources)} sources are finished. The same command "
                f"goes on with the rest."
            ) from None
        finally:
            found.seconds = time.perf_counter() - started
            self._summarize()
        return found

    def _unfinished(self) -> list[Input]:
        """Sources that are to be predicted; those with all outputs in place are entered."""
        todo, blocked = [], []
        for source in self._sources:
            path = self._outputs.mask(source)
            try:
                changed = self._outputs.differences(source)
            except OSError as error:
                self._fail(f"{source.path} cannot be read: {error.strerror}.")
                continue
            if changed == []:
                self._found.kept += 1
                self._enter(source, read_stamp(path) or {})
                continue
            todo.append(source)
            if changed:
                name = path.relative_to(self._outputs.out)
                blocked.append(f"{name} ({', '.join(changed[:3])})")
        if blocked and not self._replace:
            raise ConfigError(
                f"out = {self._outputs.out} holds {len(blocked)} files of another model, source or setting: "
                f"{'; '.join(blocked[:3])}. Choose another out=, or overwrite them with exists=replace."
            )
        return todo

    def _probed(self, videos: Iterator[Input]) -> Iterator[tuple[Input, Clip]]:
        for source in videos:
            try:
                yield source, probe(source.path)
            except DataError as error:
                self._fail(str(error))

    def _predict_images(self, images: Sequence[Input]) -> None:
        for batch in batches(self._decoded(iter(images)), self._batch):
            answers = self._outputs.predictor.segment([each.pixels for each in batch])
            for (source, digest, pixels), ids in zip(batch, answers, strict=True):
                try:
                    stamp = self._outputs.write_image(source, digest, pixels, ids)
                    self._enter(source, stamp)
                except DataError as error:
                    self._fail(str(error))
                self._advance()

    def _predict_video(self, source: Input, clip: Clip) -> None:
        try:
            stamp = write_video(self._outputs, source, clip, self._batch, self._advance)
            self._enter(source, stamp)
        except DataError as error:
            self._fail(str(error))

    def _decoded(self, sources: Iterator[Input]) -> Iterator[Decoded]:
        """Images, read ahead by threads, in order; unreadable ones become problems."""
        upright = self._outputs.upright
        with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as pool:
            ahead = itertools.islice(sources, AHEAD)
            waiting = deque(pool.submit(_read, source, upright) for source in ahead)
            try:
                while waiting:
                    done = waiting.popleft()
                    for source in itertools.islice(sources, 1):
                        waiting.append(pool.submit(_read, source, upright))
                    try:
                        yield done.result()
                    except DataError as error:
                        self._fail(str(error))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _advance(self) -> None:
        self._found.answered += 1
        self._progress(self._found.answered, max(self._total, self._found.answered))

    def _fail(self, problem: str) -> None:
        self._found.problems.append(problem)

    def _enter(self, source: Input, stamp: Stamp) -> None:
        self._found.entries[source.place] = self._outputs.entry(source, stamp)
        pairs = zip(self._found.pixels, stamp["pixels"], strict=True)
        self._found.pixels = [before + now for before, now in pairs]

    def _summarize(self) -> None:
        """Write predictions.json: everything but times, so that equal predictions give equal bytes."""
        found, predictor = self._found, self._outputs.predictor
        classes = zip(predictor.names, predictor.palette, strict=True)
        content = {
            "format": FORMAT,
            "model": predictor.model,
            "settings": self._outputs.settings,
            "classes": [
                {"id": train, "name": name, "color": color}
                for train, (name, color) in enumerate(classes)
            ],
            "complete": len(found.entries) == len(self._sources),
            "share": self._outputs.shares(found.pixels),
            "predictions": [found.entries[place] for place in sorted(found.entries)],
            "problems": found.problems,
        }
        put(self._outputs.out / SUMMARY, to_json(content))


def _read(source: Input, upright: bool) -> Decoded:
    pixels = read_image(str(source.path), exif="apply" if upright else "ignore")
    return Decoded(source, sha256(source.path), pixels)


def batches(images: Iterator[Decoded], most: int) -> Iterator[list[Decoded]]:
    """Consecutive images of one size, at most `most` at a time."""
    for _, group in itertools.groupby(images, key=lambda each: np.shape(each.pixels)):
        while batch := list(itertools.islice(group, most)):
            yield batch
