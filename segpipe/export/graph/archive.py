"""TorchScript files that say nothing about the machine they were made on and are the same every time."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_MANGLED = re.compile(rb"___torch_mangle_\d+")
_DEBUG = ".debug_pkl"  # source lines by file name; the loader does without
_EXAMPLE = "traced_inputs"
_WRITTEN_ANEW = ("version", ".data/version", ".data/serialization_id")
_C: Any = torch._C  # has no annotations for these


def write_archive(module: Any, path: Path, extra: Mapping[str, str]) -> None:
    """Writes a torch.jit.ScriptModule as `torch.jit.save` would, less its debug records and the example of the trace.

    The former hold the paths of the sources, the latter is an image of zeros. A class whose name is taken gets a
    number, which torch counts through the whole process; here they count from 0 in the order of the records.
    """
    reader = _C.PyTorchFileReader(io.BytesIO(module.save_to_buffer(_extra_files=dict(extra))))
    numbers: dict[bytes, bytes] = {}

    def renumber(text: bytes) -> bytes:
        return _MANGLED.sub(lambda found: numbers.setdefault(found[0], b"___torch_mangle_%d" % len(numbers)), text)

    writer = _C.PyTorchFileWriter(str(path))
    writer.set_min_version(_version(reader))
    for name in reader.get_all_records():
        if name.endswith(_DEBUG) or name.startswith(_EXAMPLE) or name in _WRITTEN_ANEW:
            continue
        content = reader.get_record(name)
        if _names_classes(name):
            content = renumber(content)
        writer.write_record(renumber(name.encode()).decode(), content, len(content))
    writer.write_end_of_file()


def _names_classes(name: str) -> bool:
    """Whether a record is code, or a pickle of modules: there, class names stand in lines and may change length."""
    return name.startswith("code/") or name in ("data.pkl", "constants.pkl")


def _version(reader: Any) -> int:
    names = reader.get_all_records()
    return int(reader.get_record(next(name for name in (".data/version", "version") if name in names)))
