"""Repeats every gate on an exported folder as it is on disk, against the checkpoint that it claims to come from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segpipe.errors import ConfigError
from segpipe.export.artifact.frame_statistics import frame_entries, frame_problems, unknown_frames
from segpipe.export.artifact.golden import golden_problems
from segpipe.export.artifact.manifest import checkpoint_differences, describe, in_file, parse_manifest, schema_problems
from segpipe.export.artifact.origin import Origin
from segpipe.export.artifact.outcome import NOT_VERIFIED, ExportReport, integrity_refusal, refusal
from segpipe.export.artifact.place import sums_problems
from segpipe.export.artifact.sidecars import sidecar_problems
from segpipe.export.gates.check_set import check_set
from segpipe.export.gates.judge import GateInputs, judge, load_as_robot
from segpipe.export.gates.limits import gate_integrity
from segpipe.export.graph.formats import FORMATS, ModelFile
from segpipe.export.graph.network import DeployModel, deploy_model, one_thread
from segpipe.export.graph.onnx_format import write_probe
from segpipe.export.graph.profiles import PROFILES, Image, Manifest, Size, dynamic_of
from segpipe.files import sha256
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
            manifest = parse_manifest((folder / MANIFEST).read_text())
        except (OSError, ValueError) as error:
            found = [f"{MANIFEST} cannot be read ({error})"]
        else:
            found = schema_problems(manifest)
            if not found and "status" not in manifest:
                found = [f"{MANIFEST} has no status"]
    if manifest is None or found:
        raise integrity_refusal(NOT_VERIFIED, found, str(folder))
    return dict(manifest)


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
    manifest = read_manifest(folder)
    size = image_size(manifest)
    profile = replace(PROFILES[manifest["profile"]], dynamic=dynamic_of(manifest["io"].get("free", {})))
    result = ExportReport(folder, manifest, files=manifest["files"])
    checks = check_set(images, names, size if settings.allow_unverified else None)
    with one_thread(), tempfile.TemporaryDirectory() as scratch:
        model = deploy_model(trained, profile=profile, temperature=manifest["calibration"]["temperature"])
        described = describe(trained, model, size, origin or Origin(), {})
        differences = checkpoint_differences(manifest, described)
        if differences:
            found = f"{MANIFEST} and the checkpoint differ in {', '.join(differences)}"
            raise integrity_refusal(NOT_VERIFIED, [found], str(folder))
        files = _model_files(result, model, size, Path(scratch))
        if result.passed:
            judge(result, model, trained.preprocess, files, GateInputs(checks, labelled, settings))
        if result.passed:
            problems = [
                *sidecar_problems(manifest, folder),
                *golden_problems(model, folder, manifest["golden"], result.sigma),
                *_claim_problems(manifest, described, train_images, dict(zip(names, images, strict=True))),
            ]
            result.gates["the folder"] = [gate_integrity(problems)]
    if result.passed:
        load_as_robot(result, folder)
    if not result.passed:
        raise refusal(NOT_VERIFIED, result.failed, str(folder))
    return result


def _claim_problems(
    manifest: Manifest, described: Manifest, train_images: Iterable[Image] | None, checks: Mapping[str, Image]
) -> list[str]:
    """False claims of the manifest about the run's last validation and about frames, where the data is at hand."""
    found = []
    if described["metrics"] is not None and manifest["metrics"] not in (None, described["metrics"]):
        found.append("metrics are not those of the run")
    source = manifest["frame_statistics"]["source"]
    seen = [name for name in manifest["check_images"] if name in checks]
    if source == "none":
        return found + frame_problems(manifest, unknown_frames())
    if source == "train" and train_images is not None:
        return found + frame_problems(manifest, frame_entries(train_images, source))
    if source == "check" and len(seen) == manifest["real_images"]:
        return found + frame_problems(manifest, frame_entries([checks[name] for name in seen], source))
    return found


def _model_files(result: ExportReport, model: DeployModel, size: Size, scratch: Path) -> list[ModelFile]:
    """The files with a probe each, after filling G1 of those for which none can be made.

    The probe of an ONNX file is its own graph. TorchScript and pt2 do not expose their inside: their probe is converted
    anew, and the shipped file is compared by its stored tensors and its masks.
    """
    files = []
    for name, entry in result.manifest["files"].items():
        path, probe, kind = result.folder / name, scratch / name, FORMATS[entry["format"]]
        manifest = in_file(result.manifest, entry["precision"])
        found = _file_problems(path, entry, kind.file_name(entry["precision"]))
        if not found:
            try:
                if entry["format"] == "onnx":
                    write_probe(path, probe)
                else:
                    kind.write(model, size, manifest, scratch / f"again.{name}", probe)
            except Exception as error:  # an unreadable file is refused
                found = [f"{type(error).__name__}: {error}"]
        if found:
            result.gates[name] = [gate_integrity(found)]
        files.append(ModelFile(entry["format"], entry["precision"], path, probe, manifest))
    return files


def _file_problems(path: Path, entry: dict[str, Any], file_name: str) -> list[str]:
    if path.name != file_name:
        return [f"{path.name} is named {file_name} in an export"]
    if not path.is_file():
        return [f"{path.name} is missing"]
    return [] if sha256(path) == entry["sha256"] else [f"{path.name} has another sha256 than in {MANIFEST}"]
