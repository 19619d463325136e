"""What a data set is: one protocol for folders, published sets, packs, mixtures, synthetic and plug-in sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.errors import DataError

if TYPE_CHECKING:
    from segpipe.data.catalog import ClassTable
    from segpipe.data.samples import FileSamples

Image = NDArray[np.uint8]  # (H, W, 3) RGB
Target = NDArray[np.uint8]  # (H, W) train ids
Sample = tuple[Image, Target]
Value = int | tuple[int, int, int]  # an id or a color in a mask
# A file; or of a sample that names none, what reads it and returns its SHA-256.
Input = Path | Callable[[], str]
SOME = 64  # samples that stand for all where there is no bound on the cost of one


class Content(NamedTuple):
    """What a target holds, before the class table may refuse it."""

    pixels: NDArray[np.int64]  # of each class, of ignored ones, of unknown values
    kind: str = ""  # of the mask file, such as "grey, 8 bits"


class SubSet(NamedTuple):
    """One set of a mixture, with the classes of the shared table; or a whole data set."""

    label: str  # empty: it is no mixture
    samples: DataSet
    weight: float


class Samples(Protocol):
    """What training reads: small to pickle, one sample at a time, the same for every reader."""

    if TYPE_CHECKING:  # a dataclass would take an inherited property for a default

        @property
        def classes(self) -> ClassTable:
            """The table of the train ids that `read` returns."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """File stem or scene id, for messages and reports."""

    def read(self, index: int) -> Sample:
        """Image uint8 (H, W, 3) RGB and target uint8 (H, W) of train ids. Raises DataError naming the file."""


class DataSet(Samples, Protocol):
    """A split as it was opened, with all that checks and reports ask of it.

    What a kind of data set does not define is found by reading samples.
    """

    def thread_safe(self) -> bool:
        """Whether several threads may read at once."""
        return True

    def file_sets(self) -> Sequence[FileSamples]:
        """The sets in files that it consists of: none, itself, or those of a mixture."""
        return ()

    def inputs(self) -> dict[str, Input]:
        """What the samples are made from, by its name in inputs.json: the path below the root of the data set."""
        return {}

    def size(self, index: int) -> tuple[int, int]:
        """(height, width) of a sample."""
        height, width = self.read(index)[1].shape
        return height, width

    def counts(self, index: int) -> NDArray[np.int64]:
        """Pixels of each class, int64 (C,); ignored pixels are not counted."""
        return self.content(index).pixels[:-2]

    def content(self, index: int) -> Content:
        """What the target holds."""
        target = self.read(index)[1]
        pixels = np.bincount(target.ravel(), minlength=IGNORE_INDEX + 1)
        counts = pixels[: self.classes.num_classes]
        return Content(np.append(counts, [pixels[IGNORE_INDEX], 0]))

    def countable(self) -> list[int]:
        """Indices of the samples that tell the frequencies of classes at a bounded cost, in their order."""
        return list(range(min(SOME, len(self))))

    def parts(self) -> list[SubSet]:
        """The sets of a mixture, or this one."""
        return [SubSet("", self, float(len(self)))]

    def problems(
        self,
        indices: Sequence[int],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Iterator[str]:
        """Message for every sample among these that cannot be read, or has the name of another one."""
        first: dict[str, int] = {}
        for done, index in enumerate(indices, 1):
            progress(done, len(indices))
            try:
                self.read(index)
                name = self.name(index)
            except DataError as error:
                yield str(error)
                continue
            other = first.setdefault(name, index)
            if other != index:
                yield f"samples {other} and {index} are both named {name}. Give each a name of its own."
