"""Tells whether two runs have the same bits and, if not, where they diverge: step, stage, shard, sample and layer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from segpipe.determinism import flags
from segpipe.errors import listed
from segpipe.ledger.reader import (
    RunLedger,
    changes,
    common_rows,
    read_inputs,
    read_object,
    steps_of,
)
from segpipe.ledger.rows import (
    INPUTS,
    PARTS,
    SHARD,
    STEP,
    Key,
    Rows,
    Values,
    recorded,
    unequal,
)
from segpipe.settings.config import deciding

EXIT_CODES = {"identical": 0, "identical_up_to": 2, "diverged": 5, "not_comparable": 2}
# Stage of runs whose updates are equal, but whose validations or final digests are not.
RESULT = "result"


RESULT_FILE = "result.json"
# Entries of result.json on how, where, how fast and how often validated the run was trained. All others must be equal,
# above all `weights_digest`, which covers every buffer of the network, including those in no ledger row.
NO_RESULT = (
    "name", "images_per_second", "wall_images_per_second", "train_seconds", "world_size", "config_hash", "segpipe",
    "mode", "versions", "switches", "git", "weights", "best_miou",
)  # fmt: skip
LONGEST_VALUE = 200  # characters of a value in a message


class Field(NamedTuple):
    """One recorded field of a step, and its name in messages."""

    stage: str
    kind: int
    name: str
    noun: str
    verb: str = "differs"


# In causal order: runs diverge at the first field that differs.
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
SAMPLE_STAGES = ("order", "decode", "augment")  # with one digest per sample
# Fields that are numbers.
DTYPES = {"valid": np.int64, "loss": np.float64, "lr": np.float64, "scale": np.float64}

LOW = (1 << 32) - 1  # the sample's bits in a number of epoch and sample
Pair = tuple[Rows, Rows]  # rows of equal keys
Wrong = dict[Key, list[int]]  # indices that differ


@dataclass(frozen=True)
class Comparison:
    """The verdict on two runs; None where something is unknown or does not apply."""

    # identical | identical_up_to (one run lacks steps or files of ranks) | diverged | not_comparable
    verdict: str
    sentence: str
    step: int | None = None  # the first that differs; -1: the state before step 0
    stage: str | None = None  # one of STAGES, or RESULT
    shard: int | None = None
    shards: list[int] = field(default_factory=list)  # all that differ in this field
    sample: int | None = None  # its index in A
    file: str | None = None  # its name
    layer: str | None = None
    # Stage, field and state, at `step` or at the last common one.
    fields: list[dict[str, str]] = field(default_factory=list)
    steps: int = 0  # in both runs
    # Entries and settings that differ.
    fingerprint: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    recipe: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    inputs: str = ""  # data files and sources that differ
    processes: tuple[int | str, int | str] | None = None
    notes: tuple[str, ...] = ()
    advice: str = ""

    @property
    def exit_code(self) -> int:
        """0 identical, 5 diverged, 2 not comparable or identical only up to what one run lacks."""
        return EXIT_CODES[self.verdict]

    @property
    def no_difference(self) -> bool:
        """Whether everything that both runs recorded is equal."""
        return self.verdict in ("identical", "identical_up_to")

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return dict(vars(self))


def not_comparable(reason: str, **facts: Any) -> Comparison:
    """The verdict on ledgers that cannot be compared."""
    return Comparison("not_comparable", f"not comparable: {reason}", **facts)


def compare(a: RunLedger, b: RunLedger) -> Comparison:
    """Where run `b` first differs from run `a`, by their ledgers or, if these are equal, by their results.

    Raises CheckpointError when result.json or inputs.json cannot be read.
    """
    pair = common_rows(a.rows, b.rows)
    common = steps_of(pair[0])
    spans = f"A has {_span(a)}, B has {_span(b)}"
    # Why equal common steps do not prove equal runs.
    limits = [spans] if _span(a) != _span(b) else []
    notes = []
    for name, run, other in (("A", a, b), ("B", b, a)):
        limits += [f"{name}: {fault}" for fault in run.faults]
        notes += [
            f"{file} is in {name} only"
            for file in (RESULT_FILE, INPUTS)
            if (run.folder / file).is_file() and not (other.folder / file).is_file()
        ]
        notes += [f"{name}: {note}" for note in run.notes]
    # Of the last sessions: a resumed run may have more train.steps than it had at first.
    recipes = [deciding(run.headers[-1].recipe) for run in (a, b)]
    facts: dict[str, Any] = {  # that every verdict reports
        "inputs": input_differences(a.folder, b.folder),
        "steps": len(common),
        "fingerprint": flags.differences(a.first.fingerprint, b.first.fingerprint),
        "recipe": flags.mapping_differences(*recipes),
        "processes": (_processes(a), _processes(b)),
        "notes": (*limits, *notes),
    }
    if reason := _different_work(a, b):
        return not_comparable(reason, **facts)
    differs = unequal(*pair)
    if differs.any():
        step = int(pair[0]["step"][np.argmax(differs)])
        return _explain(step, pair, a, facts)
    if not len(common):
        return not_comparable(f"no step is in both ledgers: {spans}.", **facts)
    last = int(common[-1])
    facts["fields"] = _fields(_at(last, pair)[-1])
    sentence = f"identical in all {len(common)} common steps"
    if limits:
        sentence += f", but not everything could be compared: {'; '.join(limits)}"
    if results := result_differences(a.folder, b.folder):
        sentence += f", but {results[0]}"
        return Comparison("diverged", sentence, step=last, stage=RESULT, **facts)
    return Comparison("identical_up_to" if limits else "identical", sentence, **facts)


def _processes(run: RunLedger) -> int | str:
    """Number of processes; of a run resumed with another number, that of each session: "2, then 1"."""
    by_session = {each.session: each.world_size for each in run.headers}
    sizes = list(by_session.values())
    return sizes[0] if len(set(sizes)) == 1 else ", then ".join(map(str, sizes))


def _span(run: RunLedger) -> str:
    steps = steps_of(run.rows)
    return f"steps {steps.min()} to {steps.max()}" if len(steps) else "no step"


def _different_work(a: RunLedger, b: RunLedger) -> str:
    """Why equal keys do not mean equal work in both runs; empty when they do."""
    reasons = []
    for name in ("seed", "compute.shards", "compute.samples_per_shard", "data.name"):
        here, there = a.first.recipe[name], b.first.recipe[name]
        if here != there:
            reasons.append(f"{name} is {here} in A and {there} in B")
    one, two = a.sample_names, b.sample_names
    if one and two and one != two:
        reason = f"A has {len(one)} samples and B has {len(two)}"
        for index, (here, there) in enumerate(zip(one, two, strict=False)):
            if here != there:
                reason = f"sample {index} is {here} in A and {there} in B"
                break
        reasons.append(reason)
    return "; ".join(reasons)


def _at(step: int, pair: Pair) -> tuple[Values, Values, Wrong]:
    """What each run recorded for a step, and where both recorded a sample or tensor that differs."""
    a, b = (recorded(rows[rows["step"] == step]) for rows in pair)
    return (
        a,
        b,
        {key: np.flatnonzero(a[key] != b[key]).tolist() for key in a if key in b},
    )


def _shards(entry: Field, wrong: Wrong) -> list[int] | None:
    """Shards in which a field differs; -1 is the step as a whole. None when one of the runs lacks the field."""
    names = (entry.name, entry.name + PARTS)
    keys = [key for key in wrong if key[0] == entry.kind and key[1] in names]
    if not keys:
        return None
    return sorted({key[2] for key in keys if wrong[key]})


def _fields(wrong: Wrong) -> list[dict[str, str]]:
    """The state of every field of a step: equal, differs, or not recorded (by one of the runs)."""
    found = []
    for entry in FIELDS:
        shards = _shards(entry, wrong)
        state = "not recorded" if shards is None else "differs" if shards else "equal"
        found.append({"stage": entry.stage, "field": entry.noun, "state": state})
    return found


def _explain(
    step: int, pair: Pair, run: RunLedger, facts: dict[str, Any]
) -> Comparison:
    """The verdict on runs that differ at a step: first field, then lowest shard. `run` has the names."""
    a, b, wrong = _at(step, pair)
    fields = _fields(wrong)
    first = FIELDS[[each["state"] for each in fields].index("differs")]
    shard, *others = _shards(first, wrong) or []
    key = first.kind, first.name, shard
    own = wrong.get(key)
    place = (own or wrong[first.kind, first.name + PARTS, shard])[0]
    words = [f"step {step}" if step >= 0 else "before step 0"]
    words += [f"shard {shard}"] if shard >= 0 else []
    sample, file = None, None
    if first.stage in SAMPLE_STAGES and (SHARD, "order", shard) in a:
        sample = int(a[SHARD, "order", shard][place]) & LOW
        file = dict(enumerate(run.sample_names)).get(sample)
        words.append(f"sample {sample}" + (f" ({file})" if file else ""))
    sentence = f"{', '.join(words)}: {first.noun} {first.verb}"
    if own and (first.name in DTYPES or first.name == "order"):
        one, two = (_readable(first.name, each[key][place]) for each in (a, b))
        sentence += f" ({one} in A, {two} in B)"
    layer = _layer(first, shard, wrong, run)
    sentence += f", first seen in {layer}" if layer else ""
    if others:
        sentence += f"; also in shards {', '.join(map(str, others))}"
    return Comparison(
        "diverged",
        sentence,
        step=step,
        stage=first.stage,
        shard=shard if shard >= 0 else None,
        shards=[number for number in (shard, *others) if number >= 0],
        sample=sample,
        file=file,
        layer=layer,
        fields=fields,
        advice=_advice(first, layer, facts),
        **facts,
    )


def _readable(name: str, value: Any) -> str:
    """A number, or the sample and epoch of an entry of the order, as text."""
    if name == "order":
        return f"sample {value & LOW} of epoch {value >> 32}"
    return repr(value.view(DTYPES[name]).item())


def _layer(entry: Field, shard: int, wrong: Wrong, run: RunLedger) -> str | None:
    """Name of the tensor at which a field first differs; None if the ledger has no part rows of it.

    For the forward pass these are the BatchNorm statistics. The backward pass starts at the last tensor.
    """
    name = "statistics" if entry.stage == "forward" else entry.name
    places = wrong.get((entry.kind, name + PARTS, shard))
    names = run.part_names(name)
    if not places or not names:
        return None
    return names[places[-1] if entry.stage == "backward" else places[0]]


def _advice(entry: Field, layer: str | None, facts: dict[str, Any]) -> str:
    advice = []
    if facts["recipe"]:
        advice.append("The settings differ, which by itself can explain it.")
    if facts["inputs"]:
        advice.append("Data files or segpipe's code differ, as listed above.")
    if facts["fingerprint"]:
        advice.append(
            "The environments differ: equal bits are only promised within one environment."
        )
    if layer is None and STAGES.index(entry.stage) > STAGES.index("augment"):
        advice.append("Train both with compute.mode=audit to name the layer.")
    return " ".join(advice)


def result_differences(a: Path, b: Path) -> list[str]:
    """Phrases on unequal entries of result.json; empty if one run lacks it or did another number of updates.

    Raises CheckpointError for a file that cannot be read.
    """
    paths = a / RESULT_FILE, b / RESULT_FILE
    if not all(path.is_file() for path in paths):
        return []
    one, two = map(read_object, paths)
    if one.get("steps") != two.get("steps"):
        return []
    same_release = one.get("segpipe") == two.get("segpipe")
    found = []
    for name in {**one, **two}:
        if name in NO_RESULT or not (same_release or (name in one and name in two)):
            continue  # releases add names
        # As JSON, so that NaN equals NaN.
        if json.dumps(one.get(name)) != json.dumps(two.get(name)):
            here, there = _brief(one, name), _brief(two, name)
            found.append(f"{name} in {RESULT_FILE} is {here} in A and {there} in B")
    return found


def input_differences(a: Path, b: Path) -> str:
    """A phrase with the data files and sources that differ; empty if none does or one run lacks inputs.json.

    Raises CheckpointError for a file that cannot be read.
    """
    paths = a / INPUTS, b / INPUTS
    if not all(path.is_file() for path in paths):
        return ""
    one, two = map(read_inputs, paths)
    return "; ".join(
        f"{part} of B: {listed(changed)}"
        for part in ("data", "code")
        if (changed := changes(one[part]["files"], two[part]["files"]))
    )


def _brief(content: Mapping[str, Any], name: str) -> str:
    text = str(content.get(name, "missing"))
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
