"""Every check that needs a GPU, in one call of at most ten minutes; without a GPU it says so and ends with 0.

    python scripts/gpu_check.py [--seconds 570] [--camvid FOLDER] [--out FILE.json] [--only steps speed]

Exit codes: 0 no check failed or no GPU, 1 a check failed. `--device cpu --size 64` runs the same code on a CPU.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from segpipe.determinism import flags

flags.set_environment()

import torch  # noqa: E402
from rich.console import Console  # noqa: E402

from benchmarks.gpu import CHECKS, LEFT_OUT, Bench, run  # noqa: E402


def main(arguments: list[str]) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=570)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--camvid", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    given = parser.parse_args(arguments)
    console = Console()
    if given.device == "cuda" and not torch.cuda.is_available():
        console.print("no GPU here: nothing was checked")
        return 0
    flags.apply(threads=torch.get_num_threads())
    deadline = time.monotonic() + given.seconds
    device = torch.device(given.device)
    bench = Bench(device, deadline, given.size, given.batch, given.updates, given.camvid, given.folder)
    report = {"fingerprint": flags.fingerprint(), "device": given.device, "checks": {}}
    failed = False
    for name, sound, figures in run(bench, given.only):
        failed = failed or not sound
        verdict = "FAILED" if not sound else LEFT_OUT if LEFT_OUT in figures else "passed"
        report["checks"][name] = {"passed": verdict == "passed", **figures}
        console.print(f"{verdict}  {name}  {json.dumps(figures)}", markup=False, soft_wrap=True)
        if given.out:
            given.out.write_text(json.dumps(report, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
