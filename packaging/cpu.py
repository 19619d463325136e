"""Prints the lock without PyTorch and CUDA: what `make setup CPU=1` installs beside a CPU build of torch."""

import re
from pathlib import Path

LEFT_OUT = re.compile(r"(torch|torchvision|triton|nvidia-[\w-]+|cuda-[\w-]+)==")

lock = Path(__file__).resolve().parents[1] / "requirements.txt"
entries = re.split(r"\n(?=\S)", lock.read_text(encoding="utf-8"))
print("\n".join(entry for entry in entries if not LEFT_OUT.match(entry)))
