"""Table of file formats, and TorchScript: how each is converted, opened, checked, and compared with the checkpoint.

Conversion is deterministic. With the same versions, TorchScript files are equal byte for byte; ONNX files are equal
except for their tensor values, which may differ by the rounding of another processor.
"""

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from segpipe.errors import ExportError
from segpipe.export.graph.lowprec import to_fp16, to_int8
from segpipe.export.graph.network import (
    Array,
    DeployModel,
    Image,
    Manifest,
    Profile,
    Run,
    example_of,
    in_file,
    io_problems,
    manifest_text,
    torch_run,
)
from segpipe.export.graph.onnx_format import (
    open_onnx,
    problems_of_onnx,
    to_onnx,
    write_both,
)
from segpipe.export.verify_report import ExportReport, one_line
from segpipe.files import file_sha256
from segpipe.runtime.artifact import MANIFEST
from segpipe.runtime.engines import BF16

FILES = "files"
jit: Any = torch.jit  # has no annotations
_C: Any = torch._C

# Differences that another processor may cause, as a share of a tensor's largest value
_ROUNDING = {"fp32": 1e-5, "fp16": 1e-3, "int8": 1e-5}
_SCALES = 0.05  # share of each value that comes from the int8 calibration
_MOVED = 0.01  # share of the int8 weights of a tensor that may move by 1

_MANGLED = re.compile(rb"___torch_mangle_\d+")
_DEBUG = ".debug_pkl"  # source lines by file name, which the loader does not need
_EXAMPLE = "traced_inputs"
_REWRITTEN = ("version", ".data/version", ".data/serialization_id")


def to_torchscript(
    model: DeployModel, manifest: Manifest, shipped: Path, probe: Path
) -> None:
    """Writes the shipped file and its probe, with the manifest as extra file.

    Not frozen: freezing folds BatchNorm, so the stored weights would no longer be the trained ones.
    """
    extra = {MANIFEST: manifest_text(manifest)}
    example = example_of(manifest)
    # Every traced convolution records these switches and later obeys them on a GPU.
    switches = torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    )
    with torch.no_grad(), switches:
        # torch numbers repeated class names per process. Tracing the probe first uses up the plain names, so earlier
        # traces do not change the numbers in the shipped file.
        for variant, path in ((model.probe(), probe), (model, shipped)):
            # check_trace would run the example again; the gates run real images.
            traced = jit.trace(variant, (example,), check_trace=False)
            write_archive(traced, path, extra)


def write_archive(module: Any, path: Path, extra: Mapping[str, str]) -> None:
    """Writes a ScriptModule like `torch.jit.save`, but with the same bytes every time and without paths.

    Leaves out debug records, which hold source paths, and the example of the trace. torch numbers repeated class names
    over the whole process; here the numbers start at 0, in the order of the records.
    """
    content = module.save_to_buffer(_extra_files=dict(extra))
    reader = _C.PyTorchFileReader(io.BytesIO(content))
    numbers: dict[bytes, bytes] = {}

    def renumber(text: bytes) -> bytes:
        return _MANGLED.sub(
            lambda found: numbers.setdefault(
                found[0], b"___torch_mangle_%d" % len(numbers)
            ),
            text,
        )

    names = reader.get_all_records()
    version = ".data/version" if ".data/version" in names else "version"
    path.write_bytes(content)  # raises on a full disk, where the writer aborts
    writer = _C.PyTorchFileWriter(str(path))
    writer.set_min_version(int(reader.get_record(version)))
    for name in names:
        if name.endswith(_DEBUG) or name.startswith(_EXAMPLE) or name in _REWRITTEN:
            continue
        record = reader.get_record(name)
        # Class names occur in code and in pickled modules, on lines whose length may change.
        if name.startswith("code/") or name in ("data.pkl", "constants.pkl"):
            record = renumber(record)
        writer.write_record(renumber(name.encode()).decode(), record, len(record))
    writer.write_end_of_file()


def _loaded(path: Path) -> tuple[Any, str]:
    """The module of a TorchScript file on the CPU, and its embedded manifest. Raises what torch.jit raises."""
    files: dict[str, Any] = {MANIFEST: ""}
    with quiet_torch():
        module = jit.load(str(path), map_location="cpu", _extra_files=files)
    return module, files[MANIFEST].decode()


def open_torchscript(path: Path, profile: Profile) -> Run:
    """Answers of a TorchScript file. Call it inside `one_thread`."""
    return torch_run(_loaded(path)[0], profile)


def problems_of_torchscript(path: Path, manifest: Manifest) -> list[str]:
    """G1 findings; empty when the loaded file and the manifest agree."""
    module, inside = _loaded(path)
    found = []
    if inside != manifest_text(manifest):
        found.append(f"{MANIFEST} inside the file differs from the manifest")
    needed = manifest["io"]["outputs"]
    with torch.no_grad():
        outputs = module(example_of(manifest))
    got = [
        (entry["name"], output.numpy().dtype.name, list(output.shape))
        for entry, output in zip(needed, outputs, strict=False)
    ]
    if len(outputs) != len(needed):
        return [*found, f"{len(outputs)} outputs, but the manifest has {len(needed)}"]
    return found + io_problems("outputs", got, needed)


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Hides deprecation warnings of torch and its converters, which the user cannot fix; docs/export.md explains
    torch.jit's."""
    with warnings.catch_warnings():
        # Sizes become constants of the trace, as intended: height and width are always fixed.
        for category in (FutureWarning, DeprecationWarning, jit.TracerWarning):
            warnings.simplefilter("ignore", category)
        yield


@dataclass(frozen=True)
class Format:
    """A file format. `convert` writes the shipped file and its probe, `open` runs either, `problems` is G1.

    A probe is the same graph with `logits` and `normalised` as extra outputs, for the gates only; it is not shipped.
    """

    name: str
    stem: str
    suffix: str
    convert: Callable[[DeployModel, Manifest, Path, Path], None]
    open: Callable[[Path, Profile], Run]
    problems: Callable[[Path, Manifest], list[str]]

    def file_name(self, precision: str = "fp32") -> str:
        """Name of the file, such as model.int8.onnx."""
        marked = "" if precision == "fp32" else f".{precision}"
        return f"{self.stem}{marked}{self.suffix}"

    def write(self, *given: Any) -> None:
        """Runs `convert` without warnings. Raises ExportError when torch cannot convert the network."""
        with quiet_torch():
            try:
                self.convert(*given)
            except Exception as error:
                if isinstance(error, OSError) and error.errno:
                    raise  # the disk's fault, not the network's
                # torch colors its text, which would also go into failure.json.
                text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
                raise ExportError(
                    f"export.formats = {self.name}: torch {torch.__version__} could not convert the network "
                    f"({type(error).__name__}: {text}). Leave {self.name} out of export.formats, or change the named "
                    "operation."
                ) from error


FORMATS: dict[str, Format] = {
    "onnx": Format("onnx", "model", ".onnx", to_onnx, open_onnx, problems_of_onnx),
    "torchscript": Format(
        "torchscript",
        "model.torchscript",
        ".pt",
        to_torchscript,
        open_torchscript,
        problems_of_torchscript,
    ),
}


@dataclass(frozen=True)
class ModelFile:
    """A file to check: the shipped file, its probe, and the manifest that it must contain.

    engine: runs an ONNX file in place of onnxruntime; "" for the default of the format.
    """

    format: str
    precision: str
    path: Path
    probe: Path
    manifest: Manifest
    engine: str = ""

    @property
    def name(self) -> str:
        """Name of the file, with its engine."""
        return f"{self.path.name} ({self.engine})" if self.engine else self.path.name

    @property
    def arithmetic(self) -> str:
        """Arithmetic that sets its limits: a key of LIMITS."""
        in_bf16 = self.engine == BF16 and self.precision != "int8"
        return "bf16" if in_bf16 else self.precision

    def open(self, path: Path, profile: Profile) -> Run:
        """The shipped file or its probe, ready to run."""
        if self.engine:
            return open_onnx(path, profile, engine=self.engine)
        if path == self.probe and self.precision == "int8":
            # onnxruntime 1.31 moves quantisation across a transpose, which shifts `normalised` by 0.05.
            return open_onnx(path, profile, optimize=False)
        return FORMATS[self.format].open(path, profile)

    def problems(self) -> list[str]:
        """G1 findings; empty when the file is intact and matches its manifest."""
        try:
            return FORMATS[self.format].problems(self.path, self.manifest)
        except Exception as error:  # checkers and loaders raise many types; an unreadable file is refused
            return [f"{type(error).__name__}: {error}"]


def convert(
    result: ExportReport,
    model: DeployModel,
    folder: Path,
    kinds: Sequence[tuple[str, str]],
    frames: Sequence[Image],
) -> list[ModelFile]:
    """Converts the model; returns the files for the gates and describes them in `result.files`.

    folder: gets a folder of the shipped files, FILES, and one of the probes. kinds: (format, precision) of each file,
    fp32 before the files made from it. frames: (H, W, 3), to calibrate int8. A reduced precision that cannot be
    converted is recorded in `result.dropped`. Raises ExportError when torch cannot convert the network.
    """
    files = []
    folders = folder / FILES, folder / "probes"
    for each in folders:
        each.mkdir(parents=True)
    for name, precision in kinds:
        file_name = FORMATS[name].file_name(precision)
        shipped, probe = (each / file_name for each in folders)
        manifest = in_file(result.manifest, precision)

        entry: dict[str, Any] = {"format": name, "precision": precision}
        if precision == "fp32":
            FORMATS[name].write(model, manifest, shipped, probe)
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
            write_both(onnx.load(shipped), manifest, shipped, probe)

        entry |= {"bytes": shipped.stat().st_size, "sha256": file_sha256(shipped)}
        result.files[file_name] = entry
        files.append(ModelFile(name, precision, shipped, probe, manifest))
    return files


def conversion_problem(shipped: Path, converted: ModelFile) -> str:
    """How `shipped` differs from the file that the same versions convert the checkpoint to; empty if equal.

    Nothing of the shipped file is executed.
    """
    problem = ""
    if converted.format == "onnx":
        try:
            problem = _onnx_difference(shipped, converted)
        except Exception as error:  # parsers of an altered file raise many types
            problem = f"it cannot be compared ({type(error).__name__}: {error})"
    # An archive of code, which `write_archive` makes byte-identical
    elif shipped.read_bytes() != converted.path.read_bytes():
        problem = "its bytes differ"
    told = f"{shipped.name} is not what the checkpoint converts to: {problem}"
    return told if problem else ""


def _onnx_difference(shipped: Path, converted: ModelFile) -> str:
    """First difference between two ONNX files; empty when they differ only in rounding and manifest."""
    model = onnx.load(shipped, load_external_data=False)
    other = onnx.load(converted.path)
    values, expected = _take_values(model), _take_values(other)

    if model != other:
        return f"{_other_fields(model.graph, other.graph) or _other_fields(model, other)} differ"
    for name, array in values.items():
        if not _is_rounding(name, array, expected[name], converted.precision):
            return f"tensor {name} has different values"
    return ""


def _take_values(model: onnx.ModelProto) -> dict[str, Array]:
    """Values of the tensors; removes them and the manifest from the model."""
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


def _is_rounding(name: str, values: Array, expected: Array, precision: str) -> bool:
    """Whether the values differ by no more than another processor explains; NaN does not count as equal."""
    wanted = expected.astype(np.float64)
    moved = np.abs(values.astype(np.float64) - wanted)

    # Weights of an int8 file
    if precision == "int8" and values.dtype.itemsize == 1:
        few = np.count_nonzero(moved) <= max(1, _MOVED * moved.size)
        return bool((moved <= 1).all() and few)

    # Scales and int32 biases: relative to each value, since a channel of small weights has a scale far below its
    # layer's
    is_bias = values.dtype == np.int32
    if precision == "int8" and (is_bias or name.endswith("_scale")):
        return bool((moved <= _SCALES * np.abs(wanted) + is_bias).all())

    share = _ROUNDING[precision] if values.dtype.kind == "f" else 0.0
    return bool(moved.max(initial=0.0) <= share * np.abs(wanted).max(initial=0.0))
