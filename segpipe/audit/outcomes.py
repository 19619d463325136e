"""What a run ended with, computed again: its scores, its best score, and the gates of its exported folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segpipe.audit.verdict import FAILED, PASSED, UNCHECKED, Line, shortened
from segpipe.determinism import flags
from segpipe.errors import SegpipeError
from segpipe.ledger.reader import last_seals, read_seals
from segpipe.ledger.results import read_inputs
from segpipe.ledger.rows import FOLDER, INPUTS

if TYPE_CHECKING:
    from segpipe.audit.evidence import CheckedCheckpoint
    from segpipe.ledger.reader import RunLedger
    from segpipe.settings.config import Config

Evaluate = Callable[
    [str, str], Mapping[str, Any]
]  # scores of "last" or "best" at a precision on the validation split
Verify = Callable[
    [Path], str
]  # the sentence on an exported folder whose gates all passed; raises SegpipeError
SCORES = (
    "images", "pixels", "miou", "iou", "pixel_accuracy", "precision", "recall", "f1", "mean", "interval_95",
    "sequences", "absent", "false_positives_only",
)  # fmt: skip
OTHERS = (  # names in result.json; the first four are not audited
    "images_per_second", "train_seconds", "segpipe", "git", "name", "best_miou", "steps", "stopped_early",
    "world_size", "shards", "global_batch", "weights_digest", "ema_digest", "config_hash", "mode", "versions",
    "switches", "ledger", "weights",
)  # fmt: skip


def check_result(
    run: Path,
    config: Config | None,
    checkpoints: Sequence[CheckedCheckpoint],
    ledger: RunLedger | None,
    origin: Mapping[str, Any] | None = None,
) -> Line:
    """result.json against last.pt, the ledger and the number of updates that the settings ask for.

    origin: entry `weights` of a fresh start, empty for one from the seed; None if none was made.
    """
    path = run / "result.json"
    if not path.is_file():
        return Line(
            "result", UNCHECKED, f"{path} does not exist: the run did not finish"
        )
    try:
        result = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        return Line("result", FAILED, f"{path} cannot be read: {error}")
    last = next((each for each in checkpoints if each.path.name == "last.pt"), None)
    expected: dict[str, Any] = {}
    if last is not None:
        expected = {
            "steps": last.step,
            "weights_digest": last.digests["model"],
            "ema_digest": last.digests["ema"],
        }
        expected["best_miou"] = last.best_miou
    faults = list(_unequal(result, expected, "last.pt"))
    if config is not None:
        faults += [
            *_setting_faults(result, config),
            *_weights_faults(result, run, config, origin),
        ]
    if ledger is not None:
        faults += _origin_faults(result, ledger)
        if result.get("steps") != ledger.num_updates:
            faults.append(
                f"steps is {result.get('steps')!r}, but the ledger has {ledger.num_updates}"
            )
        if result.get("config_hash") not in {
            header.config_hash for header in ledger.headers
        }:
            faults.append("config_hash belongs to no session of the ledger")
        faults += _seal_faults(result, ledger)
    if faults:
        return Line("result", FAILED, f"result.json: {shortened(faults)}")
    against = " and the ledger" if ledger is not None else ""
    status = PASSED if last is not None else UNCHECKED
    return Line("result", status, f"result.json matches last.pt{against}")


def _setting_faults(result: Mapping[str, Any], config: Config) -> Iterator[str]:
    """What of a result the settings of the run would not give."""
    compute, train = config.compute, config.train
    given = {
        "name": config.run.name,
        "mode": compute.mode,
        "shards": compute.shards,
        "global_batch": config.global_batch,
    }
    yield from _unequal(result, given, "config.json")
    switches = dict(result.get("switches", {}))
    yield from _unequal(
        switches,
        flags.wanted(compute.threads, compute.mode),
        f"compute.mode = {compute.mode}",
    )
    if result.get("stopped_early") and not train.patience:
        yield "stopped_early is true, but train.patience = 0 never stops a run"
    elif result.get("steps") != train.steps and not result.get("stopped_early"):
        yield f"steps is {result.get('steps')!r}, but the settings ask for {train.steps}"


def _weights_faults(
    result: Mapping[str, Any],
    run: Path,
    config: Config,
    origin: Mapping[str, Any] | None,
) -> Iterator[str]:
    """What of `weights` neither the settings of the start nor a fresh start give.

    A resumed run may have the file elsewhere, so its path is that of inputs.json, whose hash the ledger has.
    """
    model, found = config.model, dict(result.get("weights") or {})
    named = (
        {"file": model.weights, "sha256": model.weights_sha256} if model.weights else {}
    )
    with contextlib.suppress(SegpipeError):  # reported by the line of the data
        named |= read_inputs(run / INPUTS).get("weights", {})
    wanted = {**(origin or {}), **named}
    required = {
        name: value
        for name, value in wanted.items()
        if name in found or name in ("file", "sha256")
    }
    yield from _unequal(found, required, "the start of the run")
    if origin is not None and (
        unknown := [name for name in found if name not in wanted]
    ):
        source = "its file" if wanted else "a start from the seed"
        yield f"weights has {', '.join(unknown)}, which {source} does not give"


def _origin_faults(result: Mapping[str, Any], ledger: RunLedger) -> Iterator[str]:
    """A machine or a number of processes that no session had."""
    versions, last = dict(result.get("versions", {})), ledger.headers[-1]
    if versions not in [header.fingerprint for header in ledger.headers]:
        yield from _unequal(
            versions, {**dict.fromkeys(versions), **last.fingerprint}, "the ledger"
        )
    if result.get("world_size") not in [header.world_size for header in ledger.headers]:
        yield from _unequal(result, {"world_size": last.world_size}, "the ledger")


def _unequal(
    found: Mapping[str, Any], expected: Mapping[str, Any], where: str
) -> Iterator[str]:
    for name, value in expected.items():
        if found.get(name) != value:
            yield f"{name} is {_short(found.get(name))}, but {where} has {_short(value)}"


def _seal_faults(result: Mapping[str, Any], ledger: RunLedger) -> list[str]:
    """Hashes of ledger files in result.json that are not among their seals, or missing."""
    given = dict(result.get("ledger") or {})
    unnamed = [name for name in last_seals(ledger.folder) if name not in given]
    faults = [
        f"ledger lacks {name}, whose hash at the end of the run belongs there"
        for name in unnamed
    ]
    for name, (digest, size) in given.items():
        if (digest, size) not in [
            tuple(seal) for seal in read_seals(ledger.folder / FOLDER / f"{name}.bin")
        ]:
            faults.append(
                f"ledger/{name}.bin was sealed with {digest[:12]} at the end of the run, and is not now"
            )
    return faults


def check_scores(run: Path, evaluate: Evaluate | None, obstacle: str) -> Line:
    """The scores of result.json against those measured again; `obstacle` is why that cannot be done."""
    path = run / "result.json"
    if not path.is_file() or evaluate is None or obstacle:
        reason = obstacle or (
            "the run did not finish" if evaluate else "evaluate=false"
        )
        return Line("scores", UNCHECKED, f"not measured again: {reason}")
    try:
        recorded, again = dict(json.loads(path.read_bytes())), evaluate("last", "fp32")
    except (ValueError, TypeError, SegpipeError) as error:
        return Line("scores", FAILED, f"cannot be measured again: {error}")
    measured = {name: again[name] for name in SCORES if name in again}
    measured["mean"] = {
        name: value for name, value in again["mean"].items() if name != "boundary_iou"
    }  # no run has it
    faults = [
        f"{name} is {_short(recorded.get(name))} in result.json and {_short(measured.get(name))} measured again"
        for name in SCORES
        if recorded.get(name) != measured.get(name)
    ]
    faults += [
        f"{name} is nothing that a run writes"
        for name in recorded
        if name not in (*SCORES, *OTHERS)
    ]
    if faults:
        return Line("scores", FAILED, "; ".join(faults))
    return Line(
        "scores",
        PASSED,
        f"mIoU {100 * again['miou']:.2f} % on {again['pixels']} pixels, measured again",
    )


def check_best(
    run: Path,
    config: Config | None,
    checkpoints: Sequence[CheckedCheckpoint],
    evaluate: Evaluate | None,
    obstacle: str,
) -> Line:
    """best_miou measured again with best.pt, and an early stop against both checkpoints."""
    last, best = (
        next((each for each in checkpoints if each.path.name == name), None)
        for name in ("last.pt", "best.pt")
    )
    try:
        result = dict(json.loads((run / "result.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return Line(
            "best",
            UNCHECKED,
            "not measured again: there is no result.json that can be read",
        )
    if config is None or last is None:
        return Line(
            "best",
            UNCHECKED,
            "not measured again: last.pt or config.json was not checked",
        )
    recorded, same = (
        result.get("best_miou"),
        best is None or best.digests["ema"] == last.digests["ema"],
    )
    if best is None and (result.get("stopped_early") or recorded != result.get("miou")):
        return Line(
            "best", UNCHECKED, "not measured again: best.pt is missing, or did not pass"
        )
    if faults := list(_course_faults(result, config, last, best)) if best else []:
        return Line("best", FAILED, "; ".join(faults))
    patience = config.train.patience
    by_final = (
        best is None or best.final or 0 < patience <= best.stale
    )  # the validation at the end is in fp32
    precision = "fp32" if by_final else config.train.precision
    if evaluate is None or obstacle:
        return Line(
            "best", UNCHECKED, f"not measured again: {obstacle or 'evaluate=false'}"
        )
    try:
        again = (
            result.get("miou")
            if same and precision == "fp32"
            else evaluate("best", precision)["miou"]
        )
    except SegpipeError as error:
        return Line("best", FAILED, f"cannot be measured again: {error}")
    if again is None or again != recorded:
        return Line(
            "best",
            FAILED,
            f"best_miou is {recorded!r} in result.json and {again!r} measured again ({precision})",
        )
    where = (
        f"last.pt, after {last.step}"
        if best is None or same
        else f"best.pt, after {best.step}"
    )
    return Line(
        "best",
        PASSED,
        f"mIoU {100 * again:.2f} % ({precision}) of {where} updates, measured again",
    )


def _course_faults(
    result: Mapping[str, Any],
    config: Config,
    last: CheckedCheckpoint,
    best: CheckedCheckpoint,
) -> Iterator[str]:
    """What of the best score and of an early stop no training gives. Without patience, validate_every may change."""
    patience, every, stopped = (
        config.train.patience,
        config.train.validate_every,
        bool(result.get("stopped_early")),
    )
    if best.best_miou != last.best_miou or best.step > last.step:
        yield f"best.pt has {best.best_miou!r} at step {best.step}, last.pt {last.best_miou!r} at step {last.step}"
    if not patience:
        return
    if stopped != (last.stale >= patience):
        counted = f"last.pt counts {last.stale} validations without a better mIoU"
        yield f"stopped_early is {stopped}, but {counted} and train.patience = {patience}"
    if stopped and (last.step % every or last.step >= config.train.steps):
        wanted = f"it stops at a multiple of train.validate_every = {every} below train.steps = {config.train.steps}"
        yield f"stopped_early is true at step {last.step}, but {wanted}"
    at_end = best.final or best.step == last.step
    if not at_end and (best.step % every or best.stale):
        yield f"best.pt is of step {best.step}, stale {best.stale}, but train.validate_every = {every}"
    since = last.step // every - best.step // every
    if last.stale != best.stale + since:
        yield (
            f"{since} validations lie between best.pt (step {best.step}, stale {best.stale}) and last.pt (step "
            f"{last.step}), which counts {last.stale}; train.patience = {patience} needs {patience} to stop"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_gates(folder: Path, verify: Verify | None, obstacle: str) -> Line:
    """The gates of the exported folder, run again; `obstacle` is why that cannot be done."""
    if verify is None or obstacle:
        return Line(
            "gates",
            UNCHECKED,
            f"the exported files were not compared again: {obstacle or 'verify=false'}",
        )
    try:
        return Line("gates", PASSED, verify(folder))
    except SegpipeError as error:
        return Line("gates", FAILED, str(error))
