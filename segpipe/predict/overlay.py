"""Images blended with the colors of their classes, and the legend beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

FONT_SIZE, ROW, MARGIN = 14, 20, 8  # pixels
Palette = Sequence[tuple[int, int, int]]


def blend(
    image: NDArray[np.uint8],
    ids: NDArray[np.uint8],
    palette: Palette,
    opacity: float = 0.65,
) -> NDArray[np.uint8]:
    """`image` blended with the colors of its classes. Ids beyond the palette, such as 255, get a dark diagonal hatch.

    Shapes: image uint8 (H, W, 3) RGB, ids uint8 (H, W) -> uint8 (H, W, 3).
    """
    lut = np.zeros((256, 3), np.float32)
    lut[: len(palette)] = palette
    mixed = (1 - opacity) * image + opacity * lut[ids]
    row, column = np.indices(ids.shape)
    hatch = np.where((row + column) % 12 < 2, 96, 24)[..., None]
    return (
        np.where((ids >= len(palette))[..., None], hatch, mixed)
        .round()
        .astype(np.uint8)
    )


def legend(
    shares: Mapping[str, float], palette: Mapping[str, tuple[int, int, int]]
) -> NDArray[np.uint8]:
    """A dark panel with a line for each class: color, name, and share of the pixels. uint8 (h, w, 3)."""
    texts = [f"{name}  {_percent(share)}" for name, share in shares.items()]
    width = (
        2 * MARGIN
        + ROW
        + round(max((_font().getlength(text) for text in texts), default=0))
    )
    panel = Image.new("RGB", (width, 2 * MARGIN + ROW * len(texts)), (24, 24, 24))
    draw = ImageDraw.Draw(panel)
    for place, (name, text) in enumerate(zip(shares, texts, strict=True)):
        top = MARGIN + ROW * place
        draw.rectangle((MARGIN, top + 4, MARGIN + 12, top + 16), fill=palette[name])
        draw.text((MARGIN + ROW, top + 2), text, fill=(235, 235, 235), font=_font())
    return np.asarray(panel, np.uint8)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.001 else "< 0.1 %"


def beside(picture: NDArray[np.uint8], panel: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Both side by side, uint8 (H, W, 3); the lower one is filled up from below."""
    height = max(len(picture), len(panel))
    parts = [
        np.pad(part, ((0, height - len(part)), (0, 0), (0, 0)), constant_values=24)
        for part in (picture, panel)
    ]
    return np.hstack(parts)


@cache
def _font() -> Any:
    """A font that has more than Latin letters, of matplotlib."""
    import matplotlib

    return ImageFont.truetype(
        str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")),
        FONT_SIZE,
    )
