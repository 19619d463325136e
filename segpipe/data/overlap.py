"""Images that training and validation both read: a score on them says nothing about new images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from segpipe.errors import DataError
from segpipe.files import sha256


def shared_files(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of files of equal bytes, one of each list. Reads only files whose sizes occur in both."""
    sizes = {path: os.stat(path).st_size for path in (*first, *second)}
    common = {sizes[path] for path in first} & {sizes[path] for path in second}
    known = {sha256(Path(path)): path for path in first if sizes[path] in common}
    digests = ((sha256(Path(path)), path) for path in second if sizes[path] in common)
    return [(known[digest], path) for digest, path in digests if digest in known]


def check_overlap(train: Sequence[str], val: Sequence[str], split: str) -> None:
    """Raise DataError if images of validation, given as files, are training images too."""
    if found := shared_files(train, val):
        raise DataError(
            f"{len(found)} of the images of split {split} are training images, byte for byte (the first: {found[0][0]} "
            f"= {found[0][1]}): the score would be too good. Remove them from one of the two, or set "
            f"data.allow_overlap=true."
        )
