"""Export as one act: every gate passes and the folder appears at once, or no model file appears anywhere."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segpipe.errors import ConfigError
from segpipe.export.artifact import summary as report
from segpipe.export.artifact.golden import golden_entry, golden_figures, write_golden
from segpipe.export.artifact.manifest import describe, require_schema
from segpipe.export.artifact.origin import Origin, origin_of
from segpipe.export.artifact.outcome import NOT_EXPORTED, ExportReport
from segpipe.export.artifact.place import beside, check_place, put_in_place, recover, write_sums, writing
from segpipe.export.artifact.sidecars import write_sidecars
from segpipe.export.artifact.statistics import frame_entries, unknown_frames
from segpipe.export.evidence import gather
from segpipe.export.gates.checks import Check, Labelled, check_set
from segpipe.export.gates.comparison import Comparison
from segpipe.export.gates.confidence import calibration_entry
from segpipe.export.gates.judge import Evidence, judge
from segpipe.export.gates.limits import MAX_CLASSES
from segpipe.export.gates.robot import load_as_robot
from segpipe.export.graph.convert import manifest_text
from segpipe.export.graph.deploy import DeployModel, deploy_model
from segpipe.export.graph.formats import FORMATS, one_thread
from segpipe.export.graph.profiles import CONFIDENCE, PROFILES, Image
from segpipe.export.graph.shapes import free_lengths, trials
from segpipe.export.produce import produce
from segpipe.runtime.artifact import MANIFEST
from segpipe.settings.config import ExportConfig, export_problems

if TYPE_CHECKING:
    from segpipe.data.samples import Samples
    from segpipe.settings.config import Config
    from segpipe.train.checkpoint import TrainedNetwork

_CALIBRATION_IMAGES = 32  # on which int8 finds its ranges


def export_checkpoint(
    run: Path,
    which: str,
    trained: TrainedNetwork,
    config: Config,
    *,
    validation: Samples | None,
    training: Iterable[Image] | None,
) -> ExportReport:
    """Export `trained`, which is `which` of the folder `run`, as `config.export` says, to `export.dir` or RUN/export.

    validation: the split to check on, or None with `export.allow_unverified`. training: images of the training split,
    for the limits of frames and int8. Raises what `export_run` and `gather` raise.
    """
    export, found = config.export, gather(validation, config)
    return export_run(
        trained,
        found.images,
        Path(export.dir or run / "export"),
        export.formats,
        {},
        names=found.names,
        origin=origin_of(run, which, trained),
        train_images=training,
        labelled=found.labelled,
        settings=export,
    )


def export_run(
    trained: TrainedNetwork,
    images: Sequence[Image],
    out_dir: Path,
    formats: Sequence[str],
    extra_manifest: Mapping[str, Any],
    *,
    names: Sequence[str] | None = None,
    origin: Origin | None = None,
    train_images: Iterable[Image] | None = None,
    labelled: Labelled | None = None,
    settings: ExportConfig | None = None,
) -> ExportReport:
    """Report of the export that now lies in `out_dir`: model files and all that explains and checks them.

    images: uint8 (H, W, 3) RGB of the validation split, all of one size, which becomes the size of the files; none
    with `settings.allow_unverified`, `height` and `width`. origin: what `origin_of` found. train_images: any sizes; the
    limits of dark and bright frames come from them, or else from `images`, and int8 is calibrated on those that fit.
    labelled: for G5 and the temperature; without it neither is. settings: what else is asked for; not the formats.

    An earlier export in `out_dir` is replaced in one rename. When a gate fails, the report and the worst images go to
    `out_dir` + ".rejected", no model file is left, an earlier export stays, and ExportMismatch is raised, or one of its
    kinds: IntegrityError, QualityError, LatencyError. Raises ExportError when torch cannot convert, ConfigError for
    unusable images, formats, settings or folder.
    """
    out_dir = Path(out_dir)
    settings = settings if settings is not None else ExportConfig()
    names = names if names is not None else [f"image_{index:06d}" for index in range(len(images))]
    checks = check_set(images, names, _size_without_images(settings))
    evidence = Evidence(checks, labelled, settings)
    _check_request(trained, out_dir, formats, settings, _size(checks))
    partial = beside(out_dir, "partial")
    try:
        _make_room(out_dir, partial)
        with one_thread():
            frames, kept = _frames(images, train_images, checks[0].image.shape)
            profile = replace(PROFILES[settings.profile], dynamic=settings.dynamic)
            calibration = calibration_entry(trained, labelled if CONFIDENCE in profile.outputs else None)
            model = deploy_model(trained, profile=profile, temperature=calibration["temperature"])
            entries = {
                **frames,
                "calibration": calibration,
                "allow_unverified": settings.allow_unverified,
                "golden": golden_entry(checks),
                **extra_manifest,
            }
            result = ExportReport(out_dir, describe(trained, model, _size(checks), origin or Origin(), entries))
            require_schema(result.manifest)
            comparisons = _produce_and_judge(trained, model, result, partial, formats, kept, evidence)
        with writing(out_dir):
            if result.passed:
                _complete(result, model, checks, partial / "files")
            if not result.passed:
                _reject(result, partial, comparisons, checks)
            _publish(result, partial)
        return result
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _size_without_images(settings: ExportConfig) -> tuple[int, int] | None:
    if not settings.allow_unverified or not settings.height:
        return None
    return settings.height, settings.width


def _check_request(
    trained: TrainedNetwork, out_dir: Path, formats: Sequence[str], settings: ExportConfig, size: tuple[int, int]
) -> None:
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise ConfigError(f"export.formats = {list(formats)}, but one or more of {', '.join(FORMATS)} was needed.")
    for problem in export_problems(replace(settings, formats=list(formats))):
        raise ConfigError(problem)
    free_lengths(settings.dynamic, size, trained.model.output_stride)
    if trained.classes.num_classes > MAX_CLASSES:
        raise ConfigError(
            f"classes {trained.classes.name} has {trained.classes.num_classes} classes; a uint8 mask holds "
            f"{MAX_CLASSES}, since 255 means no answer. Merge classes in the class table."
        )
    strangers = [name for name in settings.critical_classes if name not in trained.classes.names]
    if strangers:
        raise ConfigError(
            f"export.critical_classes = {settings.critical_classes}, but {strangers[0]} is no class of "
            f"{trained.classes.name}: {', '.join(trained.classes.names)}."
        )
    check_place(out_dir)


def _make_room(out_dir: Path, partial: Path) -> None:
    """Empty folders in `partial`, after tidying up what a crash left."""
    with writing(out_dir):
        recover(out_dir)
        shutil.rmtree(partial, ignore_errors=True)
        for folder in ("files", "probes", "report"):
            (partial / folder).mkdir(parents=True)


def _size(checks: Sequence[Check]) -> tuple[int, int]:
    height, width, _ = checks[0].image.shape
    return height, width


def _frames(
    images: Sequence[Image], train_images: Iterable[Image] | None, shape: tuple[int, ...]
) -> tuple[dict[str, Any], list[Image]]:
    """Entries of the manifest about frames, and the frames of this shape on which int8 finds its ranges."""
    if train_images is None:
        return frame_entries(images, "check") if images else unknown_frames(), list(images)
    kept: list[Image] = []

    def watched() -> Iterator[Image]:
        for image in train_images:
            if image.shape == shape and len(kept) < _CALIBRATION_IMAGES:
                kept.append(image)
            yield image

    return frame_entries(watched(), "train"), kept or list(images)


def _produce_and_judge(
    trained: TrainedNetwork,
    model: DeployModel,
    result: ExportReport,
    partial: Path,
    formats: Sequence[str],
    frames: Sequence[Image],
    evidence: Evidence,
) -> list[Comparison]:
    """All comparisons, after filling the figures of `result`."""
    folders = (partial / "files", partial / "probes")
    kinds = _kinds(formats, evidence.settings.precision)
    with writing(result.folder):
        subjects = produce(result, model, _size(evidence.checks), folders, kinds, frames)
    comparisons = judge(result, model, trained.preprocess, subjects, evidence)
    for name, entry in result.files.items():
        if entry["precision"] != "fp32" and comparisons.get(name):
            entry |= golden_figures(evidence.checks, comparisons[name])
    return [entry for found in comparisons.values() for entry in found]


def _kinds(formats: Sequence[str], precisions: Sequence[str]) -> list[tuple[str, str]]:
    """(format, precision) of every file; fp32 comes first, since the others are made from it."""
    order = [precision for precision in ("fp32", "fp16", "int8") if precision in precisions]
    return [(name, precision) for name in formats for precision in (order if name == "onnx" else ("fp32",))]


def _complete(result: ExportReport, model: DeployModel, checks: Sequence[Check], files: Path) -> None:
    """Writes everything beside the model files, then loads the folder as a robot would; that is part of G1."""
    created = _now()
    manifest = {**result.manifest, **report.to_mapping(result, created)}
    require_schema(manifest)
    text = manifest_text(manifest)
    (files / MANIFEST).write_text(text + "\n")
    report.write(result, files, created)
    write_golden(model, checks, files)
    write_sidecars(json.loads(text), files)  # in the order of manifest.json, in which verify repeats it
    write_sums(files)
    load_as_robot(result, files)


def _publish(result: ExportReport, partial: Path) -> None:
    put_in_place(partial / "files", result.folder)
    shutil.rmtree(beside(result.folder, "rejected"), ignore_errors=True)


def _reject(result: ExportReport, partial: Path, comparisons: list[Comparison], checks: Sequence[Check]) -> None:
    """Leaves report and worst images in the rejected folder and raises the error of the gravest failure."""
    result.folder = rejected = beside(result.folder, "rejected")
    folder = partial / "report"
    report.write(result, folder, _now())
    images = {check.name: check.image for trial in trials(result.free, checks) for check in trial.checks}
    report.write_triptychs(result, folder, comparisons, images)
    shutil.rmtree(rejected, ignore_errors=True)
    os.rename(folder, rejected)
    raise result.error(NOT_EXPORTED, str(rejected / report.MARKDOWN))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
