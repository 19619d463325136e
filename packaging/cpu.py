"""Prints the lock without PyTorch and CUDA: what `make setup CPU=1` installs beside a CPU build of torch.

First asks pip which build it would take for TORCH, the argument, by its metadata: before 3 GB are fetched.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

LEFT_OUT = re.compile(r"(torch|torchvision|triton|nvidia-[\w-]+|cuda-[\w-]+)==")
CUDA = re.compile(r"(nvidia|cuda)-")
ADVICE = """make CPU=1: pip found no CPU build of torch. Name an index or a folder that has one in PIP_EXTRA_INDEX_URL
or PIP_FIND_LINKS, or its file as TORCH=FILE.whl; "Get started" of PyTorch says where CPU builds are. Then repeat the
command."""


def needs_cuda(report: str) -> bool:
    """Whether the build in a report of pip requires CUDA on this machine."""
    from pip._vendor.packaging.requirements import Requirement

    (found,) = json.loads(report)["install"]
    required = map(Requirement, found["metadata"].get("requires_dist", []))
    return any(
        CUDA.match(each.name)
        and (not each.marker or each.marker.evaluate({"extra": ""}))
        for each in required
    )


def main(torch: str) -> None:
    """Prints the lock; ends with 2 where pip would fetch a build for CUDA."""
    ask = ["install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
    pip = [sys.executable, "-m", "pip", *ask, "--report", "-", torch]
    found = subprocess.run(pip, stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode or needs_cuda(found.stdout):
        print(ADVICE, file=sys.stderr)
        sys.exit(2)
    lock = Path(__file__).resolve().parents[1] / "requirements.txt"
    entries = re.split(r"\n(?=\S)", lock.read_text(encoding="utf-8"))
    print("\n".join(entry for entry in entries if not LEFT_OUT.match(entry)))


if __name__ == "__main__":
    main(sys.argv[1])
