"""Where a trained network comes from: commit, checkpoint file, and what its run measured."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segpipe.errors import DataError, WeightsError
from segpipe.export.verify_report import integrity_refusal
from segpipe.files import sha256

if TYPE_CHECKING:
    from segpipe.train.checkpoint import TrainedNetwork

ROOT = Path(__file__).resolve().parents[3]
_METRICS = ("miou", "pixel_accuracy", "iou", "absent", "pixels")


@dataclass(frozen=True)
class Origin:
    """Manifest entries that the weights do not tell; None where unknown."""

    git: dict[str, Any] | None = None  # commit, dirty, known_at: train or export
    checkpoint: dict[str, str] | None = None  # file, sha256
    metrics: dict[str, Any] | None = None  # of the run's last validation, in fp32
    warnings: tuple[str, ...] = ()  # sentences that a reader of the scores must know


def origin_of(run: Path, which: str, trained: TrainedNetwork) -> Origin:
    """Origin of a network loaded from a run folder, or from one checkpoint file.

    Metrics come from result.json if it is about the same weights. Raises DataError when that file is not valid JSON.
    """
    path = run
    if run.is_dir():
        has_best = which == "best" and (run / "best.pt").is_file()
        path = run / ("best.pt" if has_best else "last.pt")
    result = _result(path.parent)
    git = result.get("git")
    metrics = None
    if result.get("ema_digest") == trained.ema_digest:
        metrics = {name: result.get(name) for name in _METRICS}
        metrics["split"] = trained.config.data.split
    planned = trained.config.train.steps
    done = max(trained.step, int(result.get("steps") or 0))
    warnings: tuple[str, ...] = ()
    if done < planned and not result.get("stopped_early"):
        warnings = (
            f"trained for {trained.step} of {planned} steps: the run was interrupted, or goes on",
        )
    return Origin(
        git={**git, "known_at": "train"} if isinstance(git, dict) else git_state(ROOT),
        checkpoint={"file": path.name, "sha256": sha256(path)}
        if path.is_file()
        else None,
        metrics=metrics,
        warnings=warnings,
    )


@contextlib.contextmanager
def every_tensor_used(verdict: str) -> Iterator[None]:
    """Turns a WeightsError of `load_network` into the refusal of G1: tensors are missing, unexpected or misshaped."""
    try:
        yield
    except WeightsError as error:
        raise integrity_refusal(verdict, [str(error)], "the checkpoint") from error


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit of the checkout at `root` and whether tracked files differ; None without a checkout or without git."""
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": bool(changed), "known_at": "export"}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()


def _result(folder: Path) -> dict[str, Any]:
    path = folder / "result.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} is not valid JSON ({error}). Run segpipe evaluate, or remove the file."
        ) from None
