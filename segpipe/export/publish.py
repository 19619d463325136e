"""Export in one step: either every gate passes and the folder appears at once, or no model file is left."""

import contextlib
import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from segpipe.data.catalog import ClassTable
from segpipe.data.data_set import DataSet
from segpipe.errors import ConfigError
from segpipe.export.artifact.golden import golden_figures, write_golden
from segpipe.export.artifact.manifest import described, require_schema
from segpipe.export.artifact.place import (
    beside,
    check_place,
    put_in_place,
    recover,
    write_sums,
    writing,
)
from segpipe.export.dataset import GateInputs, check_set, gather
from segpipe.export.gates.comparison import Check
from segpipe.export.gates.judge import judge, load_as_robot, require_engines
from segpipe.export.graph.formats import FILES, convert
from segpipe.export.graph.network import (
    PROFILES,
    DeployModel,
    Image,
    Size,
    manifest_text,
)
from segpipe.export.verify_report import (
    MARKDOWN,
    NOT_EXPORTED,
    ExportReport,
    refusal,
    write_sidecars,
)
from segpipe.ledger.inputs import changed_since
from segpipe.models.layers import SegmentationNet
from segpipe.models.preprocess import Preprocess
from segpipe.native import one_thread
from segpipe.runtime.artifact import MANIFEST
from segpipe.settings.config import Config, check_critical_classes
from segpipe.settings.groups import ExportConfig
from segpipe.train.checkpoint import TrainedNetwork


def export_checkpoint(
    run: Path,
    trained: TrainedNetwork,
    config: Config,
    *,
    validation: DataSet | None,
    training: Iterable[Image] | None,
) -> ExportReport:
    """Exports `trained`, a network of the folder `run`, with `config.export`, to `export.dir` or RUN/export.

    validation: the split to check on, or None with `export.allow_unverified`. training: images of the training split,
    for frame limits and int8. Raises what `export_run` and `gather` raise.
    """
    warning = ""
    if validation is not None:
        changed = changed_since(run, trained.config.data, config.data)
        if changed:
            warning = (
                f"{changed}; the gates and the temperature are on the changed images"
            )
    return export_run(
        trained,
        gather(validation, config),
        Path(config.export.dir or run / "export"),
        train_images=training,
        warning=warning,
    )


def export_run(
    trained: TrainedNetwork,
    inputs: GateInputs,
    out_dir: Path,
    *,
    train_images: Iterable[Image] | None = None,
    warning: str = "",
) -> ExportReport:
    """Writes model files, and the files that describe and check them, to `out_dir`; returns the report.

    inputs: images of one size, which becomes the input size of the files; real ones unless `allow_unverified` is set.
    Without labelled images, G5 and the temperature fit are skipped. train_images: any sizes; they give the frame limits
    (without them, the check images do), and those of the input size calibrate int8. warning: a further sentence that
    qualifies the scores.

    One rename replaces an earlier export in `out_dir`. A file of reduced precision that fails a gate is left out, and
    the report says why. When another gate fails, the report goes to `out_dir` + ".rejected", no model file is left, an
    earlier export stays, and ExportMismatch or its subclass IntegrityError, QualityError or LatencyError is raised.
    Raises ExportError when torch cannot convert, ConfigError for unusable images, settings or folder.
    """
    checks, settings = inputs.checks, inputs.settings
    # A rename replaces it. Both functions of os pass on an unreadable path and on a circular link.
    if os.path.islink(out_dir) or not out_dir.name:
        out_dir = Path(os.path.realpath(out_dir))
    _check_request(trained, out_dir, settings)
    partial = beside(out_dir, "partial")
    try:
        with writing(out_dir):
            recover(out_dir)
            shutil.rmtree(partial, ignore_errors=True)  # what a crash left
        with one_thread():
            model = DeployModel(
                trained,
                profile=PROFILES[settings.profile],
                mask_stride=settings.mask_stride,
            )
            manifest, frames = described(trained, model, inputs, train_images)
            if warning:
                manifest.setdefault("warnings", []).append(warning)
            manifest["allow_unverified"] = settings.allow_unverified
            require_schema(manifest)
            result = ExportReport(out_dir, manifest)
            # fp32 first: the others are made from it
            kinds = [(name, "fp32") for name in settings.formats]
            kinds += [
                ("onnx", name)
                for name in ("fp16", "int8")
                if name in settings.precision
            ]
            with writing(out_dir):
                converted = convert(result, model, partial, kinds, frames)
            comparisons = judge(result, model, trained.preprocess, converted, inputs)
        for name, entry in result.files.items():
            if entry["precision"] != "fp32" and comparisons.get(name):
                entry |= golden_figures(checks, comparisons[name], entry["precision"])
        with writing(out_dir):
            files = partial / FILES
            _complete(result, model, checks, files)
            rejected = beside(out_dir, "rejected")
            shutil.rmtree(rejected, ignore_errors=True)
            if not result.passed:
                rejected.mkdir()
                result.folder = rejected
                result.write(rejected)
                raise refusal(NOT_EXPORTED, result.failed, str(rejected / MARKDOWN))
            put_in_place(files, out_dir)
        return result
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_request(
    trained: TrainedNetwork, out_dir: Path, settings: ExportConfig
) -> None:
    require_engines(settings)
    stride = trained.model.output_stride
    if settings.mask_stride not in (1, stride):
        raise ConfigError(
            f"export.mask_stride = {settings.mask_stride}, but it must be 1 or {stride}, the output stride."
        )
    check_critical_classes(settings.critical_classes, trained.classes.names)
    check_place(out_dir)


def _complete(
    result: ExportReport, model: DeployModel, checks: Sequence[Check], folder: Path
) -> None:
    """Writes all files except the models, then loads the folder as a robot would, which is part of G1.

    Deletes files of reduced precision that failed. Stops there when another gate failed.
    """
    for name in result.drop_reduced():
        (folder / name).unlink(missing_ok=True)
    if not result.passed:
        return
    manifest = {**result.manifest, **result.to_mapping()}
    require_schema(manifest)
    text = manifest_text(manifest)
    (folder / MANIFEST).write_text(text + "\n")
    result.write(folder)
    write_golden(model, checks, folder)
    # From the sorted text, so that the key order matches manifest.json
    write_sidecars(json.loads(text), folder)
    write_sums(folder)
    load_as_robot(result, folder)
    if not result.passed:
        _complete(result, model, checks, folder)


def trial_export(
    config: Config, network: SegmentationNet, num_classes: int, size: Size
) -> str:
    """Exports an untrained network on generated images of `size`; returns the formats that passed all gates.

    Runs before hours of training, without reduced precision, engines, latency budget or critical classes. Raises what
    `export_run` raises.
    """
    settings = replace(
        config.export,
        precision=["fp32"],
        engines=[],
        critical_classes=[],
        latency_budget_ms=0.0,
    )
    ids = range(num_classes)
    classes = ClassTable(
        name="example",
        names=tuple(f"class{i}" for i in ids),
        palette=tuple((i, i, i) for i in ids),
        train_ids={i: i for i in ids},
    )
    trained = TrainedNetwork(
        model=copy.deepcopy(network).eval(),
        preprocess=Preprocess(standardize=config.model.standardize),
        config=config,
        classes=classes,
        ema_digest="0" * 16,
        step=0,
    )
    inputs = GateInputs(check_set([], [], size), None, settings)
    folder = Path(tempfile.mkdtemp(prefix="segpipe-contract-"))
    try:
        export_run(trained, inputs, folder / "export")
        shutil.rmtree(folder / "export")
    finally:
        # Fails when a report is in it, which the message then names.
        with contextlib.suppress(OSError):
            folder.rmdir()
    return ", ".join(settings.formats)
