"""Writes the model files of an export: every format in fp32, then fp16 and int8 from the shipped ONNX file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from segpipe.errors import ExportError
from segpipe.export.artifact.manifest import in_file
from segpipe.export.graph.formats import FORMATS, ModelFile
from segpipe.export.graph.onnx_format import IR_VERSION, write_probe
from segpipe.export.graph.profiles import Image, Manifest, Size, manifest_text
from segpipe.export.lowprec.half import to_fp16
from segpipe.export.lowprec.int8 import to_int8
from segpipe.files import sha256
from segpipe.runtime.artifact import MANIFEST_KEY

if TYPE_CHECKING:
    from segpipe.export.artifact.outcome import ExportReport
    from segpipe.export.graph.network import DeployModel


def produce(
    result: ExportReport,
    model: DeployModel,
    size: Size,
    folders: tuple[Path, Path],
    kinds: Sequence[tuple[str, str]],
    frames: Sequence[Image],
    schemes: Mapping[str, str] | None = None,
) -> list[ModelFile]:
    """The files to judge, after describing them in `result.files`.

    folders: for the shipped files and for the probes. kinds: (format, precision) of each file, fp32 before what is made
    from it. frames: (H, W, 3) of `size`, for the calibration of int8. schemes: of int8 files by name; without one,
    speed decides. Raises ExportError for what cannot be converted.
    """
    files = []
    for name, precision in kinds:
        file_name = FORMATS[name].file_name(precision)
        shipped, probe = (folder / file_name for folder in folders)
        manifest, scheme = in_file(result.manifest, precision), ""
        if precision == "fp32":
            FORMATS[name].write(model, size, manifest, shipped, probe)
        else:
            source, fixed = (
                shipped.with_name(FORMATS[name].file_name()),
                (schemes or {}).get(file_name, ""),
            )
            scheme = _lower(precision, source, shipped, manifest, frames, fixed)
            write_probe(shipped, probe)
        result.files[file_name] = {
            "format": name,
            "precision": precision,
            "bytes": shipped.stat().st_size,
            "sha256": sha256(shipped),
            **({"scheme": scheme} if scheme else {}),
        }
        files.append(ModelFile(name, precision, shipped, probe, manifest))
    return files


def _lower(
    precision: str,
    source: Path,
    out: Path,
    manifest: Manifest,
    frames: Sequence[Image],
    scheme: str = "",
) -> str:
    """Writes `out` with `manifest` inside; returns the scheme of an int8 file, or ""."""
    try:
        if precision == "fp16":
            to_fp16(source, out)
        else:
            scheme = to_int8(source, out, frames, scheme=scheme)
        lowered = onnx.load(out)
    except OSError:  # the disk's fault, not the network's
        raise
    except Exception as error:
        raise ExportError(
            f"export.precision = {precision}: {source.name} could not be converted ({type(error).__name__}: {error}). "
            f"Leave {precision} out of export.precision."
        ) from error
    lowered.ir_version = IR_VERSION  # the quantizer raises it
    onnx.helper.set_model_props(lowered, {MANIFEST_KEY: manifest_text(manifest)})
    onnx.save(lowered, out)
    return scheme
