"""The process group of a run: rendezvous, this process's rank, and the few collectives that segpipe needs.

torch waits for `WORLD_SIZE` ranks until its timeout, even if two processes have the same RANK or differ in WORLD_SIZE.
So every rank first leaves a card in the store, and a conflict is named within a second.
"""

import contextlib
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from segpipe.distributed import environment
from segpipe.distributed.contract import MARGIN_S, Contract, watch
from segpipe.errors import CollectiveError, ConfigError, SegpipeError, first_line
from segpipe.processes import proc_lines, this_host
from segpipe.settings.groups import ComputeConfig

T = TypeVar("T")
Card = Mapping[str, Any]
POLL_S = 0.05
SEVERAL = "NCCL_MULTI_RANK_GPU_ENABLE"  # 1: NCCL allows several ranks on one GPU
LINGER_S = 1.0  # how long the rank that holds the store stays after a failure, so that the others can read why


class Level(NamedTuple):
    """Ranks that sum among each other on one level of the reduction tree; neighbours in shard order."""

    size: int
    ranks: Any  # a dist.ProcessGroup; None: all of them


@dataclass(frozen=True)
class Group:
    """This process's place in the run; a single process communicates nothing."""

    rank: int
    world_size: int
    device: torch.device
    # With several machines: the ranks of this machine, then the ranks with this local rank on all machines.
    subgroups: tuple[Level, ...] = ()
    # Told of every collective before the call.
    contract: Contract = field(default_factory=Contract, compare=False)

    def levels(self, leaves: int) -> tuple[Level, ...]:
        """Levels from the leaves to the root: one, or two on several machines if each rank holds one subtree."""
        power_of_two = leaves & (leaves - 1) == 0
        whole = power_of_two and leaves % self.world_size == 0
        if self.subgroups and (whole or len(self.subgroups) == 1):
            return self.subgroups
        return (Level(self.world_size, None),)

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes the run's files."""
        return self.rank == 0

    def own_shards(self, shards: int) -> range:
        """The logical shards that this rank computes."""
        return self.runs(shards)[self.rank]

    def runs(self, shards: int) -> list[range]:
        """The shards of every rank, `[rank*V/R, (rank+1)*V/R)` rounded down; their counts differ by at most one."""
        size = self.world_size
        return [
            range(rank * shards // size, (rank + 1) * shards // size)
            for rank in range(size)
        ]

    def sum_tensor(self, counts: Tensor) -> Tensor:
        """Sum of an integer tensor over the ranks; not for floats, whose sum depends on the order."""
        assert not counts.is_floating_point()
        if self.world_size > 1:
            counts = counts.to(self.device)
            self.contract.enter("all_reduce", counts)
            with self.contract.waiting():
                dist.all_reduce(counts)
        return counts

    def gather(self, item: T) -> list[T]:
        """Every rank's `item`, in rank order, on every rank; for small picklable objects."""
        if self.world_size == 1:
            return [item]
        items = [item] * self.world_size
        self.contract.enter("all_gather_object")
        dist.all_gather_object(items, item)
        return items

    def together(self, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on every rank; returns the results by rank, which must be small.

        If it raises a SegpipeError on any rank, every rank raises the first such error, marked as `common`.
        """
        own: SegpipeError | None = None
        result = None
        try:
            result = action()
        except SegpipeError as error:
            own = error
        answers = self.gather((own, result))
        for number, (first, _) in enumerate(answers):
            if first is not None:
                first.common = True
                if number:  # perhaps on another machine
                    first.args = (f"rank {number}: {first}",)
                raise first from own
        return [found for _, found in answers]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            self.contract.enter("barrier")
            dist.barrier()

    def keep_stacks(self, folder: Path) -> None:
        """Write every rank's stacks to `folder`/stacks on a failure; rank 0 must have created the folder."""
        self.barrier()
        self.contract.keep_stacks(folder)


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank: its own GPU, or the CPU.

    Raises ConfigError when a GPU is requested but missing, or present but unusable for torch.
    """
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    driver = [*proc_lines("driver/nvidia/version"), *sorted(glob("/dev/nvidia[0-9]*"))]
    if name == "auto" and (hidden or not driver):
        return torch.device("cpu")
    found = f"there is a driver ({driver[0]})" if driver else "there is no driver"
    raise ConfigError(
        f"compute.device = {name}, but torch {torch.__version__}, built for CUDA {torch.version.cuda}, sees no GPU; "
        f"{found}. Install a driver for that CUDA release or a torch for this driver, give the container access to "
        f"the GPU, or set compute.device=cpu."
    )


def join(config: ComputeConfig, same: Mapping[str, str]) -> Group:
    """Group of this process; connects to the other ranks if a launcher set RANK and WORLD_SIZE.

    `same`: further values that must be equal on all ranks, by name. Raises CollectiveError when they differ, or when
    ranks are missing, and ConfigError for what this machine lacks. Uses NCCL if each rank has its own GPU; gloo on CPUs
    and when ranks share a GPU.
    """
    rank = environment.rank()
    world_size = environment.world_size() or 1
    device = choose_device(config.device, environment.local_rank())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        return Group(rank, world_size, device)
    gpu = ""  # unique across all machines
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        # NCCL does not support GPU instances (MIG), whose uuid may be the whole GPU's or their own.
        gpu = "MIG" if "MIG" in found.name else str(found.uuid)
    store, cards = meet({**same, "device": device.type}, config.timeout_s, gpu)
    # Not by the number of visible GPUs: a launcher may show each rank only its own.
    shared = [] if os.environ.get(SEVERAL) == "1" else sharing(cards)
    if shared and rank == 0:
        warnings.warn(
            f"ranks {shared[:16]} share GPUs or run on GPU instances (MIG), so all ranks exchange gradients through "
            f"the host (gloo), which is slow. Start one process for each GPU.",
            stacklevel=2,
        )
    if environment.on_loopback():
        for library in ("GLOO", "NCCL"):  # both open listening sockets
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    nccl = device.type == "cuda" and not shared
    timeout = timedelta(seconds=config.timeout_s + MARGIN_S)
    dist.init_process_group(
        "nccl" if nccl else "gloo",
        store=PrefixStore("torch", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if nccl else None,
    )
    hosts = [card["machine"] for card in sorted(cards, key=lambda card: card["rank"])]
    contract = watch(store, rank, world_size, timeout_s=config.timeout_s, hosts=hosts)
    group = Group(rank, world_size, device, contract=contract)
    subgroups = _subgroups(group, environment.local_world_size(), timeout)
    return replace(group, subgroups=subgroups)


def _subgroups(group: Group, local: int, timeout: timedelta) -> tuple[Level, ...]:
    """The two levels of several machines; none on one machine, or if machines have different numbers of ranks."""
    world = group.world_size
    if set(group.gather(local)) != {local} or local in (1, world):
        return ()
    ranks = range(world)
    machines = [list(ranks[first : first + local]) for first in range(0, world, local)]
    places = [list(ranks[place::local]) for place in range(local)]
    # Without an explicit timeout NCCL uses 600 s, and its watchdog would end the process before we name the cause.
    within, _ = dist.new_subgroups_by_enumeration(machines, timeout=timeout)
    across, _ = dist.new_subgroups_by_enumeration(places, timeout=timeout)
    return (Level(local, within), Level(world // local, across))


def leave(group: Group) -> None:
    """Destroy the process group, if there is one, and stop watching."""
    if dist.is_initialized():
        dist.destroy_process_group()
    group.contract.close()


def give_up(error: Exception) -> None:
    """Tell the ranks of other machines, which wait in `meet`, why this one ends."""
    if environment.local_world_size() < (environment.world_size() or 1):
        with contextlib.suppress(CollectiveError, OSError, ValueError):
            if environment.rank():  # torch would wait for a store, and print frames
                place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                socket.create_connection(place, environment.LINGER_S).close()
            meet({}, environment.LINGER_S, problem=str(error))


def meet(
    same: Mapping[str, str], timeout_s: float, gpu: str = "", problem: str = ""
) -> tuple[Store, list[Card]]:
    """The store of this run and the cards of all ranks, once WORLD_SIZE ranks have connected to it.

    `same`: further values that must be equal on all ranks, by name; `gpu`: a unique name of this rank's GPU. Raises
    CollectiveError on every rank when values differ, when two processes have the same RANK, when one has a `problem`,
    and after `timeout_s` when ranks are missing.
    """
    world_size = environment.world_size() or 1
    rank = environment.rank()
    card: Card = {
        "rank": rank,
        "host": socket.gethostname(),
        "machine": this_host(),
        "pid": os.getpid(),
        "gpu": gpu,
        "problem": problem,
        "same": {"WORLD_SIZE": world_size, **same},
    }
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = _open(rank, timeout_s, keeps=keeps)
    try:
        return store, _exchange(store, card, world_size, timeout_s)
    except CollectiveError:
        time.sleep(LINGER_S if keeps else 0.0)
        raise
    except RuntimeError as error:  # torch.distributed.DistError
        raise CollectiveError(
            f"rank {rank} lost the store at {_address()} before all ranks had connected: the process that holds it "
            f"ended."
        ) from error


def local_store() -> TCPStore:
    """A store held by this process that no other machine can reach."""
    listener = _listen(0)
    return TCPStore(
        environment.LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _listen(port: int) -> socket.socket:
    """A socket for a store. TCPStore itself would listen on all interfaces, without a password."""
    return socket.create_server((environment.LOOPBACK, port))


def _address() -> str:
    return f"MASTER_ADDR:MASTER_PORT = {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _open(rank: int, timeout_s: float, *, keeps: bool) -> Store:
    """The store, held by a launcher's agent, or else by rank 0 (`keeps`)."""
    try:
        port = int(os.environ["MASTER_PORT"])
        local = keeps and environment.on_loopback()
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            port,
            is_master=keeps,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_listen(port).detach() if local else None,
        )
    except (RuntimeError, ValueError, OSError, OverflowError) as error:
        place = "a free port" if keeps else "the address and port of a running rank 0"
        raise CollectiveError(
            f"{_address()} on rank {rank}, but {place} was needed: {first_line(error)}. Give all ranks the same values."
        ) from error
    # A launcher's agent keeps its store when it restarts its ranks. If rank 0 keeps it, every start has a new one, and
    # machines that joined at different times may have different restart counts.
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environment.job_attempt()[1][1] if agents else 0
    return PrefixStore(f"segpipe/{attempt}", store)


def _exchange(
    store: Store, card: Card, world_size: int, timeout_s: float
) -> list[Card]:
    """Publish `card`; returns the cards of all ranks once they are there."""
    store.set(f"card/{store.add('cards', 1)}", json.dumps(card))
    end = time.monotonic() + timeout_s
    cards: list[Card] = []
    while True:
        further = range(len(cards), store.add("cards", 0))
        cards += [json.loads(store.get(f"card/{place + 1}")) for place in further]
        if problem := conflict(cards):
            raise CollectiveError(problem)
        if len(cards) == world_size:
            return cards
        if time.monotonic() > end:
            missing = sorted({*range(world_size)} - {card["rank"] for card in cards})
            raise CollectiveError(
                f"ranks {missing[:16]} of WORLD_SIZE = {world_size} did not connect to {_address()} within "
                f"{timeout_s:.0f} s; connected: {', '.join(_who(card) for card in cards[:16])}. Check how they were "
                f"started; if they only need more time, raise compute.timeout_s."
            )
        time.sleep(POLL_S)


def sharing(cards: Sequence[Card]) -> list[int]:
    """Ranks whose GPU another rank also uses; ranks without a GPU share none."""
    gpus = [card["gpu"] for card in cards]
    return sorted(
        card["rank"] for card in cards if card["gpu"] and gpus.count(card["gpu"]) > 1
    )


def conflict(cards: Sequence[Card]) -> str:
    """Why these ranks cannot form one run, naming both sides; empty if they can."""
    by_rank: dict[int, Card] = {}
    for card in cards:
        if problem := card["problem"]:
            return f"{_who(card)}: {problem}"
        first = cards[0]
        for name, value in first["same"].items():
            if card["same"].get(name) != value:
                return (
                    f"{name} = {card['same'].get(name)} on {_who(card)}, but {value} on {_who(first)}. "
                    f"Start all processes of a run with the same values."
                )
        other = by_rank.setdefault(card["rank"], card)
        if other is not card:
            return (
                f"RANK = {card['rank']} was given twice: to {_who(other)} and to {_who(card)}. Give every process its "
                f"own rank, and every run its own MASTER_PORT."
            )
    return ""


def _who(card: Card) -> str:
    return f"rank {card['rank']} (host {card['host']}, process {card['pid']})"
