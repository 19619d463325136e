"""Repeats every gate on an exported folder on disk, against the checkpoint that it claims to come from."""

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from segpipe.errors import ConfigError
from segpipe.export.artifact.golden import golden_problems
from segpipe.export.artifact.manifest import (
    converters,
    described,
    differences,
    schema_problems,
)
from segpipe.export.artifact.place import sums_problems
from segpipe.export.dataset import GateInputs
from segpipe.export.gates.comparison import gate_integrity
from segpipe.export.gates.judge import judge, load_as_robot, require_engines
from segpipe.export.graph.formats import ModelFile, conversion_problem, convert
from segpipe.export.graph.network import PROFILES, DeployModel, Image, Manifest, Size
from segpipe.export.graph.onnx_format import write_probe
from segpipe.export.verify_report import (
    FOLDER,
    NOT_VERIFIED,
    ExportReport,
    integrity_refusal,
    refusal,
)
from segpipe.native import one_thread
from segpipe.runtime.artifact import MANIFEST, parse_manifest, read_sums
from segpipe.train.checkpoint import TrainedNetwork

_SHOWN = 5  # problems of the folder that a message lists


def read_manifest(folder: Path) -> Manifest:
    """manifest.json of an exported folder, after comparing all checksums.

    Raises IntegrityError (G1) with the first files that are missing, altered or unlisted, or the first entries that
    break the schema; ConfigError when there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"artifact = {folder} is not a folder. Give the folder of an export: runs/NAME/export."
        )
    problems = sums_problems(folder)
    manifest: Manifest = {}
    if not problems:
        try:
            manifest = parse_manifest((folder / MANIFEST).read_bytes())
            problems = schema_problems(manifest)
            if not problems:
                missing = manifest["files"].keys() - read_sums(folder).keys()
                problems = [f"{name} is missing" for name in missing]
                image_size(manifest)
        except (OSError, ValueError, LookupError, RecursionError) as error:
            problems = [f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"]
    if problems:
        raise integrity_refusal(NOT_VERIFIED, problems, str(folder))
    return manifest


def image_size(manifest: Manifest) -> Size:
    """(height, width) of the input images."""
    entry = manifest["io"]["inputs"][0]
    shape = entry["shape"]
    height, width = shape[2:] if entry["layout"] == "NCHW" else shape[1:3]
    return height, width


def verify_folder(
    trained: TrainedNetwork,
    folder: Path,
    manifest: Manifest,
    inputs: GateInputs,
    *,
    train_images: Iterable[Image] | None,
) -> ExportReport:
    """Report of all gates on the files of `folder`, against a trained network. Writes nothing there.

    manifest: from `read_manifest`. inputs: images of the files' size; real ones unless `allow_unverified` is set.
    train_images: as in `export_run`. Raises ExportMismatch or one of its subclasses when a gate fails, a file was
    altered, or the manifest describes another network; ConfigError when the data or the package versions differ from
    those of the export.
    """
    require_engines(inputs.settings)
    result = ExportReport(folder, manifest, files=manifest["files"])
    with one_thread(), tempfile.TemporaryDirectory() as scratch:
        model = DeployModel(
            trained,
            profile=PROFILES[manifest["profile"]],
            mask_stride=manifest["io"]["outputs"][0]["stride"],
        )
        computed, frames = described(trained, model, inputs, train_images)
        model.temperature = manifest["calibration"]["temperature"]
        problems = _false_claims(manifest, computed, len(inputs.real_images))
        files: list[ModelFile] = []
        if not problems:
            problems = list(golden_problems(model, folder, inputs.checks))
            files = _model_files(result, model, frames, Path(scratch))
        result.gates[FOLDER] = [gate_integrity(problems[:_SHOWN])]
        if result.passed:
            # Not timed: the load of this machine says nothing about whether the files are the ones that passed.
            judge(result, model, trained.preprocess, files, inputs, timed=False)
        if result.passed:
            load_as_robot(result, folder)
    if not result.passed:
        raise refusal(NOT_VERIFIED, result.failed, str(folder))
    return result


def _false_claims(claimed: Manifest, computed: Manifest, real_images: int) -> list[str]:
    """Differences between the manifest and its recomputed values.

    Raises ConfigError when it was made from other images than these.
    """
    then = _images_of(claimed, claimed["real_images"])
    now = _images_of(computed, real_images)
    if then != now:
        raise ConfigError(
            f"the manifest was made from {then}, but this data has {now}. Verify with the data set, export.images and "
            "export.quality_images of the export, or export again."
        )
    claims = {name: claimed.get(name) for name in computed}
    if None in (claims["metrics"], computed["metrics"]):
        claims["metrics"] = computed["metrics"]
    return list(differences(claims, computed))


def _images_of(manifest: Manifest, check_images: int) -> str:
    """Number and kind of the images that its claims were made from."""
    labelled = manifest["calibration"].get("images", 0)
    frames = manifest["frame_statistics"]
    return f"{check_images} check images, {labelled} labelled images and {frames['images']} {frames['source']} images"


def _model_files(
    result: ExportReport, model: DeployModel, frames: Sequence[Image], scratch: Path
) -> list[ModelFile]:
    """The files of the folder, each with a probe. Files that differ from what the checkpoint converts to fail G1.

    No file is run before this comparison. Raises ConfigError for a difference that other package versions explain.
    """
    entries, versions = result.manifest["files"], result.manifest["versions"]
    kinds = {(entry["format"], entry["precision"]) for entry in entries.values()}
    if any(precision != "fp32" for _, precision in kinds):
        kinds.add(("onnx", "fp32"))  # the source of the reduced ones
    ordered = sorted(kinds, key=lambda kind: (kind[1] != "fp32", kind))
    again = ExportReport(scratch, result.manifest)
    made = {
        converted.path.name: converted
        for converted in convert(again, model, scratch, ordered, frames)
    }
    others = [
        f"{name} {versions.get(name)}, here {version}"
        for name, version in converters().items()
        if versions.get(name) != version
    ]
    files = []
    for name in entries:
        path = result.folder / name
        if name not in made:
            no_such = "no file that the checkpoint converts to has this name"
            problem = f"{name}: {again.dropped.get(name, no_such)}"
        else:
            problem = conversion_problem(path, made[name])
            if problem and others:
                raise ConfigError(
                    f"{problem}; it was exported with {'; '.join(others)}. Verify with these versions, or export "
                    "again."
                )
        if problem:
            result.gates[name] = [gate_integrity([problem])]
            continue
        file = replace(made[name], path=path)
        # The probe exposes tensors of the shipped graph itself.
        if file.format == "onnx":
            file = replace(file, probe=scratch / name)
            write_probe(path, file.probe)
        files.append(file)
    return files
