"""TorchScript and torch.export files: conversion, loading and integrity."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from segpipe.export.graph.profiles import (
    Manifest,
    Profile,
    Run,
    Size,
    io_problems,
    manifest_text,
    torch_run,
)

if TYPE_CHECKING:
    from segpipe.export.graph.network import DeployModel

MANIFEST_FILE = "manifest.json"  # extra file inside both formats
jit: Any = torch.jit  # has no annotations
_C: Any = torch._C

_MANGLED = re.compile(rb"___torch_mangle_\d+")
_DEBUG = ".debug_pkl"  # source lines by file name, which the loader does not need
_EXAMPLE = "traced_inputs"
_REWRITTEN = ("version", ".data/version", ".data/serialization_id")


def to_torchscript(
    model: DeployModel, size: Size, manifest: Manifest, shipped: Path, probe: Path
) -> None:
    """Writes shipped file and probe, with the manifest as extra file.

    Not frozen: freezing folds BatchNorm, and the stored weights would no longer be the trained ones.
    """
    extra = {MANIFEST_FILE: manifest_text(manifest)}
    example = model.profile.example(size)
    # Every traced convolution records these switches, and obeys them on a GPU ever after.
    switches = torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    )
    with quiet_torchscript(), torch.no_grad(), switches:
        # torch numbers repeated class names per process. Tracing the probe first uses up the plain names, so the
        # shipped file gets the same numbers whatever was traced before.
        for variant, path in ((model.probe(), probe), (model, shipped)):
            # check_trace would run the example again; the gates run real images.
            traced = jit.trace(variant, (example,), check_trace=False)
            write_archive(traced, path, extra)


def to_pt2(
    model: DeployModel, size: Size, manifest: Manifest, shipped: Path, probe: Path
) -> None:
    """Writes shipped file and probe, with the manifest as extra file."""
    extra: dict[str, Any] = {MANIFEST_FILE: manifest_text(manifest)}
    with torch.no_grad():
        for variant, path in ((model.probe(), probe), (model, shipped)):
            program: Any = torch.export.export(variant, (model.profile.example(size),))
            for node in program.graph.nodes:
                node.meta.pop("stack_trace", None)  # paths of this machine
            torch.export.save(program, path, extra_files=dict(extra))


def write_archive(module: Any, path: Path, extra: Mapping[str, str]) -> None:
    """Writes a ScriptModule as `torch.jit.save` does, but with the same bytes every time and no paths.

    Leaves out debug records, which hold source paths, and the example of the trace. Repeated class names carry a
    number that torch counts over the whole process; here they count from 0 in the order of the records.
    """
    content = module.save_to_buffer(_extra_files=dict(extra))
    reader = _C.PyTorchFileReader(io.BytesIO(content))
    numbers: dict[bytes, bytes] = {}

    def renumber(text: bytes) -> bytes:
        return _MANGLED.sub(
            lambda found: numbers.setdefault(
                found[0], b"___torch_mangle_%d" % len(numbers)
            ),
            text,
        )

    names = reader.get_all_records()
    version = ".data/version" if ".data/version" in names else "version"
    writer = _C.PyTorchFileWriter(str(path))
    writer.set_min_version(int(reader.get_record(version)))
    for name in names:
        if name.endswith(_DEBUG) or name.startswith(_EXAMPLE) or name in _REWRITTEN:
            continue
        record = reader.get_record(name)
        # Class names occur in code and in pickles of modules, as lines whose length may change.
        if name.startswith("code/") or name in ("data.pkl", "constants.pkl"):
            record = renumber(record)
        writer.write_record(renumber(name.encode()).decode(), record, len(record))
    writer.write_end_of_file()


class Loaded(NamedTuple):
    """A torch file on the CPU: the module to call, and the manifest inside."""

    module: Any
    manifest: str

    def run(self, profile: Profile) -> Run:
        """Answers of the file. Call it inside `one_thread`."""
        return torch_run(self.module, profile)

    def problems(self, manifest: Manifest) -> list[str]:
        """G1 findings; empty when the loaded file and the manifest agree."""
        found = []
        if self.manifest != manifest_text(manifest):
            found.append(f"{MANIFEST_FILE} inside the file differs from the manifest")
        (image,) = manifest["io"]["inputs"]
        needed = manifest["io"]["outputs"]
        with torch.no_grad():
            outputs = self.module(
                torch.zeros(image["shape"], dtype=getattr(torch, image["dtype"]))
            )
        if len(outputs) != len(needed):
            lacking = f"{len(outputs)} outputs, but the manifest has {len(needed)}"
            return [*found, lacking]
        got = [
            {
                "name": entry["name"],
                "dtype": str(output.dtype).removeprefix("torch."),
                "shape": list(output.shape),
            }
            for entry, output in zip(needed, outputs, strict=True)
        ]
        return found + io_problems("outputs", got, needed)


def load_torchscript(path: Path) -> Loaded:
    """A TorchScript file. Raises what torch.jit raises."""
    files: dict[str, Any] = {MANIFEST_FILE: ""}
    with quiet_torchscript():
        module = jit.load(str(path), map_location="cpu", _extra_files=files)
    return Loaded(module, _text(files[MANIFEST_FILE]))


def load_pt2(path: Path) -> Loaded:
    """A torch.export file. Raises what torch.export raises."""
    files: dict[str, Any] = {MANIFEST_FILE: ""}
    program = torch.export.load(path, extra_files=files)
    return Loaded(program.module(), _text(files[MANIFEST_FILE]))


def _text(content: str | bytes) -> str:
    return content.decode() if isinstance(content, bytes) else content


@contextlib.contextmanager
def quiet_torchscript() -> Iterator[None]:
    """Hides torch.jit's deprecation warnings: docs/export.md tells the reader, and the user cannot act on them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is", FutureWarning)
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is", DeprecationWarning)
        # Sizes become constants of the trace. That is intended: a trace never has a free height or width.
        warnings.filterwarnings("ignore", category=jit.TracerWarning)
        yield
