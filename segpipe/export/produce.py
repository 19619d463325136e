"""The files of an export: every format in fp32, and fp16 and int8 made from the shipped ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from segpipe.errors import ExportError
from segpipe.export.artifact.manifest import in_file
from segpipe.export.artifact.outcome import ExportReport
from segpipe.export.gates.judge import Subject
from segpipe.export.graph.convert import Manifest, manifest_text
from segpipe.export.graph.deploy import DeployModel
from segpipe.export.graph.formats import FORMATS
from segpipe.export.graph.probes import write_probe
from segpipe.export.graph.profiles import Image
from segpipe.export.lowprec.half import to_fp16
from segpipe.export.lowprec.quantize import to_int8
from segpipe.files import sha256
from segpipe.runtime.artifact import MANIFEST_KEY


def produce(
    result: ExportReport,
    model: DeployModel,
    size: tuple[int, int],
    folders: tuple[Path, Path],
    kinds: Sequence[tuple[str, str]],
    frames: Sequence[Image],
) -> list[Subject]:
    """The files to judge, after describing them in `result.files`.

    folders: of the shipped files and of the probes. kinds: (format, precision) of each, fp32 before what is made from
    it. frames: (H, W, 3) of this size, on which int8 is calibrated. Raises ExportError for what cannot be converted.
    """
    subjects = []
    for name, precision in kinds:
        file_name = FORMATS[name].file_name(precision)
        shipped, probe = (folder / file_name for folder in folders)
        manifest, scheme = in_file(result.manifest, precision), ""
        if precision == "fp32":
            FORMATS[name].convert(model, size, manifest, shipped, probe)
        else:
            scheme = _lower(precision, shipped.with_name(FORMATS[name].file_name()), shipped, manifest, frames)
            write_probe(shipped, probe)
        result.files[file_name] = {
            "format": name,
            "precision": precision,
            "bytes": shipped.stat().st_size,
            "sha256": sha256(shipped),
            **({"scheme": scheme} if scheme else {}),
        }
        subjects.append(Subject(name, precision, shipped, probe, manifest))
    return subjects


def _lower(precision: str, source: Path, out: Path, manifest: Manifest, frames: Sequence[Image]) -> str:
    """Writes `out` with `manifest` inside; the scheme of an int8 file, or ""."""
    scheme = ""
    try:
        if precision == "fp16":
            to_fp16(source, out)
        else:
            scheme = to_int8(source, out, frames)
        lowered = onnx.load(out)
    except OSError:  # of the folder, not of the network
        raise
    except Exception as error:
        raise ExportError(
            f"export.precision = {precision}: {source.name} could not be converted ({type(error).__name__}: {error}). "
            f"Leave {precision} out of export.precision."
        ) from error
    onnx.helper.set_model_props(lowered, {MANIFEST_KEY: manifest_text(manifest)})
    onnx.save(lowered, out)
    return scheme
