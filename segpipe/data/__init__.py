"""Data sets, real or synthetic, as batches: catalog, samples, scenes, augment, order, loader."""

import numpy as np
from numpy.typing import NDArray

# Arrays by dtype.
Uint8 = NDArray[np.uint8]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Pixels = Uint8 | NDArray[np.uint16]  # pixels of a mask file
Sample = tuple[Uint8, Uint8]  # image (H, W, 3) RGB, target (H, W) of train ids
Size = tuple[int, int]  # (height, width)
PHOTOS = "data.sequence='(.*)'"  # makes each image a sequence of its own
