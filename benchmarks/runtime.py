"""An artifact on a robot's side: latency, its spread and growth of memory, in a process that has not imported torch."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import measure as measuring
from segpipe.errors import ConfigError, SegpipeError
from segpipe.runtime import Segmenter, Status
from segpipe.runtime.artifact import ArtifactError
from segpipe.runtime.bench import bench


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """What `python -m segpipe.runtime bench` tells of `artifact=FOLDER`, on `--repeats` frames (10000), one thread."""
    key, _, folder = " ".join(given.settings).partition("=")
    if key != "artifact" or not folder:
        raise ConfigError(f"{' '.join(given.settings)!r} names no artifact. Set artifact=FOLDER, an exported folder.")
    try:
        segmenter = Segmenter.load(folder)
    except ArtifactError as error:
        raise SegpipeError(str(error)) from error
    found = bench(segmenter, given.repeats or 10_000, 1)
    return {
        "what": f"{found['model_id']}, {' x '.join(map(str, found['size']))}, one CPU thread",
        **found,
        "machine": {**found["machine"], **measuring.machine()},
        "passed": found["statuses"].keys() <= {Status.OK} and found["memory_flat"] is not False,
    }
