"""What a run wrote down at its start and on its way, each against the others: data, sources, configuration, ledger."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from segpipe.audit.report import FAILED, NOTED, PASSED, UNCHECKED, Line
from segpipe.errors import SegpipeError
from segpipe.files import sha256
from segpipe.ledger import inputs
from segpipe.ledger.files import INPUTS, ledger_files
from segpipe.ledger.reader import RunLedger, mapping_differences, read_run
from segpipe.ledger.rows import STEP, read_file
from segpipe.ledger.seals import SUFFIX, first_broken, read_seals
from segpipe.settings.config import Config, check, config_hash, from_mapping, recipe, to_mapping
from segpipe.train import checkpoint

SHOWN = 5  # names in a line


def some(names: Sequence[str]) -> str:
    """The first names, and how many there are besides."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{'; '.join(names[:SHOWN])}{more}"


def check_config(run: Path) -> tuple[Config | None, list[Line]]:
    """The run's configuration, where config.json can be read."""
    path = run / "config.json"
    try:
        config = from_mapping(json.loads(path.read_bytes()))
        check(config, world_size=1)
        return config, []
    except (OSError, ValueError, SegpipeError) as error:
        return None, [Line("config", FAILED, f"{path} is no configuration of a run: {error}")]


def compare_config(run: Path, config: Config, ledger: RunLedger) -> list[Line]:
    """config.json against what the ledger was started with."""
    now, lines = recipe(config), []
    for header in ledger.headers:
        changed = mapping_differences(header.recipe, now)
        if changed:
            text = differences(changed, f"the ledger (session {header.session})", "config.json")
            lines.append(Line("config", FAILED, text))
            break
    if not lines and config_hash(config) != ledger.first.config_hash:
        text = "config.json is not the configuration that the ledger was started with: a setting that reaches no number"
        changed = mapping_differences(_first_settings(run, ledger), _flat(config))
        named = differences(changed, "a checkpoint", "config.json") if changed else "run.*, data.workers or the like"
        lines.append(Line("config", FAILED, f"{text} was changed ({named})"))
    hashed = f"hash {config_hash(config)}"
    return lines or [Line("config", PASSED, f"config.json is that of the ledger: {len(now)} settings, {hashed}")]


def _first_settings(run: Path, ledger: RunLedger) -> dict[str, Any]:
    """All settings of the session that started the run, from one of its checkpoints; none where it left none."""
    for path in sorted(run.glob("*.pt")):
        with contextlib.suppress(SegpipeError, AttributeError, TypeError):
            config = from_mapping(checkpoint.load(path)["config"])
            if config_hash(config) == ledger.first.config_hash:
                return _flat(config)
    return {}


def _flat(config: Config) -> dict[str, Any]:
    """All settings by dotted name."""
    groups = {name: value if isinstance(value, dict) else {"": value} for name, value in to_mapping(config).items()}
    return {f"{name}.{key}".rstrip("."): value for name, group in groups.items() for key, value in group.items()}


def differences(changed: dict[str, tuple[Any, Any]], here: str, there: str) -> str:
    """Settings that differ, with both values."""
    return some([f"{name} is {before!r} in {here} and {now!r} in {there}" for name, (before, now) in changed.items()])


def check_inputs(run: Path, config: Config, ledger: RunLedger | None) -> list[Line]:
    """Data and sources as they are now against inputs.json, and that against the ledger."""
    path = run / INPUTS
    known = ledger.first.inputs if ledger else ""
    if not path.is_file():
        if known:
            return [Line("data", FAILED, f"{path} is missing, but the ledger was started with it")]
        return [Line("data", UNCHECKED, f"{path} does not exist: files and sources were not recorded")]
    try:
        content = inputs.read(path)
    except SegpipeError as error:
        return [Line("data", FAILED, str(error))]
    lines = []
    if ledger and known != sha256(path):
        lines.append(Line("data", FAILED, f"{path} is not the file that the ledger was started with: it was altered"))
    return [*lines, _data(config, content["data"]), _code(content["code"])]


def _data(config: Config, recorded: dict[str, Any]) -> Line:
    files = recorded["files"]
    if config.data.name == "synthetic":
        return Line("data", PASSED, "scenes are painted from the seed: there are no files")
    if not files:
        return Line("data", UNCHECKED, "data.hash was false: the files were not recorded")
    if not Path(config.data.root).is_dir():
        return Line("data", UNCHECKED, f"data.root = {config.data.root} does not exist here")
    try:
        changed = inputs.changes(files, inputs.data_hashes(config.data, ("train", config.data.split)))
    except SegpipeError as error:
        return Line("data", FAILED, f"the data cannot be read: {error}")
    if changed:
        return Line("data", FAILED, f"{config.data.root}: {some(changed)}")
    return Line("data", PASSED, f"{len(files)} files in {config.data.root} are those of the run: {recorded['sha256']}")


def _code(recorded: dict[str, Any]) -> Line:
    changed = inputs.changes(recorded["files"], inputs.source_hashes())
    its = f"segpipe {recorded.get('segpipe')}, {inputs.combined(recorded['files'])}"
    if changed:
        return Line("code", NOTED, f"this is another segpipe than the run's ({its}): {some(changed)}")
    return Line("code", PASSED, f"{len(recorded['files'])} sources as they were: {its}")


def check_ledger(run: Path) -> tuple[RunLedger | None, list[Line]]:
    """The run's ledger, where there is one that can be read."""
    paths = ledger_files(run)
    if not paths:
        return None, [Line("ledger", UNCHECKED, f"{run} holds no ledger (compute.ledger=false, or an older segpipe)")]
    lines = [line for path in paths for line in _seals(path)]
    try:
        ledger = read_run(run)
    except SegpipeError as error:
        return None, [*lines, Line("ledger", FAILED, str(error))]
    lines += [Line("ledger", FAILED, fault) for fault in ledger.faults]
    lines += [Line("ledger", NOTED, note) for note in ledger.notes if note not in ledger.faults]
    if not any(line.status == FAILED for line in lines):
        rows = sum(len(kind) for kind in ledger.rows.values())
        where = f"{len(paths)} file{'s' * (len(paths) > 1)}"
        text = f"{rows} rows of {updates(ledger)} updates in {where}: none is missing or altered"
        lines.append(Line("ledger", PASSED, text))
    return ledger, lines


def updates(ledger: RunLedger) -> int:
    """Updates that the ledger knows of, counted from the start of the run."""
    steps = ledger.rows[STEP]["step"]
    return int(steps.max()) + 1 if len(steps) else 0


def _seals(path: Path) -> list[Line]:
    """A file against its running hashes."""
    seals = read_seals(path)
    if not seals and path.stem == "rank00" and any(path.parents[1].glob("*.pt")):  # each of them sealed it
        return [Line("ledger", FAILED, f"{path.with_suffix(SUFFIX)} is missing, but the run has checkpoints")]
    if not seals:
        return [Line("ledger", UNCHECKED, f"{path.name} has no seal: only the checksums of its rows were compared")]
    broken = first_broken(path, seals)
    if broken is None:
        return []
    found = f"{path} is not what it was when it was sealed: altered, or cut, between bytes {broken[0]} and {broken[1]}"
    return [Line("ledger", FAILED, found + _steps_between(path, *broken))]


def _steps_between(path: Path, first: int, last: int) -> str:
    """Which steps lie between two places of a file, where its rows can be read."""
    try:
        sessions = read_file(path).sessions
    except SegpipeError:
        return ""
    steps = []
    for session in sessions:
        ends = session.start + session.rows.itemsize * (1 + np.arange(len(session.rows)))
        steps += session.rows["step"][(ends > first) & (ends <= last)].tolist()
    return f" (steps {min(steps)} to {max(steps)})" if steps else ""
