"""Files on disk: hashed, and written so that they are whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from glob import escape
from pathlib import Path
from typing import Any

from segpipe.errors import CheckpointError


def sha256(path: Path) -> str:
    """SHA-256 of a file, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Put `content` at `path` so that a crash leaves either the old file or the new one, never a part.

    Raises CheckpointError when it cannot be written (a full disk, say); what was at `path` is then still there.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{escape(path.name)}.*.tmp"):  # of a process that was killed while it wrote
            left.unlink(missing_ok=True)
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself must survive a power cut
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        kept = "the file that was there before is unharmed" if path.exists() else "no file was there before"
        raise CheckpointError(
            f"{path} ({len(content) / 2**20:.1f} MiB) could not be written: {error.strerror or error}; {kept}. "
            f"Free some space, or choose another run.root, then continue with run.exists=resume."
        ) from error


def plain(value: Any) -> Any:
    """`value` in JSON's types; arrays and tensors become lists, NaN and infinities become None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json(content: Mapping[str, Any]) -> bytes:
    """`plain(content)` as indented JSON with a newline at the end."""
    return (json.dumps(plain(content), indent=2, allow_nan=False) + "\n").encode()
