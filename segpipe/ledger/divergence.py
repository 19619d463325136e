"""Whether two runs have the same bits, and if not, where they diverge: step, stage, shard, sample and layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from segpipe.determinism import flags
from segpipe.ledger.results import compare_results
from segpipe.ledger.rows import (
    PART,
    SHARD,
    STEP,
    Rows,
    differing,
    mapping_differences,
    part_fields,
    row_keys,
    slots,
)
from segpipe.settings.config import of_this_version

if TYPE_CHECKING:
    from segpipe.ledger.reader import RankDivergence, RunLedger

EXIT_CODES = {"identical": 0, "identical_up_to": 2, "diverged": 5, "not_comparable": 2}
RESULT = "result"  # stage of runs whose updates are equal, and whose validations or final digests are not


class Field(NamedTuple):
    """One recorded result of a step, and its name in messages."""

    stage: str
    kind: int
    name: str
    noun: str
    verb: str = "differs"


# In causal order: two runs diverge at the first field that differs.
FIELDS = (
    Field("order", SHARD, "order", "samples", "differ"),
    Field("decode", SHARD, "decoded_image", "decoded image"),
    Field("decode", SHARD, "decoded_target", "decoded mask"),
    Field("augment", SHARD, "image", "augmented image"),
    Field("augment", SHARD, "target", "mask"),
    Field("preprocess", SHARD, "batch", "preprocessed batch"),
    Field("forward", SHARD, "logits", "logits", "differ"),
    Field(
        "forward", SHARD, "statistics", "BatchNorm statistics of the shard", "differ"
    ),
    Field("loss", STEP, "valid", "number of valid pixels"),
    Field("loss", SHARD, "loss", "loss"),
    Field("backward", SHARD, "gradient", "local gradient"),
    Field("reduction", STEP, "gradient", "reduced gradient"),
    Field("optimizer", STEP, "lr", "learning rate"),
    Field("optimizer", STEP, "scale", "loss scale"),
    Field("optimizer", STEP, "optimizer", "optimizer state"),
    Field("weights", STEP, "weights", "weights", "differ"),
    Field("bn_ema", STEP, "statistics", "BatchNorm statistics", "differ"),
    Field("bn_ema", STEP, "ema", "averaged weights", "differ"),
)
STAGES = tuple(dict.fromkeys(entry.stage for entry in FIELDS))
SAMPLE_STAGES = ("order", "decode", "augment")  # with a digest for each sample
DTYPES = {
    "valid": np.int64,
    "loss": np.float64,
    "lr": np.float64,
    "scale": np.float64,
}  # fields that are numbers

Key: TypeAlias = tuple[int, str, int]  # kind, field, shard (-1: none)
Values: TypeAlias = dict[
    Key, tuple[NDArray[Any], NDArray[Any]]
]  # of both runs, one per sample or tensor
RowPairs: TypeAlias = dict[int, tuple[Rows, Rows]]  # rows of equal keys, by kind
IN_RUNS = ("in A", "in B")


@dataclass(frozen=True)
class Comparison:
    """The verdict on two runs; None where something is unknown or does not apply."""

    verdict: str  # identical | identical_up_to (one run has further steps) | diverged | not_comparable
    sentence: str
    step: int | None = (
        None  # the first that differs; -1 stands for the state before step 0
    )
    stage: str | None = None  # one of STAGES, or RESULT
    shard: int | None = None
    shards: list[int] = field(default_factory=list)  # all that differ at this stage
    sample: int | None = None  # its index in A
    file: str | None = None  # its name
    layer: str | None = None
    fields: list[dict[str, str]] = field(
        default_factory=list
    )  # stage, field, state: at `step`, or at the last one
    steps: int = 0  # that both runs have
    fingerprint: dict[str, tuple[Any, Any]] = field(
        default_factory=dict
    )  # entries that differ
    recipe: dict[str, tuple[Any, Any]] = field(
        default_factory=dict
    )  # settings that differ
    inputs: str = ""  # data files and sources that differ
    processes: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    advice: str = ""
    replay: str = ""  # result of replaying both up to that step; empty when they were not replayed
    odd: str | None = None  # A or B: the run that a replay does not reproduce

    @property
    def exit_code(self) -> int:
        """0 identical, 5 diverged, 2 not comparable, also in the steps that one of the two lacks."""
        return EXIT_CODES[self.verdict]

    @property
    def no_difference(self) -> bool:
        """Whether all that both recorded is equal."""
        return self.verdict in ("identical", "identical_up_to")

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return dict(vars(self))


def not_comparable(reason: str, **facts: Any) -> Comparison:
    """The verdict on ledgers that cannot be compared."""
    return Comparison("not_comparable", f"not comparable: {reason}", **facts)


def compare(a: RunLedger, b: RunLedger) -> Comparison:
    """Where run `b` first differs from run `a`, by their ledgers; where these are equal, by their results.

    Raises CheckpointError when a file with results cannot be read.
    """
    pairs = {kind: _common(a.rows[kind], b.rows[kind]) for kind in (SHARD, STEP, PART)}
    steps = pairs[STEP][0][
        "step"
    ]  # whose last row both have: a crash may leave shards of a step without it
    ends = compare_results(a.folder, b.folder)
    facts: dict[str, Any] = {
        "inputs": ends.inputs,
        "steps": int((steps >= 0).sum()),
        "fingerprint": flags.differences(a.first.fingerprint, b.first.fingerprint),
        "recipe": mapping_differences(
            of_this_version(a.first.recipe), of_this_version(b.first.recipe)
        ),
        "processes": (a.first.world_size, b.first.world_size),
        "notes": (
            *_limits(a, b),
            *ends.missing,
            *(f"{name}: {note}" for name, run in _named(a, b) for note in run.notes),
        ),
    }
    if reason := _obstacle(a, b):
        return not_comparable(reason, **facts)
    first = min(
        (step for kind, pair in pairs.items() for step in _first_step(kind, pair)),
        default=None,
    )
    found = [_explain(first, pairs, a, b, facts)] if first is not None else []
    found += [
        _explain_ranks(name, run, run.divergence, facts)
        for name, run in _named(a, b)
        if run.divergence
    ]
    if (
        found
    ):  # of two at the same place, ranks that diverged within a run are the cause
        return min(
            reversed(found), key=lambda each: (each.step, STAGES.index(str(each.stage)))
        )
    if not facts["steps"]:
        return not_comparable(
            f"no step is in both ledgers: A has {_span(a)}, B has {_span(b)}.", **facts
        )
    last = _StepPair(int(steps[-1]), pairs)
    fields = [_cell(entry, last.shards(entry)) for entry in FIELDS]
    limits = "; ".join(_limits(a, b))
    sentence = f"identical in all {facts['steps']} common steps"
    sentence += f", but not everything could be compared: {limits}" if limits else ""
    if ends.results:
        sentence += f", but {ends.results[0]}"
        return Comparison(
            "diverged", sentence, step=last.step, stage=RESULT, fields=fields, **facts
        )
    verdict = "identical" if _span(a) == _span(b) else "identical_up_to"
    return Comparison(verdict, sentence, fields=fields, **facts)


def _named(
    a: RunLedger, b: RunLedger
) -> tuple[tuple[str, RunLedger], tuple[str, RunLedger]]:
    return ("A", a), ("B", b)


def _limits(a: RunLedger, b: RunLedger) -> list[str]:
    """Why equal common steps do not prove equal runs; empty when they do."""
    spans = [f"A has {_span(a)}, B has {_span(b)}"] if _span(a) != _span(b) else []
    return spans + [
        f"{name}: {fault}" for name, run in _named(a, b) for fault in run.faults
    ]


def _obstacle(a: RunLedger, b: RunLedger) -> str:
    """Why equal keys do not mean equal work in the two runs; empty when they do."""
    reasons = []
    for name in ("seed", "compute.shards", "compute.samples_per_shard", "data.name"):
        here, there = a.first.recipe[name], b.first.recipe[name]
        if here != there:
            reasons.append(f"{name} is {here} in A and {there} in B")
    if a.sample_names and b.sample_names and a.sample_names != b.sample_names:
        pairs = enumerate(zip(a.sample_names, b.sample_names, strict=False))
        unlike = (
            f"sample {index} is {one} in A and {two} in B"
            for index, (one, two) in pairs
            if one != two
        )
        reasons.append(
            next(
                unlike,
                f"A has {len(a.sample_names)} samples and B has {len(b.sample_names)}",
            )
        )
    return "; ".join(reasons) + (
        ". Only runs that agree in this can have the same bits." if reasons else ""
    )


def _common(a: Rows, b: Rows) -> tuple[Rows, Rows]:
    """Rows whose keys both have, in key order."""
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
    steps = run.rows[STEP]["step"]
    steps = steps[steps >= 0]
    return f"steps {steps.min()} to {steps.max()}" if len(steps) else "no step"


class _StepPair:
    """What two runs, or two ranks of one, both recorded of one step."""

    def __init__(self, step: int, pairs: RowPairs) -> None:
        self.step = step
        self.whole: Values = {}  # from shard and step rows
        self.parts: Values = {}  # from part rows
        for kind, pair in pairs.items():
            for one, two in zip(
                *(rows[pair[0]["step"] == step] for rows in pair), strict=True
            ):
                self._add_part(one, two) if kind == PART else self._add_whole(
                    kind, one, two
                )

    def _add_whole(self, kind: int, one: Any, two: Any) -> None:
        shard = int(one["shard"])
        if kind == SHARD:
            here, there = (
                np.stack([row["epoch"], row["sample"]], axis=1) for row in (one, two)
            )
            self.whole[kind, "order", shard] = (here, there)
        for number, (name, slot) in enumerate(slots(kind, len(one["sample"])).items()):
            if (one["present"] & two["present"]) >> number & 1:
                self.whole[kind, name, shard] = (
                    one["digest"][slot],
                    two["digest"][slot],
                )

    def _add_part(self, one: Any, two: Any) -> None:
        shard = int(one["shard"])
        key = (SHARD if shard >= 0 else STEP, part_fields(shard)[one["field"]], shard)
        before = self.parts.get(key, (np.zeros(0, np.uint64),) * 2)
        here, there = (
            np.append(old, row["digest"][: row["present"]])
            for old, row in zip(before, (one, two), strict=True)
        )
        self.parts[key] = (here, there)

    def shards(self, entry: Field) -> list[int] | None:
        """Where a field differs; -1 is the step as a whole. None when one of the two lacks the field."""
        keys = {
            key
            for values in (self.whole, self.parts)
            for key in values
            if key[:2] == (entry.kind, entry.name)
        }
        return [key[2] for key in keys if self.places(*key)] if keys else None

    def places(self, kind: int, name: str, shard: int) -> list[int]:
        """Indices of the samples or tensors of a field that differ."""
        key = (kind, name, shard)
        return _places(self.parts, key) or _places(self.whole, key)

    def sample(self, shard: int, place: int, side: int) -> tuple[int, int] | None:
        """Epoch and index of a sample of a shard; None when one of the two lacks the shard's row."""
        values = self.whole.get((SHARD, "order", shard))
        return (
            (int(values[side][place, 0]), int(values[side][place, 1]))
            if values
            else None
        )


def _places(values: Values, key: Key) -> list[int]:
    if key not in values:
        return []
    unequal = np.not_equal(*values[key])
    return [
        int(place)
        for place in np.flatnonzero(unequal.any(axis=tuple(range(1, unequal.ndim))))
    ]


def _explain(
    step: int,
    pairs: RowPairs,
    a: RunLedger,
    b: RunLedger,
    facts: dict[str, Any],
    sides: tuple[str, str] = IN_RUNS,
) -> Comparison:
    """The verdict on `sides` that differ at `step`: the first stage, and there the lowest shard."""
    found = _StepPair(step, pairs)
    states = {entry: found.shards(entry) for entry in FIELDS}
    stage = next((entry.stage, entry.kind) for entry, where in states.items() if where)
    same = {
        entry: where
        for entry, where in states.items()
        if (entry.stage, entry.kind) == stage and where is not None
    }
    shards = sorted({shard for where in same.values() for shard in where})
    shard = shards[0]
    wrong = next(entry for entry, where in same.items() if shard in where)
    place = found.places(wrong.kind, wrong.name, shard)[0]
    known = found.sample(shard, place, 0) if wrong.stage in SAMPLE_STAGES else None
    sample = known[1] if known else None
    layer = _layer(found, wrong, shard, a)
    if wrong.stage == "order":
        what = _order_words(found, shard, place, (a, b), sides)
    else:
        first = sorted(
            same, key=lambda entry: shard not in same[entry]
        )  # fields that differ before equal ones
        what = ", ".join(
            _state(entry, shard in same[entry], found, shard, sides) for entry in first
        )
    return Comparison(
        "diverged",
        f"{_where(step, shard, sample, a)}: {what}{_first_in(wrong, layer)}{_other_shards(shards)}",
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


def _explain_ranks(
    name: str, run: RunLedger, diverged: RankDivergence, facts: dict[str, Any]
) -> Comparison:
    """The verdict when ranks of one run diverged: what differs, and on which rank."""
    usual, odd = (_process(run, number) for number in (diverged.usual, diverged.odd))
    found = _explain(
        diverged.step, diverged.pairs, run, run, facts, (f"on {usual}", f"on {odd}")
    )
    advice = (
        f"Check {odd} of {name}: its memory, its GPU, code that depends on the rank."
    )
    return replace(
        found,
        sentence=f"{found.sentence}: {odd} of {name} differs from {usual}",
        advice=advice,
    )


def _process(run: RunLedger, number: int) -> str:
    header = run.headers[number]
    several = run.headers[-1].session > 0
    return f"rank {header.rank}" + (f" of session {header.session}" if several else "")


def _cell(entry: Field, shards: list[int] | None) -> dict[str, str]:
    state = "not recorded" if shards is None else "differs" if shards else "equal"
    return {"stage": entry.stage, "field": entry.noun, "state": state}


def _where(step: int, shard: int, sample: int | None, run: RunLedger) -> str:
    words = [f"step {step}" if step >= 0 else "before step 0"]
    words += [f"shard {shard}"] if shard >= 0 else []
    words += [_sample(sample, run)] if sample is not None else []
    return ", ".join(words)


def _other_shards(shards: list[int]) -> str:
    others = ", ".join(map(str, shards[1:]))
    return f"; also shard{'s' * (len(shards) > 2)} {others}" if others else ""


def _sample(index: int, run: RunLedger) -> str:
    name = run.sample_name(index)
    return f"sample {index}" + (f" ({name})" if name else "")


def _state(
    entry: Field, differs: bool, found: _StepPair, shard: int, sides: tuple[str, str]
) -> str:
    if not differs:
        return f"{entry.noun} equal"
    values = found.whole.get((entry.kind, entry.name, shard))
    if values is None or entry.name not in DTYPES:
        return f"{entry.noun} {entry.verb}"
    one, two = (value.view(DTYPES[entry.name])[0].item() for value in values)
    return f"{entry.noun} {entry.verb} ({one!r} {sides[0]}, {two!r} {sides[1]})"


def _order_words(
    found: _StepPair,
    shard: int,
    place: int,
    runs: tuple[RunLedger, RunLedger],
    sides: tuple[str, str],
) -> str:
    words = []
    for number, (run, side) in enumerate(zip(runs, sides, strict=True)):
        epoch, index = found.sample(shard, place, number) or (-1, -1)
        words.append(f"{_sample(index, run)} of epoch {epoch} {side}")
    return f"place {place} holds {', '.join(words)}"


def _layer(found: _StepPair, entry: Field, shard: int, run: RunLedger) -> str | None:
    """Name of the tensor at which a field first differs, where the ledger has part rows.

    For the forward pass these are the BatchNorm statistics. The backward pass starts at the last tensor.
    """
    name = "statistics" if entry.stage == "forward" else entry.name
    wrong, names = _places(found.parts, (entry.kind, name, shard)), run.part_names(name)
    if not wrong or not names or entry.stage in SAMPLE_STAGES:
        return None
    return names[wrong[-1] if entry.stage == "backward" else wrong[0]]


def _first_in(entry: Field, layer: str | None) -> str:
    if layer is None:
        return ""
    return (
        f", first seen in {layer}"
        if entry.stage == "forward"
        else f", first in {layer}"
    )


def _advice(entry: Field, layer: str | None, facts: dict[str, Any]) -> str:
    advice = []
    if facts["recipe"]:
        advice.append(
            "The settings differ, which alone can explain it: repeat with equal ones."
        )
    if facts["inputs"]:
        advice.append("The runs read other files: repeat with equal ones.")
    if facts["fingerprint"]:
        advice.append(
            "The environments differ: equal bits are promised within one environment only."
        )
    if layer is not None and entry.stage == "forward":
        advice.append(
            f"The layer that differs comes before {layer}: --replay names it."
        )
    if layer is None and STAGES.index(entry.stage) > STAGES.index("augment"):
        advice.append(
            "Train both again with compute.mode=audit: their ledgers then name the layer."
        )
    return " ".join(advice)
