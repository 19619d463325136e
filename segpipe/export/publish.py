"""Export in one step: either every gate passes and the folder appears at once, or no model file is left."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segpipe.errors import ConfigError
from segpipe.export.artifact import verify_report
from segpipe.export.artifact.frame_statistics import frames_of
from segpipe.export.artifact.golden import golden_entry, golden_figures, write_golden
from segpipe.export.artifact.manifest import describe, require_schema
from segpipe.export.artifact.origin import Origin, origin_of
from segpipe.export.artifact.outcome import NOT_EXPORTED, ExportReport, refusal
from segpipe.export.artifact.place import (
    beside,
    check_place,
    put_in_place,
    recover,
    write_sums,
    writing,
)
from segpipe.export.artifact.sidecars import write_sidecars
from segpipe.export.dataset import gather
from segpipe.export.gates.check_set import Check, check_set, trials
from segpipe.export.gates.judge import GateInputs, judge, load_as_robot, require_engines
from segpipe.export.gates.limits import MAX_CLASSES
from segpipe.export.gates.temperature import calibration_entry
from segpipe.export.graph.formats import FORMATS
from segpipe.export.graph.network import DeployModel, deploy_model
from segpipe.export.graph.profiles import (
    CONFIDENCE,
    PROFILES,
    Image,
    Manifest,
    Size,
    free_lengths,
    manifest_text,
)
from segpipe.export.produce import produce
from segpipe.ledger.inputs import changed_since
from segpipe.native import one_thread
from segpipe.runtime.artifact import MANIFEST
from segpipe.settings.check import export_problems
from segpipe.settings.groups import ExportConfig

if TYPE_CHECKING:
    from segpipe.data.data_set import Samples
    from segpipe.export.dataset import Labelled
    from segpipe.export.gates.comparison import ImageComparison
    from segpipe.settings.config import Config
    from segpipe.train.checkpoint import TrainedNetwork


def export_checkpoint(
    run: Path,
    which: str,
    trained: TrainedNetwork,
    config: Config,
    *,
    validation: Samples | None,
    training: Iterable[Image] | None,
) -> ExportReport:
    """Exports `trained`, which is `which` of the folder `run`, to `export.dir` or RUN/export, as `config.export` says.

    validation: the split to check on, or None with `export.allow_unverified`. training: images of the training split,
    for frame limits and int8. Raises what `export_run` and `gather` raise.
    """
    export, found, origin = (
        config.export,
        gather(validation, config),
        origin_of(run, which, trained),
    )
    changed = (
        changed_since(run, trained.config.data, config.data)
        if validation is not None
        else ""
    )
    if changed:
        text = f"{changed}; the gates and the temperature are on the changed images"
        origin = replace(origin, warnings=(*origin.warnings, text))
    return export_run(
        trained,
        found.images,
        Path(export.dir or run / "export"),
        export.formats,
        {},
        names=found.names,
        origin=origin,
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
    """Report of the export that is now in `out_dir`: model files, and the files that describe and check them.

    images: uint8 (H, W, 3) RGB of the validation split, all of one size, which becomes the size of the files; none
    with `settings.allow_unverified`, `height` and `width`. origin: result of `origin_of`. train_images: any sizes;
    frame limits come from them (else from `images`), and int8 is calibrated on those of the files' size. labelled: for
    G5 and the temperature, which are skipped without it. settings: everything else except the formats.

    An earlier export in `out_dir` is replaced in one rename. When a gate fails, the report and the worst images go to
    `out_dir` + ".rejected", no model file is left, an earlier export stays, and ExportMismatch or its subclass
    IntegrityError, QualityError or LatencyError is raised. Raises ExportError when torch cannot convert, ConfigError
    for unusable images, formats, settings or folder.
    """
    out_dir = Path(out_dir)
    settings = settings if settings is not None else ExportConfig()
    names = (
        names
        if names is not None
        else [f"image_{index:06d}" for index in range(len(images))]
    )
    asked = (
        (settings.height, settings.width)
        if settings.allow_unverified and settings.height
        else None
    )
    inputs = GateInputs(check_set(images, names, asked), labelled, settings)
    _check_request(trained, out_dir, formats, settings, _size(inputs.checks))
    partial = beside(out_dir, "partial")
    try:
        _make_room(out_dir, partial)
        with one_thread():
            frames, kept = frames_of(images, train_images, inputs.checks[0].image.shape)
            model, manifest = _described(
                trained, inputs, origin or Origin(), {**frames, **extra_manifest}
            )
            result = ExportReport(out_dir, manifest)
            comparisons = _produce_and_judge(
                trained, model, result, partial, formats, kept, inputs
            )
        with writing(out_dir):
            if result.passed:
                _complete(result, model, inputs.checks, partial / "files")
            if not result.passed:
                _reject(result, partial, comparisons, inputs.checks)
            _publish(result, partial)
        return result
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_request(
    trained: TrainedNetwork,
    out_dir: Path,
    formats: Sequence[str],
    settings: ExportConfig,
    size: Size,
) -> None:
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise ConfigError(
            f"export.formats = {list(formats)}, but it must be one or more of {', '.join(FORMATS)}."
        )
    for problem in export_problems(replace(settings, formats=list(formats))):
        raise ConfigError(problem)
    require_engines(settings)
    free_lengths(settings.dynamic, size, trained.model.output_stride)
    classes = trained.classes
    if classes.num_classes > MAX_CLASSES:
        raise ConfigError(
            f"classes {classes.name} has {classes.num_classes} classes, but a uint8 mask holds {MAX_CLASSES}, since "
            "255 means no answer. Merge classes in the class table."
        )
    unknown = [name for name in settings.critical_classes if name not in classes.names]
    if unknown:
        raise ConfigError(
            f"export.critical_classes = {settings.critical_classes}, but {unknown[0]} is no class of {classes.name}: "
            f"{', '.join(classes.names)}."
        )
    check_place(out_dir)


def _described(
    trained: TrainedNetwork,
    inputs: GateInputs,
    origin: Origin,
    extra: Mapping[str, Any],
) -> tuple[DeployModel, Manifest]:
    """The model to export, with the fitted temperature, and its manifest without figures."""
    settings = inputs.settings
    profile = replace(PROFILES[settings.profile], dynamic=settings.dynamic)
    calibration = calibration_entry(
        trained, inputs.labelled if CONFIDENCE in profile.outputs else None
    )
    model = deploy_model(
        trained, profile=profile, temperature=calibration["temperature"]
    )
    entries = {
        "calibration": calibration,
        "allow_unverified": settings.allow_unverified,
        "golden": golden_entry(inputs.checks),
        **extra,
    }
    manifest = describe(trained, model, _size(inputs.checks), origin, entries)
    require_schema(manifest)
    return model, manifest


def _make_room(out_dir: Path, partial: Path) -> None:
    """Creates empty folders in `partial`, after cleaning up what a crash left."""
    with writing(out_dir):
        recover(out_dir)
        shutil.rmtree(partial, ignore_errors=True)
        for folder in ("files", "probes", "report"):
            (partial / folder).mkdir(parents=True)


def _size(checks: Sequence[Check]) -> Size:
    height, width, _ = checks[0].image.shape
    return height, width


def _produce_and_judge(
    trained: TrainedNetwork,
    model: DeployModel,
    result: ExportReport,
    partial: Path,
    formats: Sequence[str],
    frames: Sequence[Image],
    inputs: GateInputs,
) -> list[ImageComparison]:
    """All comparisons, after filling the figures of `result`."""
    kinds = _kinds(formats, inputs.settings.precision)
    with writing(result.folder):
        folders = (partial / "files", partial / "probes")
        files = produce(result, model, _size(inputs.checks), folders, kinds, frames)
    comparisons = judge(result, model, trained.preprocess, files, inputs)
    for name, entry in result.files.items():
        if entry["precision"] != "fp32" and comparisons.get(name):
            entry |= golden_figures(inputs.checks, comparisons[name])
    return [entry for found in comparisons.values() for entry in found]


def _kinds(formats: Sequence[str], precisions: Sequence[str]) -> list[tuple[str, str]]:
    """(format, precision) of every file; fp32 first, since the others are made from it."""
    order = [
        precision for precision in ("fp32", "fp16", "int8") if precision in precisions
    ]
    return [
        (name, precision)
        for name in formats
        for precision in (order if name == "onnx" else ("fp32",))
    ]


def _complete(
    result: ExportReport, model: DeployModel, checks: Sequence[Check], folder: Path
) -> None:
    """Writes everything besides the model files, then loads the folder as a robot would, which is part of G1."""
    created = _now()
    manifest = {**result.manifest, **verify_report.to_mapping(result, created)}
    require_schema(manifest)
    text = manifest_text(manifest)
    (folder / MANIFEST).write_text(text + "\n")
    verify_report.write(result, folder, created)
    write_golden(model, checks, folder)
    write_sidecars(
        json.loads(text), folder
    )  # from the sorted manifest.json, as verify renders them again
    write_sums(folder)
    load_as_robot(result, folder)


def _publish(result: ExportReport, partial: Path) -> None:
    put_in_place(partial / "files", result.folder)
    shutil.rmtree(beside(result.folder, "rejected"), ignore_errors=True)


def _reject(
    result: ExportReport,
    partial: Path,
    comparisons: list[ImageComparison],
    checks: Sequence[Check],
) -> None:
    """Leaves report and worst images in the rejected folder, and raises the error of the worst failure."""
    result.folder = rejected = beside(result.folder, "rejected")
    folder = partial / "report"
    verify_report.write(result, folder, _now())
    images = {
        check.name: check.image
        for trial in trials(result.free, checks)
        for check in trial.checks
    }
    verify_report.write_triptychs(result, folder, comparisons, images)
    shutil.rmtree(rejected, ignore_errors=True)
    os.rename(folder, rejected)
    raise refusal(NOT_EXPORTED, result.failed, str(rejected / verify_report.MARKDOWN))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
