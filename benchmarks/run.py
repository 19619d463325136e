"""One command per claim: python benchmarks/run.py C9 [--out FILE]; without an id, what there is.

C8 takes a finished run: python benchmarks/run.py C8 run=runs/NAME [which=best] [sizes=[HxW]] [--out FILE].
engines takes a run with its export: python benchmarks/run.py engines run=runs/NAME [cpp=BUILD] [--out FILE].
runtime takes an export: python benchmarks/run.py runtime artifact=FOLDER [--out FILE].
cluster needs root, and takes names of cases: python benchmarks/run.py cluster [cut ...] [--out FILE].
Prints JSON with the machine it ran on. Most take minutes; nothing else should run meanwhile. `--smoke` shows within
seconds that a benchmark still runs: one round at the sizes in SMOKE of its module, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from segpipe.errors import SegpipeError

GOALS = {  # on a GPU; `segpipe gpu-check` measures all of them
    "G1": "the whole loop on files: images per second as a share of what copies allow",
    "G1b": "an update against those of other recipes, eager, recorded and compiled",
    "G2": "upsampling and loss against interpolate + cross_entropy: time, peak memory",
    "G3": "what determinism costs: mode elastic against mode off",
    "G4": "waits of the host and kernels that it starts in an update between logs",
    "G5": "updates fed by the loader against updates on one batch; how busy the GPU is",
    "G6": "equal bits for 1, 2, 3 and 4 processes of one GPU, also with graphs, over NCCL where it takes several",
    "G7": "peak memory against a torchvision-style update",
}
CLAIMS = {  # id: what is measured, and the module whose `measure` does it
    "C5": (
        "upsampling and loss against interpolate + cross_entropy: time, peak memory, error",
        "fused_loss",
    ),
    "C7": (
        "from logits to the counts of a validation, against torchvision, PIDNet and mmseg",
        "validation",
    ),
    "C8": (
        "latency and mIoU of the exported files: eager, TorchScript, fp32, fp16, int8",
        "export_speed",
    ),
    "engines": (
        "one golden frame in torch, libtorch C++, onnxruntime and OpenVINO: equal masks, latency",
        "engines",
    ),
    "runtime": (
        "latency, its spread and growth of memory of an exported folder, without torch",
        "runtime",
    ),
    "C6": (
        "train step of PIDNet-S against the steps of other recipes, fp32 and bf16",
        "train_step",
    ),
    "C1": ("loader from PNG files, against torchvision's recipe", "loader_speed"),
    "C2": (
        "loader from a warm pack, against the recipes of torchvision, mmseg and PIDNet from PNG",
        "loader_speed",
    ),
    "C2b": (
        "an epoch in which the pack is built, against an epoch of torchvision's recipe",
        "loader_speed",
    ),
    "C3": (
        "loader from a warm pack of JPEG files, against torchvision's recipe from the files",
        "loader_speed",
    ),
    "C4": (
        "batches from two loader processes, against torchvision's recipe through DataLoader",
        "loader_speed",
    ),
    "C9": ("cost of compute.mode: step time and peak memory on one batch", "modes"),
    "C10": (
        "seconds to --help, and from the start of a run to its first update",
        "startup",
    ),
    "start": (
        "processor time that 20,000 images add to the start of a run, the first time and the second",
        "data_start",
    ),
    "host": (
        "what the host does in an update of a GPU: operators, launches, processor time; needs no GPU",
        "host",
    ),
    "ledger": (
        "cost of the digests that every run, and an audit, writes down",
        "ledger",
    ),
    "augment": (
        "augmentation is pure: every transform, in three processes",
        "augment",
    ),
    "bits": (
        "equal digests for any number of processes, workers and start method",
        "bits",
    ),
    "plants": (
        "faults planted into 16 processes are named in a comparison with 4",
        "plants",
    ),
    "desync": (
        "ways to deadlock or desync 4 ranks end, with the cause named",
        "desync",
    ),
    "rare": (
        "class weights, balanced sampling and rare-class crops on a held-out drive of CamVid",
        "rare_classes",
    ),
    "attacks": (
        "a second owner, another environment, changed evidence and each planted impure transform are named",
        "attacks",
    ),
    "trace": (
        "what a reader of a run walks through: modules, moves between them, scans of the data",
        "trace",
    ),
    "chaos": (
        "random faults on random layouts: each ends named, leaves nothing, and goes on to equal digests",
        "chaos",
    ),
    "scale": (
        "a model of an update and a start on 1 to 1,024 ranks: counts of the code, assumed links",
        "scale",
    ),
    "cluster": (
        "two machines in namespaces: faults of links, machines and ranks end named, and resume",
        "cluster",
    ),
}
CLAIMS |= {goal: (text, "gpu_claims") for goal, text in GOALS.items()}
WITH_SETTINGS = {
    "C8": "run=runs/NAME and more",
    "engines": "run=runs/NAME and cpp=BUILD",
    "runtime": "artifact=FOLDER",
    "cluster": "names of cases, such as cut dead_1",
    "desync": "ranks=2 and settings of the runs, such as compute.device=cuda",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("claim", nargs="?", choices=CLAIMS)
    parser.add_argument(
        "settings",
        nargs="*",
        help="; ".join(f"{name}: {what}" for name, what in WITH_SETTINGS.items()),
    )
    parser.add_argument(
        "--camvid",
        type=Path,
        help="folder of CamVid, for the claims that use real frames",
    )
    parser.add_argument(
        "--repeats", type=int, help="rounds of a measurement, or number of faults"
    )
    parser.add_argument("--out", type=Path, help="file for the JSON as well")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes: does it still run?"
    )
    given = parser.parse_args()
    if given.claim is None:
        print("\n".join(f"{name:8} {text}" for name, (text, _) in CLAIMS.items()))
        return 0
    if given.settings and given.claim not in WITH_SETTINGS:
        parser.error(f"{given.claim} takes no {given.settings[0]}")
    module = import_module(f"benchmarks.{CLAIMS[given.claim][1]}")
    if given.smoke:
        given.repeats = 1
        vars(module).update(module.SMOKE)
    try:
        found = module.measure(given)
    except SegpipeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    text = json.dumps({"claim": given.claim, "smoke": given.smoke, **found}, indent=2)
    print(text)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + "\n")
    return 0 if found["passed"] or given.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
