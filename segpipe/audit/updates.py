"""What can be checked of every update without training it again: first state, samples and learning rate."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from segpipe.audit.verdict import FAILED, PASSED, UNCHECKED, Line
from segpipe.data.order import Order
from segpipe.ledger.reader import RunLedger
from segpipe.ledger.rows import SHARD, STEP, differing, lacking, slots
from segpipe.settings.config import Config
from segpipe.train.optim import learning_rate

PART = "updates"


def check_updates(config: Config, ledger: RunLedger, order: Order, start: RunLedger | None) -> Iterator[Line]:
    """Findings on all updates in the ledger.

    order: the samples of each update. start: the ledger of a fresh state of this configuration; None if unknown.
    """
    steps = int((ledger.rows[STEP]["step"] >= 0).sum())
    faults = [*_start_faults(ledger, start), *_order_faults(order, ledger), *_rate_faults(config, ledger)]
    yield from (Line(PART, FAILED, fault) for fault in faults)
    if not faults:
        text = f"all {steps} took the samples and the learning rate that seed and settings give"
        yield Line(PART, PASSED, text)
    if start is None:
        yield Line(PART, UNCHECKED, "whether the run started from the weights of its seed")


def _start_faults(ledger: RunLedger, start: RunLedger | None) -> list[str]:
    if start is None:
        return []
    one, two = (rows[rows["step"] == -1] for rows in (ledger.rows[STEP], start.rows[STEP]))
    if not len(one):
        return ["the ledger lacks the state before the first update"]
    if fields := lacking(one, two, STEP):
        return [f"the ledger lacks {', '.join(fields)} of the state before the first update"]
    names = [name for name, unequal in differing(one, two, STEP).items() if unequal.any()]
    return [f"the run did not start from the state that its settings give: {', '.join(names)} differ"] if names else []


def _order_faults(order: Order, ledger: RunLedger) -> list[str]:
    rows = ledger.rows[SHARD][ledger.rows[SHARD]["step"] >= 0]
    wanted, shards = ledger.num_updates * ledger.first.shards, ledger.first.shards
    if not np.array_equal(rows["step"] * shards + rows["shard"], np.arange(wanted)):
        return [f"the ledger has the samples of {len(rows)} shards, but {ledger.num_updates} updates have {wanted}"]
    for row in rows:
        expected = order.shard(int(row["step"]), int(row["shard"]))
        found = list(zip(row["epoch"].tolist(), row["sample"].tolist(), strict=True))
        if found != expected:
            place = next(number for number, pair in enumerate(found) if pair != expected[number])
            return [
                f"step {row['step']}, shard {row['shard']}, place {place}: sample {found[place][1]} of epoch "
                f"{found[place][0]} instead of sample {expected[place][1]} of epoch {expected[place][0]}, which the "
                f"seed gives for {order.num_samples} training samples"
            ]
    return []


def _rate_faults(config: Config, ledger: RunLedger) -> list[str]:
    rows = ledger.rows[STEP][ledger.rows[STEP]["step"] >= 0]
    optim, steps = config.optim, config.optim.schedule_steps or config.train.steps
    expected = np.array([learning_rate(int(step), steps, optim) for step in rows["step"]])
    column = slots(STEP, 0)["lr"].start
    wrong = np.flatnonzero(rows["digest"][:, column] != expected.view(np.uint64))
    if not len(wrong):
        return []
    row = rows[wrong[0]]
    rate = row["digest"][column : column + 1].view(np.float64)[0]
    return [f"step {row['step']}: learning rate {rate!r} instead of {expected[wrong[0]]!r} ({len(wrong)} such updates)"]
