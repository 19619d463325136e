"""Copies segpipe/runtime into the wheel as `segpipe_runtime`, so that it can be installed beside segpipe."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path(__file__).resolve().parents[2] / "segpipe" / "runtime"


class RuntimeSources(BuildHookInterface):
    """Renames the package in imports and messages; nothing else changes."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the renamed sources to the wheel."""
        self.folder = Path(tempfile.mkdtemp(prefix="segpipe-runtime-"))
        for path in sorted(SOURCE.rglob("*.py")):
            target = self.folder / path.relative_to(SOURCE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(
                path.read_text().replace("segpipe.runtime", "segpipe_runtime")
            )
        (self.folder / "py.typed").touch()
        build_data["force_include"][str(self.folder)] = "segpipe_runtime"

    def finalize(
        self, version: str, build_data: dict[str, Any], artifact_path: str
    ) -> None:
        """Delete the copy."""
        shutil.rmtree(self.folder)
