"""Every file format in one table: how it is written, opened, and looked over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from segpipe.export.gates.integrity import (
    Tensors,
    problems_of_onnx,
    problems_of_pt2,
    problems_of_torchscript,
    tensors_of_pt2,
    tensors_of_torchscript,
)
from segpipe.export.gates.sessions import open_session
from segpipe.export.graph.convert import Manifest, jit, quiet_torchscript, to_onnx, to_pt2, to_torchscript
from segpipe.export.graph.deploy import DeployModel
from segpipe.export.graph.profiles import INPUT, ROBOT, Answer, Image, Profile, Run, Runner, answers_of


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch on one CPU thread: the number of threads changes sums, and the reference must be one thing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_eager(model: DeployModel) -> Runner:
    """The reference: torch's eager mode, fp32, with all that the gates look at. Call it inside `one_thread`."""
    return _run_torch(model.probe(), model.profile)


def open_torchscript(path: Path, profile: Profile = ROBOT) -> Runner:
    """A TorchScript file on the CPU. Call it inside `one_thread`."""
    with quiet_torchscript():
        module = jit.load(str(path), map_location="cpu")
    return _run_torch(module, profile)


def open_pt2(path: Path, profile: Profile = ROBOT) -> Runner:
    """A file of torch.export on the CPU. Call it inside `one_thread`."""
    return _run_torch(torch.export.load(path).module(), profile)


def open_onnx(path: Path, profile: Profile = ROBOT, *, optimise: bool = True) -> Runner:
    """An ONNX file in onnxruntime, one CPU thread, not spinning."""
    session = open_session(path, optimise=optimise)
    names = [output.name for output in session.get_outputs()]

    def batch(images: Sequence[Image]) -> list[Answer]:
        return answers_of(names, session.run(None, {INPUT: profile.encode(*images)}))

    return Runner(batch)


@dataclass(frozen=True)
class Format:
    """One row: `convert` writes shipped file and probe, `open` runs either, `problems` looks the shipped one over.

    `tensors` gives the stored tensors by their names in the trained network, where the format keeps them.
    """

    stem: str
    suffix: str
    convert: Callable[[DeployModel, tuple[int, int], Manifest, Path, Path], None]
    open: Callable[[Path, Profile], Run]
    problems: Callable[[Path, Manifest], list[str]]
    tensors: Callable[[Path], Tensors] | None = None

    def file_name(self, precision: str = "fp32") -> str:
        """Name of the file, such as model.int8.onnx."""
        return f"{self.stem}{'' if precision == 'fp32' else f'.{precision}'}{self.suffix}"


FORMATS: dict[str, Format] = {
    "onnx": Format("model", ".onnx", to_onnx, open_onnx, problems_of_onnx),
    "torchscript": Format(
        "model.torchscript", ".pt", to_torchscript, open_torchscript, problems_of_torchscript, tensors_of_torchscript
    ),
    "pt2": Format("model", ".pt2", to_pt2, open_pt2, problems_of_pt2, tensors_of_pt2),
}


def _run_torch(module: Any, profile: Profile) -> Runner:
    def batch(images: Sequence[Image]) -> list[Answer]:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            outputs = module(torch.from_numpy(profile.encode(*images)))
        return profile.answers([output.numpy() for output in outputs])

    return Runner(batch)
