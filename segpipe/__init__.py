"""segpipe trains real-time semantic segmentation so that the same run gives the same bits.

From Python: `segpipe.train`, `load`, `evaluate`, `export` and `compare`, which segpipe.cli.api describes.
"""

import os
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.3.0"

# As segpipe.runtime does where it is alone: onnxruntime sends no telemetry.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

IGNORE_INDEX = 255  # class id in a target (uint8) that losses and metrics ignore
# Names of segpipe.cli.api, which is imported when one of them is accessed.
API = ("RunResult", "compare", "configuration", "evaluate", "load")


class CallableRoom(ModuleType):
    """A package that is also callable: `segpipe.train(...)` trains, segpipe.train.step is a module."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Calls the function of this name in segpipe.cli.api."""
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module("segpipe.cli.api"), name)(*given, **named)


def __getattr__(name: str) -> Any:
    if name in ("train", "export"):
        return import_module(f"segpipe.{name}")
    if name in API:
        return getattr(import_module("segpipe.cli.api"), name)
    raise AttributeError(f"module 'segpipe' has no attribute {name!r}")
