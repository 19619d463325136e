"""Reads an exported folder. Compares every file with its checksum before using any of them."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from .frames import FrameLimits, Pixels

FORMAT = "segpipe-export/3"
PROFILE, VERIFIED = "robot", "verified"
SUMS = "SHA256SUMS"
MANIFEST = "manifest.json"
MANIFEST_KEY = "segpipe"  # in an ONNX file's metadata_props: a copy of the manifest
OUTPUTS = ["mask", "confidence"]
EXPORT_AGAIN = "Copy the whole folder again, or export again."
Shape = tuple[int, ...]
# Levels by which kernels of other versions and processors change a confidence; between onnxruntime 1.31 and 1.14 to
# 1.23: 5 in int8 files.
_ROUNDING = {"int8": 8}
# Share of the cells of a confidence map that must be within the limit: in reduced precision single cells differ by far
# more than the others, so a limit on the largest difference would be useless.
CONFIDENCE_SHARE = {"fp32": 1.0, "fp16": 0.999, "bf16": 0.999, "int8": 0.99}
# An engine that computes in bf16 rounds eight times as coarsely as fp16.
BF16_LEVELS = 16
_BF16_AGREEMENT = 0.99


class ArtifactError(Exception):
    """The folder is incomplete, altered, or of another format; nothing in it is used."""

    exit_code = 7


class UnusableError(ArtifactError):
    """The wrong folder or precision was requested; no file was altered."""

    exit_code = 2


class SelfTestError(ArtifactError):
    """The files are intact, but this machine computes different answers than the one that exported them."""

    exit_code = 4


@dataclass(frozen=True)
class Golden:
    """Frames with the trained network's answers: uint8 (n, H, W, 3), (n, H, W), (n, h, w)."""

    image: Pixels
    mask: Pixels
    confidence: Pixels
    image_agreement: float  # smallest fraction of equal mask pixels that passes
    confidence_levels: int  # largest difference of confidence that passes
    confidence_share: float  # share of the cells for which that holds

    def in_bf16(self) -> Golden:
        """The same frames, with limits for an engine that computes in bf16."""
        return replace(
            self,
            image_agreement=min(self.image_agreement, _BF16_AGREEMENT),
            confidence_levels=max(self.confidence_levels, BF16_LEVELS),
            confidence_share=min(self.confidence_share, CONFIDENCE_SHARE["bf16"]),
        )


@dataclass(frozen=True)
class Artifact:
    """Content of an exported folder; `model` holds the bytes whose checksum was compared."""

    folder: Path
    manifest: dict[str, Any]
    model: bytes
    frame: Shape  # of an image (H, W, 3)
    answers: list[Shape]  # of mask and confidence
    num_classes: int
    limits: FrameLimits
    golden: Golden
    model_id: str
    requires: dict[str, str]  # the oldest version of an engine
    num_files: int

    @property
    def status(self) -> str:
        """`status` of the manifest; verified if every gate passed on enough real images."""
        return str(self.manifest.get("status", "unknown"))

    @property
    def caveat(self) -> str:
        """A sentence for a folder that is not verified; empty otherwise."""
        if self.status == VERIFIED:
            return ""
        return (
            f"{self.folder} has the status {self.status}, but {VERIFIED} was needed to trust its answers. "
            "model_card.md says what is missing. Run segpipe export with the data set and 16 validation images."
        )


def read_artifact(folder: Path | str, *, precision: str = "fp32") -> Artifact:
    """The exported folder with its ONNX file of the given precision.

    Raises ArtifactError, which names the first file that is missing, altered or malformed.
    """
    folder = Path(folder)
    sums = read_sums(folder)
    for name in sorted(sums):  # all of them, even those not used here
        read_file(folder, name, sums)
    path = folder / MANIFEST
    try:
        manifest = parse_manifest(read_file(folder, MANIFEST, sums))
        found = manifest["format"]
        if found != FORMAT:
            raise _altered(f"{path} has format {found!r}, but {FORMAT!r} was needed.")
        return _artifact(folder, manifest, precision, sums)
    except ArtifactError:
        raise
    except Exception as error:  # an altered manifest may have any type anywhere
        raise _altered(
            f"{path} does not follow {FORMAT} ({type(error).__name__}: {error})."
        ) from error


def parse_manifest(text: bytes) -> Any:
    """The JSON value of `text`. Raises ValueError for invalid JSON, and for NaN and infinity.

    Python's parser accepts NaN, and a NaN limit would pass every comparison written as `value > limit`.
    """

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a JSON number")

    return json.loads(text, parse_constant=refuse)


def _altered(text: str) -> ArtifactError:
    return ArtifactError(f"{text} {EXPORT_AGAIN}")


def _artifact(
    folder: Path, manifest: dict[str, Any], precision: str, sums: Mapping[str, str]
) -> Artifact:
    profile = manifest.get("profile", PROFILE)
    if profile != PROFILE:
        raise UnusableError(
            f"{folder} has profile {profile}, but the runtime needs {PROFILE}: uint8 frames in, mask and confidence "
            "out. Export again."
        )
    files: dict[str, Any] = manifest["files"]
    onnx_files = {}
    for name, entry in files.items():
        if name in sums and entry.get("sha256", sums[name]) != sums[name]:
            raise _altered(
                f"{folder / name} is the file of {SUMS}, but {MANIFEST} describes one with sha256 "
                f"{entry['sha256'][:12]}...: both were changed after the export."
            )
        if entry["format"] == "onnx":
            onnx_files[entry["precision"]] = name
    if precision not in onnx_files:
        raise UnusableError(
            f"{folder} has no ONNX file of precision {precision}, only: {', '.join(onnx_files) or 'none'}. Choose one "
            "of these."
        )
    name = onnx_files[precision]
    io = manifest["io"]
    frame = tuple(io["inputs"][0]["shape"][1:])
    answers = [tuple(entry["shape"][1:]) for entry in io["outputs"]]
    return Artifact(
        folder=folder,
        manifest=manifest,
        model=read_file(folder, name, sums),
        frame=frame,
        answers=answers,
        num_classes=len(manifest["classes"]),
        limits=FrameLimits(manifest["frame_limits"]),
        golden=_golden(folder, manifest, [frame, *answers], sums, files[name]),
        model_id=f"{manifest['model']}-{precision}-{sums[name][:12]}",
        requires=dict(manifest.get("requires", {})),
        num_files=len(sums),
    )


def read_sums(folder: Path) -> dict[str, str]:
    """SHA-256 in hex by file name, from SHA256SUMS in the format of `sha256sum`.

    Raises ArtifactError when the file cannot be read, a line is malformed, or a name points outside the folder.
    """
    path = folder / SUMS
    try:
        lines = _content(path).decode().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        inside = next(folder.glob(f"*/{SUMS}"), None)
        right = inside.parent if inside else "the folder that segpipe export wrote"
        # With a manifest, it was an exported folder.
        kind = ArtifactError if (folder / MANIFEST).exists() else UnusableError
        raise kind(
            f"{folder} is not an exported folder: it has no {SUMS}. Give {right}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _altered(f"{path} cannot be read ({error}).") from None
    sums = {}
    for line in lines:
        digest, _, name = line.partition("  ")
        inside_folder = name and not name.startswith("/")
        if len(digest) != 64 or not inside_folder or ".." in PurePosixPath(name).parts:
            raise ArtifactError(
                f"{path} has the line {line[:100]!r}, but a digest and a file name were needed."
            )
        sums[name] = digest
    return sums


def _content(path: Path) -> bytes:
    """Bytes of a regular file. Reading a pipe would block forever, and a link may lead outside the folder."""
    if path.exists() and (path.is_symlink() or not path.is_file()):
        raise _altered(f"{path} is a link, a pipe or a device, not a file.")
    return path.read_bytes()


def read_file(folder: Path, name: str, sums: Mapping[str, str]) -> bytes:
    """Content of a listed file, after comparing it with its checksum."""
    if name not in sums:
        raise _altered(f"{folder / SUMS} does not list {name}.")
    try:
        content = _content(folder / name)
    except OSError as error:
        raise _altered(f"{folder / name} cannot be read: {error.strerror}.") from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != sums[name]:
        raise _altered(
            f"{folder / name} has sha256 {digest[:12]}..., but {SUMS} says {sums[name][:12]}...: it was altered or "
            "truncated."
        )
    return content


def _golden(
    folder: Path,
    manifest: Mapping[str, Any],
    needed: list[Shape],
    sums: Mapping[str, str],
    model: Mapping[str, Any],
) -> Golden:
    names = [entry["name"] for entry in manifest["io"]["outputs"]]
    arrays = {}
    for part in ("image", "mask", "confidence"):
        content = read_file(folder, f"golden/{part}.npy", sums)
        try:
            arrays[part] = np.load(io.BytesIO(content), allow_pickle=False)
        # numpy's parser raises many types, and MemoryError for a giant shape.
        except Exception as error:
            raise _altered(
                f"{folder}/golden/{part}.npy is not a numpy array ({error})."
            ) from None
    found = [array.shape for array in arrays.values()]
    wanted = [(len(arrays["image"]) or 1, *shape) for shape in needed]
    if names != OUTPUTS or found != wanted:
        raise _altered(
            f"{folder}/golden holds {found} for {names}, but {wanted} was needed."
        )
    # The golden answers are those of the trained fp32 network. A model of reduced precision differed from them by this
    # much at its export; the tolerance between two machines is added.
    limits = manifest["golden"]
    loss = 1 - model.get("golden_agreement", 1)
    levels = model.get("golden_confidence_levels", 0)
    return Golden(
        **arrays,
        image_agreement=limits["image_agreement"] - loss,
        confidence_levels=limits["confidence_levels"]
        + levels
        + _ROUNDING.get(model["precision"], 0),
        confidence_share=CONFIDENCE_SHARE[model["precision"]],
    )
