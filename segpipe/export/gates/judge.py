"""The sequence of gates, which export, verify and audit share: a file that is not whole is not compared."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from segpipe.errors import ConfigError
from segpipe.export.gates import latency
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
from segpipe.export.gates.outcome import EAGER, ExportReport
from segpipe.export.gates.quality import gate_quality, scores
from segpipe.export.graph.formats import FORMATS, ModelFile
from segpipe.export.graph.network import DeployModel, run_eager
from segpipe.export.graph.profiles import ROBOT, Run, further_sizes
from segpipe.runtime.segmenter import Segmenter

if TYPE_CHECKING:
    from segpipe.export.dataset import GateInputs, Trial
    from segpipe.settings.groups import ExportConfig


def judge(
    result: ExportReport,
    model: DeployModel,
    preprocess: nn.Module,
    files: Sequence[ModelFile],
    inputs: GateInputs,
) -> dict[str, list[ImageComparison]]:
    """Comparisons by file name, after filling gates, sigma, images and latency of `result`.

    Call it inside `one_thread`. `model` is the reference, `preprocess` what training applies to a decoded image. A file
    with free lengths is compared in several shapes; `result.sigma` is that of the exported shape. A file that fails a
    gate is not judged by those after it, and none is when an fp32 file fails.
    """
    engines = [
        replace(file, engine=engine)
        for engine in inputs.settings.engines
        for file in files
        if file.format == "onnx"
    ]
    by_name = {file.name: file for file in (*files, *engines)}
    result.images = [check.name for check in inputs.checks]
    result.real_images = sum(check.is_real for check in inputs.checks)
    reference = as_trained(run_eager(model), preprocess)

    # G1 to G4
    candidates = _open(result, model, by_name)
    comparisons: dict[str, list[ImageComparison]] = {name: [] for name in candidates}
    for trial in inputs.trials(result.free):
        tried = {
            name: Candidate(opened.probe, opened.shipped)
            for name, opened in candidates.items()
        }
        sigma = compare(reference, list(tried.values()), trial.checks, trial.batch)
        if not trial.name:  # the exported shape
            result.sigma = sigma
        for name, candidate in tried.items():
            gates = _gates_of_answers(model, by_name[name], candidate, sigma, trial)
            result.gates[name] += gates
            comparisons[name] += candidate.comparisons

    # G6
    result.gates[EAGER] = [gate_power(model, reference, inputs.checks, result.sigma)]

    # G5, then latency, in the exported shape
    runs: dict[str, Run] = {name: opened.shipped for name, opened in candidates.items()}
    runs[EAGER] = run_eager(model)
    if inputs.labelled is not None:
        _judge_quality(result, _still_judged(result, runs, by_name), by_name, inputs)
    _judge_latency(result, _still_judged(result, runs, by_name), by_name, inputs)
    return comparisons


def _still_judged(
    result: ExportReport,
    runs: Mapping[str, Run],
    files: Mapping[str, ModelFile],
) -> dict[str, Run]:
    """Runs of the files that passed so far and of the reference; none when that is not enough to publish anything."""
    failed = {name for name, _ in result.failed}
    # Nothing is published without its fp32 files.
    if any(name not in files or files[name].precision == "fp32" for name in failed):
        return {}
    # Eager first, as in reports
    kept = [name for name in (EAGER, *files) if name in runs and name not in failed]
    return {name: runs[name] for name in kept}


def _open(
    result: ExportReport, model: DeployModel, files: Mapping[str, ModelFile]
) -> dict[str, Candidate]:
    """Candidates of the files that are whole, by name, after filling G1 of all files."""
    candidates = {}
    for name, file in files.items():
        problems = file.problems()
        if not problems:
            try:
                probe = file.open(file.probe, model.profile)
                shipped = file.open(file.path, model.profile)
                candidates[name] = Candidate(probe, shipped)
            except Exception as error:  # as in ModelFile.problems
                problems = [f"{type(error).__name__}: {error}"]
        result.gates[name] = [gate_integrity(problems)]
    return candidates


def _gates_of_answers(
    model: DeployModel,
    file: ModelFile,
    candidate: Candidate,
    sigma: Sigma,
    trial: Trial,
) -> list[GateResult]:
    """G2 to G4 in one shape; G1 again for a file that could not be run."""
    answers = candidate.comparisons
    limits = LIMITS[file.precision]
    if candidate.broken:
        gates = [gate_integrity([candidate.broken])]
    else:
        changed = []
        tensors = FORMATS[file.format].tensors
        if tensors and not trial.name:  # they are the same in every shape
            changed = _changed_tensors(tensors(file.path), model.state_dict())
        gates = [
            gate_logits(answers, sigma, limits, changed),
            gate_mask(answers, sigma, limits),
            gate_preprocessing(answers, limits),
        ]
    if not trial.name:
        return gates
    return [
        replace(gate, shape=trial.name, figures={**gate.figures, "shape": trial.name})
        for gate in gates
    ]


def _changed_tensors(
    stored: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor]
) -> list[str]:
    """Names of tensors that differ from the trained network's in any bit, or are in only one of the two."""
    both = stored.keys() & trained.keys()
    return [
        name
        for name in sorted(stored.keys() | trained.keys())
        if name not in both or not torch.equal(stored[name].cpu(), trained[name].cpu())
    ]


def _judge_quality(
    result: ExportReport,
    runs: Mapping[str, Run],
    files: Mapping[str, ModelFile],
    inputs: GateInputs,
) -> None:
    """Adds G5 of each run."""
    if not runs or inputs.labelled is None:
        return
    classes = [entry["name"] for entry in result.manifest["classes"]]
    found = scores(runs, inputs.labelled, len(classes))
    critical = inputs.settings.critical_classes
    for name in runs.keys() - {EAGER}:
        limits = LIMITS[files[name].precision]
        gate = gate_quality(found[EAGER], found[name], classes, limits, critical)
        result.gates[name].append(gate)


def _judge_latency(
    result: ExportReport,
    runs: Mapping[str, Run],
    files: Mapping[str, ModelFile],
    inputs: GateInputs,
) -> None:
    """Fills the latency of `result`, and adds its gate for each run."""
    if not runs:
        return
    result.latency = latency.measure(runs, inputs.checks[0].image)
    for name in runs.keys() - {EAGER}:
        file = files[name]
        # In the same engine: what another one gains is no gain of int8.
        whole = replace(file, path=file.path.with_name(FORMATS["onnx"].file_name()))
        gate = latency.gate_latency(
            result.latency[name],
            budget_ms=inputs.settings.latency_budget_ms,
            fp32=result.latency.get(whole.name),
            limits=LIMITS[file.precision],
        )
        result.gates[name].append(gate)


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
        if entry["format"] != "onnx":
            continue
        try:
            with warnings.catch_warnings():
                # The export tells its status itself.
                warnings.simplefilter("ignore", UserWarning)
                segmenter = Segmenter.load(folder, precision=entry["precision"])
            for size in further_sizes(result.free):
                segmenter.session.run(np.zeros((*size, 3), dtype=np.uint8))
        except Exception as error:  # ArtifactError, or one of onnxruntime's many types
            # The temporary folder will be gone.
            problem = str(error).replace(str(folder), result.folder.name)
            result.gates[name][0] = gate_integrity([problem])
