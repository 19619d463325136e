"""`segpipe gpu-check`: all checks that need a GPU, within a time limit."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from segpipe.determinism import flags
from segpipe.errors import ConfigError


def main(given: dict[str, Any]) -> int:
    """Exit code."""
    if find_spec("benchmarks") is None or find_spec("benchmarks.gpu") is None:
        raise ConfigError(
            "gpu-check runs benchmarks/gpu.py, which is not installed. Run it in a clone of segpipe."
        )
    flags.set_environment()  # before torch is imported
    from benchmarks.gpu import check

    return check(given)
