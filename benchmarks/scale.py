"""A model of what an update and a start cost on R = 1 to 1,024 ranks. Nothing of it was measured on several machines.

Counts (buckets, collectives, bytes, store requests) are those of the code. Three terms of the host are measured, on
one process: an announced call, a request to the store, writing a checkpoint's bytes. Links are ASSUMED. So every
time is a modelled one; the counts are the part to rely on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure as measuring
from segpipe.data.catalog import STREET
from segpipe.distributed.contract import POSTED, CallLog
from segpipe.distributed.group import local_store
from segpipe.distributed.reduce import FlatLayout
from segpipe.models import build_model
from segpipe.train.forward import statistics
from segpipe.train.step import BUCKET_SIZE

NETWORK, RANKS, LOCAL, ROUNDS = "pidnet_s", (1, 2, 4, 8, 16, 64, 256, 1024), 8, 2000
SMOKE = {"NETWORK": "fast_scnn", "RANKS": (1, 16), "ROUNDS": 20}
# Assumed, per GPU: bytes per second and seconds of a message within a machine (NVLink) and between (400 Gbit/s).
WITHIN, BETWEEN = (300e9, 5e-6), (45e9, 12e-6)
WATCH_S = 0.3  # between the posts of a rank
CARD_BYTES, POST_BYTES = 300, 16 * POSTED


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Counts and modelled times for every number of ranks, flat and in two levels, and the terms they stand on."""
    del given
    model = build_model(NETWORK, STREET.num_classes)
    kept, parameters = statistics(model), list(model.parameters())
    figures = torch.zeros(4 + len(parameters))
    layout = FlatLayout([*kept, figures, *parameters], bucket_size=BUCKET_SIZE)
    weights = 4 * sum(p.numel() for p in parameters)
    terms = host_terms(3 * weights)  # weights, average and momentum
    return {
        "what": f"modelled update of {NETWORK}, {LOCAL} ranks per machine; links are assumed, not measured",
        "machine": measuring.machine(),
        "measured_terms": terms,
        "assumed_links": {"within": WITHIN, "between": BETWEEN},
        "buckets": len(layout.buckets),
        "vector_mib": round(4 * layout.size / 2**20, 1),
        "modelled": {str(ranks): of_ranks(ranks, layout, terms) for ranks in RANKS},
        "passed": True,
    }


def host_terms(checkpoint_bytes: int) -> dict[str, float]:
    """What one process takes here: microseconds of a call and of a request to a store, seconds of a checkpoint."""
    log, value, store = CallLog(), torch.zeros(1), local_store()
    store.set("card", "a" * CARD_BYTES)
    content = torch.zeros(checkpoint_bytes // 4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        written = _seconds(lambda: torch.save(content, path), 1)
    return {
        "call_us": round(
            1e6 * _seconds(lambda: log.add("all_to_all", value), ROUNDS), 2
        ),
        "store_get_us": round(1e6 * _seconds(lambda: store.get("card"), ROUNDS), 1),
        "checkpoint_mib": round(checkpoint_bytes / 2**20, 1),
        "checkpoint_s": round(written, 3),
    }


def _seconds(action: Callable[[], Any], rounds: int) -> float:
    before = time.perf_counter()
    for _ in range(rounds):
        action()
    return (time.perf_counter() - before) / rounds


def of_ranks(
    ranks: int, layout: FlatLayout, terms: dict[str, float]
) -> dict[str, float]:
    """One row: what a rank sends in an update, and how long that takes if nothing hides it."""
    size, buckets = 4 * layout.size, len(layout.buckets)
    machines = -(-ranks // LOCAL)
    local = min(ranks, LOCAL)
    inner = 2 * size * (local - 1) / local
    outer = 2 * size / local * (machines - 1) / machines
    levels = (local > 1) + (machines > 1)
    per_bucket = 2 * levels
    messages = 2 * buckets * ((local - 1) * WITHIN[1] + (machines - 1) * BETWEEN[1])
    two = inner / WITHIN[0] + outer / BETWEEN[0] + messages
    between = 2 * size * (ranks - local) / ranks  # of one level, past its machine
    alone = 2 * size * (local - 1) / ranks
    flat = alone / WITHIN[0] + between / BETWEEN[0]
    flat += 2 * buckets * ((local - 1) * WITHIN[1] + (ranks - local) * BETWEEN[1])
    calls = buckets * per_bucket + (ranks > 1)
    gets = ranks * ranks if ranks > 1 else 0
    return {
        "mib_sent_within": round(inner / 2**20, 1),
        "mib_sent_between": round(outer / 2**20, 2),
        "mib_sent_between_one_level": round(between / 2**20, 1),
        "collectives": calls,
        "host_ms": round(calls * terms["call_us"] / 1000, 3),
        "exchange_ms_two_levels": round(1000 * two, 2),
        "exchange_ms_one_level": round(1000 * flat, 2),
        "rendezvous_store_gets": gets,
        "rendezvous_s": round(gets * terms["store_get_us"] / 1e6, 2),
        "watcher_kib_per_s_at_rank_0": round(ranks * POST_BYTES / WATCH_S / 1024, 1),
        "checkpoint_s_of_rank_0": terms["checkpoint_s"],
    }
