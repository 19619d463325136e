"""Export as one act: every gate passes and the folder appears at once, or no model file appears anywhere."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from segpipe.errors import ConfigError, ExportMismatch
from segpipe.export import report
from segpipe.export.convert import Manifest, manifest_text
from segpipe.export.deploy import DeployModel, deploy_model
from segpipe.export.formats import FORMATS, Image, Run, one_thread, run_eager
from segpipe.export.manifest import describe
from segpipe.export.verify import (
    MAX_CLASSES,
    Candidate,
    Check,
    Comparison,
    GateResult,
    Sigma,
    check_set,
    compare,
    gate_integrity,
    gate_logits,
    gate_mask,
)

if TYPE_CHECKING:
    from segpipe.checkpoint import TrainedNetwork

EAGER = "eager"
_MANIFEST = "manifest.json"
_RUNS, _WARMUP = 10, 2


@dataclass
class ExportReport:
    """Figures of an export: `gates` and `files` by file name, `latency_ms` by file name and "eager" (p50, 1 thread)."""

    folder: Path
    manifest: Manifest
    sigma: Sigma = field(default_factory=lambda: Sigma(math.nan, math.nan))
    images: list[str] = field(default_factory=list)
    gates: dict[str, list[GateResult]] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    latency_ms: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every gate of every file passed."""
        return all(gate.passed for gates in self.gates.values() for gate in gates)


def export_run(
    trained: TrainedNetwork,
    images: Sequence[Image],
    out_dir: Path,
    formats: Sequence[str],
    extra_manifest: Mapping[str, Any],
    *,
    names: Sequence[str] | None = None,
) -> ExportReport:
    """Report of the export that now lies in `out_dir`, model files, manifest, checksums and verify_report included.

    images: uint8 (H, W, 3) RGB of the validation split, all of one size, which becomes the size of the files. An
    earlier export in `out_dir` is replaced in one rename. When a gate fails, the report and the worst images go to
    `out_dir` + ".rejected", no model file is left, an earlier export stays, and ExportMismatch is raised. Raises
    ExportError when torch cannot convert, ConfigError for unusable images, formats or folder.
    """
    out_dir = Path(out_dir)
    names = names if names is not None else [f"image_{index:06d}" for index in range(len(images))]
    checks = check_set(images, names)
    _check_request(trained, out_dir, formats)
    _recover(out_dir)
    partial = _beside(out_dir, "partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for folder in ("files", "probes", "report"):
            (partial / folder).mkdir(parents=True)
        model = deploy_model(trained)
        manifest = describe(trained, model, images[0].shape[:2], extra_manifest)
        result = ExportReport(out_dir, manifest)
        with one_thread():
            comparisons = _convert_and_compare(model, result, partial, formats, checks)
        if not result.passed:
            _reject(result, partial, comparisons, {check.name: check.image for check in checks})
        _publish(result, partial)
        return result
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_request(trained: TrainedNetwork, out_dir: Path, formats: Sequence[str]) -> None:
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise ConfigError(f"export.formats = {list(formats)}, but one or more of {', '.join(FORMATS)} was needed.")
    if trained.classes.num_classes > MAX_CLASSES:
        raise ConfigError(
            f"classes {trained.classes.name} has {trained.classes.num_classes} classes; a uint8 mask holds "
            f"{MAX_CLASSES}, since 255 means no answer. Merge classes in the class table."
        )
    # The folder is going to be replaced: never one that is not ours.
    if out_dir.exists() and not (out_dir / _MANIFEST).is_file() and (out_dir.is_file() or any(out_dir.iterdir())):
        raise ConfigError(f"export.dir = {out_dir} holds other files, and an export replaces it. Choose a new folder.")


def _convert_and_compare(
    model: DeployModel,
    result: ExportReport,
    partial: Path,
    formats: Sequence[str],
    checks: list[Check],
) -> list[Comparison]:
    """All comparisons, after filling gates, files and latency of `result`."""
    height, width = checks[0].image.shape[:2]
    candidates: dict[str, Candidate] = {}
    for name in formats:
        kind = FORMATS[name]
        shipped, probe = partial / "files" / kind.file_name, partial / "probes" / kind.file_name
        kind.convert(model, (height, width), result.manifest, shipped, probe)
        result.files[kind.file_name] = {"bytes": shipped.stat().st_size, "sha256": _sha256(shipped)}
        integrity = gate_integrity(_problems(name, shipped, result.manifest))
        result.gates[kind.file_name] = [integrity]
        if integrity.passed:
            candidates[kind.file_name] = Candidate(kind.open(probe), kind.open(shipped))
    eager = run_eager(model)
    result.images = [check.name for check in checks]
    result.sigma = compare(eager, list(candidates.values()), checks)
    for file_name, candidate in candidates.items():
        found = candidate.comparisons
        result.gates[file_name] += [gate_logits(found, result.sigma), gate_mask(found, result.sigma)]
    if result.passed:
        runs = {EAGER: eager, **{name: candidate.shipped for name, candidate in candidates.items()}}
        result.latency_ms = {name: _latency_ms(run, checks[0].image) for name, run in runs.items()}
    return [entry for candidate in candidates.values() for entry in candidate.comparisons]


def _problems(name: str, shipped: Path, manifest: Manifest) -> list[str]:
    beside = sorted(path.name for path in shipped.parent.iterdir() if path.name.startswith(shipped.name))
    if beside != [shipped.name]:
        return [f"needs more than one file: {', '.join(beside)}"]
    try:
        return FORMATS[name].problems(shipped, manifest)
    except Exception as error:  # whatever checker or loader raise: a file that cannot be read is refused
        return [f"{type(error).__name__}: {error}"]


def _latency_ms(run: Run, image: Image) -> float:
    """Median of a few single runs; a first impression, not a benchmark."""
    times = []
    for _ in range(_WARMUP + _RUNS):
        start = time.perf_counter()
        run(image)
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times[_WARMUP:]))


def _publish(result: ExportReport, partial: Path) -> None:
    """Moves the finished folder into place; an earlier export is out of the way for two renames at most."""
    files, out_dir = partial / "files", result.folder
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    figures = report.to_mapping(result, created)
    (files / _MANIFEST).write_text(manifest_text({**result.manifest, **figures}) + "\n")
    report.write(result, files, created)
    listed = sorted(path for path in files.iterdir())
    (files / "SHA256SUMS").write_text("".join(f"{_sha256(path)}  {path.name}\n" for path in listed))
    for path in files.iterdir():
        _to_disk(path)
    _to_disk(files)
    old = _beside(out_dir, "old")
    try:
        if out_dir.exists():
            os.rename(out_dir, old)
        os.rename(files, out_dir)
    except BaseException:
        _recover(out_dir)
        raise
    _to_disk(out_dir.parent)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(_beside(out_dir, "rejected"), ignore_errors=True)


def _reject(result: ExportReport, partial: Path, comparisons: list[Comparison], images: dict[str, Image]) -> None:
    """Leaves report and worst images in the rejected folder and raises ExportMismatch."""
    result.folder = rejected = _beside(result.folder, "rejected")
    folder = partial / "report"
    report.write(result, folder, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    report.write_triptychs(result, folder, comparisons, images)
    shutil.rmtree(rejected, ignore_errors=True)
    os.rename(folder, rejected)
    failed = [f"{gate.message} in {name}" for name, gates in result.gates.items() for gate in gates if not gate.passed]
    raise ExportMismatch(f"EXPORT REJECTED: {'; '.join(failed)} - see {rejected / report.MARKDOWN}")


def _recover(out_dir: Path) -> None:
    """Puts back an export that a crash between the two renames of `_publish` left aside."""
    old = _beside(out_dir, "old")
    if old.exists() and not out_dir.exists():
        os.rename(old, out_dir)
    shutil.rmtree(old, ignore_errors=True)


def _beside(out_dir: Path, suffix: str) -> Path:
    return out_dir.with_name(f"{out_dir.name}.{suffix}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    """Without it a power cut can leave the new name in place and the content not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
