"""Repeats every gate on an exported folder as it is on disk, against the checkpoint that it claims to come from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segpipe.errors import ConfigError
from segpipe.export.artifact.frame_statistics import frames_of
from segpipe.export.artifact.golden import golden_entry, golden_problems
from segpipe.export.artifact.manifest import (
    NOT_REPEATED,
    Origin,
    converters,
    describe,
    differences,
    parse_manifest,
    schema_problems,
)
from segpipe.export.artifact.place import sums_problems
from segpipe.export.convert import conversion_problems, convert
from segpipe.export.dataset import GateInputs
from segpipe.export.gates.comparison import gate_integrity
from segpipe.export.gates.judge import judge, load_as_robot, require_engines
from segpipe.export.gates.quality import calibration_entry
from segpipe.export.graph.formats import ModelFile
from segpipe.export.graph.network import (
    CONFIDENCE,
    PROFILES,
    DeployModel,
    Image,
    Manifest,
    Size,
    deploy_model,
)
from segpipe.export.graph.onnx_format import write_probe
from segpipe.export.verify_report import (
    FOLDER,
    NOT_VERIFIED,
    ExportReport,
    integrity_refusal,
    refusal,
)
from segpipe.native import one_thread
from segpipe.runtime.artifact import MANIFEST, read_sums

if TYPE_CHECKING:
    from segpipe.train.checkpoint import TrainedNetwork

_SHOWN = 5  # problems of the folder in a message


def read_manifest(folder: Path) -> Manifest:
    """manifest.json of an exported folder, after comparing all checksums.

    Raises IntegrityError (G1) with the first files that are missing, altered or unlisted, or the first entries that
    break the schema; ConfigError when there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"artifact = {folder}, but that is no folder. Give the folder of an export: runs/NAME/export."
        )
    problems = sums_problems(folder)
    manifest: Manifest = {}
    if not problems:
        try:
            manifest = parse_manifest((folder / MANIFEST).read_text())
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
    """(height, width) of the images that the files take."""
    entry = manifest["io"]["inputs"][0]
    shape = entry["shape"]
    height, width = shape[2:] if entry["layout"] == "NCHW" else shape[1:3]
    return height, width


def verify_folder(
    trained: TrainedNetwork,
    folder: Path,
    inputs: GateInputs,
    *,
    origin: Origin | None = None,
    train_images: Iterable[Image] | None = None,
) -> ExportReport:
    """Report of all gates on the files of `folder`, against a trained network. Writes nothing there.

    inputs: of the size of the files; without real images only with `allow_unverified`. origin, train_images: as in
    `export_run`. Raises ExportMismatch or one of its subclasses when a gate fails, a file was altered, or the manifest
    is about another network; ConfigError where the data or the versions of the export are not here.
    """
    require_engines(inputs.settings)
    manifest = read_manifest(folder)
    result = ExportReport(folder, manifest, files=manifest["files"])
    with one_thread(), tempfile.TemporaryDirectory() as scratch:
        entries, frames = frames_of(inputs.real_images, train_images, (*inputs.size, 3))
        model, problems = _claims(
            manifest, trained, inputs, origin or Origin(), entries
        )
        files: list[ModelFile] = []
        if not problems:
            problems = list(golden_problems(model, folder, inputs.checks))
            files = _model_files(result, model, inputs.size, frames, Path(scratch))
        result.gates[FOLDER] = [gate_integrity(problems[:_SHOWN])]
        if result.passed:
            judge(result, model, trained.preprocess, files, inputs)
        if result.passed:
            load_as_robot(result, folder)
    if not result.passed:
        raise refusal(NOT_VERIFIED, result.failed, str(folder))
    return result


def _claims(
    claimed: Manifest,
    trained: TrainedNetwork,
    inputs: GateInputs,
    origin: Origin,
    frame_entries: dict[str, Any],
) -> tuple[DeployModel, list[str]]:
    """The network with the temperature of the manifest, and where the manifest differs from what is computed again.

    Raises ConfigError where it was made from other images than are here.
    """
    profile = PROFILES[claimed["profile"]]
    model = deploy_model(
        trained,
        profile=profile,
        temperature=claimed["calibration"]["temperature"],
        mask_stride=claimed["io"]["outputs"][0]["stride"],
    )
    labelled = inputs.labelled if CONFIDENCE in profile.outputs else None
    entries = {
        "calibration": calibration_entry(trained, labelled),
        "golden": golden_entry(inputs.checks),
        **frame_entries,
    }
    computed = describe(trained, model, inputs.size, origin, entries)
    then = _images_of(claimed, claimed["real_images"])
    now = _images_of(computed, len(inputs.real_images))
    if then != now:
        raise ConfigError(
            f"the manifest was made from {then}, here are {now}. Verify with the data set of the export and its "
            "export.images and export.quality_images, or export again."
        )

    # Where it was exported from: the weights are compared by their digest.
    unknown = {"git": None, "checkpoint": None}
    pair = [dict(manifest) for manifest in (claimed, computed)]
    for manifest in pair:
        manifest["source"] = {**manifest["source"], **unknown}
        if claimed["metrics"] is None or computed["metrics"] is None:
            manifest["metrics"] = None
    names = computed.keys() - set(NOT_REPEATED)
    one, other = ({name: manifest[name] for name in names} for manifest in pair)
    return model, list(differences(one, other))


def _images_of(manifest: Manifest, check_images: int) -> str:
    """From which images its claims were made."""
    labelled = manifest["calibration"].get("images", 0)
    frames = manifest["frame_statistics"]
    return f"{check_images} check images, {labelled} labelled images and {frames['images']} {frames['source']} images"


def _model_files(
    result: ExportReport,
    model: DeployModel,
    size: Size,
    frames: Sequence[Image],
    scratch: Path,
) -> list[ModelFile]:
    """The files of the folder with a probe each, after filling G1 of those that differ from what the checkpoint gives.

    Nothing of the folder is run before it is known to be that. Raises ConfigError for a difference that other versions
    explain.
    """
    entries = result.manifest["files"]
    kinds = [(entry["format"], entry["precision"]) for entry in entries.values()]
    if any(precision != "fp32" for _, precision in kinds):
        kinds.append(("onnx", "fp32"))  # from which they are made
    kinds = sorted(dict.fromkeys(kinds), key=lambda kind: kind[1] != "fp32")
    folders = scratch / "again", scratch / "probes"
    for folder in folders:
        folder.mkdir()
    again = ExportReport(scratch, result.manifest)
    made = convert(again, model, size, folders, kinds, frames)

    others = [
        f"{name} {result.manifest['versions'].get(name)}, here {version}"
        for name, version in converters().items()
        if result.manifest["versions"].get(name) != version
    ]
    files = []
    for converted in made:
        name = converted.path.name
        if name not in entries:
            continue
        problems = conversion_problems(result.folder / name, converted)
        if problems and others:
            raise ConfigError(
                f"{problems[0]}; it was exported with {'; '.join(others)}. Verify with these versions, or export again."
            )
        if problems:
            result.gates[name] = [gate_integrity(problems)]
            continue
        path, probe = result.folder / name, converted.probe
        if converted.format == "onnx":  # its own graph is looked into
            probe = scratch / name
            write_probe(path, probe)
        files.append(replace(converted, path=path, probe=probe))
    for name in entries.keys() - {converted.path.name for converted in made}:
        reason = again.dropped.get(
            name, "no conversion of the checkpoint has this name"
        )
        result.gates[name] = [gate_integrity([f"{name}: {reason}"])]
    return files
