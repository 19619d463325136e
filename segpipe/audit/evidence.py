"""Checks the files of a run against each other: data, sources, configuration, ledger, checkpoints, result, export."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from segpipe import plugins
from segpipe.audit.verdict import FAILED, NOTED, PASSED, UNCHECKED, Line, shortened
from segpipe.data.mix import absent_root, all_parts
from segpipe.errors import CheckpointError, ConfigError, DataError, SegpipeError
from segpipe.files import sha256
from segpipe.ledger import inputs
from segpipe.ledger.reader import RunLedger, first_broken, read_run, read_seals
from segpipe.ledger.results import changes, read_inputs
from segpipe.ledger.rows import (
    INPUTS,
    SEAL_SUFFIX,
    STEP,
    differing,
    lacking,
    ledger_files,
    mapping_differences,
    read_file,
)
from segpipe.runtime.artifact import MANIFEST, SUMS, ArtifactError, read_sums
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

# Raised for content that matches its own digests but is not what a run writes.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RuntimeError)
StateLedger = Callable[
    [Path, int], RunLedger
]  # of a checkpoint and its step: the row of its state


def differences(changed: dict[str, tuple[Any, Any]], here: str, there: str) -> str:
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


def check_config(run: Path, config: Config, ledger: RunLedger) -> Line:
    """config.json against the header of every session."""
    now = course(recipe(config))
    for header in ledger.headers:
        if changed := mapping_differences(course(header.recipe), now):
            return Line(
                "config",
                FAILED,
                differences(
                    changed, f"the ledger (session {header.session})", "config.json"
                ),
            )
    digest = config_hash(
        dict(json.loads((run / "config.json").read_bytes()))
    )  # as saved: versions differ in settings
    if digest not in {header.config_hash for header in ledger.headers}:
        changed = mapping_differences(_first_settings(run, ledger), flat(config))
        named = (
            differences(changed, "a checkpoint", "config.json")
            if changed
            else "such as run.* or data.workers"
        )
        text = f"config.json differs from the ledger in a setting that does not affect the numbers ({named})"
        return Line("config", FAILED, text)
    return Line(
        "config",
        PASSED,
        f"config.json matches the ledger: {len(now)} settings, hash {digest}",
    )


def _first_settings(run: Path, ledger: RunLedger) -> dict[str, Any]:
    """All settings of the first session, from one of its checkpoints; empty when it left none."""
    for path in sorted(run.glob("*.pt")):
        with contextlib.suppress(SegpipeError, AttributeError, TypeError):
            saved = checkpoint.load(path)["config"]
            if config_hash(saved) == ledger.first.config_hash:
                return flat(from_mapping(saved))
    return {}


def check_inputs(run: Path, config: Config, ledger: RunLedger | None) -> list[Line]:
    """Current data and sources against inputs.json, and that against the ledger."""
    path = run / INPUTS
    recorded = (
        {header.inputs: header.session for header in reversed(ledger.headers)}
        if ledger
        else {}
    )
    if not path.is_file():
        if any(recorded):
            return [
                Line("data", FAILED, f"{path} is missing, but the ledger has its hash")
            ]
        return [
            Line(
                "data",
                UNCHECKED,
                f"{path} does not exist: files and sources were not recorded",
            )
        ]
    try:
        content = read_inputs(path)
    except SegpipeError as error:
        return [Line("data", FAILED, str(error))]
    lines = [_check_data(config, content["data"]), _check_code(content["code"])]
    if config.import_paths:
        lines.append(_check_plugins(config, content.get("plugins", {})))
    if unlike := [
        f"session {number}"
        for digest, number in recorded.items()
        if digest != sha256(path)
    ]:
        text = f"{path} is not the file whose hash the ledger has ({', '.join(unlike)}): it was altered"
        lines.insert(0, Line("data", FAILED, text))
    return lines


def _check_data(config: Config, recorded: dict[str, Any]) -> Line:
    files = recorded["files"]
    splits = ("train", config.data.split)
    if all(part.data.name == "synthetic" for part in all_parts(config.data, splits)):
        return Line(
            "data", PASSED, "scenes are rendered from the seed: there are no files"
        )
    if not files and not recorded.get("sizes"):
        return Line(
            "data", UNCHECKED, "data.hash was false: the files were not recorded"
        )
    if absent := absent_root(config.data):
        return Line("data", UNCHECKED, f"data.root = {absent} does not exist here")
    try:
        changed = inputs.resized(recorded, config.data, splits)
        if files and not changed:
            changed = changes(files, inputs.data_hashes(config.data, splits))
    except SegpipeError as error:
        return Line("data", FAILED, f"the data cannot be read: {error}")
    if changed:
        return Line("data", FAILED, f"{config.data.root}: {shortened(changed)}")
    if not files:
        return Line(
            "data",
            UNCHECKED,
            "data.hash was false: names and sizes are unchanged, contents were not recorded",
        )
    return Line(
        "data",
        PASSED,
        f"{len(files)} files in {config.data.root} are unchanged: {recorded['sha256']}",
    )


def check_weights(config: Config) -> list[Line]:
    """The file of `model.weights` against its SHA-256 in config.json; nothing for a run from the seed."""
    if not config.model.weights:
        return []
    path = weights_path(config)
    if not path.is_file():
        return [
            Line(
                "weights",
                UNCHECKED,
                f"{path} does not exist here. Set model.weights=FILE to replay from step 0",
            )
        ]
    if sha256(path) != config.model.weights_sha256:
        text = f"{path} is not the file that the run was started with: its SHA-256 was {config.model.weights_sha256}"
        return [Line("weights", UNCHECKED, text)]
    return [
        Line("weights", PASSED, f"{path} is unchanged: {config.model.weights_sha256}")
    ]


def _check_code(recorded: dict[str, Any]) -> Line:
    changed = changes(recorded["files"], inputs.source_hashes())
    version = f"segpipe {recorded.get('segpipe')}, {inputs.combined(recorded['files'])}"
    if changed:
        return Line(
            "code",
            NOTED,
            f"this segpipe is not that of the run ({version}): {shortened(changed)}",
        )
    return Line(
        "code",
        PASSED,
        f"{len(recorded['files'])} source files are unchanged: {version}",
    )


def _check_plugins(config: Config, recorded: dict[str, Any]) -> Line:
    try:
        now = plugins.sources(config.import_paths)
    except SegpipeError as error:
        return Line("plug-ins", UNCHECKED, str(error))
    if changed := changes(recorded.get("files", {}), now):
        return Line(
            "plug-ins",
            FAILED,
            f"this code is not that of the run: {shortened(changed)}",
        )
    return Line(
        "plug-ins",
        PASSED,
        f"{len(now)} files and packages are unchanged: {recorded.get('sha256')}",
    )


def check_ledger(run: Path) -> tuple[RunLedger | None, list[Line]]:
    """The run's ledger, None when it cannot be read, and what is wrong with it."""
    paths = ledger_files(run)
    if not paths:
        return None, [
            Line(
                "ledger",
                UNCHECKED,
                f"{run} holds no ledger (compute.ledger=false, or an older segpipe)",
            )
        ]
    lines = [line for path in paths for line in _check_seals(path)]
    try:
        ledger = read_run(run)
    except SegpipeError as error:
        return None, [*lines, Line("ledger", FAILED, str(error))]
    lines += [Line("ledger", FAILED, fault) for fault in ledger.faults]
    lines += [Line("ledger", NOTED, note) for note in ledger.notes]
    if not any(line.status == FAILED for line in lines):
        rows, files = (
            sum(map(len, ledger.rows.values())),
            f"{len(paths)} file{'s' * (len(paths) > 1)}",
        )
        text = f"{rows} rows of {ledger.num_updates} updates in {files}: none is missing or altered"
        lines.append(Line("ledger", PASSED, text))
    return ledger, lines


def _check_seals(path: Path) -> list[Line]:
    """A ledger file against its running hashes."""
    seals = read_seals(path)
    if (
        not seals and path.stem == "rank00" and any(path.parents[1].glob("*.pt"))
    ):  # each checkpoint seals it
        return [
            Line(
                "ledger",
                FAILED,
                f"{path.with_suffix(SEAL_SUFFIX)} is missing, but the run has checkpoints",
            )
        ]
    if not seals:
        return [
            Line(
                "ledger",
                UNCHECKED,
                f"{path.name} has no seal: only the checksums of its rows were checked",
            )
        ]
    broken = first_broken(path, seals)
    if broken is None:
        return []
    text = f"{path} changed after it was sealed: altered, or cut, between bytes {broken[0]} and {broken[1]}"
    return [Line("ledger", FAILED, text + _steps_between(path, *broken))]


def _steps_between(path: Path, first: int, last: int) -> str:
    """The steps in a byte range of a file; empty when its rows cannot be read."""
    try:
        sessions = read_file(path).sessions
    except SegpipeError:
        return ""
    steps = []
    for session in sessions:
        ends = session.start + session.rows.itemsize * (
            1 + np.arange(len(session.rows))
        )
        steps += session.rows["step"][(ends > first) & (ends <= last)].tolist()
    return f" (steps {min(steps)} to {max(steps)})" if steps else ""


class CheckedCheckpoint(NamedTuple):
    """A checkpoint that passed."""

    path: Path
    step: int
    digests: dict[str, str]  # of model, ema and the rest
    best_miou: float
    stale: int  # validations since the best one; a run's final one does not count
    final: bool  # of the last step that its settings ask for


def check_checkpoints(
    run: Path, ledger: RunLedger | None, state_ledger: StateLedger | None
) -> tuple[list[CheckedCheckpoint], list[Line]]:
    """Checkpoints that passed, by step, and a line for each file; states are checked with `state_ledger` only."""
    passed, lines = [], []
    for path in sorted(run.glob("*.pt")):
        try:
            saved = checkpoint.load(path)
            step, of_file = int(saved["step"]), from_mapping(saved["config"])
            best, stale = float(saved["best_miou"]), int(saved["stale"])
            found = CheckedCheckpoint(
                path, step, saved["digests"], best, stale, step == of_file.train.steps
            )
            settings = recipe(of_file)
        except SegpipeError as error:
            lines.append(Line(path.name, FAILED, str(error)))
            continue
        except MALFORMED as error:
            lines.append(
                Line(
                    path.name,
                    FAILED,
                    f"its step or its configuration is malformed: {error}",
                )
            )
            continue
        faults: list[str] = []
        state = ""
        if ledger is not None:
            changed = mapping_differences(course(ledger.first.recipe), course(settings))
            faults += [differences(changed, "the ledger", path.name)] if changed else []
        if ledger is not None and state_ledger is not None and not faults:
            with contextlib.suppress(DataError):  # the line of the data reports it
                faults = _state_faults(found, ledger, state_ledger)
                state = (
                    "; weights, statistics, averages and optimizer match its ledger row"
                )
        lines += [Line(path.name, FAILED, fault) for fault in faults]
        if not faults:
            passed.append(found)
            digests = f"weights {found.digests['model']}, averaged weights {found.digests['ema']}"
            lines.append(
                Line(
                    path.name,
                    PASSED,
                    f"after {found.step} updates; its content is unchanged{state}; {digests}",
                )
            )
    return sorted(passed, key=lambda each: (each.step, each.path.name)), lines


def _state_faults(
    found: CheckedCheckpoint, ledger: RunLedger, state_ledger: StateLedger
) -> list[str]:
    """The state of a checkpoint, recorded again, against the run's ledger."""
    try:
        again = state_ledger(found.path, found.step)
    except DataError:
        raise
    except SegpipeError as error:
        return [str(error)]
    except MALFORMED as error:  # torch's, for a state of another optimizer or scaler
        return [f"its state does not fit the run's network and optimizer: {error}"]
    one, two = (
        each.rows[STEP][each.rows[STEP]["step"] == found.step - 1]
        for each in (ledger, again)
    )
    if not len(one):
        return [
            f"after {found.step} updates, but update {found.step - 1} is missing in the ledger"
        ]
    row = f"the ledger's row of step {found.step - 1}"
    if fields := lacking(one, two, STEP):
        return [f"{row} lacks {', '.join(fields)}"]
    names = [
        name for name, unequal in differing(one, two, STEP).items() if unequal.any()
    ]
    return (
        [f"its {', '.join(names)} do not match {row}: one of the two was altered"]
        if names
        else []
    )


def export_folder(run: Path, config: Config | None) -> Path:
    """Where a run exports to."""
    return Path(config.export.dir) if config and config.export.dir else run / "export"


def holds_export(folder: Path) -> bool:
    """Whether there is an exported network to check."""
    return (folder / MANIFEST).is_file() and (folder / SUMS).is_file()


def _no_export(run: Path, folder: Path, config: Config | None) -> Line:
    lacking = [name for name in (MANIFEST, SUMS) if not (folder / name).is_file()]
    if folder.is_dir() and any(folder.iterdir()):
        return Line(
            "export",
            FAILED,
            f"{folder} lacks {' and '.join(lacking)}, without which nothing shows what it holds",
        )
    if config and config.export.enabled and (run / "result.json").is_file():
        text = f"{folder} holds no exported network, though export.enabled = true: it was refused, removed, or failed"
        return Line("export", UNCHECKED, text)
    return Line("export", NOTED, f"{folder} holds no exported network")


def check_export(
    run: Path, config: Config | None, checkpoints: Sequence[CheckedCheckpoint]
) -> Line:
    """The exported folder against its checksums and the checkpoint that it was made from."""
    folder = export_folder(run, config)
    if not holds_export(folder):
        return _no_export(run, folder, config)
    try:
        source = dict(json.loads((folder / MANIFEST).read_bytes())["source"])
        sums = read_sums(folder)
    except (ValueError, KeyError, TypeError, ArtifactError) as error:
        return Line(
            "export", FAILED, f"{folder} cannot be read as an export: {error!r}"
        )
    faults = []
    for name, digest in sums.items():
        if not (folder / name).is_file():
            faults.append(f"{name} is missing")
        elif sha256(folder / name) != digest:
            faults.append(f"{name} was altered")
    file = source.get("checkpoint") or {}
    origin = next(
        (each for each in checkpoints if each.path.name == file.get("file")), None
    )
    if origin is not None and source.get("weights_digest") != origin.digests["ema"]:
        faults.append(
            f"its weights are {source.get('weights_digest')}, {origin.path.name} has {origin.digests['ema']}"
        )
    if origin is not None and file.get("sha256") != sha256(origin.path):
        faults.append(f"it was made from another {origin.path.name}")
    if faults:
        return Line("export", FAILED, f"{folder}: {shortened(faults)}")
    if origin is None:
        text = f"the files of {folder} are unchanged, but their checkpoint ({file.get('file')}) was not checked"
        return Line("export", NOTED, text)
    text = f"the files of {folder} are unchanged and were made from the averaged weights of {origin.path.name}"
    return Line("export", PASSED, text)
