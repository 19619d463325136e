"""segpipe from Python: the functions that the commands of the same names call.

    import segpipe
    run = segpipe.train(["model=ddrnet23_slim", "data=folder", "data.root=ours", "train.epochs=100"])
    ids, confidence = segpipe.load(run.folder).predict(image)  # uint8 RGB (H, W, 3)

Errors are those of segpipe.errors. `settings` are those of the run that are replaced, {"data.split": "test"}; `keys`
are the other keys of the command, as `segpipe evaluate --help` lists them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from segpipe import plugins
from segpipe.cli.commands import COMMANDS, TRUST
from segpipe.settings.compose import complete, compose, quoted
from segpipe.settings.config import SETTINGS, Config

if TYPE_CHECKING:
    from segpipe.export.verify_report import ExportReport
    from segpipe.ledger.divergence import Comparison
    from segpipe.predict.predictor import Predictor

Settings = Sequence[str] | Mapping[str, Any] | Config


@dataclass(frozen=True)
class RunResult:
    """A finished training: its folder, the content of result.json, and the mIoU of the validation, from 0 to 1."""

    folder: Path
    figures: dict[str, Any]

    @property
    def miou(self) -> float | None:
        """None if no pixel of the validation is labelled."""
        found: float | None = self.figures["miou"]
        return found


def train(settings: Settings = ()) -> RunResult:
    """Train a network into a folder of its own and export it; what the run ended with.

    settings: as typed (["model=pidnet_s", "optim.lr=0.1"]), by name ({"model": "pidnet_s", "optim": {"lr": 0.1}}), or a
    Config. A script needs `if __name__ == "__main__":` for several processes. Sets torch's determinism in this process.
    """
    result: RunResult = _command("train").train(configuration(settings))
    return result


def configuration(settings: Settings = ()) -> Config:
    """The configuration that `train` uses for these settings."""
    if isinstance(settings, Config):
        return settings
    if isinstance(settings, Mapping):
        return compose(list(_overrides(settings)))
    return compose(list(settings))


def load(
    folder: Path | str,
    *,
    settings: Mapping[str, Any] | None = None,
    trust: Sequence[str] = (),
    **keys: Any,
) -> Predictor:
    """The network of a run, or of an exported folder: `.predict(image)` gives class ids and confidence.

    Shapes: image uint8 RGB (H, W, 3) -> uint8 (H, W), float32 (H, W) from 0 to 1. `.names` and `.palette` are those of
    the classes. Keys are those of `segpipe predict` but for its files, such as which="best" or tta=["flip"].
    """
    from segpipe.runtime.artifact import MANIFEST

    predict = _command("predict")
    kind = "artifact" if (Path(folder) / MANIFEST).is_file() else "run"
    # What `segpipe predict` does with its files is of no account here.
    values = keys | {kind: folder, "trust": trust, "source": "-", "out": "-"}
    given = _given("predict", values, settings)
    predict.check(given, has_video=False)
    found: Predictor = predict.predictor(given)
    return found


def evaluate(
    run: Path | str,
    *,
    settings: Mapping[str, Any] | None = None,
    trust: Sequence[str] = (),
    **keys: Any,
) -> dict[str, Any]:
    """Scores of a run on a split: what `segpipe evaluate` prints, by the same names."""
    values = keys | {"run": run, "trust": trust}
    given = _given("evaluate", values, settings)
    figures: dict[str, Any] = _command("evaluate").evaluate(given).figures
    return figures


def export(
    run: Path | str,
    *,
    settings: Mapping[str, Any] | None = None,
    trust: Sequence[str] = (),
    **keys: Any,
) -> ExportReport:
    """Export a run; the published folder with the result of every gate. Raises ExportMismatch if it fails one."""
    values = keys | {"run": run, "trust": trust}
    report: ExportReport = _command("export").export(_given("export", values, settings))
    return report


def compare(
    a: Path | str, b: Path | str, *, trust: Sequence[str] = (), **keys: Any
) -> Comparison:
    """Whether two runs hold the same bits, and where they first differ."""
    values = keys | {"a": a, "b": b, "trust": trust}
    found: Comparison = _command("runs").compared(_given("compare", values, {}))
    return found


def _command(name: str) -> ModuleType:
    """The module of a command; not before it is called, since most import torch."""
    return import_module(f"segpipe.cli.{name}")


def _given(
    name: str, values: Mapping[str, Any], settings: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What the command line of these values would give."""
    command = COMMANDS[name]
    plain = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in {**values, **(settings or {})}.items()
    }
    given = complete(plain, command.keys, command.settings)
    plugins.trust(given[TRUST.key])
    return given


def _overrides(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The settings as they would be typed."""
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in SETTINGS:
            yield from _overrides(value, f"{key}.")
        else:
            is_text = isinstance(value, str | Path)
            yield f"{key}={value if is_text else _typed(value)}"


def _typed(value: Any) -> str:
    if isinstance(value, Mapping):
        entries = (f"{key}: {_typed(each)}" for key, each in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_typed, value))}]"
    if isinstance(value, str | Path):
        return quoted(str(value))
    return json.dumps(value)
