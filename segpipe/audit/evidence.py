"""Checks the files of a run against each other, and what it ended with against what is measured and verified again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from segpipe.data.mix import absent_root
from segpipe.data.samples import open_splits
from segpipe.determinism.flags import mapping_differences
from segpipe.disk import sha256
from segpipe.errors import CheckpointError, ConfigError, SegpipeError, listed
from segpipe.files import read_json
from segpipe.ledger import inputs
from segpipe.ledger.reader import RunLedger, changes, read_inputs, read_run
from segpipe.ledger.rows import INPUTS
from segpipe.settings.config import Config, config_hash, course, recipe
from segpipe.train import checkpoint
from segpipe.train.start import weights_path

PASSED, FAILED, NOTED, UNCHECKED = "passed", "failed", "noted", "not checked"
# The sentence on an exported folder whose gates all passed; raises SegpipeError.
Verify = Callable[[Config, Path], str]
# Raised for content that matches its own digests but is not what a run writes.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError)


class Line(NamedTuple):
    """The result of one check. `noted`: something changed that does not make the audit fail."""

    part: str
    status: str
    text: str


def shortened(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return listed(names, joint="; ")


def differences(changed: Mapping[str, tuple[Any, Any]], here: str, there: str) -> str:
    """Settings that differ, with both values."""
    return shortened(
        [
            f"{name} is {one!r} in {here} and {two!r} in {there}"
            for name, (one, two) in changed.items()
        ]
    )


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
        rows = len(ledger.rows)
        text = f"{rows} rows of {ledger.num_updates} updates are whole"
        lines.append(Line("ledger", PASSED, text))
    return ledger, lines + [Line("ledger", NOTED, note) for note in ledger.notes]


class CheckedCheckpoint(NamedTuple):
    """A checkpoint that passed."""

    path: Path
    step: int
    digests: Mapping[str, str]  # of model, ema and the rest


def check_checkpoints(
    run: Path, ledger: RunLedger
) -> tuple[list[CheckedCheckpoint], list[Line]]:
    """Checkpoints that passed, by step, and a line for each file."""
    passed, lines = [], []
    sessions = {header.config_hash for header in ledger.headers}
    for path in sorted(run.glob("*.pt")):
        try:
            saved = checkpoint.load(path)
            found = CheckedCheckpoint(path, int(saved["step"]), saved["digests"])
            # All of them: a resume may set those anew that do not affect the numbers.
            is_known = config_hash(saved["config"]) in sessions
        except SegpipeError as error:
            lines.append(Line(path.name, FAILED, str(error)))
            continue
        except MALFORMED as error:
            lines.append(Line(path.name, FAILED, f"its content is malformed: {error}"))
            continue
        if not is_known:
            text = "its settings are those of no session of the ledger"
            lines.append(Line(path.name, FAILED, text))
            continue
        passed.append(found)
        digests = (
            f"weights {found.digests['model']}, averaged weights {found.digests['ema']}"
        )
        text = f"after {found.step} updates; the file is unchanged; {digests}"
        lines.append(Line(path.name, PASSED, text))
    return sorted(passed, key=lambda each: (each.step, each.path.name)), lines


def check_config(config: Config, ledger: RunLedger) -> Line:
    """config.json against the header of every session, in what affects the numbers."""
    for header in ledger.headers:
        changed = mapping_differences(course(header.recipe), course(recipe(config)))
        if changed:
            session = f"the ledger (session {header.session})"
            return Line("config", FAILED, differences(changed, session, "config.json"))
    return Line("config", PASSED, "config.json has the recipe of the ledger")


def check_result(
    run: Path, ledger: RunLedger, checkpoints: Sequence[CheckedCheckpoint]
) -> Line:
    """result.json against last.pt and the ledger."""
    path = run / "result.json"
    try:
        result = dict(read_json(path))
    except FileNotFoundError:
        text = f"{path} does not exist: the run did not finish"
        return Line("result", UNCHECKED, text)
    except (OSError, ValueError, TypeError) as error:
        return Line("result", FAILED, f"{path} cannot be read: {error}")
    last = next((each for each in checkpoints if each.path.name == "last.pt"), None)
    expected: dict[str, Any] = {"steps": ledger.num_updates}
    if last:
        expected |= {
            "weights_digest": last.digests["model"],
            "ema_digest": last.digests["ema"],
        }
    faults = [
        f"{name} is {result.get(name)!r}, but the other files have {value!r}"
        for name, value in expected.items()
        if result.get(name) != value
    ]
    if last and last.step != ledger.num_updates:
        updates = f"the ledger has {ledger.num_updates} updates"
        faults.append(f"last.pt is of step {last.step}, but {updates}")
    if result.get("config_hash") not in {each.config_hash for each in ledger.headers}:
        faults.append("config_hash belongs to no session of the ledger")
    if faults:
        return Line("result", FAILED, f"result.json: {shortened(faults)}")
    if last is None:
        text = "result.json matches the ledger; last.pt was not checked"
        return Line("result", UNCHECKED, text)
    return Line("result", PASSED, "result.json matches last.pt and the ledger")


def check_export(run: Path, config: Config, verify: Verify | None) -> Line:
    """The gates of the exported folder, run again."""
    folder = Path(config.export.dir) if config.export.dir else run / "export"
    if not folder.is_dir() or not any(folder.iterdir()):
        status = UNCHECKED if config.export.enabled else NOTED
        return Line("export", status, f"{folder} holds no exported network")
    if verify is None:
        return Line("export", UNCHECKED, f"{folder} was not verified again")
    try:
        return Line("export", PASSED, verify(config, folder))
    except ConfigError as error:  # other versions or data than at the export
        return Line("export", UNCHECKED, str(error))
    except SegpipeError as error:
        return Line("export", FAILED, str(error))
