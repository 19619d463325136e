"""The files that a run leaves, each against the ledger and the others: checkpoints, result.json, exported folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from segpipe.audit.evidence import differences, some, updates
from segpipe.audit.report import FAILED, NOTED, PASSED, UNCHECKED, Line
from segpipe.audit.task import Task, in_folder
from segpipe.audit.worker import run_tasks
from segpipe.errors import DataError, SegpipeError
from segpipe.files import sha256
from segpipe.ledger.reader import RunLedger, mapping_differences, read_run
from segpipe.ledger.rows import STEP, differing
from segpipe.ledger.seals import read_seals
from segpipe.runtime.artifact import MANIFEST, SUMS
from segpipe.settings.config import Config, from_mapping, recipe
from segpipe.train import checkpoint

# What content raises that is whole by its own digests, and still is not what a run writes.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RuntimeError)


class Kept(NamedTuple):
    """A checkpoint whose content is whole."""

    path: Path
    step: int
    digests: dict[str, str]  # of model, ema and all the rest


def check_checkpoints(
    run: Path, config: Config | None, ledger: RunLedger | None, scratch: Path
) -> tuple[list[Kept], list[Line]]:
    """Checkpoints that are what they were, by step, and a line for each file.

    Without `config` their states are not compared with the ledger.
    """
    kept, lines = [], []
    recorded, paths = _recorded_sums(run), sorted(run.glob("*.pt"))
    if paths and not recorded and ledger is not None and ledger.first.inputs:
        lines.append(Line(checkpoint.HASHES, FAILED, "it is missing, but a run that has inputs.json writes it"))
    for path in paths:
        try:
            saved = checkpoint.load(path)
            found, settings = Kept(path, int(saved["step"]), saved["digests"]), recipe(from_mapping(saved["config"]))
        except SegpipeError as error:
            lines.append(Line(path.name, FAILED, str(error)))
            continue
        except MALFORMED as error:
            lines.append(Line(path.name, FAILED, f"its step or its configuration is none: {error}"))
            continue
        faults = _sum_faults(path, recorded)
        if ledger is not None:
            changed = mapping_differences(ledger.first.recipe, settings)
            faults += [differences(changed, "the ledger", path.name)] if changed else []
        compared = False
        if config is not None and ledger is not None and not faults:
            with contextlib.suppress(DataError):  # the line of the data says it
                faults += _state_faults(found, config, ledger, scratch)
                compared = True
        lines += [Line(path.name, FAILED, fault) for fault in faults]
        if not faults:
            kept.append(found)
            lines.append(Line(path.name, PASSED, _said(found, recorded, compared)))
    return sorted(kept, key=lambda each: (each.step, each.path.name)), lines


def _said(kept: Kept, recorded: Mapping[str, list[str]], compared: bool) -> str:
    whole = "every byte is as it was written" if kept.path.name in recorded else "its content is as it was written"
    state = "; weights, statistics, average and optimizer are those of its ledger row" if compared else ""
    digests = f"weights {kept.digests['model']}, averaged weights {kept.digests['ema']}"
    return f"after {kept.step} updates; {whole}{state}; {digests}"


def _recorded_sums(run: Path) -> dict[str, list[str]]:
    """SHA-256 of the checkpoints as they were written, by name, the last one last."""
    path = run / checkpoint.HASHES
    found: dict[str, list[str]] = {}
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        parts = line.split()
        if len(parts) >= 2:
            found.setdefault(parts[1], []).append(parts[0])
    return found


def _sum_faults(path: Path, recorded: Mapping[str, list[str]]) -> list[str]:
    """A line is written before its file, so a crash may leave the file of the line before."""
    if not recorded:
        return []
    if path.name not in recorded:
        return [f"{checkpoint.HASHES} does not know it: the run did not write this file"]
    if sha256(path) not in recorded[path.name][-2:]:
        return [f"it has other bytes than the file that the run wrote ({checkpoint.HASHES}): altered or replaced"]
    return []


def _state_faults(kept: Kept, config: Config, ledger: RunLedger, scratch: Path) -> list[str]:
    """The state of a checkpoint, written into a ledger of its own, against the run's."""
    folder = scratch / f"state-{kept.path.stem}"
    try:
        task = Task(in_folder(config, folder, any_environment=True), str(kept.path), kept.step, kept.step)
        run_tasks([task], nproc=1)
    except DataError:
        raise
    except SegpipeError as error:
        return [str(error)]
    except MALFORMED as error:  # of torch, for a state of another optimizer or scaler
        return [f"its state is none of the run's network and optimizer: {error}"]
    one, two = (run.rows[STEP][run.rows[STEP]["step"] == kept.step - 1] for run in (ledger, read_run(folder)))
    if not len(one):
        return [
            f"it holds {kept.step} updates, but the ledger has {updates(ledger)}: update {kept.step - 1} is missing"
        ]
    names = [name for name, unequal in differing(one, two, STEP).items() if unequal.any()]
    row = f"the ledger's row of step {kept.step - 1}"
    return [f"its {', '.join(names)} are not those of {row}: one of the two was altered"] if names else []


def check_result(run: Path, kept: list[Kept], ledger: RunLedger | None) -> list[Line]:
    """result.json against last.pt and the ledger."""
    path = run / "result.json"
    if not path.is_file():
        return [Line("result", UNCHECKED, f"{path} does not exist: the run did not come to its end")]
    try:
        result = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        return [Line("result", FAILED, f"{path} cannot be read: {error}")]
    last = next((each for each in kept if each.path.name == "last.pt"), None)
    expected: dict[str, Any] = {}
    if last is not None:
        expected = {"steps": last.step, "weights_digest": last.digests["model"], "ema_digest": last.digests["ema"]}
    faults = [
        f"{name} is {result.get(name)!r}, but last.pt has {value!r}"
        for name, value in expected.items()
        if result.get(name) != value
    ]
    if ledger is not None:
        steps = updates(ledger)
        faults += [f"steps is {result.get('steps')!r}, the ledger has {steps}"] if result.get("steps") != steps else []
        if result.get("config_hash") not in {header.config_hash for header in ledger.headers}:
            faults.append("config_hash is that of no session of the ledger")
        faults += _seal_faults(result, ledger)
    if faults:
        return [Line("result", FAILED, f"result.json: {some(faults)}")]
    against = "and the ledger " if ledger is not None else ""
    status = PASSED if last is not None else UNCHECKED
    return [Line("result", status, f"result.json speaks of last.pt {against}(its mIoU was not measured again)")]


def _seal_faults(result: Mapping[str, Any], ledger: RunLedger) -> list[str]:
    """The hashes of the ledger files that result.json holds, where it does."""
    faults = []
    for name, (digest, size) in dict(result.get("ledger", {})).items():
        path = ledger.folder / "ledger" / f"{name}.bin"
        if (digest, size) not in [tuple(seal) for seal in read_seals(path)]:
            faults.append(f"ledger/{name}.bin was sealed with {digest[:12]} at the end of the run, and is not now")
    return faults


def check_export(run: Path, config: Config | None, kept: list[Kept]) -> list[Line]:
    """The exported folder against the checkpoint that it was made from."""
    folder = Path(config.export.dir) if config and config.export.dir else run / "export"
    if not (folder / MANIFEST).is_file() or not (folder / SUMS).is_file():
        return [Line("export", UNCHECKED, f"{folder} holds no exported network")]
    faults = []
    for line in (folder / SUMS).read_text(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if not (folder / name).is_file():
            faults.append(f"{name} is missing")
        elif sha256(folder / name) != digest:
            faults.append(f"{name} was altered")
    try:
        source = dict(json.loads((folder / MANIFEST).read_bytes())["source"])
    except (ValueError, KeyError, TypeError) as error:
        return [Line("export", FAILED, f"{folder / MANIFEST} cannot be read: {error!r}")]
    faults += _source_faults(source, kept)
    if faults:
        return [Line("export", FAILED, f"{folder}: {some(faults)}")]
    return [Line("export", *_origin(source, kept, folder))]


def _source_faults(source: Mapping[str, Any], kept: list[Kept]) -> list[str]:
    file = source.get("checkpoint") or {}
    origin = next((each for each in kept if each.path.name == file.get("file")), None)
    if origin is None:
        return []
    faults = []
    if source.get("weights_digest") != origin.digests["ema"]:
        faults.append(f"its weights are {source.get('weights_digest')}, {origin.path.name} has {origin.digests['ema']}")
    if file.get("sha256") != sha256(origin.path):
        faults.append(f"it was made from another {origin.path.name}")
    return faults


def _origin(source: Mapping[str, Any], kept: list[Kept], folder: Path) -> tuple[str, str]:
    name = (source.get("checkpoint") or {}).get("file")
    if name in [each.path.name for each in kept]:
        return PASSED, f"the files of {folder} are whole, and made from the averaged weights of {name}"
    return NOTED, f"the files of {folder} are whole, but the checkpoint they name ({name}) was not checked"
