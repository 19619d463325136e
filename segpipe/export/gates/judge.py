"""The sequence of gates that publish, verify and audit run, and its last one, latency on one CPU thread."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from segpipe.errors import ConfigError
from segpipe.export.gates.comparison import (
    FP32,
    LIMITS,
    Candidate,
    GateResult,
    ImageComparison,
    Limits,
    as_trained,
    compare,
    gate_integrity,
    gate_logits,
    gate_mask,
    gate_preprocessing,
)
from segpipe.export.gates.controls import gate_power
from segpipe.export.gates.quality import gate_quality, scores
from segpipe.export.graph.formats import FORMATS, ModelFile
from segpipe.export.graph.network import ROBOT, DeployModel, Image, Run, run_eager
from segpipe.export.verify_report import EAGER, ExportReport
from segpipe.runtime.segmenter import Segmenter

if TYPE_CHECKING:
    from segpipe.export.dataset import GateInputs
    from segpipe.settings.groups import ExportConfig

SECONDS = 1.0  # per file, after the minimum number of runs
_MIN_RUNS, _MAX_RUNS, _WARMUP = 10, 50, 2


def measure(runs: Mapping[str, Run], image: Image) -> dict[str, dict[str, float]]:
    """By name: p50_ms, p90_ms and p99_ms of n single runs, and cpu_ms, the lowest CPU time of a run.

    The runs alternate, so a change in the machine's load affects all of them alike.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    end = time.perf_counter() + SECONDS * len(runs)
    for rounds in range(_WARMUP + _MAX_RUNS):
        if rounds >= _WARMUP + _MIN_RUNS and time.perf_counter() >= end:
            break
        for name, run in runs.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            run(image)
            spent = time.process_time() - start_cpu
            taken[name].append((time.perf_counter() - start, spent))

    figures: dict[str, dict[str, float]] = {}
    for name, found in taken.items():
        wall, cpu = 1e3 * np.array(found[_WARMUP:]).T
        p50, p90, p99 = np.percentile(wall, (50, 90, 99)).round(3).tolist()
        figures[name] = {
            "p50_ms": p50,
            "p90_ms": p90,
            "p99_ms": p99,
            "n": len(wall),
            "cpu_ms": round(float(cpu.min()), 3),
        }
    return figures


def gate_latency(
    measured: Mapping[str, float],
    *,
    budget_ms: float,
    fp32: Mapping[str, float] | None = None,
    limits: Limits = FP32,
) -> GateResult:
    """Latency: p50 within `budget_ms` (0: no budget); CPU time within `limits.relative_latency` of fp32's.

    measured, fp32: results of `measure` for the file and the fp32 file. Files are compared by their lowest CPU time,
    which other processes hardly affect. The figures hold only the limits, so that equal exports have equal reports
    except for `latency`.
    """
    # Without an fp32 file there is nothing to compare with.
    share = limits.relative_latency if fp32 is not None else math.inf
    part = measured["cpu_ms"] / max(fp32["cpu_ms"], 1e-3) if fp32 is not None else 0.0
    failure = ""
    if 0 < budget_ms < measured["p50_ms"]:
        failure = f"p50 {measured['p50_ms']:.1f} ms > {budget_ms:g} ms of export.latency_budget_ms, 1 thread"
    elif not part <= share:
        failure = f"CPU time {part:.3g} > {share:g} of the fp32 file's, so the file gains nothing"
    finding = f"within {budget_ms:g} ms" if budget_ms else "no budget"
    if math.isfinite(share):
        finding += f", at most {share:g} of fp32"
    figures = {"budget_ms": budget_ms, "share_of_fp32": share}
    return GateResult("latency", failure, figures, finding)


@dataclass
class _Case:
    """Files, their reference and inputs, and the report that collects the verdicts."""

    result: ExportReport
    model: DeployModel
    reference: Run
    files: dict[str, ModelFile]
    inputs: GateInputs
    candidates: dict[str, Candidate] = field(default_factory=dict)

    def still_judged(self) -> dict[str, Run]:
        """Runs of the reference and of the files that have passed so far; empty when an fp32 file failed."""
        failed = {name for name, _ in self.result.failed}
        reduced = {
            name for name, file in self.files.items() if file.precision != "fp32"
        }
        if failed - reduced:
            return {}
        kept = {
            name: candidate.shipped
            for name, candidate in self.candidates.items()
            if name not in failed
        }
        return {EAGER: run_eager(self.model), **kept}


def judge(
    result: ExportReport,
    model: DeployModel,
    preprocess: nn.Module,
    files: Sequence[ModelFile],
    inputs: GateInputs,
    *,
    timed: bool = True,
) -> dict[str, list[ImageComparison]]:
    """Fills gates, sigma, images and latency of `result`; returns the comparisons by file name.

    Call it inside `one_thread`. model: the reference. preprocess: what training applies to a decoded image. timed: with
    latency. G5 and latency skip files that failed an earlier gate, and all files when an fp32 file failed.
    """
    engines = [
        replace(file, engine=engine)
        for engine in inputs.settings.engines
        for file in files
        if file.format == "onnx"
    ]
    by_name = {file.name: file for file in (*files, *engines)}
    reference = as_trained(run_eager(model), preprocess)
    result.images = [check.name for check in inputs.checks]
    result.real_images = len(inputs.real_images)
    case = _Case(result, model, reference, by_name, inputs)
    _integrity(case)
    _answers(case)
    power = gate_power(model, reference, inputs.checks, result.sigma)
    result.gates[EAGER] = [power]
    _quality(case)
    if timed:
        _latency(case)
    return {name: opened.comparisons for name, opened in case.candidates.items()}


def _integrity(case: _Case) -> None:
    """G1 for all files; those that pass become candidates."""
    for name, file in case.files.items():
        problems = file.problems()
        if not problems:
            try:
                probe = file.open(file.probe, case.model.profile)
                shipped = file.open(file.path, case.model.profile)
                case.candidates[name] = Candidate(probe, shipped)
            except Exception as error:  # as in ModelFile.problems
                problems = [f"{type(error).__name__}: {error}"]
        case.result.gates[name] = [gate_integrity(problems)]


def _answers(case: _Case) -> None:
    """G2 to G4; a file that could not be run fails G1."""
    candidates = list(case.candidates.values())
    sigma = compare(case.reference, candidates, case.inputs.checks)
    case.result.sigma = sigma
    for name, candidate in case.candidates.items():
        answers, limits = candidate.comparisons, LIMITS[case.files[name].arithmetic]
        if candidate.broken:
            case.result.gates[name].append(gate_integrity([candidate.broken]))
            continue
        case.result.gates[name] += [
            gate_logits(answers, sigma, limits),
            gate_mask(answers, sigma, limits),
            gate_preprocessing(answers, limits),
        ]


def _quality(case: _Case) -> None:
    """G5, if there are labels."""
    runs = case.still_judged()
    if not runs or case.inputs.labelled is None:
        return
    manifest = case.result.manifest
    classes = [entry["name"] for entry in manifest["classes"]]
    corners = manifest["align_corners"]
    found = scores(runs, case.inputs.labelled, len(classes), align_corners=corners)
    critical = case.inputs.settings.critical_classes
    for name in runs.keys() - {EAGER}:
        limits = LIMITS[case.files[name].arithmetic]
        gate = gate_quality(found[EAGER], found[name], classes, limits, critical)
        case.result.gates[name].append(gate)


def _latency(case: _Case) -> None:
    runs = case.still_judged()
    if not runs:
        return
    measured = measure(runs, case.inputs.checks[0].image)
    case.result.latency = measured
    for name in runs.keys() - {EAGER}:
        file = case.files[name]
        # In the same engine: a faster engine is no gain of int8.
        whole = replace(file, path=file.path.with_name(FORMATS["onnx"].file_name()))
        gate = gate_latency(
            measured[name],
            budget_ms=case.inputs.settings.latency_budget_ms,
            fp32=measured.get(whole.name),
            limits=LIMITS[file.arithmetic],
        )
        case.result.gates[name].append(gate)


def require_engines(settings: ExportConfig) -> None:
    """Raises ConfigError when an engine of `export.engines` is not installed."""
    if (
        any(name.startswith("openvino") for name in settings.engines)
        and find_spec("openvino") is None
    ):
        raise ConfigError(
            f"export.engines = {settings.engines}, but openvino is not installed. pip install openvino, or leave it "
            "out."
        )


def load_as_robot(result: ExportReport, folder: Path) -> None:
    """Loads every ONNX file of the folder with segpipe.runtime, including its self-test; failures count as G1.

    The runtime only supports the profile robot; files of other profiles are skipped.
    """
    if result.manifest["profile"] != ROBOT.name:
        return
    for name, entry in result.files.items():
        if entry["format"] != "onnx":
            continue
        try:
            with warnings.catch_warnings():
                # The export itself reports its status.
                warnings.simplefilter("ignore", UserWarning)
                Segmenter.load(folder, precision=entry["precision"])
        except Exception as error:  # ArtifactError, or one of onnxruntime's many types
            # The temporary folder will be gone.
            problem = str(error).replace(str(folder), result.folder.name)
            result.gates[name][0] = gate_integrity([problem])
