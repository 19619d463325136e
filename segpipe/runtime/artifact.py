"""The folder that an export left: every file is compared with its checksum before anything in it is used."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segpipe.runtime.shapes import Shapes

FORMAT = "segpipe-export/2"
PROFILE = "robot"
SUMS = "SHA256SUMS"
MANIFEST = "manifest.json"
MANIFEST_KEY = "segpipe"  # of ONNX metadata_props: where a file holds the same
EXPORT_AGAIN = "Copy the whole folder again, or export again with scripts/export.py."


class ArtifactError(Exception):
    """The folder is incomplete, altered, or of another format: nothing in it is used."""

    exit_code = 7


class SelfTestError(ArtifactError):
    """The files are whole, but on this machine they give other answers than where they were made."""

    exit_code = 4


@dataclass(frozen=True)
class Golden:
    """Frames with the answers of the trained network: uint8 (n, H, W, 3), (n, H, W), (n, h, w)."""

    image: NDArray[np.uint8]
    mask: NDArray[np.uint8]
    confidence: NDArray[np.uint8]
    image_agreement: float  # smallest share of equal pixels that passes
    confidence_levels: int  # largest difference that passes


@dataclass(frozen=True)
class Artifact:
    """What was read from the folder; `model` holds the very bytes whose checksum was compared."""

    folder: Path
    manifest: dict[str, Any]
    model: bytes
    shapes: Shapes
    golden: Golden
    model_id: str
    num_files: int

    @property
    def palette(self) -> NDArray[np.uint8]:
        """Colours of the classes, uint8 (C, 3) RGB."""
        return np.array([entry["color"] for entry in self.manifest["classes"]], dtype=np.uint8)


def read_artifact(folder: Path | str, *, precision: str = "fp32") -> Artifact:
    """The artefact in `folder`, its ONNX file being the one of `precision`.

    Raises ArtifactError that names the first file that is missing, altered or not understood.
    """
    folder = Path(folder)
    sums = read_sums(folder)
    if MANIFEST not in sums:
        raise ArtifactError(f"{folder / SUMS} does not list {MANIFEST}. {EXPORT_AGAIN}")
    for name in sorted(sums):
        _read(folder, name, sums, keep=False)
    manifest = _parse(folder, _read(folder, MANIFEST, sums))
    profile = manifest.get("profile", PROFILE)
    if profile != PROFILE:
        raise ArtifactError(
            f"{folder} has profile {profile}, but {PROFILE} was needed here: uint8 frames in, mask and confidence out. "
            f"Export with export.profile={PROFILE}."
        )
    try:
        name, shapes = _model_file(folder, manifest, precision), Shapes(manifest["io"])
        return Artifact(
            folder=folder,
            manifest=manifest,
            model=_read(folder, name, sums),
            shapes=shapes,
            golden=_golden(folder, manifest, shapes, sums, manifest["files"][name]),
            model_id=f"{manifest['model']}-{precision}-{sums[name][:12]}",
            num_files=len(sums),
        )
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ArtifactError(
            f"{folder / MANIFEST} is not as {FORMAT} has it ({type(error).__name__}: {error}). {EXPORT_AGAIN}"
        ) from error


def read_sums(folder: Path) -> dict[str, str]:
    """Hex digest by name, from lines `digest  name` as sha256sum writes them."""
    path = folder / SUMS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); an exported folder was needed. {EXPORT_AGAIN}") from None
    sums = {}
    for line in lines:
        digest, _, name = line.partition("  ")
        parts = PurePosixPath(name).parts
        if len(digest) != 64 or not parts or ".." in parts or PurePosixPath(name).is_absolute():
            raise ArtifactError(f"{path} has the line {line[:100]!r}, but a digest and a name were needed.")
        sums[name] = digest
    return sums


def _read(folder: Path, name: str, sums: dict[str, str], *, keep: bool = True) -> bytes:
    """Content of a listed file, compared with its checksum; without `keep` it is compared alone."""
    if name not in sums:
        raise ArtifactError(f"{folder / SUMS} does not list {name}. {EXPORT_AGAIN}")
    try:
        with (folder / name).open("rb") as file:
            content = file.read() if keep else b""
            digest = hashlib.sha256(content) if keep else hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise ArtifactError(f"{folder / name} cannot be read: {error.strerror}. {EXPORT_AGAIN}") from None
    if digest.hexdigest() != sums[name]:
        raise ArtifactError(
            f"{folder / name} has sha256 {digest.hexdigest()[:12]}..., but {SUMS} says {sums[name][:12]}...: it was "
            f"altered or is torn. {EXPORT_AGAIN}"
        )
    return content


def _parse(folder: Path, text: bytes) -> dict[str, Any]:
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise ArtifactError(f"{folder / MANIFEST} is no JSON ({error}). {EXPORT_AGAIN}") from None
    found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
    if found != FORMAT:
        raise ArtifactError(f"{folder / MANIFEST} has format {found!r}, but {FORMAT!r} was needed. {EXPORT_AGAIN}")
    return dict(manifest)


def _model_file(folder: Path, manifest: dict[str, Any], precision: str) -> str:
    """Name of the ONNX file of `precision`."""
    files = {name: entry for name, entry in manifest["files"].items() if entry["format"] == "onnx"}
    for name, entry in files.items():
        if entry["precision"] == precision:
            return str(name)
    there = ", ".join(f"{name} ({entry['precision']})" for name, entry in files.items()) or "none"
    raise ArtifactError(
        f"{folder} has no ONNX file of precision {precision}; it has {there}. Choose one of these, or export with "
        "export.formats=[onnx]."
    )


def _golden(
    folder: Path, manifest: dict[str, Any], shapes: Shapes, sums: dict[str, str], model: dict[str, Any]
) -> Golden:
    arrays = {}
    for part in ("image", "mask", "confidence"):
        content = _read(folder, f"golden/{part}.npy", sums)
        try:
            arrays[part] = np.load(io.BytesIO(content), allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ArtifactError(f"{folder}/golden/{part}.npy is no numpy array ({error}). {EXPORT_AGAIN}") from None
    limits = manifest["golden"]
    # The answers are those of the trained network. A file of reduced precision was this far from them where it was
    # exported, and gets the room between two machines on top.
    golden = Golden(
        **arrays,
        image_agreement=limits["image_agreement"] - 1 + model.get("golden_agreement", 1),
        confidence_levels=limits["confidence_levels"] + model.get("golden_confidence_levels", 0),
    )
    found = {part: array.shape[1:] for part, array in arrays.items()}
    names = [entry["name"] for entry in (*manifest["io"]["inputs"], *manifest["io"]["outputs"])]
    needed = dict(zip(names, (shapes.exported, *shapes.answers(shapes.exported)), strict=True))
    if found != needed or not len(golden.image) == len(golden.mask) == len(golden.confidence) > 0:
        raise ArtifactError(f"{folder}/golden holds {found}, but {needed} was needed. {EXPORT_AGAIN}")
    return golden
