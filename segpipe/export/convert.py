"""Converts a checkpoint into model files, and compares shipped files with what it converts to.

Conversion is deterministic. With the same versions TorchScript files are equal byte for byte; of an ONNX file
everything is equal but the values of its tensors, which may differ by the rounding of another processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from segpipe.disk import sha256
from segpipe.export.artifact.manifest import in_file
from segpipe.export.graph.formats import FORMATS, ModelFile
from segpipe.export.graph.lowprec import to_fp16, to_int8
from segpipe.export.graph.network import Image, Manifest, Size, manifest_text
from segpipe.export.graph.onnx_format import IR_VERSION, write_probe
from segpipe.export.verify_report import one_line
from segpipe.runtime.artifact import MANIFEST_KEY

if TYPE_CHECKING:
    from segpipe.export.graph.network import DeployModel
    from segpipe.export.verify_report import ExportReport

# What another processor may change: share of a tensor's largest value
_ROUNDING = {"fp32": 1e-5, "fp16": 1e-3, "int8": 1e-5}
_SCALES = 0.05  # share of each value that an int8 file takes from its calibration
_MOVED = 0.01  # share of the int8 weights of a tensor that may move by 1


def convert(
    result: ExportReport,
    model: DeployModel,
    size: Size,
    folders: tuple[Path, Path],
    kinds: Sequence[tuple[str, str]],
    frames: Sequence[Image],
) -> list[ModelFile]:
    """The files to judge, after describing them in `result.files`.

    folders: for the shipped files and for the probes. kinds: (format, precision) of each file, fp32 before what is made
    from it. frames: (H, W, 3) of `size`, for the calibration of int8. A reduced precision that cannot be converted is
    noted in `result.dropped`. Raises ExportError when torch cannot convert the network.
    """
    files = []
    for name, precision in kinds:
        file_name = FORMATS[name].file_name(precision)
        shipped, probe = (folder / file_name for folder in folders)
        manifest = in_file(result.manifest, precision)

        entry: dict[str, Any] = {"format": name, "precision": precision}
        if precision == "fp32":
            FORMATS[name].write(model, size, manifest, shipped, probe)
        else:
            source = shipped.with_name(FORMATS[name].file_name())
            try:
                if precision == "fp16":
                    to_fp16(source, shipped)
                else:
                    to_int8(source, shipped, frames)
            except OSError:  # the disk's fault, not the network's
                raise
            except Exception as error:  # onnxruntime's converters raise many types
                reason = f"{source.name} could not be converted ({type(error).__name__}: {error})"
                result.dropped[file_name] = one_line(reason)
                continue
            _put_manifest(shipped, manifest)
            write_probe(shipped, probe)

        entry |= {"bytes": shipped.stat().st_size, "sha256": sha256(shipped)}
        result.files[file_name] = entry
        files.append(ModelFile(name, precision, shipped, probe, manifest))
    return files


def _put_manifest(path: Path, manifest: Manifest) -> None:
    """Writes the manifest of its precision into an ONNX file."""
    model = onnx.load(path)
    model.ir_version = IR_VERSION  # the quantizer raises it
    onnx.helper.set_model_props(model, {MANIFEST_KEY: manifest_text(manifest)})
    onnx.save(model, path)


def conversion_problems(shipped: Path, converted: ModelFile) -> list[str]:
    """How `shipped` differs from the file that the same versions made from the checkpoint; empty when it does not.

    Nothing of the shipped file is executed.
    """
    problem = ""
    if converted.format == "onnx":
        try:
            problem = _onnx_difference(shipped, converted.path, converted.precision)
        except Exception as error:  # parsers of an altered file raise many types
            problem = f"it cannot be compared ({type(error).__name__}: {error})"
    # An archive of code, which torch writes the same every time
    elif shipped.read_bytes() != converted.path.read_bytes():
        problem = "its bytes are others"
    if not problem:
        return []
    return [f"{shipped.name} is not what the checkpoint converts to: {problem}"]


def _onnx_difference(shipped: Path, converted: Path, precision: str) -> str:
    """The first difference between two ONNX files; empty when they differ in rounding and in their manifest at most."""
    model = onnx.load(shipped, load_external_data=False)
    other = onnx.load(converted)
    values, expected = _take_values(model), _take_values(other)

    if model != other:
        return f"{_other_fields(model.graph, other.graph) or _other_fields(model, other)} differ"
    for name, array in values.items():
        if not _is_rounding(name, array, expected[name], precision):
            return f"tensor {name} has other values"
    return ""


def _take_values(model: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    """Values of the tensors, which are taken out of the model, as is the manifest."""
    values = {}
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            raise ValueError(f"tensor {tensor.name} is stored outside the file")
        values[tensor.name] = numpy_helper.to_array(tensor)
        for field, _ in tensor.ListFields():
            if field.name.endswith("_data"):
                tensor.ClearField(field.name)
    for entry in model.metadata_props:
        entry.ClearField("value")
    return values


def _other_fields(one: Any, other: Any) -> str:
    """Names of the fields in which two messages differ."""
    names = (field.name for field in one.DESCRIPTOR.fields)
    return ", ".join(
        name for name in names if getattr(one, name) != getattr(other, name)
    )


def _is_rounding(
    name: str, values: NDArray[Any], expected: NDArray[Any], precision: str
) -> bool:
    """Whether the values of a tensor differ by no more than another processor explains; NaN does not count as equal."""
    wanted = expected.astype(np.float64)
    moved = np.abs(values.astype(np.float64) - wanted)

    # Weights of an int8 file
    if precision == "int8" and values.dtype.itemsize == 1:
        few = np.count_nonzero(moved) <= max(1, _MOVED * moved.size)
        return bool((moved <= 1).all() and few)

    # Scales and biases, which are int32: of each value, since a channel of small weights has a scale far below that of
    # its layer
    is_bias = values.dtype == np.int32
    if precision == "int8" and (is_bias or name.endswith("_scale")):
        return bool((moved <= _SCALES * np.abs(wanted) + is_bias).all())

    share = _ROUNDING[precision] if values.dtype.kind == "f" else 0.0
    return bool(moved.max(initial=0.0) <= share * np.abs(wanted).max(initial=0.0))
