"""Rendezvous of the ranks: before a process group is made, each rank publishes its identity in the store.

torch waits for `WORLD_SIZE` ranks until its timeout, even if two processes have the same RANK or another WORLD_SIZE.
Here every rank leaves a card in the store, and a conflict is named within a second.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from segpipe.distributed import environment
from segpipe.errors import CollectiveError

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

POLL_S = 0.05
LINGER_S = 1.0  # for which the rank that holds the store stays after a failure, so that the others can read why
SAME = (
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)  # variables that must be equal on all ranks


def meet(
    *, timeout_s: float, same: Mapping[str, str] | None = None, gpu: str = ""
) -> Store:
    """The store of this run, once all WORLD_SIZE ranks have connected to MASTER_ADDR:MASTER_PORT.

    `same`: further values that must be equal on all ranks, by name; `gpu`: the name of this rank's GPU, which no other
    has. Raises CollectiveError on every rank when values differ, when two processes have the same RANK, and after
    `timeout_s` when ranks are missing.
    """
    rank, world_size = environment.rank(), environment.world_size() or 1
    card = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "gpu": gpu}
    card |= {name: os.environ[name] for name in SAME}
    store, keeps = _open(rank, timeout_s)
    try:
        _gather(
            store,
            {**card, **(same or {})},
            [*SAME, *(same or ())],
            world_size,
            timeout_s,
        )
    except CollectiveError:
        time.sleep(LINGER_S if keeps else 0.0)
        raise
    except RuntimeError as error:  # torch.distributed.DistError
        raise CollectiveError(
            f"rank {rank} lost the store at {_address()} before all ranks had connected: the process that holds it "
            f"ended."
        ) from error
    return store


def _address() -> str:
    return f"MASTER_ADDR:MASTER_PORT = {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def local_store() -> TCPStore:
    """A store that no other machine reaches, held by this process."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # TCPStore itself would listen on all interfaces, and asks for no password.
    listener = socket.create_server((environment.LOOPBACK, 0))
    return TCPStore(
        environment.LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _open(rank: int, timeout_s: float) -> tuple[Store, bool]:
    """The store, and whether this process holds it: a launcher's agent does, or else rank 0."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps = rank == 0 and not agent
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        listener = None
        if keeps and environment.on_loopback():
            listener = socket.create_server((address, port)).detach()
        store = TCPStore(
            address,
            port,
            None,
            keeps,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener,
        )
    except (RuntimeError, ValueError, OSError, OverflowError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        needed = (
            "a free port of this machine"
            if keeps
            else "the address and port of a running rank 0"
        )
        raise CollectiveError(
            f"{_address()} on rank {rank}, but {needed} was needed: {reason}. Give all ranks the same values."
        ) from error
    return PrefixStore(
        f"segpipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store
    ), keeps


def _gather(
    store: Store,
    card: dict[str, Any],
    same: list[str],
    world_size: int,
    timeout_s: float,
) -> None:
    """Publish `card`, and wait for those of all ranks."""
    store.set(f"card/{store.add('cards', 1)}", json.dumps(card))
    cards: list[dict[str, Any]] = []
    end = time.monotonic() + timeout_s
    while True:
        while len(cards) < store.add("cards", 0):
            cards.append(json.loads(store.get(f"card/{len(cards) + 1}")))
        if problem := conflict(cards, same):
            raise CollectiveError(problem)
        if len(cards) == world_size:
            return
        if time.monotonic() > end:
            raise CollectiveError(_missing(cards, world_size, timeout_s))
        time.sleep(POLL_S)


def sharing(store: Store, world_size: int) -> list[int]:
    """Ranks of a run that has met whose GPU another rank has too; ranks without one share none."""
    cards = [
        json.loads(store.get(f"card/{number}")) for number in range(1, world_size + 1)
    ]
    ranks: dict[str, list[int]] = {}
    for card in cards:
        ranks.setdefault(card["gpu"], []).append(card["rank"])
    return sorted(
        rank for gpu, users in ranks.items() if gpu and len(users) > 1 for rank in users
    )


def conflict(cards: list[dict[str, Any]], same: list[str]) -> str:
    """Why these ranks cannot be one run, naming both sides; empty if they can."""
    by_rank: dict[int, dict[str, Any]] = {}
    for card in cards:
        first = cards[0]
        for name in same:
            if card.get(name) != first.get(name):
                return (
                    f"{name} = {card.get(name)} on {_who(card)}, but {first.get(name)} on {_who(first)}. "
                    f"Start all processes of a run with the same values."
                )
        if not 0 <= card["rank"] < int(card["WORLD_SIZE"]):
            return f"RANK = {card['rank']} on {_who(card)}, but 0 to {int(card['WORLD_SIZE']) - 1} was needed."
        other = by_rank.setdefault(card["rank"], card)
        if other is not card:
            return (
                f"RANK = {card['rank']} was given twice: to {_who(other)} and to {_who(card)}. Give every process a "
                f"rank of its own, and every run a MASTER_PORT of its own."
            )
    return ""


def _who(card: dict[str, Any]) -> str:
    return f"rank {card['rank']} (host {card['host']}, process {card['pid']})"


def _missing(cards: list[dict[str, Any]], world_size: int, timeout_s: float) -> str:
    came = {card["rank"]: card["host"] for card in cards}
    missing = [rank for rank in range(world_size) if rank not in came]
    return (
        f"ranks {missing[:16]} of WORLD_SIZE = {world_size} did not come to {_address()} within {timeout_s:.0f} s; "
        f"there were {', '.join(f'{rank} (host {host})' for rank, host in sorted(came.items())[:16])}. Check how they "
        f"were started; if they only needed longer, raise compute.timeout_s."
    )
