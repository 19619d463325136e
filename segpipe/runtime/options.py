"""onnxruntime options that robot and export share."""

from __future__ import annotations

from typing import Any

import onnxruntime

_FATAL = 4  # onnxruntime logs every aborted run as an error; failures are raised anyway


def session_options(threads: int) -> Any:
    """onnxruntime.SessionOptions for `threads` CPU threads that sleep while they wait.

    Spinning threads would take a core each from the rest of the robot.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.log_severity_level = _FATAL
    return options
