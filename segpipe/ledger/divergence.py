"""Whether two runs are the same bits, and if not, where they part: step, stage, shard, sample and layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from segpipe.ledger.drift import Drift
from segpipe.ledger.reader import RunLedger, mapping_differences
from segpipe.ledger.rows import PART, SHARD, STEP, Rows, differing, row_keys
from segpipe.ledger.stages import DTYPES, FIELDS, SAMPLE_STAGES, STAGES, Evidence, Field, evidence, places

EXIT_CODES = {"identical": 0, "diverged": 1, "incomparable": 2}


@dataclass(frozen=True)
class Comparison:
    """The verdict on two runs; what is None could not be told or does not apply."""

    verdict: str  # identical | diverged | incomparable
    sentence: str
    step: int | None = None  # the first that differs; -1 stands for the state before step 0
    stage: str | None = None  # one of STAGES
    shard: int | None = None
    shards: list[int] = field(default_factory=list)  # all that differ at this stage
    sample: int | None = None  # its index in A
    file: str | None = None  # its name
    layer: str | None = None
    fields: list[dict[str, str]] = field(default_factory=list)  # stage, field, state: at `step`, or at the last one
    steps: int = 0  # that both runs have
    fingerprint: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # entries that differ
    recipe: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # settings that differ
    processes: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    advice: str = ""
    replay: str = ""  # what came out when both were trained again up to that step; empty when they were not
    odd: str | None = None  # A or B: the run that its own settings, data and code do not give again

    @property
    def exit_code(self) -> int:
        """0 identical, 1 diverged, 2 incomparable."""
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return dict(vars(self))


def incomparable(reason: str, **facts: Any) -> Comparison:
    """The verdict when the ledgers say nothing about each other."""
    return Comparison("incomparable", f"cannot compare: {reason}", **facts)


def compare(a: RunLedger, b: RunLedger) -> Comparison:
    """Where run `b` first differs from run `a`, by their ledgers alone."""
    pairs = {kind: _common(a.rows[kind], b.rows[kind]) for kind in (SHARD, STEP, PART)}
    steps = np.unique(np.concatenate([pairs[kind][0]["step"] for kind in (SHARD, STEP)]))
    facts: dict[str, Any] = {
        "steps": int((steps >= 0).sum()),
        "fingerprint": mapping_differences(a.first.fingerprint, b.first.fingerprint),
        "recipe": mapping_differences(a.first.recipe, b.first.recipe),
        "processes": (a.first.world_size, b.first.world_size),
        "notes": _notes(a, b),
    }
    if reason := _obstacle(a, b):
        return incomparable(reason, **facts)
    first = min((step for kind, pair in pairs.items() for step in _first_step(kind, pair)), default=None)
    found = [_explain(first, evidence(first, pairs), a, b, facts)] if first is not None else []
    found += [_explain_drift(name, run, run.drift, facts) for name, run in (("A", a), ("B", b)) if run.drift]
    if found:  # a drift within a run explains what follows from it, so it wins where both come at once
        return min(reversed(found), key=lambda each: (each.step, STAGES.index(str(each.stage))))
    if not facts["steps"]:
        return incomparable(f"no step is in both ledgers: A has {_span(a)}, B has {_span(b)}.", **facts)
    last = evidence(int(steps[-1]), pairs)
    fields = [_cell(entry, last.shards(entry)) for entry in FIELDS]
    words = f"identical in all {facts['steps']} steps that both have{_limits(a, b)}"
    return Comparison("identical", words, fields=fields, **facts)


def _limits(a: RunLedger, b: RunLedger) -> str:
    """What keeps two runs that agree from being the same whole run; empty when nothing does."""
    unlike = [f"A has {_span(a)}, B has {_span(b)}"] if _span(a) != _span(b) else []
    faults = [f"{name}: {fault}" for name, run in (("A", a), ("B", b)) for fault in run.faults]
    return f", but not all could be compared: {'; '.join([*unlike, *faults])}" if unlike or faults else ""


def _obstacle(a: RunLedger, b: RunLedger) -> str:
    """Why equal keys do not stand for equal work in the two runs; empty when they do."""
    reasons = []
    for name in ("seed", "compute.shards", "compute.samples_per_shard", "data.name"):
        here, there = a.first.recipe[name], b.first.recipe[name]
        if here != there:
            reasons.append(f"{name} is {here} in A and {there} in B")
    if a.sample_names and b.sample_names and a.sample_names != b.sample_names:
        pairs = enumerate(zip(a.sample_names, b.sample_names, strict=False))
        unlike = (f"sample {index} is {one} in A and {two} in B" for index, (one, two) in pairs if one != two)
        reasons.append(next(unlike, f"A has {len(a.sample_names)} samples and B has {len(b.sample_names)}"))
    return "; ".join(reasons) + (". Only runs that agree in this can have the same bits." if reasons else "")


def _common(a: Rows, b: Rows) -> tuple[Rows, Rows]:
    """Rows of the keys that both have, in the order of the keys; none when their shards are of different sizes."""
    if a.dtype != b.dtype:
        return a[:0], a[:0]
    keys = row_keys(a), row_keys(b)
    if np.array_equal(*keys):
        return a, b
    _, here, there = np.intersect1d(*keys, assume_unique=True, return_indices=True)
    return a[here], b[there]


def _first_step(kind: int, pair: tuple[Rows, Rows]) -> list[int]:
    """The first step at which rows of a kind differ; empty when none does."""
    unequal = np.any([*differing(*pair, kind).values()], axis=0)
    return [int(pair[0]["step"][np.argmax(unequal)])] if unequal.any() else []


def _span(run: RunLedger) -> str:
    steps = np.concatenate([run.rows[kind]["step"] for kind in (SHARD, STEP)])
    steps = steps[steps >= 0]
    return f"steps {steps.min()} to {steps.max()}" if len(steps) else "no step"


def _notes(a: RunLedger, b: RunLedger) -> tuple[str, ...]:
    notes = [f"{name}: {note}" for name, run in (("A", a), ("B", b)) for note in run.notes]
    if _span(a) != _span(b):
        notes.append(f"A has {_span(a)}, B has {_span(b)}: only what both have was compared")
    return tuple(notes)


def _explain(step: int, found: Evidence, a: RunLedger, b: RunLedger, facts: dict[str, Any]) -> Comparison:
    """The verdict on two runs that differ at `step`: the first stage, and there the lowest shard."""
    states = {entry: found.shards(entry) for entry in FIELDS}
    first = next(entry for entry, where in states.items() if where)
    same = [entry for entry in FIELDS if (entry.stage, entry.kind) == (first.stage, first.kind)]
    shards = sorted({shard for entry in same for shard in states[entry] or []})
    shard = shards[0]
    wrong = next(entry for entry in same if shard in (states[entry] or []))
    place = found.first_place(wrong, shard)
    known = found.sample(shard, place, 0) if wrong.stage in SAMPLE_STAGES else None
    sample = known[1] if known else None
    layer = _layer(found, wrong, shard, a)
    if wrong.stage == "order":
        what = _order_words(found, shard, place, a, b)
    else:
        told = [(shard not in where, entry) for entry in same for where in [states[entry]] if where is not None]
        told.sort(key=lambda pair: pair[0])  # what differs comes first
        what = ", ".join(_state(entry, equal, found, shard) for equal, entry in told)
    rest = f"shard{'s' * (len(shards) > 2)} {', '.join(map(str, shards[1:]))}"
    also = f"; also {rest}" if len(shards) > 1 else ""
    return Comparison(
        "diverged",
        f"{_where(step, shard, sample, a)}: {what}{_first_in(wrong, layer)}{also}",
        step=step,
        stage=wrong.stage,
        shard=shard if shard >= 0 else None,
        shards=[number for number in shards if number >= 0],
        sample=sample,
        file=a.sample_name(sample) if sample is not None else None,
        layer=layer,
        fields=[_cell(entry, where) for entry, where in states.items()],
        advice=_advice(wrong, layer, facts),
        **facts,
    )


def _explain_drift(name: str, run: RunLedger, drift: Drift, facts: dict[str, Any]) -> Comparison:
    """The verdict where processes of one run do not hold the same: what differs, and on which rank."""
    found = _explain(drift.step, evidence(drift.step, drift.pairs), run, run, facts)
    odd, usual = (_process(run, number) for number in (drift.odd, drift.usual))
    sentence = found.sentence.replace(" in A", f" on {usual}").replace(" in B", f" on {odd}")
    words = f"{sentence}: {odd} of {name} is not as {usual} is"
    advice = f"Look at {odd} of {name}: its memory, its GPU, code that depends on the rank."
    return replace(found, sentence=words, advice=advice)


def _process(run: RunLedger, number: int) -> str:
    header = run.headers[number]
    several = run.headers[-1].session > 0
    return f"rank {header.rank}" + (f" of session {header.session}" if several else "")


def _cell(entry: Field, shards: list[int] | None) -> dict[str, str]:
    state = "not recorded" if shards is None else "differs" if shards else "equal"
    return {"stage": entry.stage, "field": entry.noun, "state": state}


def _where(step: int, shard: int, sample: int | None, run: RunLedger) -> str:
    words = [f"step {step}" if step >= 0 else "before step 0"]
    if shard >= 0:
        words.append(f"shard {shard}")
    if sample is not None:
        words.append(_sample(sample, run))
    return ", ".join(words)


def _sample(index: int, run: RunLedger) -> str:
    name = run.sample_name(index)
    return f"sample {index}" + (f" ({name})" if name else "")


def _state(entry: Field, equal: bool, found: Evidence, shard: int) -> str:
    if equal:
        return f"{entry.noun} equal"
    values = found.whole.get((entry.kind, entry.name, shard))
    if values is None or entry.name not in DTYPES:
        return f"{entry.noun} {entry.verb}"
    one, two = (value.view(DTYPES[entry.name])[0].item() for value in values)
    return f"{entry.noun} {entry.verb} ({one!r} in A, {two!r} in B)"


def _order_words(found: Evidence, shard: int, place: int, a: RunLedger, b: RunLedger) -> str:
    words = []
    for name, run, number in (("A", a, 0), ("B", b, 1)):
        epoch, index = found.sample(shard, place, number) or (-1, -1)
        words.append(f"{_sample(index, run)} of epoch {epoch} in {name}")
    return f"place {place} holds {', '.join(words)}"


def _layer(found: Evidence, entry: Field, shard: int, run: RunLedger) -> str | None:
    """Name of the tensor at which a field first differs, where an audit has a digest for each.

    The forward pass is told by the statistics of its BatchNorm layers. The backward pass runs from the last tensor.
    """
    name = "statistics" if entry.stage == "forward" else entry.name
    wrong, names = places(found.parts, (entry.kind, name, shard)), run.part_names(name)
    if not wrong or not names or entry.stage in SAMPLE_STAGES:
        return None
    return names[wrong[-1] if entry.stage == "backward" else wrong[0]]


def _first_in(entry: Field, layer: str | None) -> str:
    if layer is None:
        return ""
    return f", first seen in {layer}" if entry.stage == "forward" else f", first in {layer}"


def _advice(entry: Field, layer: str | None, facts: dict[str, Any]) -> str:
    advice = []
    if facts["recipe"]:
        advice.append("The settings differ, which alone can explain it: repeat with equal ones.")
    if facts["fingerprint"]:
        advice.append("The environments differ: the same bits are promised within one environment only.")
    if layer is not None and entry.stage == "forward":
        advice.append(f"The layer that made the difference comes before {layer}: --replay names it.")
    if layer is None and STAGES.index(entry.stage) > STAGES.index("augment"):
        advice.append("Train both again with compute.mode=audit: their ledgers then name the layer.")
    return " ".join(advice)
