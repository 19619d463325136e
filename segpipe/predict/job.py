"""One command's predictions: what is there is kept, what is bad is named, and all the rest is predicted."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from segpipe.data.readers import read_image
from segpipe.errors import ConfigError, DataError, Interrupted
from segpipe.files import sha256, to_json
from segpipe.predict.outputs import FORMAT, Outputs, Pixels, differences
from segpipe.predict.sources import Input
from segpipe.predict.stamp import Stamp, put, read_stamp
from segpipe.predict.video import Clip, probe, write_video

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

    entries: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # of finished sources, by place
    pixels: list[int] = field(default_factory=list)  # of each class, over all of them
    problems: list[str] = field(default_factory=list)
    kept: int = 0  # sources that were finished before
    answered: int = 0  # images and frames
    seconds: float = 0.0


@dataclass
class PredictJob:
    """Predicts sources into a folder."""

    sources: Sequence[Input]
    outputs: Outputs
    batch: int = 1
    replace: bool = False
    progress: Callable[[int, int], None] = lambda done, total: None
    found: Predictions = field(default_factory=Predictions)
    clips: dict[str, Clip] = field(default_factory=dict)

    def run(self) -> Predictions:
        """Predict all sources and write predictions.json; problems of single files are in the result.

        Raises ConfigError before the first prediction when outputs of another model or other settings are in the way,
        and later when one cannot be written; Interrupted, with all finished files in place, on Ctrl-C.
        """
        self.found.pixels = [0] * len(self.outputs.predictor.names)
        todo = self._without_finished()
        self.clips = dict(self._probed(source for source in todo if source.is_video))
        total = sum(not source.is_video for source in todo) + sum(
            clip.frames for clip in self.clips.values()
        )
        started = time.perf_counter()
        try:
            self._predict(
                todo,
                lambda: self.progress(
                    self.found.answered, max(total, self.found.answered)
                ),
            )
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted: {len(self.found.entries)} of {len(self.sources)} sources are finished. The same command "
                f"goes on with the rest."
            ) from None
        finally:
            self.found.seconds = time.perf_counter() - started
            self._summarize()
        return self.found

    def _without_finished(self) -> list[Input]:
        """Sources that are to be predicted; those with all outputs in place are entered."""
        todo, blocked = [], []
        for source in self.sources:
            stamps = self.outputs.stamps(source, "")
            if not any(path.exists() for path in stamps):
                todo.append(source)
                continue
            try:
                stamps = self.outputs.stamps(source, sha256(source.path))
            except OSError as error:
                self.found.problems.append(
                    f"{source.path} cannot be read: {error.strerror}."
                )
                continue
            states = {path: differences(path, stamp) for path, stamp in stamps.items()}
            blocked += [(path, changed) for path, changed in states.items() if changed]
            if any(changed != [] for changed in states.values()):
                todo.append(source)
            else:
                self.found.kept += 1
                self._enter(source, read_stamp(list(stamps)[-1]) or {})
        if blocked and not self.replace:
            raise self._blocked(blocked)
        return todo

    def _blocked(self, blocked: Sequence[tuple[Path, list[str]]]) -> ConfigError:
        named = "; ".join(
            f"{path.relative_to(self.outputs.out)} ({', '.join(why[:3])})"
            for path, why in blocked[:3]
        )
        return ConfigError(
            f"out = {self.outputs.out} holds {len(blocked)} files of another model, source or setting: {named}. "
            f"Choose another out=, or overwrite them with exists=replace."
        )

    def _probed(self, videos: Iterator[Input]) -> Iterator[tuple[str, Clip]]:
        for source in videos:
            try:
                yield source.place, probe(source.path)
            except DataError as error:
                self.found.problems.append(str(error))

    def _predict(self, todo: Sequence[Input], advance: Callable[[], None]) -> None:
        images = self._decoded(source for source in todo if not source.is_video)
        for batch in batches(images, self.batch):
            answers = self.outputs.predictor.answer([each.pixels for each in batch])
            for (source, digest, pixels), ids in zip(batch, answers, strict=True):
                try:
                    self._enter(
                        source, self.outputs.write_image(source, digest, pixels, ids)
                    )
                except DataError as error:
                    self.found.problems.append(str(error))
                self.found.answered += 1
                advance()
        for source in todo:
            if source.place in self.clips:
                self._predict_video(source, self.clips[source.place], advance)

    def _predict_video(
        self, source: Input, clip: Clip, advance: Callable[[], None]
    ) -> None:
        def count() -> None:
            self.found.answered += 1
            advance()

        try:
            self._enter(
                source, write_video(self.outputs, source, clip, self.batch, count)
            )
        except DataError as error:
            self.found.problems.append(str(error))

    def _decoded(self, sources: Iterator[Input]) -> Iterator[Decoded]:
        """Images, read ahead by threads, in order; unreadable ones become problems."""
        with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as pool:
            waiting = deque(
                pool.submit(_read, source, self.outputs.upright)
                for source in itertools.islice(sources, AHEAD)
            )
            try:
                while waiting:
                    done = waiting.popleft()
                    waiting.extend(
                        pool.submit(_read, source, self.outputs.upright)
                        for source in itertools.islice(sources, 1)
                    )
                    try:
                        yield done.result()
                    except DataError as error:
                        self.found.problems.append(str(error))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _enter(self, source: Input, stamp: Stamp) -> None:
        self.found.entries[source.place] = self.outputs.entry(source, stamp)
        self.found.pixels = [
            sum(pair) for pair in zip(self.found.pixels, stamp["pixels"], strict=True)
        ]

    def _summarize(self) -> None:
        """Write predictions.json: everything but times, so that equal predictions give equal bytes."""
        predictor = self.outputs.predictor
        classes = zip(predictor.names, predictor.palette, strict=True)
        content = {
            "format": FORMAT,
            "model": predictor.model,
            "settings": self.outputs.settings,
            "classes": [
                {"id": place, "name": name, "color": color}
                for place, (name, color) in enumerate(classes)
            ],
            "complete": len(self.found.entries) == len(self.sources),
            "share": self.outputs.shares(self.found.pixels),
            "predictions": [
                self.found.entries[place] for place in sorted(self.found.entries)
            ],
            "problems": self.found.problems,
        }
        put(self.outputs.out / SUMMARY, to_json(content))


def _read(source: Input, upright: bool) -> Decoded:
    pixels = read_image(
        str(source.path),
        (lambda header: header.orientation) if upright else (lambda header: 1),
    )
    return Decoded(source, sha256(source.path), pixels)


def batches(images: Iterator[Decoded], most: int) -> Iterator[list[Decoded]]:
    """Consecutive images of one size, at most `most` at a time."""
    for _, group in itertools.groupby(images, key=lambda each: np.shape(each.pixels)):
        while batch := list(itertools.islice(group, most)):
            yield batch
