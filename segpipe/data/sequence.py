"""Which sequence (drive, recording) an image belongs to, by its name.

Neighboring frames of one video show nearly the same scene. Where a sequence is in both training and validation, the
score says little about places that training has not seen.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from segpipe.errors import DataError

# A word of a name that is a number, with a short prefix at most: 08640, f00930, frame0012.
_NUMBER = re.compile(r"(?<![0-9A-Za-z])([A-Za-z]{0,6})([0-9]+)(?![0-9A-Za-z])")
_END = re.compile(r"[\W_]+$")


def sequence(name: str, pattern: str = "") -> str:
    """Sequence of the image `name`, a path below the split's folder without suffix (`Samples.name`).

    The folder, if the name has one; otherwise what stands before the last number. A name without a number is a
    sequence of its own:

    `0016E5_08640` -> `0016E5`, `Seq05VD_f00030` -> `Seq05VD`, `lindau/lindau_000003_000019_leftImg8bit` -> `lindau`,
    `lindau_000003_000019` -> `lindau_000003`, `frame0012` -> `frame`, `000012` -> `unnamed`, `kitchen` -> `kitchen`.

    With `pattern`, a regular expression, its first group or else its whole match. Raises DataError for a name that it
    does not match.
    """
    if not pattern:
        return frame(name)[0]
    found = re.search(pattern, name)
    if found is None or not (text := found[1] if found.re.groups else found[0]):
        raise DataError(
            f"data.sequence = {pattern!r} does not match {name}. Change it, or leave it empty."
        )
    return text


def frame(name: str) -> tuple[str, int | None]:
    """Sequence of an image by the rule above and its number in it; None for a name without a number."""
    path = PurePosixPath(name)
    folder = "" if path.parent == PurePosixPath(".") else str(path.parent)
    numbers = list(_NUMBER.finditer(path.name))
    if not numbers:
        return folder or path.name, None
    before = _END.sub("", path.name[: numbers[-1].start()]) or numbers[-1][1]
    return folder or before or "unnamed", int(numbers[-1][2])
