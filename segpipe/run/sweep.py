"""Trains the jobs of a --multirun one after another, each in processes of its own, and summarizes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from segpipe.errors import ConfigError, Interrupted, SegpipeError
from segpipe.settings.compose import resolve
from segpipe.settings.config import Config, recipe

REPEATS = ("seed", "data.hold_out")  # runs that differ in nothing else repeat one recipe


@dataclass(frozen=True)
class Outcome:
    """One finished job of a sweep."""

    name: str
    code: int
    recipe: dict[str, Any]  # its settings without those of REPEATS
    result: dict[str, Any] | None  # content of result.json
    held_out: str = ""  # data.hold_out


class Sweep:
    """Trains jobs with `train`, which returns an exit code, and keeps their results.

    `train` must start other processes for each job, so that the runs share no state.
    """

    def __init__(self, train: Callable[[Config], int]) -> None:
        self._train = train
        self._outcomes: list[Outcome] = []
        self._folders: set[Path] = set()
        self._interrupted = False

    @property
    def started(self) -> bool:
        """Whether there was a job to train."""
        return bool(self._outcomes)

    def job(self, composed: DictConfig) -> None:
        """Train one job. A failure does not stop the following jobs, but Ctrl-C does."""
        if self._interrupted:
            return
        try:
            config = resolve(composed)
            self._check_own_folder(config)
        except SegpipeError as error:
            print(error, file=sys.stderr)
            self._outcomes.append(Outcome(str(OmegaConf.select(composed, "run.name")), error.exit_code, {}, None))
            return
        code = self._train(config)
        self._interrupted = code == Interrupted.exit_code
        path = config.run_dir / "result.json"
        result = json.loads(path.read_text()) if code == 0 and path.is_file() else None
        settings = {key: value for key, value in recipe(config).items() if key not in REPEATS}
        self._outcomes.append(Outcome(str(config.run_dir), code, settings, result, config.data.hold_out))

    def _check_own_folder(self, config: Config) -> None:
        """Refuse two jobs in one folder: the second would replace or resume the first."""
        if config.run_dir in self._folders:
            raise ConfigError(
                f"run.name = {config.run.name} is also that of another job of this sweep. Include the swept settings: "
                f"'run.name=NAME-${{optim.lr}}'."
            )
        self._folders.add(config.run_dir)

    def finish(self) -> int:
        """Print a table of all runs, and the spread over the seeds of each recipe; returns the first exit code that
        is not 0."""
        if not self._outcomes:
            return 0
        if self._interrupted:
            print("the sweep was interrupted; jobs that are not in the table did not start.", file=sys.stderr)
        table = Table("run", "exit code", "mIoU %", title="sweep", title_justify="left")
        for outcome in self._outcomes:
            score = outcome.result["miou"] if outcome.result else None  # also None if no pixel is labelled
            table.add_row(outcome.name, str(outcome.code), "-" if score is None else f"{100 * score:.2f}")
        console = Console(markup=False)
        console.print(table)
        for title, results in _by_recipe(self._outcomes):
            console.print(_spread(title, results))
        return next((outcome.code for outcome in self._outcomes if outcome.code), 0)


def _by_recipe(outcomes: list[Outcome]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Results of each recipe with more than one run, under the settings in which the recipes differ."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.result is not None:
            groups.setdefault(json.dumps(outcome.recipe, sort_keys=True), []).append(outcome)
    recipes = [members[0].recipe for members in groups.values()]
    differing = [key for key in (recipes[0] if recipes else {}) if len({str(r.get(key)) for r in recipes}) > 1]
    found = []
    for members in groups.values():
        if len(members) > 1:
            repeated = "held-out sequences" if len({outcome.held_out for outcome in members}) > 1 else "seeds"
            recipe_of = ", ".join(f"{key}={members[0].recipe.get(key)}" for key in differing)
            title = f"{len(members)} {repeated}{f' of {recipe_of}' if recipe_of else ''}: IoU in %"
            found.append((title, [outcome.result for outcome in members if outcome.result is not None]))
    return found


def _spread(title: str, results: list[dict[str, Any]]) -> Table:
    """Mean and range of mIoU and of each class's IoU over the runs of a recipe."""
    table = Table("class", "mean", "lowest", "highest", "range", title=title, title_justify="left")
    rows = {name: [result["iou"].get(name) for result in results] for name in results[0]["iou"]}
    rows["mean of classes"] = [result["miou"] for result in results]
    for name, scores in rows.items():
        known = [100 * score for score in scores if score is not None]
        if name == "mean of classes":
            table.add_section()
        if known:
            low, high = min(known), max(known)
            table.add_row(name, *(f"{number:.2f}" for number in (fmean(known), low, high, high - low)))
    return table
