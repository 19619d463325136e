"""Outputs of an ONNX graph, taken away from the file that ships and given back to look inside it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx

from segpipe.export.graph.profiles import PROBES


def keep_outputs(model: onnx.ModelProto, names: Collection[str]) -> None:
    """Takes all outputs but `names` from the graph; the tensors stay inside it under their names."""
    kept = [output for output in model.graph.output if output.name in names]
    del model.graph.output[:]
    model.graph.output.extend(kept)


def write_probe(shipped: Path, probe: Path) -> None:
    """Writes the very graph of `shipped` with its tensors `logits` and `normalised` as further outputs.

    Raises ValueError when the graph has no tensor of that name: then nobody can look inside.
    """
    model = onnx.load(shipped)
    inside = {name for node in model.graph.node for name in node.output}
    for name in PROBES:
        if name not in inside:
            raise ValueError(f"the graph has no tensor {name!r}, on which the gates look")
        if name not in {output.name for output in model.graph.output}:
            # Without a type: onnxruntime finds it, and in a half precision file it is another one.
            model.graph.output.append(onnx.ValueInfoProto(name=name))
    onnx.save(model, probe)
