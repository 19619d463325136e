"""An artifact on a robot's side: latency, its spread, growth of memory, and what `infer` adds to the engine's run.

The process has not imported torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import measure as measuring
from segpipe.errors import ConfigError, SegpipeError
from segpipe.runtime import Segmenter, Status
from segpipe.runtime.artifact import ArtifactError
from segpipe.runtime.bench import bench

OVERHEAD_MS, OVERHEAD_PIXELS = (
    0.5,
    360 * 480,
)  # `infer` may add this much at this size; larger frames in proportion
SMOKE: dict[str, Any] = {}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """What `python -m segpipe.runtime bench` tells of `artifact=FOLDER`, on `--repeats` frames (10000), one thread."""
    key, _, folder = " ".join(given.settings).partition("=")
    if key != "artifact" or not folder:
        raise ConfigError(
            f"{' '.join(given.settings)!r} names no artifact. Set artifact=FOLDER, an exported folder."
        )
    try:
        segmenter = Segmenter.load(folder)
    except ArtifactError as error:
        raise SegpipeError(str(error)) from error
    found = bench(segmenter, given.repeats or 10_000)
    added, size = overhead(segmenter, min(given.repeats or 300, 300)), found["size"]
    limit = OVERHEAD_MS * max(1.0, size[0] * size[1] / OVERHEAD_PIXELS)
    return {
        "what": f"{found['model_id']}, {' x '.join(map(str, found['size']))}, one CPU thread",
        **found,
        "machine": {**found["machine"], **measuring.machine()},
        "overhead": added,
        "overhead_limit_ms": round(limit, 3),
        "passed": (
            found["statuses"].keys() <= {Status.OK}
            and found["memory_flat"] is not False
            and added["high_ms"] <= limit
        ),
    }


def overhead(segmenter: Segmenter, frames: int) -> dict[str, float]:
    """Processor time of `infer` outside the engine's run, in ms: median over frames with its 95 % interval.

    The time of the run is taken within the same call. Caches are as cold as a run leaves them, and the noise of two
    separate runs, which is larger than what is looked for, does not enter.
    """
    engine, inside = segmenter.session.engine, [0.0]
    prepare = engine.prepare

    def timed(outputs: list[str]) -> Any:
        run, end = prepare(outputs)

        def measured(batch: Any) -> Any:
            begin = time.thread_time()
            answer = run(batch)
            inside[0] = time.thread_time() - begin
            return answer

        return measured, end

    engine.prepare = timed  # type: ignore[method-assign]
    try:
        image = cycle(segmenter.artifact.golden.image)
        return summary(
            np.array(
                [
                    _outside(lambda: segmenter.infer(next(image)), inside)
                    for _ in range(frames)
                ]
            )
        )
    finally:
        engine.prepare = prepare  # type: ignore[method-assign]


def _outside(call: Callable[[], object], inside: list[float]) -> float:
    begin = time.thread_time()
    call()
    return (time.thread_time() - begin - inside[0]) * 1e3


def summary(times_ms: NDArray[np.float64]) -> dict[str, float]:
    """Median with its 95 % interval by bootstrap, p90, least, and number."""
    medians = np.median(
        np.random.default_rng(0).choice(times_ms, (2000, len(times_ms))), axis=1
    )
    low, high = np.percentile(medians, [2.5, 97.5])
    named = {
        "median_ms": np.median(times_ms),
        "low_ms": low,
        "high_ms": high,
        "p90_ms": np.percentile(times_ms, 90),
    }
    return {
        **{name: round(float(value), 4) for name, value in named.items()},
        "n": len(times_ms),
    }
