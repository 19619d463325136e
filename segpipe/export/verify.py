"""Repeats every gate on an exported folder as it is on disk, against the checkpoint that it claims to come from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segpipe.errors import ConfigError
from segpipe.export.artifact.frame_statistics import frames_of
from segpipe.export.artifact.golden import golden_entry, golden_problems
from segpipe.export.artifact.manifest import (
    NOT_REPEATED,
    converters,
    describe,
    differences,
    in_file,
    parse_manifest,
    schema_problems,
)
from segpipe.export.artifact.origin import Origin
from segpipe.export.artifact.place import sums_problems
from segpipe.export.convert import conversion_problems, convert
from segpipe.export.dataset import GateInputs
from segpipe.export.gates.judge import judge, load_as_robot, require_engines
from segpipe.export.gates.limits import gate_integrity
from segpipe.export.gates.quality import calibration_entry
from segpipe.export.graph.formats import FORMATS, ModelFile
from segpipe.export.graph.network import DeployModel, deploy_model
from segpipe.export.graph.onnx_format import write_probe
from segpipe.export.graph.profiles import (
    CONFIDENCE,
    PROFILES,
    Image,
    Manifest,
    Size,
)
from segpipe.export.verify_report import (
    FOLDER,
    NOT_VERIFIED,
    ExportReport,
    integrity_refusal,
    refusal,
    sidecar_problems,
)
from segpipe.native import one_thread
from segpipe.runtime.artifact import MANIFEST, read_sums

if TYPE_CHECKING:
    from segpipe.train.checkpoint import TrainedNetwork

_SHOWN = 5  # problems of the folder in a message
# Factor by which a temperature fitted on another number of images may differ
_SAMPLE = 1.5


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
                problems = _file_problems(manifest, folder)
                image_size(manifest)
        except (OSError, ValueError, LookupError, RecursionError) as error:
            problems = [f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"]
    if problems:
        raise integrity_refusal(NOT_VERIFIED, problems, str(folder))
    return manifest


def _file_problems(manifest: Manifest, folder: Path) -> list[str]:
    """What is wrong with `files` of a manifest, or with its absence."""
    if "status" not in manifest:
        return [f"{MANIFEST} has no status"]
    sums = read_sums(folder)
    problems = []
    for name, entry in manifest["files"].items():
        if name != FORMATS[entry["format"]].file_name(entry["precision"]):
            problems.append(
                f"{name} is no {entry['format']} file of {entry['precision']}"
            )
        elif name not in sums:
            problems.append(f"{name} is missing")
        elif sums[name] != entry["sha256"]:
            problems.append(f"{name} has another sha256 than in {MANIFEST}")
    return problems


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
    `export_run`; without them the manifest's entries about the run's mIoU, or about frames, are not checked. Raises
    ExportMismatch or one of its subclasses when a gate fails, a file was altered, or the manifest is about another
    network.
    """
    require_engines(inputs.settings)
    manifest = read_manifest(folder)
    result = ExportReport(folder, manifest, files=manifest["files"])
    with one_thread(), tempfile.TemporaryDirectory() as scratch:
        entries, frames = frames_of(inputs.real_images, train_images, (*inputs.size, 3))
        model, problems = _claims(result, trained, inputs, origin or Origin(), entries)
        files: list[ModelFile] = []
        if not problems:
            problems = _beside_the_models(result, model, inputs)
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
    result: ExportReport,
    trained: TrainedNetwork,
    inputs: GateInputs,
    origin: Origin,
    frame_entries: dict[str, Any],
) -> tuple[DeployModel, list[str]]:
    """The network with the temperature of the manifest, and where the manifest differs from what is computed again.

    Counts are those of this verification, not of the manifest. What cannot be computed here is noted in
    `result.not_repeated`.
    """
    claimed = dict(result.manifest)
    profile = PROFILES[claimed["profile"]]
    temperature = claimed["calibration"]["temperature"]
    stride = claimed["io"]["outputs"][0]["stride"]
    model = deploy_model(
        trained, profile=profile, temperature=temperature, mask_stride=stride
    )
    labelled = inputs.labelled if CONFIDENCE in profile.outputs else None
    entries = {
        "calibration": calibration_entry(trained, labelled),
        "golden": golden_entry(claimed["golden"]["images"]),
        **frame_entries,
    }
    computed = describe(trained, model, inputs.size, origin, entries)

    # Where it was exported from: the weights are compared by their digest.
    unknown = {"git": None, "checkpoint": None}
    for manifest in (claimed, computed):
        manifest["source"] = {**manifest["source"], **unknown}
    if claimed["metrics"] is None or computed["metrics"] is None:
        claimed["metrics"] = computed["metrics"] = None

    others = _of_other_images(claimed, computed, inputs.settings.allow_unverified)
    result.not_repeated += filter(None, others.values())
    names = computed.keys() - others.keys() - set(NOT_REPEATED)
    problems = differences(
        {name: claimed[name] for name in names},
        {name: computed[name] for name in names},
    )
    return model, list(problems)


def _of_other_images(
    claimed: Manifest, computed: Manifest, is_allowed: bool
) -> dict[str, str]:
    """By entry that was made of other images than are here: a sentence, or "" where the status says enough.

    An export without the data set has no temperature and no limits of frames. With the data set at hand that is a
    difference, unless it is allowed.
    """
    reasons = {}

    # The temperature: from labelled validation images
    said, fitted = claimed["calibration"], computed["calibration"]
    count, here = said.get("images", 0), fitted.get("images", 0)
    ratio = said["temperature"] / fitted["temperature"]
    if count and not here:
        reasons["calibration"] = ""
    elif count != here and (1 / _SAMPLE <= ratio <= _SAMPLE if count else is_allowed):
        reasons["calibration"] = (
            f"the temperature was fitted on {count} labelled images, here are {here}"
        )

    # The limits of frames: from training images, or else from the check images
    said, seen = claimed["frame_statistics"], computed["frame_statistics"]
    keys = ("source", "images") if said["source"] == "check" else ("source",)
    is_same = all(said[key] == seen[key] for key in keys)
    if seen["source"] == "none":
        reasons |= {"frame_statistics": "", "frame_limits": ""}
    elif not is_same and (is_allowed or said["source"] != "none"):
        reasons["frame_statistics"] = ""
        reasons["frame_limits"] = (
            f"frame_limits were made of {said['images']} {said['source']} images, here are {seen['images']} "
            f"{seen['source']} images"
        )
    return reasons


def _beside_the_models(
    result: ExportReport, model: DeployModel, inputs: GateInputs
) -> list[str]:
    """What is wrong with golden/, and with the files for people."""
    manifest = result.manifest
    names = manifest["golden"]["images"]
    images = inputs.named(names)
    # An export without the data set has generated golden frames.
    if inputs.labelled is None or inputs.settings.allow_unverified:
        images |= {check.name: check.image for check in inputs.checks}
    problems = list(golden_problems(model, result.folder, names, images))
    if manifest["versions"].get("segpipe") == converters()["segpipe"]:
        problems += sidecar_problems(manifest, result.folder)
    return problems


def _model_files(
    result: ExportReport,
    model: DeployModel,
    size: Size,
    frames: Sequence[Image],
    scratch: Path,
) -> list[ModelFile]:
    """The files of the folder with a probe each, after filling G1 of those that differ from what the checkpoint gives.

    A TorchScript or pt2 file is code, so it is run only when it is byte for byte what the checkpoint converts to. An
    ONNX file is data: if it was made by other versions, its answers are judged. Its probe is its own graph.
    """
    then, now = result.manifest["versions"], converters()
    others = "; ".join(
        f"{name} {then.get(name)}, here {now[name]}"
        for name in now
        if then.get(name) != now[name]
    )
    converted, failures = _convert_again(result, model, size, frames, scratch)
    files = []
    for name, entry in result.manifest["files"].items():
        path, again = result.folder / name, converted.get(name)
        kind, precision = entry["format"], entry["precision"]
        problems = conversion_problems(path, again) if again else []
        by_answers = ""
        if again is None:
            by_answers = failures.get(name, "no frames of its calibration are here")
        elif problems and others and kind != "onnx":
            result.not_repeated.append(
                f"{name} was not run, since it is code and was exported with {others}"
            )
            continue
        elif problems and others:
            by_answers = f"it was exported with {others}"
            problems = []

        probe = scratch / name
        if kind != "onnx" and again is not None:
            probe = again.probe
        elif not problems:
            try:
                write_probe(path, probe)
            except Exception as error:  # the parser raises many types
                problems = [f"{name} cannot be looked into ({error})"]
        if problems:
            result.gates[name] = [gate_integrity(problems)]
            continue
        if by_answers:
            result.not_repeated.append(
                f"{name} was compared by answers only: {by_answers}"
            )
        manifest = in_file(result.manifest, precision)
        files.append(ModelFile(kind, precision, path, probe, manifest))
    return files


def _convert_again(
    result: ExportReport,
    model: DeployModel,
    size: Size,
    frames: Sequence[Image],
    scratch: Path,
) -> tuple[dict[str, ModelFile], dict[str, str]]:
    """By name, what the checkpoint converts to now, and why a file cannot be made again.

    int8 is left out where no frame is at hand for its calibration.
    """
    entries = result.manifest["files"]
    kinds = [(entry["format"], entry["precision"]) for entry in entries.values()]
    if any(precision != "fp32" for _, precision in kinds):
        kinds.append(("onnx", "fp32"))  # from which they are made
    kinds = [kind for kind in dict.fromkeys(kinds) if frames or kind[1] != "int8"]
    kinds.sort(key=lambda kind: kind[1] != "fp32")
    folders = scratch / "again", scratch / "probes"
    for folder in folders:
        folder.mkdir()
    schemes = {name: entry.get("scheme", "") for name, entry in entries.items()}
    again = ExportReport(scratch, result.manifest)
    files = convert(again, model, size, folders, kinds, frames, schemes)
    return {file.path.name: file for file in files}, again.dropped
