"""Builds a TensorRT engine from an exported folder and checks it with the gates of the export, on the target machine.

    python examples/tensorrt/verify_engine.py runs/NAME runs/NAME/export [model.plan] [export.images=N ...]

Give the settings of segpipe verify that the export changed from those of the run.

Export with export.profile=isaac: TensorRT supports uint8 only at inputs and outputs of a network. The graph is checked
against TensorRT's rules, then every ONNX file of the folder must pass G1 to G5 in TensorRT (with the limits of its
precision), then the golden frames. Only then is model.plan written, the same engine that passed: TensorRT selects
kernels by timing, so a second build may differ. Needs segpipe, torch with CUDA and tensorrt (10 or later).

Exit codes: 0 verified, 2 usage, TensorRT missing or a graph that it cannot run, otherwise those of segpipe verify.
Written from NVIDIA's documentation and tested with a stand-in for tensorrt: it has not run on a GPU.
Sources of the rules: TensorRT 10, python_api, DataType.UINT8; operators, Identity; onnx-tensorrt, docs/operators.md.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from segpipe.cli.commands import COMMANDS
from segpipe.cli.export import verify
from segpipe.errors import SegpipeError
from segpipe.export.graph.network import PROFILES
from segpipe.export.verify import read_manifest
from segpipe.runtime.engines import ENGINES, EngineError
from segpipe.settings.compose import parse

DEVICE = "cuda"
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
_UINT8 = onnx.TensorProto.UINT8
Array = NDArray[Any]


def rule_problems(model: onnx.ModelProto) -> list[str]:
    """Parts of the graph that TensorRT cannot run, one sentence each.

    uint8 is allowed only for an input that is directly cast to float, and for an output that was cast from float. A
    quantised graph needs int8 with zero point 0.
    """
    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*graph.value_info, *graph.input, *graph.output)
    }
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    found = []
    for node in graph.node:
        reads = [name for name in node.input if types.get(name) == _UINT8]
        writes = [name for name in node.output if types.get(name) == _UINT8]
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and (reads or writes):
            found.append(
                f"{node.op_type} {node.name} quantises to uint8, but TensorRT only has int8 with zero point 0."
            )
        elif reads and not (
            node.op_type == "Cast" and types.get(node.output[0]) in _FLOATS
        ):
            found.append(
                f"{node.op_type} {node.name} reads uint8, but only a Cast to float may."
            )
        elif writes and not (
            node.op_type == "Cast" and types.get(node.input[0]) in _FLOATS
        ):
            found.append(
                f"{node.op_type} {node.name} writes uint8 from a type other than float."
            )
    return found


def require_rules(model: onnx.ModelProto) -> None:
    """Raises EngineError with the first rule that the graph breaks."""
    if found := rule_problems(model):
        raise EngineError(
            f"TensorRT cannot run this graph: {found[0]} Export with export.profile=isaac."
        )


class TensorRt:
    """An ONNX file as a TensorRT engine, a `segpipe.runtime.engines.Engine`; a run cannot be cancelled.

    Each file is built once per process.
    """

    plans: ClassVar[dict[bytes, bytes]] = {}  # by content of the ONNX file

    def __init__(
        self,
        model: bytes,
        *,
        threads: int = 1,
        providers: Sequence[str] | None = None,
        oldest: str = "",
    ) -> None:
        import tensorrt as trt

        self._trt, self.described = trt, f"tensorrt {trt.__version__}"
        # The extra outputs of a probe have no type in the file.
        self._model = onnx.shape_inference.infer_shapes(onnx.load_from_string(model))
        require_rules(self._model)
        self.plan = self.plans[model] if model in self.plans else self._build()
        self.plans[model] = self.plan
        self._engine = trt.Runtime(
            trt.Logger(trt.Logger.ERROR)
        ).deserialize_cuda_engine(self.plan)
        self._context = self._engine.create_execution_context()
        names = [
            self._engine.get_tensor_name(index)
            for index in range(self._engine.num_io_tensors)
        ]
        inputs = [
            name
            for name in names
            if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        ]
        self._input, self._outputs = (
            inputs[0],
            [name for name in names if name not in inputs],
        )

    def _build(self) -> bytes:
        trt = self._trt
        logger = trt.Logger(trt.Logger.ERROR)
        builder = trt.Builder(logger)
        # Types as in the file: the export made fp16 and int8; TensorRT must not lower precision.
        typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        network = builder.create_network(0 if typed is None else 1 << int(typed))
        parser = trt.OnnxParser(network, logger)
        if not parser.parse(self._model.SerializeToString()):
            raise EngineError(f"TensorRT cannot parse it: {parser.get_error(0)}.")
        config = builder.create_builder_config()
        config.clear_flag(
            trt.BuilderFlag.TF32
        )  # on by default, with 10 bits of mantissa
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise EngineError("TensorRT could not build an engine; its log says why.")
        return bytes(plan)

    def metadata(self, key: str) -> str:
        """Entry of the file's metadata_props; "" when there is none."""
        return {entry.key: entry.value for entry in self._model.metadata_props}.get(
            key, ""
        )

    def prepare(
        self, outputs: list[str]
    ) -> tuple[Callable[[Array], list[Array]], Callable[[], None]]:
        """A function that runs one input batch for these outputs, and one that does nothing."""

        def run(batch: Array) -> list[Array]:
            given = torch.from_numpy(np.ascontiguousarray(batch)).to(DEVICE)
            self._context.set_tensor_address(self._input, given.data_ptr())
            answers = {name: self._empty(name) for name in self._outputs}
            for name, tensor in answers.items():
                self._context.set_tensor_address(name, tensor.data_ptr())
            stream = torch.cuda.current_stream() if DEVICE == "cuda" else None
            if not self._context.execute_async_v3(stream.cuda_stream if stream else 0):
                raise RuntimeError(
                    "TensorRT could not run the engine; its log says why"
                )
            if stream:
                stream.synchronize()
            return [answers[name].cpu().numpy() for name in outputs]

        return run, lambda: None

    def _empty(self, name: str) -> torch.Tensor:
        kind = np.dtype(self._trt.nptype(self._engine.get_tensor_dtype(name)))
        dtype = torch.from_numpy(np.empty(0, kind)).dtype
        return torch.empty(
            tuple(self._context.get_tensor_shape(name)), dtype=dtype, device=DEVICE
        )


def golden_agreement(engine: TensorRt, folder: Path, profile: str) -> float:
    """Lowest share of equal mask pixels over the golden frames."""
    run, _ = engine.prepare(["mask"])
    images, masks = (
        np.load(folder / "golden" / f"{name}.npy") for name in ("image", "mask")
    )
    found = [
        (run(PROFILES[profile].encode(image))[0][0] == mask).mean()
        for image, mask in zip(images, masks, strict=True)
    ]
    return float(min(found))


def main(arguments: Sequence[str]) -> int:
    """Exit code."""
    settings = [given for given in arguments if "=" in given]
    paths = [Path(given) for given in arguments if "=" not in given]
    if len(paths) not in (2, 3):
        print(
            f"usage: {sys.argv[0]} RUN FOLDER [PLAN] [KEY=VALUE ...]", file=sys.stderr
        )
        return 2
    run, folder, plan = (*paths, Path("model.plan"))[:3]
    try:
        manifest = read_manifest(folder)
        ENGINES["tensorrt"] = TensorRt
        content = (folder / "model.onnx").read_bytes()
        require_rules(
            onnx.load_from_string(content)
        )  # before the gates, since its message names the rule
        importlib.import_module("tensorrt")  # missing: not a fault of the files
        TensorRt.plans.clear()
        report = verify(
            parse(
                [f"run={run}", f"artifact={folder}", *settings],
                COMMANDS["verify"].known,
            ),
            engines=["tensorrt"],
        )
        if content not in TensorRt.plans:
            print(
                f"{folder / 'model.onnx'} was altered during the gates: the engine is not written",
                file=sys.stderr,
            )
            return 7
        engine = TensorRt(content)
        print(report.line("ARTIFACT"), f"in {engine.described}")
        agreement, needed = (
            golden_agreement(engine, folder, manifest["profile"]),
            manifest["golden"]["image_agreement"],
        )
        print(f"golden frames: at least {100 * agreement:.4f} % of the pixels equal")
        if not agreement >= needed:
            print(
                f"the golden frames need {100 * needed:g} %: the engine is not written",
                file=sys.stderr,
            )
            return 4
    except SegpipeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (EngineError, ImportError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    plan.write_bytes(engine.plan)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
