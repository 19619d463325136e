"""All gates on all files, in the order in which they make sense: a file that is not whole is not compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from segpipe.export.artifact.outcome import EAGER, ExportReport
from segpipe.export.gates import latency
from segpipe.export.gates.checks import Check, Labelled
from segpipe.export.gates.comparison import Candidate, Comparison, Sigma, as_trained, compare
from segpipe.export.gates.controls import gate_power
from segpipe.export.gates.integrity import foreign_tensors
from segpipe.export.gates.limits import (
    LIMITS,
    GateResult,
    gate_integrity,
    gate_latency,
    gate_logits,
    gate_mask,
    gate_preprocessing,
)
from segpipe.export.gates.quality import gate_quality, scores
from segpipe.export.graph.convert import Manifest
from segpipe.export.graph.deploy import DeployModel
from segpipe.export.graph.formats import FORMATS, open_onnx, run_eager
from segpipe.export.graph.profiles import Profile, Run
from segpipe.export.graph.shapes import Trial, trials
from segpipe.settings.config import ExportConfig


@dataclass(frozen=True)
class Subject:
    """A file under test, the variant of it that shows its inside, and the manifest that must be in it."""

    format: str
    precision: str
    path: Path
    probe: Path
    manifest: Manifest


@dataclass(frozen=True)
class Evidence:
    """On what is judged: check images, labelled images where there are some, and what the user asked for."""

    checks: Sequence[Check]
    labelled: Labelled | None
    settings: ExportConfig


def problems(subject: Subject) -> list[str]:
    """What is wrong with the file as a file."""
    found = sorted(path.name for path in subject.path.parent.iterdir() if path.name.startswith(subject.path.name))
    if found != [subject.path.name]:
        return [f"needs more than one file: {', '.join(found)}"]
    try:
        return FORMATS[subject.format].problems(subject.path, subject.manifest)
    except Exception as error:  # whatever checker or loader raise: a file that cannot be read is refused
        return [f"{type(error).__name__}: {error}"]


def judge(
    result: ExportReport, model: DeployModel, preprocess: nn.Module, subjects: Sequence[Subject], evidence: Evidence
) -> dict[str, list[Comparison]]:
    """Comparisons by file name, after filling gates, sigma, images and latency of `result`.

    Call it inside `one_thread`. `model` is the reference, `preprocess` what training applies to a decoded image. A file
    that leaves lengths open is compared at several; sigma is that of the exported shape. Quality is measured when the
    gates before it passed, latency when all others did, both in that shape.
    """
    reference = as_trained(run_eager(model), preprocess)
    result.images = [check.name for check in evidence.checks]
    result.real_images = sum(check.is_real for check in evidence.checks)
    candidates = _open(result, model, subjects)
    by_name = {subject.path.name: subject for subject in subjects}
    comparisons: dict[str, list[Comparison]] = {name: [] for name in candidates}
    for trial in trials(result.free, evidence.checks):
        tried = {name: Candidate(opened.probe, opened.shipped) for name, opened in candidates.items()}
        sigma = compare(reference, list(tried.values()), trial.checks, trial.batch)
        result.sigma = sigma if not trial.name else result.sigma
        for name, candidate in tried.items():
            result.gates[name] += _gates_of_answers(model, by_name[name], candidate, sigma, trial)
            comparisons[name] += candidate.comparisons
    result.gates[EAGER] = [gate_power(model, reference, evidence.checks, result.sigma)]
    runs: dict[str, Run] = {
        EAGER: run_eager(model),
        **{name: candidate.shipped for name, candidate in candidates.items()},
    }
    if result.passed and evidence.labelled is not None:
        _judge_quality(result, runs, by_name, evidence)
    if result.passed:
        _judge_latency(result, runs, by_name, evidence)
    return comparisons


def _open(result: ExportReport, model: DeployModel, subjects: Sequence[Subject]) -> dict[str, Candidate]:
    """Candidates of the files that are whole, by name, after filling G1 of all."""
    candidates = {}
    for subject in subjects:
        found, kind = problems(subject), FORMATS[subject.format]
        if not found:
            try:
                probe = _open_probe(subject, model.profile)
                candidates[subject.path.name] = Candidate(probe, kind.open(subject.path, model.profile))
            except Exception as error:  # as in `problems`
                found = [f"{type(error).__name__}: {error}"]
        result.gates[subject.path.name] = [gate_integrity(found)]
    return candidates


def _open_probe(subject: Subject, profile: Profile) -> Run:
    if subject.precision == "int8":
        # onnxruntime 1.31 moves quantisation across a transposition and then shows `normalised` after it: 0.05 off.
        return open_onnx(subject.probe, profile, optimise=False)
    return FORMATS[subject.format].open(subject.probe, profile)


def _gates_of_answers(
    model: DeployModel, subject: Subject, candidate: Candidate, sigma: Sigma, trial: Trial
) -> list[GateResult]:
    if candidate.broken:
        return [_in_shape(trial, gate_integrity([candidate.broken]))]
    found, limits = candidate.comparisons, LIMITS[subject.precision]
    tensors = FORMATS[subject.format].tensors if not trial.name else None  # which are the same in every shape
    foreign = foreign_tensors(tensors(subject.path), model.state_dict()) if tensors else []
    gates = (gate_logits(found, sigma, limits, foreign), gate_mask(found, sigma, limits))
    return [_in_shape(trial, gate) for gate in (*gates, gate_preprocessing(found, limits))]


def _in_shape(trial: Trial, gate: GateResult) -> GateResult:
    """The verdict under a name that tells the shape, where it is not the exported one."""
    if not trial.name:
        return gate
    return replace(gate, name=f"{gate.name}, {trial.name}", figures={**gate.figures, "shape": trial.name})


def _judge_quality(
    result: ExportReport, runs: dict[str, Run], subjects: dict[str, Subject], evidence: Evidence
) -> None:
    assert evidence.labelled is not None
    names = [entry["name"] for entry in result.manifest["classes"]]
    found = scores(runs, evidence.labelled, len(names))
    for name, subject in subjects.items():
        limits = LIMITS[subject.precision]
        gate = gate_quality(found[EAGER], found[name], names, limits, evidence.settings.critical_classes)
        result.gates[name].append(gate)


def _judge_latency(
    result: ExportReport, runs: dict[str, Run], subjects: dict[str, Subject], evidence: Evidence
) -> None:
    result.latency = latency.measure(runs, evidence.checks[0].image)
    whole = FORMATS["onnx"].file_name()
    fp32_p50_ms = result.latency[whole]["p50_ms"] if whole in result.latency else None
    for name, subject in subjects.items():
        result.gates[name].append(
            gate_latency(
                result.latency[name]["p50_ms"],
                budget_ms=evidence.settings.latency_budget_ms,
                fp32_p50_ms=fp32_p50_ms,
                limits=LIMITS[subject.precision],
            )
        )
