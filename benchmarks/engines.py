"""One golden frame of an export in every engine that is here: equal pixels, difference of confidence, latency.

torch by the checkpoint, TorchScript, onnxruntime and OpenVINO in turns in one process, on one thread; the C++ programs
of examples/cpp (cpp=BUILD) by themselves.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import measure as measuring
from segpipe.cli.commands import RUN, WHICH
from segpipe.export.graph.formats import FORMATS
from segpipe.export.graph.network import ROBOT, DeployModel, run_eager
from segpipe.native import one_thread
from segpipe.runtime.artifact import Artifact, read_artifact
from segpipe.runtime.session import Session
from segpipe.settings.compose import Setting, parse
from segpipe.train.checkpoint import load_network

CPP = Setting("cpp", "", "folder in which examples/cpp was built")
PROGRAMS = {"segpipe_torch": "libtorch, C++", "segpipe_ort": "onnxruntime, C++"}
_LINE = re.compile(
    r"frame 0: ([\d.]+) % of the pixels equal, confidence within (\d+) levels, p50 ([\d.]+) ms"
)
SMOKE: dict[str, Any] = {}
EQUAL = 0.9999  # of a fp32 mask's pixels, as G3
Masks = tuple[NDArray[Any], NDArray[Any]]
Run = Callable[[], Masks]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """A row per engine; `passed` if the masks of all fp32 ones equal the golden one as G3 needs it."""
    settings = parse(given.settings, (RUN, WHICH, CPP))
    folder, repeats = Path(settings["run"]), given.repeats or 40
    artifact = read_artifact(folder / "export")
    with one_thread():
        rows = compared(arms(folder, settings["which"], artifact), artifact, repeats)
    if settings["cpp"]:
        rows |= {
            title: row
            for name, title in PROGRAMS.items()
            if (row := _program(settings["cpp"], name, folder, repeats))
        }
    height, width = artifact.frame[:2]
    return {
        "what": f"{artifact.model_id}, one golden frame of {height}x{width}, one CPU thread",
        "machine": {
            **measuring.machine(),
            "openvino": _version("openvino"),
            "onnxruntime": _version("onnxruntime"),
        },
        "load_average": round(os.getloadavg()[0], 1),
        "rows": rows,
        "table": table(rows),
        "passed": all(
            row["equal"] >= EQUAL
            for name, row in rows.items()
            if "default precision" not in name
        ),
    }


def arms(folder: Path, which: str, artifact: Artifact) -> dict[str, Run]:
    """A run of the first golden frame by engine. Call it inside `one_thread`."""
    image = artifact.golden.image[0]
    trained = load_network(folder, which)
    model = DeployModel(
        trained,
        profile=ROBOT,
        temperature=artifact.manifest["calibration"]["temperature"],
    )
    eager = run_eager(model)
    found: dict[str, Run] = {"torch, eager": lambda: _masks(eager(image))}
    script = artifact.folder / FORMATS["torchscript"].file_name()
    if script.is_file():
        traced = FORMATS["torchscript"].open(script, ROBOT)
        found["torch, TorchScript"] = lambda: _masks(traced(image))
    ort = Session(artifact)
    found["onnxruntime"] = lambda: ort.run(image)
    if find_spec("openvino") is not None:
        vino = Session(artifact, engine="openvino")
        found["OpenVINO, f32"] = lambda: vino.run(image)
        found["OpenVINO, default precision"] = _default_precision(artifact)
    return found


def compared(
    found: dict[str, Run], artifact: Artifact, repeats: int
) -> dict[str, dict[str, float]]:
    """Row of each engine: share of equal pixels and levels of confidence against the golden frame; times in ms.

    cpu_ms is the least processor time; of the C++ programs the mean.
    """
    golden, rows = artifact.golden, {}
    cpu = measuring.interleaved(found, repeats=repeats, clock=time.process_time)
    wall = measuring.interleaved(found, repeats=repeats)
    for name, run in found.items():
        mask, confidence = run()
        rows[name] = {
            "equal": float((mask == golden.mask[0]).mean()),
            "levels": int(np.abs(confidence.astype(int) - golden.confidence[0]).max()),
            "p50_ms": round(1e3 * float(np.median(wall[name])), 2),
            "cpu_ms": round(1e3 * min(cpu[name]), 2),
        }
    return rows


def table(rows: dict[str, dict[str, float]]) -> list[str]:
    """Lines of a Markdown table."""
    head = [
        "| engine | equal pixels | confidence, levels | p50, ms | processor time, ms |",
        "|---|---|---|---|---|",
    ]
    return head + [
        f"| {name} | {100 * row['equal']:.4f} % | {row['levels']} | {row['p50_ms']:.2f} | {row['cpu_ms']:.2f} |"
        for name, row in rows.items()
    ]


def _masks(answer: Any) -> Masks:
    return answer.mask, answer.confidence


def _default_precision(artifact: Artifact) -> Run:
    """OpenVINO as it comes: bf16 or fp16 where the processor has it."""
    import openvino

    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": 1}
    core = openvino.Core()
    request = core.compile_model(
        core.read_model(artifact.model), "CPU", options
    ).create_infer_request()
    batch = artifact.golden.image[:1].copy()

    def run() -> Masks:
        answer = request.infer({0: batch}, share_inputs=True)
        return answer["mask"][0], answer["confidence"][0]

    return run


def _program(
    build: str, name: str, folder: Path, repeats: int
) -> dict[str, float] | None:
    """Row of a C++ program, which compares with the golden frames itself; None where it was not built."""
    path = Path(build) / name
    if not path.is_file():
        return None
    one, _ = _spent(path, folder, 1)
    all_runs, done = _spent(path, folder, 1 + repeats)
    line = _LINE.search(done.stdout)
    if line is None:
        raise RuntimeError(
            f"{path} ended with {done.returncode}: {done.stderr.strip()}"
        )
    runs = repeats * done.stdout.count("frame ")
    return {
        "equal": float(line[1]) / 100,
        "levels": int(line[2]),
        "p50_ms": round(float(line[3]), 2),
        "cpu_ms": round(1e3 * (all_runs - one) / runs, 2),
    }


def _spent(
    path: Path, folder: Path, runs: int
) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Processor time of the program in seconds, and how it ended."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [str(path), str(folder / "export"), str(runs)],
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
