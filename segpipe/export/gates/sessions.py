"""onnxruntime as the gates use it: one CPU thread that sleeps while it waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime


def open_session(path: Path, *, optimise: bool = True) -> Any:
    """onnxruntime.InferenceSession of an ONNX file; without `optimise` it runs node by node as written.

    Raises what onnxruntime raises.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
