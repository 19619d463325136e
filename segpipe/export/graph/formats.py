"""Table of file formats: how each is converted, opened and checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from segpipe.errors import ExportError
from segpipe.export.graph.onnx_format import (
    open_in_engine,
    open_onnx,
    problems_of_onnx,
    to_onnx,
)
from segpipe.export.graph.profiles import Manifest, Profile, Run, Size
from segpipe.export.graph.torch_formats import (
    Loaded,
    load_pt2,
    load_torchscript,
    to_pt2,
    to_torchscript,
)

if TYPE_CHECKING:
    from segpipe.export.graph.network import DeployModel


@dataclass(frozen=True)
class Format:
    """A file format. `convert` writes the shipped file and its probe, `open` runs either, `problems` is G1.

    A probe is the same graph with `logits` and `normalised` as further outputs; the gates compare it, it is not
    shipped.
    """

    name: str
    stem: str
    suffix: str
    convert: Callable[[DeployModel, Size, Manifest, Path, Path], None]
    open: Callable[[Path, Profile], Run]
    problems: Callable[[Path, Manifest], list[str]]

    def file_name(self, precision: str = "fp32") -> str:
        """Name of the file, such as model.int8.onnx."""
        marked = "" if precision == "fp32" else f".{precision}"
        return f"{self.stem}{marked}{self.suffix}"

    def write(
        self,
        model: DeployModel,
        size: Size,
        manifest: Manifest,
        shipped: Path,
        probe: Path,
    ) -> None:
        """Converts `model` for images of `size`. Raises ExportError when torch cannot convert the network."""
        with warnings.catch_warnings():
            for category in (FutureWarning, DeprecationWarning):
                warnings.filterwarnings(
                    "ignore",
                    category=category,
                    module=r"(torch|onnxscript|onnx_ir|copyreg)\b",
                )
            try:
                self.convert(model, size, manifest, shipped, probe)
            except Exception as error:
                if isinstance(error, OSError) and error.errno:
                    raise  # the disk's fault, not the network's
                raise ExportError(
                    f"export.formats = {self.name}: torch {torch.__version__} could not convert the network "
                    f"({type(error).__name__}: {error}). Leave {self.name} out of export.formats, or change the named "
                    "operation."
                ) from error


def _torch_format(
    name: str, stem: str, suffix: str, convert: Any, load: Callable[[Path], Loaded]
) -> Format:
    return Format(
        name,
        stem,
        suffix,
        convert,
        open=lambda path, profile: load(path).run(profile),
        problems=lambda path, manifest: load(path).problems(manifest),
    )


_TORCHSCRIPT = _torch_format(
    "torchscript", "model.torchscript", ".pt", to_torchscript, load_torchscript
)
FORMATS: dict[str, Format] = {
    "onnx": Format("onnx", "model", ".onnx", to_onnx, open_onnx, problems_of_onnx),
    "torchscript": _TORCHSCRIPT,
    "pt2": _torch_format("pt2", "model", ".pt2", to_pt2, load_pt2),
}


@dataclass(frozen=True)
class ModelFile:
    """A file to check: the shipped file, its probe, and the manifest that it must contain.

    engine: what runs an ONNX file in place of onnxruntime; "" for the format's own.
    """

    format: str
    precision: str
    path: Path
    probe: Path
    manifest: Manifest
    engine: str = ""

    @property
    def name(self) -> str:
        """Name of the file, with its engine."""
        return f"{self.path.name} ({self.engine})" if self.engine else self.path.name

    def open(self, path: Path, profile: Profile) -> Run:
        """The shipped file or its probe, ready to run."""
        if self.engine:
            return open_in_engine(path, profile, self.engine)
        if path == self.probe and self.precision == "int8":
            # onnxruntime 1.31 moves quantisation across a transpose, and `normalised` is then off by 0.05.
            return open_onnx(path, profile, optimise=False)
        return FORMATS[self.format].open(path, profile)

    def problems(self) -> list[str]:
        """G1 findings; empty when the file is whole and what its manifest says."""
        try:
            return FORMATS[self.format].problems(self.path, self.manifest)
        except Exception as error:  # checkers and loaders raise many types; an unreadable file is refused
            return [f"{type(error).__name__}: {error}"]
