"""Exported files against those that the checkpoint converts to now, before anything loads or runs them.

Conversion is deterministic: with the same versions, the records of a TorchScript or pt2 file are equal byte for byte,
and so is an ONNX file but for its tensors, which may differ by the rounding of another processor. With other versions
only the answers can be compared; then a file must not hold anything that its own conversion does not
need: no other operator, no other word in its code, no other class in a pickle, no record of another kind. torch runs
Python text of a pt2 file when it loads it, so there no list helps: with another torch it is refused.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from segpipe.export.graph.profiles import Manifest

CONVERTERS = ("torch", "onnx", "onnxscript", "onnxruntime")
ROUNDING = {
    "fp32": 1e-5,
    "fp16": 1e-3,
    "int8": 1e-5,
}  # of a tensor's largest value: what another processor may change
SCALES = 0.05  # of each value that an int8 file takes from its calibration
WEIGHT_STEPS, _MOVED = (
    1,
    0.01,
)  # of an int8 weight, and how many weights of a tensor may move
LARGER = 2  # times as many bytes as converted now
_C: Any = torch._C
_RANDOM = ".data/serialization_id"
Records = Mapping[str, Callable[[], bytes]]
_WORDS = re.compile(
    r"\w+"
)  # `torch.save(x)` has other spellings: `x.save()`, `getattr(x, "save")()`
_NUMBERS = re.compile(r"\d+")
_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def other_versions(manifest: Manifest) -> dict[str, str]:
    """Phrases such as `torch 2.13.0, here 2.14.1`, by converter whose version is not that of the export."""
    then, now = manifest["versions"], {name: version(name) for name in CONVERTERS}
    return {
        name: f"{name} {then.get(name)}, here {now[name]}"
        for name in CONVERTERS
        if then.get(name) != now[name]
    }


def conversion_problems(
    shipped: Path, again: Path, kind: str, precision: str
) -> list[str]:
    """How `shipped` differs from `again`, which the same versions made from the checkpoint; empty when it does not."""
    compare = onnx_differences if kind == "onnx" else archive_differences
    return _first(shipped, compare(shipped, again, precision))


def harmful(shipped: Path, again: Path, kind: str) -> list[str]:
    """What `shipped` holds that its conversion by other versions does not need; empty when it holds nothing else."""
    surplus = {
        "onnx": _onnx_surplus,
        "torchscript": _archive_surplus,
        "pt2": _pt2_surplus,
    }
    return _first(shipped, surplus[kind](shipped, again))


def _first(shipped: Path, found: Iterator[str]) -> list[str]:
    try:
        problem = next(found, None)
    except Exception as error:  # parsers of an altered file raise many types
        problem = f"cannot be compared ({type(error).__name__}: {error})"
    return (
        [f"{shipped.name} is not what the checkpoint converts to: {problem}"]
        if problem
        else []
    )


def onnx_differences(shipped: Path, again: Path, precision: str) -> Iterator[str]:
    """Differences between two ONNX files: nodes with their attributes, inputs, outputs, tensors, then all else."""
    one, two = (onnx.load(path, load_external_data=False) for path in (shipped, again))
    yield from _beside_the_graph(one)
    if list(one.opset_import) != list(two.opset_import):
        yield "its opsets are others"
    if len(one.graph.node) != len(two.graph.node):
        yield f"{len(one.graph.node)} nodes instead of {len(two.graph.node)}"
    for place, (here, there) in enumerate(
        zip(one.graph.node, two.graph.node, strict=False)
    ):
        if here.SerializeToString(deterministic=True) != there.SerializeToString(
            deterministic=True
        ):
            yield f"node {place} ({here.op_type} {here.name}) is another than {there.op_type} {there.name}"
    for name in ("input", "output"):
        here, there = (
            [v.SerializeToString(deterministic=True) for v in getattr(m.graph, name)]
            for m in (one, two)
        )
        if here != there:
            yield f"its {name}s are others"
    yield from _tensor_differences(one, two, precision)
    if (
        shipped.read_bytes() != one.SerializeToString()
    ):  # a field twice, say, of which a reader takes one
        yield "its bytes are not those that onnx writes for its content"
    for model in (one, two):
        for tensor in model.graph.initializer:
            for name in _stored(tensor):
                tensor.ClearField(name)
        for text in (model.graph, *model.graph.initializer, *model.graph.value_info):
            if not text.doc_string:  # set to nothing or absent: conversions write both
                text.ClearField("doc_string")
        for entry in (
            model.metadata_props
        ):  # the manifest, which G1 compares with that of the folder
            entry.ClearField("value")
    if one.SerializeToString(deterministic=True) != two.SerializeToString(
        deterministic=True
    ):
        yield f"its {_other_field(one, two)} is another"


def _other_field(one: onnx.ModelProto, two: onnx.ModelProto) -> str:
    """The first field of two files, or of their graphs, that differs."""
    for here, there in ((one.graph, two.graph), (one, two)):
        fields, others = (
            {entry.name: value for entry, value in each.ListFields()}
            for each in (here, there)
        )
        for name in fields | others:
            if name != "graph" and fields.get(name) != others.get(name):
                return str(name)
    return "unknown field"


def _beside_the_graph(model: onnx.ModelProto) -> Iterator[str]:
    if model.functions or model.graph.sparse_initializer or model.training_info:
        yield "it holds functions, sparse tensors or training information"


def _tensor_differences(
    one: onnx.ModelProto, two: onnx.ModelProto, precision: str
) -> Iterator[str]:
    here, there = (
        {tensor.name: tensor for tensor in model.graph.initializer}
        for model in (one, two)
    )
    if list(here) != list(there):
        yield f"its tensors are others: {sorted(here.keys() ^ there.keys())[:3]}"
    for name in here.keys() & there.keys():
        if (
            here[name].data_location == onnx.TensorProto.EXTERNAL
            or here[name].external_data
        ):
            yield f"tensor {name} is stored outside the file"
        elif _stored(here[name]) != _stored(there[name]):
            yield f"tensor {name} is stored in another way"
        elif here[name].SerializeToString() != there[name].SerializeToString():
            values = map(numpy_helper.to_array, (here[name], there[name]))
            yield from _value_difference(name, *values, precision=precision)


def _stored(tensor: onnx.TensorProto) -> list[str]:
    """The fields that hold values: readers differ in which they take where there are two."""
    return [
        entry.name for entry, _ in tensor.ListFields() if entry.name.endswith("_data")
    ]


def _value_difference(
    name: str, here: np.ndarray, there: np.ndarray, *, precision: str
) -> Iterator[str]:
    if here.shape != there.shape or here.dtype != there.dtype:
        yield f"tensor {name} is {here.dtype} {here.shape} instead of {there.dtype} {there.shape}"
        return
    wide, expected = here.astype(np.float64), there.astype(np.float64)
    differs, share = np.abs(wide - expected), _allowed(name, here.dtype, precision)
    if precision == "int8" and here.dtype.itemsize == 1:
        fits = bool(
            (differs <= WEIGHT_STEPS).all()
            and np.count_nonzero(differs) <= max(1, _MOVED * differs.size)
        )
    elif (
        share == SCALES
    ):  # of each value: a channel of small weights has a scale far below that of its layer
        fits = bool(
            (differs <= share * np.abs(expected) + (here.dtype == np.int32)).all()
        )
    else:
        fits = bool(
            differs.max(initial=0.0) <= share * np.abs(expected).max(initial=0.0)
        )
    if not fits:  # NaN does not either
        yield f"tensor {name} has other values"


def _allowed(name: str, kind: np.dtype, precision: str) -> float:
    """Share of a tensor's largest value by which its values may differ."""
    if precision == "int8" and (
        name.endswith("_scale") or kind == np.int32
    ):  # of activations, and of biases with them
        return SCALES
    return ROUNDING[precision] if kind.kind == "f" else 0.0


def archive_differences(
    shipped: Path, again: Path, precision: str = "fp32"
) -> Iterator[str]:
    """Differences between two TorchScript or pt2 files, record by record."""
    if shipped.read_bytes() == again.read_bytes():
        return
    for view in (_as_torch, _as_python):
        one, two = view(shipped), view(again)
        if one.keys() != two.keys():
            yield f"record {sorted(one.keys() ^ two.keys())[0]} is in one of them only"
        for name in one.keys() & two.keys():
            if not name.endswith(_RANDOM) and one[name]() != two[name]():
                yield f"record {name} has other bytes"


def _as_torch(path: Path) -> Records:
    """Readers of the records of an archive as torch finds them when it loads the file.

    One file may hold two directories of records, and torch's and Python's parser then find different ones. torch uses
    both: Python's where its own fails.
    """
    reader = _C.PyTorchFileReader(str(path))
    names = reader.get_all_records()
    if len(set(names)) < len(names):
        raise ValueError("a record has two contents")
    return {name: lambda name=name: bytes(reader.get_record(name)) for name in names}  # type: ignore[misc]


def _as_python(path: Path) -> Records:
    """The same as Python's zipfile finds them, by their whole names."""
    archive = zipfile.ZipFile(path)
    names = archive.namelist()
    if len(set(names)) < len(names):
        raise ValueError("a record has two contents")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
        raise ValueError("a record is compressed, which torch does not do")
    return {name: lambda name=name: archive.read(name) for name in names}  # type: ignore[misc]


def _onnx_surplus(shipped: Path, again: Path) -> Iterator[str]:
    one, two = (onnx.load(path, load_external_data=False) for path in (shipped, again))
    yield from _beside_the_graph(one)
    if shipped.stat().st_size > LARGER * again.stat().st_size:
        yield f"it has {shipped.stat().st_size} bytes, and the conversion {again.stat().st_size}"
    if unknown := sorted(_operators(one) - _operators(two)):
        yield f"it uses {', '.join(unknown[:3])}"
    attributes = [attribute for node in one.graph.node for attribute in node.attribute]
    if any(attribute.type in _GRAPHS for attribute in attributes):
        yield "a node holds a graph"
    tensors = [
        *one.graph.initializer,
        *(tensor for each in attributes for tensor in (each.t, *each.tensors)),
    ]
    if any(
        tensor.external_data or tensor.data_location == onnx.TensorProto.EXTERNAL
        for tensor in tensors
    ):
        yield "its tensors are stored outside the file"


def _operators(model: onnx.ModelProto) -> set[str]:
    return {
        ".".join(filter(None, (node.domain, node.op_type))) for node in model.graph.node
    }


def _pt2_surplus(shipped: Path, again: Path) -> Iterator[str]:
    if next(archive_differences(shipped, again), None):
        yield (
            "torch runs text of a pt2 file when it loads it, so it must equal its conversion, which takes the torch "
            "that the manifest names. Verify with that one, or export again"
        )


def _archive_surplus(shipped: Path, again: Path) -> Iterator[str]:
    for view in (_as_torch, _as_python):
        yield from _surplus_records(shipped, again, view(shipped), view(again))


def _surplus_records(
    shipped: Path, again: Path, one: Records, two: Records
) -> Iterator[str]:
    if unknown := sorted(
        {_NUMBERS.sub("0", name) for name in one}
        - {_NUMBERS.sub("0", name) for name in two}
    ):
        yield f"it holds a record {unknown[0]}"
    if shipped.stat().st_size > LARGER * again.stat().st_size:
        yield f"it has {shipped.stat().st_size} bytes, and the conversion {again.stat().st_size}"
    if unknown := sorted(_names(one) - _names(two)):
        yield f"it uses {', '.join(unknown[:3])}"


def _names(records: Records) -> set[str]:
    """Words in code, and classes named by pickles, with 0 for every number."""
    found: set[str] = set()
    for name, read in records.items():
        if "code/" in name:
            found.update(_WORDS.findall(read().decode()))
        elif name.endswith(".pkl"):
            found.update(_classes(read()))
    return {_NUMBERS.sub("0", used) for used in found}


def _classes(pickled: bytes) -> Iterator[str]:
    """What a pickle would import, as `module name`, without unpickling it."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("GLOBAL", "INST"):
            yield str(argument)
        elif "GLOBAL" in opcode.name or opcode.name.startswith(
            "EXT"
        ):  # which names no class here; torch writes none
            yield f"a class by {opcode.name}"
