"""Checks the files of a run against each other, and runs the gates of its export again."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from segpipe.data.samples import absent_root, open_splits
from segpipe.determinism.flags import mapping_differences
from segpipe.errors import CheckpointError, ConfigError, SegpipeError, listed
from segpipe.files import file_sha256
from segpipe.ledger import inputs
from segpipe.ledger.reader import RunLedger, changes, read_inputs, read_object, read_run
from segpipe.ledger.rows import INPUTS
from segpipe.settings.config import Config, config_hash, course, recipe
from segpipe.train import checkpoint
from segpipe.train.start import weights_file

PASSED, FAILED, NOTED, UNCHECKED = "passed", "failed", "noted", "not checked"
# Returns a sentence on an exported folder whose gates all pass; raises SegpipeError otherwise.
Verify = Callable[[Config, Path], str]


class Line(NamedTuple):
    """The result of one check. `noted`: a change that does not make the audit fail."""

    part: str
    status: str
    text: str


def differences(changed: Mapping[str, tuple[Any, Any]], here: str, there: str) -> str:
    """A phrase on the entries that differ, with both values."""
    return _first(
        f"{name} is {one!r} in {here} and {two!r} in {there}"
        for name, (one, two) in changed.items()
    )


def _first(faults: Iterable[str]) -> str:
    return listed([*faults], joint="; ")


def check_inputs(run: Path, config: Config) -> list[Line]:
    """Compares current data and sources with inputs.json."""
    path = run / INPUTS
    if not path.is_file():
        text = f"{path} does not exist: files and sources were not recorded"
        return [Line("data", UNCHECKED, text)]
    try:
        content = read_inputs(path)
    except SegpipeError as error:
        return [Line("data", FAILED, str(error))]
    data, code = content["data"], content["code"]

    # Changed sources are only noted: the replayed bits decide.
    now = inputs.source_hashes()
    status, text = PASSED, f"{len(now)} files are unchanged: {code['sha256']}"
    if changed := changes(code["files"], now):
        status, text = NOTED, f"this segpipe differs from the run's: {_first(changed)}"
    return [Line("data", *_check_data(config, data)), Line("code", status, text)]


def _check_data(config: Config, recorded: Mapping[str, Any]) -> tuple[str, str]:
    """Status and text of the data line."""
    if absent := absent_root(config.data):
        return UNCHECKED, f"data.root = {absent} does not exist here"
    try:
        found = inputs.inputs_of(open_splits(config, packed=False))
        changed = inputs.changed_inputs(recorded, found)
    except SegpipeError as error:
        return FAILED, f"the data cannot be read: {error}"
    root, files = config.data.root, recorded["files"]
    if changed:
        return FAILED, f"{root}: {_first(changed)}"
    if files:
        text = f"{len(files)} files in {root} are unchanged: {recorded['sha256']}"
        return PASSED, text
    if recorded.get("hashed"):
        return PASSED, "the samples are generated from the seed, not from files"
    text = "contents were not recorded (data.hash=false); names and sizes are unchanged"
    return UNCHECKED, text


def check_weights(config: Config) -> list[Line]:
    """Checks the file of `model.weights` against its SHA-256 in config.json; no line for a run from the seed."""
    if not config.model.weights:
        return []
    model = config.model
    path, expected = weights_file(model.weights), model.weights_sha256
    status = UNCHECKED
    if not path.is_file():
        text = "does not exist here. Set model.weights=FILE to replay from step 0"
    elif file_sha256(path) != expected:
        text = f"is not the file that the run started from: its SHA-256 was {expected}"
    else:
        status, text = PASSED, f"is unchanged: {expected}"
    return [Line("weights", status, f"{path} {text}")]


def check_ledger(run: Path) -> tuple[RunLedger | None, list[Line]]:
    """The run's ledger (None if it cannot be read), and its lines."""
    try:
        ledger = read_run(run)
    except CheckpointError as error:
        return None, [Line("ledger", FAILED, str(error))]
    found = [(FAILED, fault) for fault in ledger.faults]
    text = f"{len(ledger.rows)} rows of {ledger.num_updates} updates are intact"
    found = found or [(PASSED, text)]
    found += [(NOTED, note) for note in ledger.notes]
    return ledger, [Line("ledger", *each) for each in found]


class CheckedCheckpoint(NamedTuple):
    """A checkpoint that passed."""

    path: Path
    step: int
    digests: Mapping[str, str]  # of model, ema and rest


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
            # Of any session: a resume may change settings that do not affect the numbers.
            if config_hash(saved["config"]) not in sessions:
                raise ValueError("its settings match no session of the ledger")
            # Written before it by all ranks, unless it is ahead of a ledger that went back to an earlier one.
            lost = ledger.partial[ledger.partial < found.step]
            if len(lost) and found.step <= ledger.num_updates:
                raise ValueError(
                    f"it is of step {found.step}, but the ledger lacks shards of step {lost[0]} ({len(lost)} such "
                    "steps)"
                )
        # The others: content that matches its own digests but is not what a run writes.
        except (SegpipeError, ValueError, TypeError, KeyError, AttributeError) as error:
            lines.append(Line(path.name, FAILED, str(error)))
            continue
        passed.append(found)
        weights, averaged = (found.digests[part] for part in ("model", "ema"))
        text = f"after {found.step} updates; the file is unchanged; weights {weights}, averaged weights {averaged}"
        lines.append(Line(path.name, PASSED, text))
    return sorted(passed, key=lambda each: (each.step, each.path.name)), lines


def check_config(config: Config, ledger: RunLedger) -> Line:
    """Compares config.json with the header of every session, in settings that affect the numbers."""
    for header in ledger.headers:
        changed = mapping_differences(course(header.recipe), course(recipe(config)))
        if changed:
            session = f"the ledger (session {header.session})"
            return Line("config", FAILED, differences(changed, session, "config.json"))
    return Line("config", PASSED, "config.json has the recipe of the ledger")


def check_result(
    run: Path, ledger: RunLedger, checkpoints: Sequence[CheckedCheckpoint]
) -> Line:
    """Compares result.json with last.pt and the ledger."""
    path = run / "result.json"
    if not path.exists():
        text = f"{path} does not exist: the run did not finish"
        return Line("result", UNCHECKED, text)
    try:
        result = read_object(path)
    except CheckpointError as error:
        return Line("result", FAILED, str(error))
    expected: dict[str, Any] = {"steps": ledger.num_updates}
    faults = []
    last = next((each for each in checkpoints if each.path.name == "last.pt"), None)
    if last:
        expected["weights_digest"] = last.digests["model"]
        expected["ema_digest"] = last.digests["ema"]
        if last.step != ledger.num_updates:
            updates = f"the ledger has {ledger.num_updates} updates"
            faults.append(f"last.pt is of step {last.step}, but {updates}")
    for name, value in expected.items():
        if result.get(name) != value:
            there = f"the other files have {value!r}"
            faults.append(f"{name} is {result.get(name)!r}, but {there}")
    if result.get("config_hash") not in {each.config_hash for each in ledger.headers}:
        faults.append("config_hash matches no session of the ledger")
    if faults:
        return Line("result", FAILED, f"result.json: {_first(faults)}")
    if last is None:
        text = "result.json matches the ledger; last.pt was not checked"
        return Line("result", UNCHECKED, text)
    return Line("result", PASSED, "result.json matches last.pt and the ledger")


def check_export(run: Path, config: Config, verify: Verify | None) -> Line:
    """Runs the gates of the exported folder again."""
    folder = Path(config.export.dir or run / "export")
    status = UNCHECKED
    if not folder.is_dir() or not any(folder.iterdir()):
        status = UNCHECKED if config.export.enabled else NOTED
        text = f"{folder} holds no exported network"
    elif verify is None:
        text = f"{folder} was not verified again"
    else:
        try:
            status, text = PASSED, verify(config, folder)
        except SegpipeError as error:
            text = str(error)
            # ConfigError: versions or data differ from those at the export.
            status = UNCHECKED if isinstance(error, ConfigError) else FAILED
    return Line("export", status, text)
