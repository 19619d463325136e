"""Repeats every gate on an exported folder as it is on disk, against the checkpoint that it claims to come from."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segpipe.errors import ConfigError
from segpipe.export.artifact.conversion import (
    conversion_problems,
    harmful,
    other_versions,
)
from segpipe.export.artifact.frame_statistics import (
    frame_entries,
    frame_problems,
    frames_of,
    unknown_frames,
)
from segpipe.export.artifact.golden import golden_frame_problems, golden_problems
from segpipe.export.artifact.manifest import (
    checkpoint_differences,
    describe,
    in_file,
    parse_manifest,
    schema_problems,
)
from segpipe.export.artifact.origin import Origin
from segpipe.export.artifact.outcome import (
    NOT_VERIFIED,
    ExportReport,
    integrity_refusal,
    refusal,
)
from segpipe.export.artifact.place import sums_problems
from segpipe.export.artifact.sidecars import sidecar_problems, unlisted
from segpipe.export.gates.check_set import Check, check_set
from segpipe.export.gates.judge import GateInputs, judge, load_as_robot, require_engines
from segpipe.export.gates.limits import gate_integrity
from segpipe.export.gates.temperature import calibration_entry, calibration_problems
from segpipe.export.graph.formats import FORMATS, ModelFile
from segpipe.export.graph.network import DeployModel, deploy_model
from segpipe.export.graph.onnx_format import write_probe
from segpipe.export.graph.profiles import (
    CONFIDENCE,
    PROFILES,
    Image,
    Manifest,
    Size,
    dynamic_of,
    manifest_text,
)
from segpipe.export.produce import produce
from segpipe.files import sha256
from segpipe.native import one_thread
from segpipe.runtime.artifact import MANIFEST, exported_lengths, resolved

if TYPE_CHECKING:
    from segpipe.export.dataset import Labelled
    from segpipe.settings.groups import ExportConfig
    from segpipe.train.checkpoint import TrainedNetwork


def read_manifest(folder: Path) -> Manifest:
    """manifest.json of an exported folder, after comparing all checksums.

    Raises IntegrityError (G1) with the first files that are missing, altered or unlisted, or the first entries that
    break the schema; ConfigError when there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"artifact = {folder}, but that is no folder. Give the folder of an export: runs/NAME/export."
        )
    manifest, found = None, sums_problems(folder)
    if not found:
        try:
            text = (folder / MANIFEST).read_text()
            manifest = parse_manifest(text)
            if text.strip() != manifest_text(
                manifest
            ):  # a name twice: another reader takes the other value
                raise ValueError("it is not written as an export writes it")
        except (OSError, ValueError, RecursionError) as error:
            found = [f"{MANIFEST} cannot be read ({error})"]
        else:
            found = schema_problems(manifest)
            if not found:
                found = _contradictions(manifest)
    if manifest is not None and not found:
        found = unlisted(manifest, folder)
    if manifest is None or found:
        raise integrity_refusal(NOT_VERIFIED, found, str(folder))
    return dict(manifest)


def _contradictions(manifest: Manifest) -> list[str]:
    """What the schema cannot say about a manifest that came with files."""
    if "status" not in manifest:
        return [f"{MANIFEST} has no status"]
    files, whole = manifest["files"], FORMATS["onnx"].file_name()
    found = [
        f"{name} cannot be of {entry['precision']}: it is made from {whole} only"
        for name, entry in files.items()
        if entry["precision"] != "fp32"
        and (entry["format"] != "onnx" or whole not in files)
    ]
    try:
        image_size(manifest)
    except (LookupError, ValueError, ArithmeticError) as error:
        found.append(f"io.inputs has no size ({type(error).__name__}: {error})")
    return found


def image_size(manifest: Manifest) -> Size:
    """(height, width) of the images that the files take, or with which they were exported."""
    entry = manifest["io"]["inputs"][0]
    shape = resolved(entry["shape"], exported_lengths(manifest["io"]))
    height, width = shape[2:] if entry["layout"] == "NCHW" else shape[1:3]
    return height, width


def verify_folder(
    trained: TrainedNetwork,
    folder: Path,
    images: Sequence[Image],
    *,
    names: Sequence[str],
    labelled: Labelled | None,
    settings: ExportConfig,
    origin: Origin | None = None,
    train_images: Iterable[Image] | None = None,
) -> ExportReport:
    """Report of all gates on the files of `folder`, against a trained network. Writes nothing there.

    images: uint8 (H, W, 3) RGB of `image_size`; none with `settings.allow_unverified`. origin, train_images: as in
    `export_run`; without them the manifest's entries about the run's mIoU, or about frames, are not checked. Raises
    ExportMismatch or one of its subclasses when a gate fails, a file was altered, or the manifest is about another
    network.
    """
    require_engines(settings)
    with one_thread(), tempfile.TemporaryDirectory() as scratch:
        # Judge a copy: who can write to the folder could swap a file between its comparison and its first run.
        judged = Path(shutil.copytree(folder, Path(scratch) / "judged", symlinks=True))
        manifest = read_manifest(judged)
        size = image_size(manifest)
        profile = replace(
            PROFILES[manifest["profile"]],
            dynamic=dynamic_of(manifest["io"].get("free", {})),
        )
        result = ExportReport(folder, manifest, files=manifest["files"])
        checks = check_set(images, names, size if settings.allow_unverified else None)
        model = deploy_model(
            trained, profile=profile, temperature=manifest["calibration"]["temperature"]
        )
        described = describe(trained, model, size, origin or Origin(), {})
        _refuse_claims(
            result,
            trained,
            described,
            labelled if CONFIDENCE in profile.outputs else None,
        )
        entries, frames = frames_of(images, train_images, (*size, 3))
        again = _convert_again(result, model, size, frames, Path(scratch))
        files = _model_files(result, judged, again, Path(scratch))
        if result.passed:
            judge(
                result,
                model,
                trained.preprocess,
                files,
                GateInputs(checks, labelled, settings),
            )
        if result.passed:
            _judge_the_rest(result, model, judged, described, entries, checks)
    if not result.passed:
        raise refusal(NOT_VERIFIED, result.failed, str(folder))
    return result


def _judge_the_rest(
    result: ExportReport,
    model: DeployModel,
    folder: Path,
    described: Manifest,
    entries: Mapping[str, Any],
    checks: Sequence[Check],
) -> None:
    """Fills G1 with what is wrong beside the model files; then the runtime loads the folder."""
    problems = [
        *sidecar_problems(result.manifest, folder),
        *golden_problems(model, folder, result.manifest["golden"], result.sigma),
        *_claim_problems(result, folder, described, entries, checks),
    ]
    result.gates["the folder"] = [gate_integrity(problems)]
    if result.passed:
        load_as_robot(result, folder)


def _refuse_claims(
    result: ExportReport,
    trained: TrainedNetwork,
    described: Manifest,
    labelled: Labelled | None,
) -> None:
    """Raises IntegrityError when the manifest is about another network, or its temperature is not the fitted one."""
    manifest = result.manifest
    differences = checkpoint_differences(manifest, described)
    found = (
        [f"{MANIFEST} and the checkpoint differ in {', '.join(differences)}"]
        if differences
        else []
    )
    if not found:
        found, result.answers_only = calibration_problems(
            manifest["calibration"],
            calibration_entry(trained, labelled),
            without_data=not manifest["real_images"],
        )
    if found:
        raise integrity_refusal(NOT_VERIFIED, found, str(result.folder))


def _claim_problems(
    result: ExportReport,
    folder: Path,
    described: Manifest,
    entries: Mapping[str, Any],
    checks: Sequence[Check],
) -> list[str]:
    """False claims of the manifest about golden frames, the run's last validation and frames, where the data is here.

    Notes in `result.answers_only` what could not be computed again.
    """
    manifest = result.manifest
    found, unseen = golden_frame_problems(folder, manifest, checks)
    if described["metrics"] is not None and manifest["metrics"] not in (
        None,
        described["metrics"],
    ):
        found.append("metrics are not those of the run")
    source, here = (
        manifest["frame_statistics"]["source"],
        {check.name: check.image for check in checks},
    )
    real = manifest["check_images"][: manifest["real_images"]]
    if source == "none" and manifest["real_images"]:
        found.append("frame_statistics.source = none, but the export had images")
    elif source == "none":
        found += frame_problems(manifest, unknown_frames())
    elif source == "train" and entries["frame_statistics"]["source"] == source:
        found += frame_problems(manifest, entries)
    elif source == "check" and real and here.keys() >= set(real):
        found += frame_problems(
            manifest, frame_entries([here[name] for name in real], source)
        )
    elif source == "check":
        unseen = unseen or "frame_limits were made of check images that are not here"
    result.answers_only = result.answers_only or unseen
    return found


def _convert_again(
    result: ExportReport,
    model: DeployModel,
    size: Size,
    frames: Sequence[Image],
    scratch: Path,
) -> dict[str, ModelFile]:
    """By name, what the checkpoint converts to now; without int8 where no frame is at hand for its calibration."""
    entries = result.manifest["files"]
    kinds = [(entry["format"], entry["precision"]) for entry in entries.values()]
    kinds = sorted(
        (kind for kind in kinds if frames or kind[1] != "int8"),
        key=lambda kind: kind[1] != "fp32",
    )
    folders = scratch / "again", scratch / "probes"
    for folder in folders:
        folder.mkdir()
    schemes = {
        name: entry["scheme"] for name, entry in entries.items() if "scheme" in entry
    }
    made = produce(
        ExportReport(scratch, result.manifest),
        model,
        size,
        folders,
        kinds,
        frames,
        schemes,
    )
    return {file.path.name: file for file in made}


def _model_files(
    result: ExportReport, folder: Path, again: Mapping[str, ModelFile], scratch: Path
) -> list[ModelFile]:
    """The files of `folder` with a probe each, after filling G1 of those that are not what the checkpoint converts to.

    Nothing is loaded before that comparison. The probe of an ONNX file is its own graph. TorchScript and pt2 do not
    expose their inside: their probe is that of today's conversion.
    """
    files, versions = [], other_versions(result.manifest)
    if versions:
        result.answers_only = f"compared by answers only, since it was exported with {', '.join(versions.values())}"
    for name, entry in result.manifest["files"].items():
        path, kind = folder / name, entry["format"]
        found = _file_problems(
            name, path, entry, FORMATS[kind].file_name(entry["precision"])
        )
        if (
            not found and name not in again
        ):  # int8 alone: every other name is that of a conversion
            result.answers_only = f"{name} was compared by answers only: no frames of its calibration are here"
        elif not found and (versions if kind == "onnx" else "torch" in versions):
            found = harmful(path, again[name].path, kind)
        elif not found:
            found = conversion_problems(
                path, again[name].path, kind, entry["precision"]
            )
        probe = (
            scratch / name if kind == "onnx" or name not in again else again[name].probe
        )
        if not found and kind == "onnx":
            write_probe(path, probe)
        if found:
            result.gates[name] = [gate_integrity(found)]
        files.append(
            ModelFile(
                kind,
                entry["precision"],
                path,
                probe,
                in_file(result.manifest, entry["precision"]),
            )
        )
    return files


def _file_problems(
    name: str, path: Path, entry: dict[str, Any], file_name: str
) -> list[str]:
    if name != file_name:  # ./model.onnx is another name, too
        return [f"{name} is named {file_name} in an export"]
    if not path.is_file():
        return [f"{name} is missing"]
    same = (path.stat().st_size, sha256(path)) == (entry["bytes"], entry["sha256"])
    return [] if same else [f"{name} has another size or sha256 than in {MANIFEST}"]
