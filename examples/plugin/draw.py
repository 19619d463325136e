"""Draws a small data set for this example: `python draw.py shots` makes 16 images of crates and persons on a floor."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import cv2
import numpy as np

SIZE = (96, 128)  # height, width
COLORS = {1: (40, 160, 230), 2: (60, 60, 200)}  # BGR of crates and persons


def draw(folder: Path, num: dict[str, int]) -> None:
    """Write images, masks and pairs.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(0)
    rows = []
    for split, count in num.items():
        for number in range(count):
            image = draws.integers(90, 140, (*SIZE, 3), dtype=np.uint8)
            mask = np.zeros(SIZE, np.uint8)
            for label, color in COLORS.items():
                x, y, width, height = (
                    int(draws.integers(low, high))
                    for low, high in ((0, 90), (0, 50), (15, 38), (20, 46))
                )
                cv2.rectangle(image, (x, y), (x + width, y + height), color, -1)
                cv2.rectangle(mask, (x, y), (x + width, y + height), label, -1)
            mask[:2] = 255
            row = {
                "split": split,
                "image": f"{split}{number:02d}.png",
                "mask": f"{split}{number:02d}_mask.png",
            }
            cv2.imwrite(str(folder / row["image"]), image)
            cv2.imwrite(str(folder / row["mask"]), mask)
            rows.append(row)
    with (folder / "pairs.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["split", "image", "mask"])
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), {"train": 12, "val": 4})
