"""Every gate once more, on an exported folder as it lies there and the checkpoint it claims to come from."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segpipe.errors import ConfigError, IntegrityError
from segpipe.export.artifact.golden import unlike_golden
from segpipe.export.artifact.manifest import describe, in_file, strangers
from segpipe.export.artifact.origin import Origin
from segpipe.export.artifact.outcome import NOT_VERIFIED, ExportReport
from segpipe.export.artifact.place import wrong_sums
from segpipe.export.artifact.schema import violations
from segpipe.export.artifact.sidecars import unlike_sidecars
from segpipe.export.artifact.statistics import frame_entries, unknown_frames, unlike_frames
from segpipe.export.gates.checks import Labelled, check_set
from segpipe.export.gates.judge import Evidence, Subject, judge
from segpipe.export.gates.limits import gate_integrity
from segpipe.export.gates.robot import load_as_robot
from segpipe.export.graph.convert import Manifest
from segpipe.export.graph.deploy import DeployModel, deploy_model
from segpipe.export.graph.formats import FORMATS, one_thread
from segpipe.export.graph.probes import write_probe
from segpipe.export.graph.profiles import PROFILES, Image
from segpipe.export.graph.shapes import dynamic_of
from segpipe.files import sha256
from segpipe.runtime.artifact import MANIFEST, exported_lengths, resolved
from segpipe.settings.config import ExportConfig

if TYPE_CHECKING:
    from segpipe.train.checkpoint import TrainedNetwork


def read_manifest(folder: Path) -> Manifest:
    """manifest.json of an exported folder whose files all have their checksums.

    Raises IntegrityError (G1) that names the first files which are missing, altered or not listed, or the first
    entries that break the manifest's contract; ConfigError when there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"artifact = {folder} is no folder. Give the folder of an export, such as runs/NAME/export.")
    found = wrong_sums(folder)
    if not found:
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
        except (OSError, ValueError) as error:
            found = [f"{MANIFEST} cannot be read ({error})"]
        else:
            found = violations(manifest)
            if not found and "status" not in manifest:
                found = [f"{MANIFEST} has no status"]
    if found:
        raise IntegrityError(f"{NOT_VERIFIED}: G1 integrity: {'; '.join(found[:3])} - see {folder}")
    return dict(manifest)


def image_size(manifest: Manifest) -> tuple[int, int]:
    """(height, width) of the images that the files take, or of those with which they were exported."""
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
    """Report of all gates on the files of `folder`, against a trained network; nothing is written there.

    images: uint8 (H, W, 3) RGB of `image_size`; none with `settings.allow_unverified`. origin, train_images: as
    `export_run` takes them; without them what the manifest says of the run's mIoU, or of frames, is not repeated.
    Raises ExportMismatch or one of its kinds, as `export_run` does, when a gate fails, the manifest tells of another
    network, or a file was altered.
    """
    manifest = read_manifest(folder)
    size = image_size(manifest)
    profile = replace(PROFILES[manifest["profile"]], dynamic=dynamic_of(manifest["io"].get("free", {})))
    temperature = manifest["calibration"]["temperature"]
    result = ExportReport(folder, manifest, files=manifest["files"])
    checks = check_set(images, names, size if settings.allow_unverified else None)
    with one_thread(), tempfile.TemporaryDirectory() as scratch:
        model = deploy_model(trained, profile=profile, temperature=temperature)
        described = describe(trained, model, size, origin or Origin(), {})
        _check_claims(manifest, described, folder)
        subjects = _subjects(result, model, size, Path(scratch))
        wrong = {name: gates for name, gates in result.gates.items() if not all(gate.passed for gate in gates)}
        if not wrong:
            judge(result, model, trained.preprocess, subjects, Evidence(checks, labelled, settings))
        if result.passed:
            found = [
                *unlike_sidecars(manifest, folder),
                *unlike_golden(model, folder, manifest["golden"], result.sigma),
                *_unlike_run(manifest, described, train_images, dict(zip(names, images, strict=True))),
            ]
            result.gates["the folder"] = [gate_integrity(found)]
    if result.passed:
        load_as_robot(result, folder)
    if not result.passed:
        raise result.error(NOT_VERIFIED, str(folder))
    return result


def _check_claims(manifest: Manifest, described: Manifest, folder: Path) -> None:
    """Raises IntegrityError when the manifest says something else than the checkpoint."""
    found = strangers(manifest, described)
    if found:
        told = f"{MANIFEST} and the checkpoint differ in {', '.join(found)}"
        raise IntegrityError(f"{NOT_VERIFIED}: G1 integrity: {told} - see {folder}")


def _unlike_run(
    manifest: Manifest, described: Manifest, train_images: Iterable[Image] | None, checks: Mapping[str, Image]
) -> list[str]:
    """What the manifest says of the run's last validation and of frames, and is not so, as far as both are at hand."""
    found = []
    if described["metrics"] is not None and manifest["metrics"] not in (None, described["metrics"]):
        found.append("metrics are not those of the run")
    source = manifest["frame_statistics"]["source"]
    seen = [name for name in manifest["check_images"] if name in checks]
    if source == "none":
        return found + unlike_frames(manifest, unknown_frames())
    if source == "train" and train_images is not None:
        return found + unlike_frames(manifest, frame_entries(train_images, source))
    if source == "check" and len(seen) == manifest["real_images"]:
        return found + unlike_frames(manifest, frame_entries([checks[name] for name in seen], source))
    return found


def _subjects(result: ExportReport, model: DeployModel, size: tuple[int, int], scratch: Path) -> list[Subject]:
    """The files as they lie there, each with a probe; G1 of those for which none can be made.

    The probe of an ONNX file is its own graph. The other formats do not show their inside: theirs is converted anew,
    and what the file itself holds is compared tensor by tensor and mask by mask.
    """
    subjects = []
    for name, entry in result.manifest["files"].items():
        path, probe, kind = result.folder / name, scratch / name, FORMATS[entry["format"]]
        manifest = in_file(result.manifest, entry["precision"])
        found = _unlike_manifest(path, entry, kind.file_name(entry["precision"]))
        if not found:
            try:
                if entry["format"] == "onnx":
                    write_probe(path, probe)
                else:
                    kind.convert(model, size, manifest, scratch / f"again.{name}", probe)
            except Exception as error:  # a file that cannot be read is refused
                found = [f"{type(error).__name__}: {error}"]
        if found:
            result.gates[name] = [gate_integrity(found)]
        subjects.append(Subject(entry["format"], entry["precision"], path, probe, manifest))
    return subjects


def _unlike_manifest(path: Path, entry: dict[str, Any], file_name: str) -> list[str]:
    if path.name != file_name:
        return [f"{path.name} is named {file_name} in an export"]
    if not path.is_file():
        return [f"{path.name} is missing"]
    return [] if sha256(path) == entry["sha256"] else [f"{path.name} has another sha256 than {MANIFEST} says"]
