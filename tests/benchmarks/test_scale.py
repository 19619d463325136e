"""The model of many ranks counts what the code sends."""

from __future__ import annotations

import torch

from benchmarks import scale
from segpipe.distributed.reduce import FlatLayout

TERMS = {"call_us": 1.0, "store_get_us": 100.0, "checkpoint_s": 0.1}


def test_two_levels_send_less_between_machines_and_count_their_collectives() -> None:
    layout = FlatLayout([torch.zeros(1 << 20)] * 4, bucket_size=1 << 20)
    rows = {ranks: scale.of_ranks(ranks, layout, TERMS) for ranks in (1, 8, 64)}
    assert rows[1]["collectives"] == rows[1]["mib_sent_within"] == 0
    # An all-to-all and an all-gather of 16 MiB, and the count of pixels.
    assert (rows[8]["collectives"], rows[8]["mib_sent_within"]) == (9, 28.0)
    assert rows[8]["mib_sent_between"] == 0
    assert rows[64]["collectives"] == 17
    assert rows[64]["mib_sent_between"] == 3.5
    assert rows[64]["mib_sent_between_one_level"] == 28.0
    assert rows[64]["rendezvous_store_gets"] == 64 * 64
