"""Which frames fit an exported file, and the shapes of the answers to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Shape = tuple[int, ...]


def resolved(axes: Sequence[int | str], lengths: Mapping[str, int]) -> Shape:
    """`axes` of the manifest in numbers; "height/8" is an eighth of the length of `height`."""
    return tuple(axis if isinstance(axis, int) else _resolved(axis, lengths) for axis in axes)


def exported_lengths(io: Mapping[str, Any]) -> dict[str, int]:
    """Length of each free axis in the shape of the export; empty for a file of one shape."""
    return {axis: int(entry["exported"]) for axis, entry in io.get("free", {}).items()}


class Shapes:
    """Shapes of frames and of their answers, without the axis of the batch, by `io` of a manifest."""

    def __init__(self, io: Mapping[str, Any]) -> None:
        self._frame: Sequence[int | str] = io["inputs"][0]["shape"][1:]
        self._answers: list[Sequence[int | str]] = [entry["shape"][1:] for entry in io["outputs"]]
        self._free: Mapping[str, Mapping[str, int]] = io.get("free", {})
        self.exported = resolved(self._frame, exported_lengths(io))
        # A manifest that tells less than is needed is refused here, when it is read, and not at some frame.
        if not self.fits(self.exported) or not self.answers(self.exported):
            raise ValueError(f"io: {self.exported} does not fit what is said about free axes")

    def fits(self, shape: Shape) -> bool:
        """Whether a frame of this shape can be answered."""
        return len(shape) == len(self._frame) and all(map(self._is_within, shape, self._frame))

    def words(self) -> str:
        """Height x width of the frames that fit, such as `360x480`, or `64 to 96 in steps of 4 x 480`."""
        lengths = [str(axis) if isinstance(axis, int) else self._range(axis) for axis in self._frame[:2]]
        return ("x" if all(isinstance(axis, int) for axis in self._frame[:2]) else " x ").join(lengths)

    def _range(self, axis: str) -> str:
        entry = self._free[axis]
        last = f" to {entry['max']}" if "max" in entry else " or more"
        return f"{entry['min']}{last} in steps of {entry['multiple']}"

    def answers(self, shape: Shape) -> list[Shape]:
        """Shapes of the answers to a frame that fits."""
        lengths = {axis: length for axis, length in zip(self._frame, shape, strict=True) if isinstance(axis, str)}
        return [resolved(axes, lengths) for axes in self._answers]

    def _is_within(self, length: int, axis: int | str) -> bool:
        if isinstance(axis, int):
            return length == axis
        entry = self._free[axis]
        return entry["min"] <= length <= entry.get("max", length) and length % entry["multiple"] == 0


def _resolved(axis: str, lengths: Mapping[str, int]) -> int:
    name, _, stride = axis.partition("/")
    return lengths[name] // int(stride or 1)
