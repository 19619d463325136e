"""All gates on all files, in order: a file that is not whole is not compared."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from segpipe.errors import ConfigError
from segpipe.export.artifact.outcome import EAGER, ExportReport
from segpipe.export.gates import latency
from segpipe.export.gates.check_set import Check, Trial, trials
from segpipe.export.gates.comparison import (
    Candidate,
    ImageComparison,
    as_trained,
    compare,
    gate_logits,
    gate_mask,
    gate_preprocessing,
)
from segpipe.export.gates.controls import gate_power
from segpipe.export.gates.limits import LIMITS, GateResult, Sigma, gate_integrity
from segpipe.export.gates.quality import gate_quality, scores
from segpipe.export.graph.formats import FORMATS, ModelFile
from segpipe.export.graph.network import DeployModel, run_eager
from segpipe.export.graph.profiles import ROBOT, Run, further_sizes
from segpipe.runtime.segmenter import Segmenter

if TYPE_CHECKING:
    from segpipe.export.dataset import Labelled
    from segpipe.settings.groups import ExportConfig


@dataclass(frozen=True)
class GateInputs:
    """What the gates judge by: check images, labelled images if there are any, and the user's settings."""

    checks: Sequence[Check]
    labelled: Labelled | None
    settings: ExportConfig


def judge(
    result: ExportReport,
    model: DeployModel,
    preprocess: nn.Module,
    files: Sequence[ModelFile],
    inputs: GateInputs,
) -> dict[str, list[ImageComparison]]:
    """Comparisons by file name, after filling gates, sigma, images and latency of `result`.

    Call it inside `one_thread`. `model` is the reference, `preprocess` what training applies to a decoded image. A file
    with free lengths is compared in several shapes; `result.sigma` is that of the exported shape. Quality runs when
    the gates before it passed, latency when all others did, both in the exported shape.
    """
    engines = inputs.settings.engines
    files = [
        *files,
        *(
            replace(file, engine=name)
            for name in engines
            for file in files
            if file.format == "onnx"
        ),
    ]
    reference = as_trained(run_eager(model), preprocess)
    result.images = [check.name for check in inputs.checks]
    result.real_images = sum(check.is_real for check in inputs.checks)
    candidates = _open(result, model, files)
    by_name = {file.name: file for file in files}
    comparisons: dict[str, list[ImageComparison]] = {name: [] for name in candidates}
    for trial in trials(result.free, inputs.checks):
        tried = {
            name: Candidate(opened.probe, opened.shipped)
            for name, opened in candidates.items()
        }
        sigma = compare(reference, list(tried.values()), trial.checks, trial.batch)
        result.sigma = sigma if not trial.name else result.sigma
        for name, candidate in tried.items():
            result.gates[name] += _gates_of_answers(
                model, by_name[name], candidate, sigma, trial
            )
            comparisons[name] += candidate.comparisons
    result.gates[EAGER] = [gate_power(model, reference, inputs.checks, result.sigma)]
    runs: dict[str, Run] = {
        EAGER: run_eager(model),
        **{name: candidate.shipped for name, candidate in candidates.items()},
    }
    if result.passed and inputs.labelled is not None:
        _judge_quality(result, runs, by_name, inputs)
    if result.passed:
        _judge_latency(result, runs, by_name, inputs)
    return comparisons


def require_engines(settings: ExportConfig) -> None:
    """Raises ConfigError when an engine of `export.engines` is not installed."""
    missing = [name for name in settings.engines if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"export.engines = {settings.engines}, but {missing[0]} is not installed. pip install {missing[0]}, or "
            "leave it out."
        )


def load_as_robot(result: ExportReport, folder: Path) -> None:
    """Loads every ONNX file of the folder with segpipe.runtime, including its self-test; a failure is one of G1.

    Where sizes are free, it also runs a frame of each further size. The runtime is for the profile robot; files of
    other profiles are skipped.
    """
    if result.manifest["profile"] != ROBOT.name:
        return
    for name, entry in result.files.items():
        if entry["format"] == "onnx":
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter(
                        "ignore", UserWarning
                    )  # the export tells its status itself
                    segmenter = Segmenter.load(folder, precision=entry["precision"])
                for size in further_sizes(result.free):
                    segmenter.session.run(np.zeros((*size, 3), dtype=np.uint8))
            except (
                Exception
            ) as error:  # ArtifactError, or one of onnxruntime's many types
                found = str(error).replace(
                    str(folder), result.folder.name
                )  # the temporary folder will be gone
                result.gates[name][0] = gate_integrity([found])


def _open(
    result: ExportReport, model: DeployModel, files: Sequence[ModelFile]
) -> dict[str, Candidate]:
    """Candidates of the files that are whole, by name, after filling G1 of all files."""
    candidates = {}
    for file in files:
        found = file.problems()
        if not found:
            try:
                opened = Candidate(
                    file.open(file.probe, model.profile),
                    file.open(file.path, model.profile),
                )
                candidates[file.name] = opened
            except Exception as error:  # as in ModelFile.problems
                found = [f"{type(error).__name__}: {error}"]
        result.gates[file.name] = [gate_integrity(found)]
    return candidates


def _gates_of_answers(
    model: DeployModel,
    file: ModelFile,
    candidate: Candidate,
    sigma: Sigma,
    trial: Trial,
) -> list[GateResult]:
    if candidate.broken:
        return [_in_shape(trial, gate_integrity([candidate.broken]))]
    found, limits = candidate.comparisons, LIMITS[file.precision]
    tensors = (
        FORMATS[file.format].tensors if not trial.name else None
    )  # they are the same in every shape
    changed = (
        _changed_tensors(tensors(file.path), model.state_dict()) if tensors else []
    )
    gates = (
        gate_logits(found, sigma, limits, changed),
        gate_mask(found, sigma, limits),
    )
    return [
        _in_shape(trial, gate) for gate in (*gates, gate_preprocessing(found, limits))
    ]


def _changed_tensors(
    stored: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor]
) -> list[str]:
    """Names of tensors that differ from the trained network's in any bit, or are in only one of the two."""
    return [
        name
        for name in sorted(stored.keys() | trained.keys())
        if name not in stored
        or name not in trained
        or not torch.equal(stored[name].cpu(), trained[name].cpu())
    ]


def _in_shape(trial: Trial, gate: GateResult) -> GateResult:
    if not trial.name:
        return gate
    return replace(
        gate, shape=trial.name, figures={**gate.figures, "shape": trial.name}
    )


def _judge_quality(
    result: ExportReport,
    runs: dict[str, Run],
    files: dict[str, ModelFile],
    inputs: GateInputs,
) -> None:
    assert inputs.labelled is not None
    names = [entry["name"] for entry in result.manifest["classes"]]
    found = scores(runs, inputs.labelled, len(names))
    for name, file in files.items():
        limits = LIMITS[file.precision]
        gate = gate_quality(
            found[EAGER], found[name], names, limits, inputs.settings.critical_classes
        )
        result.gates[name].append(gate)


def _judge_latency(
    result: ExportReport,
    runs: dict[str, Run],
    files: dict[str, ModelFile],
    inputs: GateInputs,
) -> None:
    result.latency = latency.measure(runs, inputs.checks[0].image)
    for name, file in files.items():
        # In the same engine: what another one gains is no gain of int8.
        fp32 = result.latency.get(
            replace(file, path=file.path.with_name(FORMATS["onnx"].file_name())).name
        )
        result.gates[name].append(
            latency.gate_latency(
                result.latency[name],
                budget_ms=inputs.settings.latency_budget_ms,
                fp32=fp32,
                limits=LIMITS[file.precision],
            )
        )
