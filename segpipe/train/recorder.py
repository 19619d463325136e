"""Observers of a run's updates: agreement between ranks, and the ledger.

The ledger holds digests of what every update read, computed and left behind. Level 0 (`compute.ledger`): one row per
shard and one per step. Level 1 (`compute.mode=audit`): also one row per sample and per tensor.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from segpipe.errors import DivergenceError
from segpipe.ledger.digest import as_tensors, digest_groups, digest_many, float_bits
from segpipe.ledger.rows import LedgerWriter, SessionHeader, ledger_path, next_session
from segpipe.settings.config import Config, config_hash, recipe

if TYPE_CHECKING:
    from torch.profiler import profile

    from segpipe.data.data_set import Samples
    from segpipe.data.loader import ShardBatch
    from segpipe.distributed.group import Group
    from segpipe.train.state import TrainState

# Spans of an update, in order; see `Watch.span`.
PARTS = (
    "data", "counts", "copy", "forward", "loss", "backward", "reduction", "clip", "optimizer", "average", "ledger",
)  # fmt: skip
NamedTensors = Mapping[str, Sequence[Tensor]]


class Watch:
    """Hooks that an update calls. This class keeps no ledger (compute.ledger=false, compute.mode=off).

    It compares the calls and states of the ranks inside a sum that an update needs anyway.

    After the gradients are reduced, every rank does the same arithmetic. A rank with different bits therefore has a
    fault: a flipped bit, a nondeterministic kernel, or code that depends on the rank. Each rank adds the digest of its
    state to the sum. If the sum is not the rank's own digest times the number of ranks, the states differ, and all
    ranks see it in the same step. (If one rank of R differs, the others always see it. That rank misses it only if the
    difference times R - 1 is a multiple of 2^64: impossible for even R; for odd R up to 17, probability at most 2^-60.)

    No hook changes a number.
    """

    # Digest of the state after the last update; equal on all ranks. None: states are not compared.
    state_digest: Tensor | None = None

    def __init__(self, group: Group, state: TrainState) -> None:
        self.group = group
        self.state = state
        self._unequal = torch.zeros((), dtype=torch.bool, device=group.device)
        # Seconds of this process in each part of an update; a GPU may finish the part's work later.
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def sum(self, numbers: Sequence[int], *, wait: bool = True) -> Tensor:
        """Sums of these integers over the ranks, int64 (n,), on the device. A collective.

        Raises CollectiveError or DivergenceError on every rank when ranks differ: at once on a CPU or with `wait`,
        otherwise at the next call that waits, so that the host need not synchronize with a GPU.
        """
        group = self.group
        ticket = group.contract.ticket()
        own = torch.tensor([*numbers, ticket, 0]).to(group.device, non_blocking=True)
        if self.state_digest is not None:
            own[-1] = self.state_digest  # as a number it would synchronize with a GPU
        total = group.sum_tensor(own.clone())
        if group.world_size > 1:
            self._unequal |= total[-1] != own[-1] * group.world_size
            if wait or group.device.type == "cpu":
                group.contract.settle(int(total[-2]))
                if self._unequal:
                    verdict = first_disagreement(group.gather(self.state_parts()))
                    raise DivergenceError(
                        f"step {self.state.step}: ranks that must hold the same bits differ. {verdict} No checkpoint "
                        f"has been written since. If it is always the same rank, test its memory and GPU; otherwise "
                        f"look for code that depends on the rank. Continue with run.exists=resume."
                    )
        return total[:-2]

    def state_parts(self) -> dict[str, dict[str, int]]:
        """Digests of the current state's tensors, by kind and name, in the order in which a fault spreads."""
        return {}

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """Context of one part of an update, which `segpipe profile` measures; spans do not overlap."""
        started = time.perf_counter()
        with record_function(part):
            yield
        self.seconds[part] += time.perf_counter() - started

    def _nothing(self, *given: Any, **named: Any) -> None:
        """Stands in for the hooks of a Recorder."""

    forward = shard = whole_batch = reduced = applied = after_update = _nothing
    flush = close = _nothing


class Recorder(Watch):
    """Watch that writes this process's rows. Digests stay on the device until a flush, so nothing waits for a GPU."""

    state_digest: Tensor  # int64, 0-d

    def __init__(
        self,
        config: Config,
        group: Group,
        state: TrainState,
        samples: Samples,
        fingerprint: dict[str, Any],
    ) -> None:
        """Open the run's ledger for a session that starts at `state.step`. Raises CheckpointError on failure."""
        super().__init__(group, state)
        self.samples = samples
        self.audits = config.compute.mode == "audit"

        # Steps whose digests stay on the device before they are written.
        self.steps_held = 10 if self.audits else 50

        named = dict(state.model.named_parameters())
        self._trained = {name: one for name, one in named.items() if one.requires_grad}
        self._weights = {name: [value] for name, value in named.items()}
        self._averaged = _numbers(state.ema.model)
        self._statistics = _numbers(state.model)
        for name in named:
            del self._statistics[name]

        folder, is_main = config.run_dir, group.is_main
        session = next_session(folder) if is_main else 0
        kinds = {"gradient": self._trained, **self._kinds()} if self.audits else {}
        indices = range(len(samples)) if is_main else ()
        header = SessionHeader(
            session=group.gather(session)[0],
            first_step=state.step,
            rank=group.rank,
            world_size=group.world_size,
            recipe=recipe(config),
            config_hash=config_hash(config),
            fingerprint=fingerprint,
            level=int(self.audits),
            parts={kind: list(tensors) for kind, tensors in kinds.items()},
            sample_names=[samples.name(index) for index in indices],
        )

        path = ledger_path(folder, group.rank)
        self._writer = LedgerWriter(path, header)
        self._step: dict[str, Tensor] = {}

        self._state_row(state.step - 1)

    def forward(self, seen: Tensor, heads: Mapping[str, Tensor]) -> None:
        """Digest the network's input and output for the shard's row."""
        with self.span("ledger"):
            batch, logits = digest_groups([[seen], list(heads.values())])
            self._shard = {"batch": batch, "logits": logits}

    def whole_batch(self, shards: Sequence[ShardBatch]) -> None:
        """Write rows of shards that have no forward of their own."""
        with self.span("ledger"):
            for batch in shards:
                self._shard_row(batch, {})

    def shard(
        self,
        batch: ShardBatch,
        loss: Tensor,
        statistics: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> None:
        """Write the row of a shard after its backward; `gradients` in the order of the trained parameters."""
        with self.span("ledger"):
            own, grads = digest_groups([statistics, gradients])
            found = {"statistics": own, "gradient": grads, "loss": float_bits(loss)}
            self._shard_row(batch, {**self._shard, **found})

            if not self.audits:
                return

            # The samples before augmentation, which this process reads again.
            frames = [self.samples.read(int(index)) for index in batch.index]
            images, targets = zip(*frames, strict=True)
            rows = {
                "gradient": _each(gradients),
                "statistics": _each(statistics),
                "decoded_image": _each(as_tensors(*images)),
                "decoded_target": _each(as_tensors(*targets)),
            }
            for name, digests in rows.items():
                self._writer.part_rows(self.state.step, batch.shard, name, digests)

    def _shard_row(self, batch: ShardBatch, found: Mapping[str, Tensor]) -> None:
        # A digest of each image and of each target, int64 (b,).
        image, target = _each([*batch.image, *batch.target]).chunk(2)
        row = {**found, "image": image, "target": target}
        self._writer.shard_row(
            self.state.step, batch.shard, batch.epoch, batch.index, row
        )

    def reduced(self, valid: Tensor) -> None:
        """Digest the gradients of the step, before anything scales or clips them."""
        with self.span("ledger"):
            gradients = [
                p.grad if p.grad is not None else torch.zeros_like(p)
                for p in self._trained.values()
            ]
            self._step = {"valid": valid.long(), "gradient": digest_many(gradients)}
            if self.audits:
                self._writer.part_rows(
                    self.state.step, -1, "gradient", _each(gradients)
                )

    def applied(self, rate: float) -> None:
        """Write the row of the update."""
        with self.span("ledger"):
            self._step |= {"lr": float_bits(rate), "scale": float_bits(1.0)}
            self._state_row(self.state.step - 1)

    def _state_row(self, step: int) -> None:
        kinds = self._kinds()
        groups = [list(chain.from_iterable(named.values())) for named in kinds.values()]
        found = digest_groups(groups)

        scaler = self.state.scaler
        # Also before a session's first update: a loaded scale decides which updates are skipped.
        if scaler.is_enabled():
            scale = scaler._get_scale_async()  # no wait for a GPU
            self._step["scale"] = float_bits(
                scaler.get_scale() if scale is None else scale
            )

        digests = dict(zip(kinds, found.unbind(), strict=True))
        self._writer.step_row(step, {**self._step, **digests})

        self.state_digest = digest_many([found])

        if self.audits:
            for name, named in kinds.items():
                self._writer.part_rows(step, -1, name, _each(named.values()))

    def _kinds(self) -> dict[str, NamedTensors]:
        """Tensors of the state by kind and name, in row order; moments are missing before the first update."""
        moments = {
            name: _moments(self.state.optimizer, value)
            for name, value in self._trained.items()
        }

        return {
            "weights": self._weights,
            "optimizer": moments,
            "statistics": self._statistics,
            "ema": self._averaged,
        }

    def state_parts(self) -> dict[str, dict[str, int]]:
        """As in Watch."""
        return {
            kind: dict(zip(named, _each(named.values()).tolist(), strict=True))
            for kind, named in self._kinds().items()
        }

    def after_update(self) -> None:
        """Flush every `steps_held` updates, on all ranks together: a full disk on one ends the run on all."""
        with self.span("ledger"):
            if self.state.step % self.steps_held == 0:
                self.group.together(self.flush)

    def flush(self, *, sync: bool = False) -> None:
        """Write pending rows; with `sync`, also to the physical disk, as for the checkpoint that follows."""
        self._writer.flush(sync=sync)

    def close(self) -> None:
        """Write pending rows and close the file."""
        self._writer.close()


def first_disagreement(by_rank: Sequence[dict[str, dict[str, int]]]) -> str:
    """A sentence that names the first tensor on which ranks differ, and the ranks in the minority.

    by_rank: each rank's digests by kind (weights, optimizer, ...) and tensor name. Kinds are in the order in which a
    fault spreads.
    """
    for kind, tensors in by_rank[0].items():
        for tensor in tensors:
            digests = [parts[kind][tensor] % 2**64 for parts in by_rank]
            usual, votes = Counter(digests).most_common(1)[0]
            if votes == len(digests):
                continue
            odd = [
                f"rank {rank} {digest:016x}"
                for rank, digest in enumerate(digests)
                if digest != usual
            ]
            sides = f"{votes} of {len(digests)} ranks have {usual:016x}, but {', '.join(odd[:8])}"
            if 2 * votes <= len(digests):
                sides += ", so no side has a majority"
            return f"The first tensor that differs is {tensor} ({kind}): {sides}."
    return "No tensor differs now, so the sum itself was corrupted in transit."


def _numbers(model: nn.Module) -> dict[str, list[Tensor]]:
    """Parameters and buffers by name, except BatchNorm's step counters; valid as long as the model."""
    return {
        name: [value]
        for name, value in model.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }


def _moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    """The optimizer's state of a parameter, ordered by name; empty before the first update."""
    kept = optimizer.state.get(parameter, {})
    return [kept[name] for name in sorted(kept) if isinstance(kept[name], Tensor)]


def _each(parts: Iterable[Tensor | Sequence[Tensor]]) -> Tensor:
    """Digest of every tensor, or of the tensors of every name, int64 (n,)."""
    groups = [[part] if isinstance(part, Tensor) else part for part in parts]
    return digest_groups(groups)


def keeps_ledger(config: Config) -> bool:
    """Whether the run writes rows: `compute.ledger`, but not in mode off."""
    return config.compute.ledger and config.compute.mode != "off"


def open_watch(
    config: Config,
    group: Group,
    state: TrainState,
    samples: Samples,
    fingerprint: dict[str, Any],
) -> Watch:
    """The observer of a run: a Recorder if it keeps a ledger, else a Watch."""
    if not keeps_ledger(config):
        return Watch(group, state)
    return Recorder(config, group, state, samples, fingerprint)


def spent(trace: profile, device: torch.device) -> dict[str, float]:
    """Seconds in each of PARTS: on the device if it is a GPU, except for data, which the host waits for."""
    found: dict[str, float] = {}
    for event in trace.key_averages():
        if event.key in PARTS:
            on_host = event.key == "data" or device.type == "cpu"
            time_us = event.cpu_time_total if on_host else event.device_time_total
            found[event.key] = max(found.get(event.key, 0.0), time_us / 1e6)
    return found
