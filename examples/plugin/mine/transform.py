"""A flickering lamp: rows of the image get darker and brighter, as with a rolling shutter."""

from __future__ import annotations

from typing import Any

import albumentations as A
import numpy as np
from numpy.typing import NDArray


class Flicker(A.ImageOnlyTransform):
    """Draws from `self.py_random` only, which segpipe sets from the key of the sample."""

    def __init__(self) -> None:
        super().__init__(p=0.3)

    def get_params(self) -> dict[str, Any]:
        return {
            "depth": self.py_random.uniform(0.1, 0.5),
            "rows": self.py_random.randint(8, 64),
        }

    def apply(
        self, img: NDArray[np.uint8], depth: float, rows: int, **_: Any
    ) -> NDArray[np.uint8]:
        # Whole steps instead of a sine: the last bit of a sine depends on the library.
        phase = (np.arange(img.shape[0]) % rows < rows // 2)[:, None, None]
        factor = np.where(phase, 256, round(256 * (1 - depth))).astype(np.uint16)
        return ((img * factor) >> 8).astype(np.uint8)
