"""Rendezvous of the ranks: before a process group is made, each rank publishes its identity in the store.

torch waits for `WORLD_SIZE` ranks until its timeout, even if two processes have the same RANK or another WORLD_SIZE.
Here every rank leaves a card in the store, and a conflict is named within a second.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from segpipe.distributed import environment
from segpipe.errors import CollectiveError

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

Card = Mapping[str, Any]
POLL_S = 0.05
LINGER_S = 1.0  # for which the rank that holds the store stays after a failure, so that the others can read why
SAME = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # must be equal on all ranks


def meet(
    *, timeout_s: float, same: Mapping[str, str] | None = None, gpu: str = ""
) -> Store:
    """The store of this run, once all WORLD_SIZE ranks have connected to MASTER_ADDR:MASTER_PORT.

    `same`: further values that must be equal on all ranks, by name; `gpu`: the name of this rank's GPU, which no other
    has. Raises CollectiveError on every rank when values differ, when two processes have the same RANK, and after
    `timeout_s` when ranks are missing.
    """
    compared = {name: os.environ[name] for name in SAME} | dict(same or {})
    rank = environment.rank()
    card = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "gpu": gpu}
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = _open(rank, timeout_s, keeps=keeps)
    try:
        _exchange(store, card | compared, tuple(compared), timeout_s)
    except CollectiveError:
        time.sleep(LINGER_S if keeps else 0.0)
        raise
    except RuntimeError as error:  # torch.distributed.DistError
        raise CollectiveError(
            f"rank {rank} lost the store at {_address()} before all ranks had connected: the process that holds it "
            f"ended."
        ) from error
    return store


def local_store() -> TCPStore:
    """A store that no other machine reaches, held by this process."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = _listen(0)
    return TCPStore(
        environment.LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _listen(port: int) -> socket.socket:
    """A socket for a store. TCPStore itself would listen on all interfaces, and asks for no password."""
    return socket.create_server((environment.LOOPBACK, port))


def _address() -> str:
    return f"MASTER_ADDR:MASTER_PORT = {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _open(rank: int, timeout_s: float, *, keeps: bool) -> Store:
    """The store, which a launcher's agent holds, or else rank 0: it `keeps` it."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    try:
        port = int(os.environ["MASTER_PORT"])
        local = keeps and environment.on_loopback()
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            port,
            None,
            keeps,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_listen(port).detach() if local else None,
        )
    except (RuntimeError, ValueError, OSError, OverflowError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        place = "a free port" if keeps else "the address and port of a running rank 0"
        raise CollectiveError(
            f"{_address()} on rank {rank}, but {place} was needed: {reason}. Give all ranks the same values."
        ) from error
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"segpipe/{restart}", store)


def _exchange(store: Store, card: Card, same: Sequence[str], timeout_s: float) -> None:
    """Publish `card`, and wait for those of all ranks."""
    store.set(f"card/{store.add('cards', 1)}", json.dumps(card))
    world_size = int(card["WORLD_SIZE"])
    end = time.monotonic() + timeout_s
    cards: list[Card] = []
    while True:
        cards += _cards(store, len(cards), store.add("cards", 0))
        if problem := conflict(cards, same):
            raise CollectiveError(problem)
        if len(cards) == world_size:
            return
        if time.monotonic() > end:
            raise CollectiveError(_missing(cards, world_size, timeout_s))
        time.sleep(POLL_S)


def _cards(store: Store, first: int, end: int) -> list[Card]:
    return [json.loads(store.get(f"card/{place + 1}")) for place in range(first, end)]


def sharing(store: Store, world_size: int) -> list[int]:
    """Ranks of a run that has met whose GPU another rank has too; ranks without one share none."""
    cards = _cards(store, 0, world_size)
    gpus = [card["gpu"] for card in cards]
    return sorted(
        card["rank"] for card in cards if card["gpu"] and gpus.count(card["gpu"]) > 1
    )


def conflict(cards: Sequence[Card], same: Sequence[str]) -> str:
    """Why these ranks cannot be one run, naming both sides; empty if they can."""
    by_rank: dict[int, Card] = {}
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


def _who(card: Card) -> str:
    return f"rank {card['rank']} (host {card['host']}, process {card['pid']})"


def _missing(cards: Sequence[Card], world_size: int, timeout_s: float) -> str:
    present = [card["rank"] for card in cards]
    missing = [rank for rank in range(world_size) if rank not in present]
    return (
        f"ranks {missing[:16]} of WORLD_SIZE = {world_size} did not come to {_address()} within {timeout_s:.0f} s; "
        f"there were {', '.join(_who(card) for card in cards[:16])}. Check how they were started; if they only needed "
        f"longer, raise compute.timeout_s."
    )
