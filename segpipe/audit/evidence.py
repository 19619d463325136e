"""Checks the files of a run against each other: data, sources, configuration, ledger, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from segpipe.audit.verdict import FAILED, NOTED, PASSED, UNCHECKED, Line, shortened
from segpipe.data.mix import absent_root
from segpipe.data.samples import open_splits
from segpipe.errors import CheckpointError, ConfigError, SegpipeError
from segpipe.files import sha256
from segpipe.ledger import inputs
from segpipe.ledger.reader import RunLedger, read_run
from segpipe.ledger.results import changes, mapping_differences, read_inputs
from segpipe.ledger.rows import INPUTS
from segpipe.settings.check import check
from segpipe.settings.config import (
    Config,
    config_hash,
    course,
    flat,
    from_mapping,
    recipe,
    saved_config,
)
from segpipe.train import checkpoint
from segpipe.train.start import weights_path

if TYPE_CHECKING:
    from segpipe.data.catalog import ClassTable

# Raised for content that matches its own digests but is not what a run writes.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError)


def differences(changed: Mapping[str, tuple[Any, Any]], here: str, there: str) -> str:
    """Settings that differ, with both values."""
    return shortened(
        [
            f"{name} is {one!r} in {here} and {two!r} in {there}"
            for name, (one, two) in changed.items()
        ]
    )


def read_config(run: Path) -> Config:
    """The configuration of a run. Raises CheckpointError when config.json is missing or invalid."""
    try:
        config = saved_config(run)
        check(config, world_size=1)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    return config


def check_inputs(run: Path, config: Config) -> list[Line]:
    """Current data and sources against inputs.json."""
    path = run / INPUTS
    if not path.is_file():
        text = f"{path} does not exist: files and sources were not recorded"
        return [Line("data", UNCHECKED, text)]
    try:
        content = read_inputs(path)
    except SegpipeError as error:
        return [Line("data", FAILED, str(error))]
    return [_check_data(config, content["data"]), _check_code(content["code"])]


def _check_data(config: Config, recorded: Mapping[str, Any]) -> Line:
    if absent := absent_root(config.data):
        return Line("data", UNCHECKED, f"data.root = {absent} does not exist here")
    try:
        changed = inputs.changed_files(recorded, open_splits(config, packed=False))
    except SegpipeError as error:
        return Line("data", FAILED, f"the data cannot be read: {error}")
    if changed:
        return Line("data", FAILED, f"{config.data.root}: {shortened(changed)}")
    if recorded["files"]:
        text = f"{len(recorded['files'])} files in {config.data.root} are unchanged: {recorded['sha256']}"
        return Line("data", PASSED, text)
    if recorded.get("hashed"):
        return Line(
            "data", PASSED, "the samples are made from the seed, not from files"
        )
    text = "contents were not recorded (data.hash=false); names and sizes are unchanged"
    return Line("data", UNCHECKED, text)


def _check_code(recorded: Mapping[str, Any]) -> Line:
    """Other sources are noted: the replayed bits decide."""
    now = inputs.source_hashes()
    if changed := changes(recorded["files"], now):
        text = f"this segpipe is not that of the run: {shortened(changed)}"
        return Line("code", NOTED, text)
    text = f"{len(now)} files are unchanged: {recorded['sha256']}"
    return Line("code", PASSED, text)


def check_weights(config: Config) -> list[Line]:
    """The file of `model.weights` against its SHA-256 in config.json; nothing for a run from the seed."""
    if not config.model.weights:
        return []
    path, expected = weights_path(config), config.model.weights_sha256
    if not path.is_file():
        text = (
            f"{path} does not exist here. Set model.weights=FILE to replay from step 0"
        )
        return [Line("weights", UNCHECKED, text)]
    if sha256(path) != expected:
        text = f"{path} is not the file that the run was started with: its SHA-256 was {expected}"
        return [Line("weights", UNCHECKED, text)]
    return [Line("weights", PASSED, f"{path} is unchanged: {expected}")]


def check_ledger(run: Path) -> tuple[RunLedger | None, list[Line]]:
    """The run's ledger, None when it cannot be read, and what is wrong with it."""
    try:
        ledger = read_run(run)
    except CheckpointError as error:
        return None, [Line("ledger", FAILED, str(error))]
    lines = [Line("ledger", FAILED, fault) for fault in ledger.faults]
    if not lines:
        rows = sum(map(len, ledger.rows.values()))
        text = f"{rows} rows of {ledger.num_updates} updates are whole"
        lines.append(Line("ledger", PASSED, text))
    return ledger, lines + [Line("ledger", NOTED, note) for note in ledger.notes]


class CheckedCheckpoint(NamedTuple):
    """A checkpoint that passed."""

    path: Path
    step: int
    digests: Mapping[str, str]  # of model, ema and the rest
    best_miou: float
    settings: Config


def check_checkpoints(
    run: Path, config: Config, ledger: RunLedger, classes: ClassTable | None
) -> tuple[list[CheckedCheckpoint], list[Line]]:
    """Checkpoints that passed, by step, and a line for each file.

    classes: those of the data set; None where it is not on this machine.
    """
    passed, lines = [], []
    for path in sorted(run.glob("*.pt")):
        try:
            saved = checkpoint.load(path)
            found = CheckedCheckpoint(
                path,
                int(saved["step"]),
                saved["digests"],
                float(saved["best_miou"]),
                from_mapping(saved["config"]),
            )
            faults = [
                *_setting_faults(found, saved, config, ledger),
                *_class_faults(saved["classes"], classes),
            ]
        except SegpipeError as error:
            lines.append(Line(path.name, FAILED, str(error)))
            continue
        except MALFORMED as error:
            lines.append(Line(path.name, FAILED, f"its content is malformed: {error}"))
            continue
        if faults:
            lines.append(Line(path.name, FAILED, shortened(faults)))
            continue
        passed.append(found)
        digests = (
            f"weights {found.digests['model']}, averaged weights {found.digests['ema']}"
        )
        text = f"after {found.step} updates; the file is unchanged; {digests}"
        lines.append(Line(path.name, PASSED, text))
    return sorted(passed, key=lambda each: (each.step, each.path.name)), lines


def _setting_faults(
    found: CheckedCheckpoint,
    saved: Mapping[str, Any],
    config: Config,
    ledger: RunLedger,
) -> list[str]:
    """All settings must be those of a session: a resume may set those anew that do not affect the numbers."""
    if config_hash(saved["config"]) in _session_hashes(ledger):
        return []
    changed = mapping_differences(flat(config), flat(found.settings))
    named = differences(changed, "config.json", found.path.name)
    return [f"its settings are those of no session of the ledger: {named}"]


def _class_faults(saved: Mapping[str, Any], classes: ClassTable | None) -> list[str]:
    expected = asdict(classes) if classes else {}
    return [
        f"its class {part} are not those of the data set"
        for part in ("names", "palette", "train_ids")
        if expected and saved[part] != expected[part]
    ]


def _session_hashes(ledger: RunLedger) -> set[str]:
    return {header.config_hash for header in ledger.headers}


def check_config(
    run: Path,
    config: Config,
    ledger: RunLedger,
    checkpoints: list[CheckedCheckpoint],
) -> Line:
    """config.json against the header of every session."""
    for header in ledger.headers:
        changed = mapping_differences(course(header.recipe), course(recipe(config)))
        if changed:
            session = f"the ledger (session {header.session})"
            return Line("config", FAILED, differences(changed, session, "config.json"))
    # As saved: versions differ in settings.
    digest = config_hash(dict(json.loads((run / "config.json").read_bytes())))
    if digest in _session_hashes(ledger):
        return Line("config", PASSED, f"config.json matches the ledger: hash {digest}")
    first = next(iter(checkpoints), None)
    changed = mapping_differences(flat(first.settings), flat(config)) if first else {}
    named = differences(changed, "a checkpoint", "config.json") or "no checkpoint"
    text = f"config.json differs from the ledger in a setting that does not affect the numbers: {named}"
    return Line("config", FAILED, text)
