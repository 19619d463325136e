"""What observes the updates of a run: agreement between ranks, memory, and with `recorder.Recorder` the ledger."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from segpipe.distributed.watch.agreement import Agreement
from segpipe.distributed.watch.health import Health, Scene, out_of_memory_named

if TYPE_CHECKING:
    from segpipe.data.loader import ShardBatch
    from segpipe.distributed.group import Group
    from segpipe.train.state import TrainState


class Watch:
    """Hooks that an update calls. This version keeps no ledger (compute.ledger=false, compute.mode=off).

    Ranks still compare the collectives that they called, and memory is still watched. No hook changes a number.
    """

    state_digest: Tensor | None = (
        None  # of what the last update left behind; equal on all ranks
    )

    def __init__(
        self,
        group: Group,
        state: TrainState,
        folder: Path = Path(),
        *,
        cache_mib: float = 0.0,
    ) -> None:
        """`folder`: for reports of failures; `cache_mib`: memory that this process's caches may use."""
        self.group, self.state = group, state
        self.health = Health(group, allowance_mib=cache_mib)
        # Sums integers over the ranks, which compare their states on the way. Bound, not wrapped: the line of a
        # collective is the nearest outside segpipe/distributed, and must be that of the caller.
        self.sum = Agreement(group, self, folder).sum

    def span(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Context of one part of an update, which `segpipe profile` measures; spans do not overlap."""
        return contextlib.nullcontext()

    def forward(self, seen: Tensor, heads: Mapping[str, Tensor]) -> None:
        """After a shard's forward pass, with the network's input and outputs."""

    def shard(
        self,
        batch: ShardBatch,
        loss: Tensor,
        statistics: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> None:
        """The backward of a shard is done; `gradients` in the order of the trained parameters."""

    def whole_batch(self, shards: Sequence[ShardBatch]) -> None:
        """DDP takes these shards as one batch: there is no `forward` and `shard` for each."""

    def reduced(self, valid: Tensor) -> None:
        """The gradients of the step are in `.grad`, before anything scales or clips them."""

    def applied(self, rate: float) -> None:
        """The update is done, at this learning rate."""

    def after_update(self) -> None:
        """Gradients are gone, so memory can be compared with that of earlier updates. May be a collective."""
        self.health.after_step(self.state.step)

    def flush(self, *, sync: bool = False) -> None:
        """Write what is pending; with `sync` it is on the disk afterwards."""

    def close(self) -> None:
        """Write what is pending, and end."""

    def state_parts(self) -> dict[str, list[int]]:
        """Digests of the tensors that `part_names` names, as the state is now."""
        return {}

    def part_names(self) -> dict[str, list[str]]:
        """Names of the tensors of the state, by kind, in the order in which a fault spreads."""
        return {}

    def explain_out_of_memory(
        self, shapes: Sequence[tuple[int, ...]]
    ) -> contextlib.AbstractContextManager[None]:
        """Context that raises OutOfMemory in place of torch's errors; `shapes`: of the image batches inside."""
        group, state = self.group, self.state
        scene = Scene(
            group.rank,
            state.step,
            shapes,
            state.model,
            group.device,
            state.optimizer,
            state.ema.model,
        )
        return out_of_memory_named(scene)
