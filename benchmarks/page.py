"""docs/performance.md from benchmarks/results/: python -m benchmarks.page > docs/performance.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.run import CLAIMS, GOALS

RESULTS = Path(__file__).with_name("results")
SHOWN = 8  # figures of a result
NEEDED = ("must", "limits", "limit")
NOT_FIGURES = (
    "machine",
    "rows",
    "runs",
    "faults",
    "plants",
    "load_average",
    "untrained",
    "by_fault",
    "unsound",
    "differing",
    *NEEDED,
)

HEAD = """# Performance

`segpipe profile experiment=...` runs a few updates of a fresh network and prints where they spend their time: the wait
for data, the copy to the device, forward, loss, backward, reduction, clipping, optimizer, average and ledger. It
says how many `data.workers` keep up with the network, and writes a trace for ui.perfetto.dev to `runs/NAME_profile`.
If the loss takes long, `loss.stride=2` computes it on a quarter of the pixels. If updates wait for the exchange of
gradients, raise `compute.samples_per_shard`. Settings are those of `segpipe train`; under torchrun every process takes
its own shards.

## What a step does, and why

- `train.channels_last=true` (the default) and `train.precision=bf16` where the device has instructions for it: below,
  C6 has both. bf16 changes the numbers, so it is not a default; sums, loss and weights stay fp32 in every precision.
- `train.precision=tf32` lets GPUs round the inputs of convolutions and matrix products to 10 bits of mantissa: faster
  than fp32 (not measured here), with the same bits in every run on GPUs of one kind. The last validation and
  `result.json` are fp32.
- On a CPU the optimizer updates one parameter after the other, on a GPU all at once (`foreach`), with the same bits.
  `fused` kernels give other bits. They are used only for fp16 on GPUs, where they skip an update that overflowed
  without a wait of the host.
- Between logs the host does not wait for a GPU: a test counts the operators that would make it. Exceptions: the ledger
  is written every 50 updates, and a trained parameter that no shard of this process used is looked up in every step.
- Equal bits and the ledger need the same few kernels for a network of any size: two for the digests of all tensors
  (Triton, on a GPU), a few for gradients, statistics and counters. A test counts them.
- Feature maps are resized by one Triton kernel forward and one backward on a GPU, in their dtype and memory format.
- Batches are copied from page-locked memory in the order of the updates, on a separate stream while the GPU computes
  the previous update; the host does not wait for them. This saves 0.9 ms per update of pidnet_s, 12 x 1024x1024 (H200).
- A validation runs between two updates, on all ranks, each with its share of the images. It is not overlapped with
  training: both would wait for the same GPU. What can be hidden is loading, which `data.cache_mib` saves.
- Gradients are sent bucket by bucket during the backward of the last shard, and their sums come back during it too.
- `compute.compile=true` trains through `torch.compile`. Its bits differ from those of eager, by rounding. They are
  equal for any number of processes as long as hardware and torch are equal, since every shard has one shape and
  the compiler is told not to choose kernels by trials (`torch._inductor.config.deterministic`). It works with
  `compute.mode=elastic` alone. A compiled backward hands over all gradients at its end, so with several processes
  nothing is sent while it runs. The first update takes up to minutes. Every network is one graph
  (`python benchmarks/run.py host` counts them): resizes and poolings are an operator of it. On an H200 the kernels of
  an update of pidnet_s, 12 x 1024x1024 in bf16, take 23 ms in place of 33 ([gpu.md](gpu.md#results-on-an-h200)).
- On a GPU, in mode elastic, forward and backward are recorded at the first batch as CUDA graphs, and replayed. The
  kernels are those of eager, or of the compiled network with `compute.compile=true`; on an H200 an update of pidnet_s
  without a recording is bound by the host, which starts 1,478 kernels. The first batch compares digests of logits,
  gradients and statistics of a replay with theirs; if they differ, training continues without it, with a warning.
  `auto` records the 15 networks that were tried on a GPU, `on` any network, `off` none. A network that cannot
  be recorded, because it asks the device for a value, ends the run. The Python code of a recorded forward runs once;
  keep that in mind for a network of your own. A recording keeps its memory for the whole run, in addition to that of
  validations. Like compiled networks, recorded ones hand over all gradients at the end of the backward.
  There is no graph of the whole step: learning rate, step and decay of the average are values on the host.
"""

UNMEASURED = """Not measured on a GPU yet. [gpu.md](gpu.md) has the two commands that measure these rows."""
RESULTS_HEAD = """## Results

A row is what `python benchmarks/run.py ID` printed on that machine with the code of that commit; `benchmarks/results/`
keeps the JSON. Some need something else to repeat them: C8 a trained run; `rare`, `augment` and some runs of `bits`
CamVid (`--camvid FOLDER`); `cluster` root; G1 to G7 a GPU. Arms are interleaved in one run; a figure in brackets is its
95 % interval. A goal is met if the worse end of the interval meets it. What is not met stays in the table. Figures of a
CPU say nothing about a GPU; [gpu.md](gpu.md) says what those of the GPU are worth.

The name of a figure is its place in the JSON. `A over B` is the time of A divided by that of B, and `over B` before a
name the time under that name divided by that of B; `times as fast` and `speedup` are above 1 where segpipe is faster.
The mode `ddp` was called `run` in older results.
"""
NEEDS = {  # on an H200, 12 x 1024x1024, bf16
    "G1": "0.38 of copies",
    "G1b": "2x PIDNet-style, 1x torchvision-style compiled",
    "G2": "6x; 1/20",
    "G3": "5 % at most",
    "G4": "0; 50 at most with a graph",
    "G5": "95 %; 90 %",
    "G6": "equal",
    "G7": "60 %",
}


def page() -> str:
    """The page as Markdown."""
    lines = [
        HEAD,
        *unmeasured(),
        RESULTS_HEAD,
        "| id | what | figures | needed | met | machine |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(
        RESULTS.glob("*.json"), key=lambda path: (_place(_content(path)), path.name)
    ):
        content = _content(path)
        if "passed" in content:
            lines.append(f"| {' | '.join(_cells(path, content))} |")
    return "\n".join(lines) + "\n"


def unmeasured() -> list[str]:
    """The goals on a GPU that no result answers yet."""
    known = {_content(path).get("claim") for path in RESULTS.glob("*.json")}
    rows = [
        f"| {goal} | {text} | not measured | {NEEDS[goal]} |"
        for goal, text in GOALS.items()
        if goal not in known
    ]
    if not rows:
        return []
    head = ["## On a GPU", "", UNMEASURED, "", "| id | what | figures | needed |"]
    return [*head, "|---|---|---|---|", *rows, ""]


def _content(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _place(content: Mapping[str, Any]) -> int:
    """Claims in the order of benchmarks/run.py, then the rest."""
    known = list(CLAIMS)
    return (
        known.index(content["claim"]) if content.get("claim") in known else len(known)
    )


def _cells(path: Path, content: Mapping[str, Any]) -> list[str]:
    claim = str(content.get("claim", path.stem))
    told = CLAIMS[claim][0] if claim in CLAIMS else ""
    what = str(content.get("what", ""))
    setting = what if len(what) <= 120 else f"{what[:117]}..."
    rows = list(figures(content.get("figures", content)))
    rows = [
        row for row in rows if row.endswith("]")
    ] or rows  # a ratio with an interval says more than milliseconds
    left = f"<br>{len(rows) - SHOWN} more in {path.name}" if len(rows) > SHOWN else ""
    needed = NEEDS.get(claim, "")
    for name in NEEDED:
        if name in content:
            needed = _needed(content[name])
            break
    cells = [
        claim,
        f"{told}: {setting}",
        "<br>".join(rows[:SHOWN]) + left,
        needed,
        _verdict(content),
        _machine(content),
    ]
    return [cell.replace("|", "/").replace("\n", " ") for cell in cells]


def figures(value: Any, name: str = "") -> Iterator[str]:
    """Figures with an interval, and plain numbers, each with its place in the JSON."""
    if isinstance(value, Mapping) and {"low", "high"} <= value.keys():
        middle = value.get("ratio", value.get("median"))
        yield f"{name}: **{middle:.3g}** [{value['low']:.3g}, {value['high']:.3g}]"
    elif isinstance(value, Mapping) and "median_ms" in value:
        yield f"{name}: {value['median_ms']:.3g} ms"
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key not in NOT_FIGURES:
                yield from figures(part, f"{name} {key}".strip().replace("_", " "))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield f"{name}: {value:.4g}"


def _needed(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return "; ".join(f"{name} {_needed(part)}" for name, part in value.items())


def _verdict(content: Mapping[str, Any]) -> str:
    more = {
        name.removeprefix("passed_"): met
        for name, met in content.items()
        if name.startswith("passed_")
    }
    parts = [
        f"{name}: {_word(met)}"
        for name, met in {**content.get("verdicts", {}), **more}.items()
    ]
    return "; ".join([_word(content["passed"]), *parts])


def _word(met: bool) -> str:
    return "yes" if met else "**no**"


def _machine(content: Mapping[str, Any]) -> str:
    machine = content.get("machine", {})
    device = (
        machine.get("cpu", "")
        if machine.get("device") in (None, "x86_64", "aarch64")
        else machine["device"]
    )
    code = str(machine.get("code") or machine.get("git") or "")[:7]
    told = [
        device,
        f"{machine['cores']} cores" if "cores" in machine else "",
        machine.get("cpu_capability", ""),
    ]
    told += [
        f"torch {machine['torch']}" if "torch" in machine else "",
        f"code {code}" if code else "",
    ]
    return ", ".join(str(part) for part in told if part)


if __name__ == "__main__":
    print(page(), end="")
