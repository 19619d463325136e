"""`segpipe gpu-check`: all checks that need a GPU, within a time limit."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from segpipe.determinism import flags
from segpipe.errors import ConfigError, SegpipeError


def main(given: dict[str, Any]) -> int:
    """Exit code."""
    if find_spec("benchmarks") is None or find_spec("benchmarks.gpu") is None:
        raise ConfigError("gpu-check runs benchmarks/gpu.py, which is not installed. Run it in a clone of segpipe.")
    flags.set_environment()  # before torch is imported, so the imports follow here
    import torch
    from rich.console import Console

    from benchmarks.gpu import CHECKS, LEFT_OUT, Bench, run

    names = list(CHECKS) if given["only"] == ["all"] else given["only"]
    if unknown := [name for name in names if name not in CHECKS]:
        raise ConfigError(f"only = {unknown[0]} is not one of {', '.join(CHECKS)}.")
    console = Console()
    if given["device"] == "cuda" and not torch.cuda.is_available():
        console.print("no GPU here: nothing was checked")
        return 0
    flags.apply(threads=torch.get_num_threads())
    bench = Bench(
        torch.device(given["device"]),
        time.monotonic() + given["seconds"],
        **{name: given[name] for name in ("size", "batch", "updates")},
        camvid=Path(given["camvid"]) if given["camvid"] else None,
        folder=Path(given["folder"]),
    )
    report: dict[str, Any] = {"fingerprint": flags.fingerprint(), "device": given["device"], "checks": {}}
    failed = False
    for name, sound, figures in run(bench, names):
        failed = failed or not sound
        verdict = "FAILED" if not sound else LEFT_OUT if LEFT_OUT in figures else "passed"
        report["checks"][name] = {"passed": verdict == "passed", **figures}
        console.print(f"{verdict}  {name}  {json.dumps(figures)}", markup=False, soft_wrap=True)
        if given["out"]:
            Path(given["out"]).write_text(json.dumps(report, indent=2) + "\n")
    return SegpipeError.exit_code if failed else 0
