"""Pairs of image and mask from a CSV table with the columns split, image, mask."""

from __future__ import annotations

import csv
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray


class CsvPairs:
    """A split. Masks hold class ids as gray values, 255 for pixels without a label."""

    classes = ("floor", "crate", "person")
    palette = ((128, 64, 128), (250, 170, 30), (220, 20, 60))

    def __init__(self, root: str, split: str, table: str = "pairs.csv") -> None:
        self.table = Path(root) / table
        with self.table.open(newline="") as file:
            self.rows = [row for row in csv.DictReader(file) if row["split"] == split]

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        return Path(self.rows[index]["image"]).stem

    def files(self, index: int) -> list[Path]:
        """Optional: files whose SHA-256 goes into inputs.json, so that an audit detects changes."""
        row = self.rows[index]
        return [
            self.table,
            self.table.parent / row["image"],
            self.table.parent / row["mask"],
        ]

    def read(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        _, image, mask = self.files(index)
        rgb = cv2.cvtColor(cv2.imread(str(image), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
        return np.asarray(rgb, np.uint8), np.asarray(
            cv2.imread(str(mask), cv2.IMREAD_GRAYSCALE), np.uint8
        )
