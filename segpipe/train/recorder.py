"""The ledger of a run: digests of what every update read, computed and left behind.

Level 0 (`compute.ledger`): one row per shard and one per step. Level 1 (`compute.mode=audit`): also one row per sample
and per tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from segpipe.ledger import writer as ledger
from segpipe.ledger.digest import digest_groups, digest_many, float_bits
from segpipe.ledger.rows import ledger_path
from segpipe.train.watch import Watch

if TYPE_CHECKING:
    from segpipe.data.data_set import Samples
    from segpipe.data.loader import ShardBatch
    from segpipe.distributed.group import Group
    from segpipe.settings.config import Config
    from segpipe.train.state import TrainState


class Recorder(Watch):
    """Watch that writes this process's rows. Digests stay on the device until a flush, so nothing waits in between."""

    state_digest: Tensor  # int64, 0-d

    def __init__(
        self,
        config: Config,
        group: Group,
        state: TrainState,
        samples: Samples,
        fingerprint: dict[str, Any],
        *,
        cache_mib: float = 0.0,
    ) -> None:
        """Open the run's ledger for a session that starts at `state.step`. Raises CheckpointError."""
        super().__init__(group, state, config.run_dir, cache_mib=cache_mib)
        self.samples = samples
        self.audits = config.compute.mode == "audit"
        self.steps_held = (
            10 if self.audits else 50
        )  # on the device, before they are written
        self._names, self._parameters = zip(*_trained(state.model), strict=True)
        self._norms = {
            name: value
            for name, value in _numbers(state.model).items()
            if name not in self._names
        }
        self._averaged = _numbers(state.ema.model)
        # In the order of a row; the optimizer's moments are made by its first updates.
        self._tensors: dict[str, Sequence[Tensor]] = {
            "weights": self._parameters,
            "optimizer": [],
            "statistics": list(self._norms.values()),
            "ema": list(self._averaged.values()),
        }
        session = group.gather(
            ledger.next_session(config.run_dir) if group.is_main else 0
        )[0]
        header = ledger.session_header(
            config,
            fingerprint,
            session=session,
            first_step=state.step,
            rank=group.rank,
            world_size=group.world_size,
            parts={"gradient": self._names, **self.part_names()}
            if self.audits
            else None,
            sample_names=[samples.name(index) for index in range(len(samples))]
            if group.is_main
            else [],
        )
        self._writer = ledger.LedgerWriter(
            ledger_path(config.run_dir, group.rank), header
        )
        self._shard: dict[str, Tensor] = {}
        self._step: dict[str, Tensor] = {}
        self.state_digest = torch.zeros((), dtype=torch.int64)
        self._state_row(state.step - 1)

    def forward(self, seen: Tensor, heads: Mapping[str, Tensor]) -> None:
        """Digests of input and output of the shard's network, for its row."""
        found = digest_groups([[seen], list(heads.values())], channels_last=True)
        self._shard = dict(zip(("batch", "logits"), found.unbind(), strict=True))

    def whole_batch(self, shards: Sequence[ShardBatch]) -> None:
        """Rows of shards that have no forward of their own."""
        for batch in shards:
            self._writer.shard_row(
                self.state.step, batch.shard, batch.epoch, batch.index, _samples(batch)
            )

    def shard(
        self,
        batch: ShardBatch,
        loss: Tensor,
        statistics: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> None:
        """Row of a shard, after its backward; `gradients` in the order of the trained parameters."""
        step, shard = self.state.step, batch.shard
        found = digest_groups([statistics, gradients], channels_last=True)
        sums = dict(zip(("statistics", "gradient"), found.unbind(), strict=True))
        row = {
            **self._shard,
            **_samples(batch),
            **sums,
            "loss": float_bits(loss.detach().double()),
        }
        self._writer.shard_row(step, shard, batch.epoch, batch.index, row)
        if not self.audits:
            return
        self._writer.part_rows(step, shard, "gradient", _each(gradients))
        self._writer.part_rows(step, shard, "statistics", _each(statistics))
        for name, digests in self._decoded(batch).items():
            self._writer.part_rows(step, shard, name, digests)

    def _decoded(self, batch: ShardBatch) -> dict[str, Tensor]:
        """Digests of the samples before augmentation; reads them again, in this process."""
        pairs = [self.samples.read(int(index)) for index in batch.index]
        images, targets = (
            [digest_many([torch.from_numpy(part.copy())]) for part in parts]
            for parts in zip(*pairs, strict=True)
        )
        return {
            "decoded_image": torch.stack(images),
            "decoded_target": torch.stack(targets),
        }

    def reduced(self, valid: Tensor) -> None:
        """Digests of the gradients of the step, before anything scales or clips them."""
        gradients = [
            p.grad if p.grad is not None else torch.zeros_like(p)
            for p in self._parameters
        ]
        self._step = {
            "valid": valid.long(),
            "gradient": digest_many(gradients, channels_last=True),
        }
        if self.audits:
            self._writer.part_rows(self.state.step, None, "gradient", _each(gradients))

    def applied(self, rate: float) -> None:
        """Row of the update."""
        self._step |= {"lr": float_bits(rate), "scale": float_bits(1.0)}
        self._state_row(self.state.step - 1)

    def _state_row(self, step: int) -> None:
        moments = [
            value
            for parameter in self._parameters
            for value in _moments(self.state.optimizer, parameter)
        ]
        kinds = {**self._tensors, "optimizer": moments}
        found = digest_groups(list(kinds.values()), channels_last=True)
        scaler = self.state.scaler
        if scaler.is_enabled():  # also before a session's first update: a loaded scale decides what is skipped
            scale = scaler._get_scale_async()  # no wait for a GPU
            self._step["scale"] = float_bits(
                scaler.get_scale() if scale is None else scale
            )
        self._writer.step_row(
            step, {**self._step, **dict(zip(kinds, found.unbind(), strict=True))}
        )
        self.state_digest = digest_many([found])
        if self.audits:
            for name, digests in self._digest_parts().items():
                self._writer.part_rows(step, None, name, digests)

    def _digest_parts(self) -> dict[str, Tensor]:
        """For every name of `part_names` the digests of the tensors, or moments, under that name, int64 (n,)."""
        found = {name: _each(tensors) for name, tensors in self._tensors.items()}
        return found | {
            "optimizer": _each(
                [_moments(self.state.optimizer, value) for value in self._parameters]
            )
        }

    def part_names(self) -> dict[str, list[str]]:
        """Names of the tensors of the state, by kind, in the order in which a fault spreads."""
        names = list(self._names)
        return {
            "weights": names,
            "optimizer": names,
            "statistics": list(self._norms),
            "ema": list(self._averaged),
        }

    def state_parts(self) -> dict[str, list[int]]:
        """Digests of the tensors that `part_names` names, as the state is now."""
        return {
            name: digests.tolist() for name, digests in self._digest_parts().items()
        }

    def after_update(self) -> None:
        """Flush every `steps_held` updates, on all ranks or none: a full disk ends the run on all."""
        super().after_update()
        if self.state.step % self.steps_held == 0:
            self.group.together(self.flush)

    def flush(self, *, sync: bool = False) -> None:
        """Write what is pending; with `sync` it is on the disk, as the checkpoint beside it will be."""
        self._writer.flush(sync=sync)

    def close(self) -> None:
        """Write what is pending, and end."""
        self._writer.close()


def _samples(batch: ShardBatch) -> dict[str, Tensor]:
    """Digests of each image, with its color where the device applies that, and of each target, int64 (b,)."""
    images = (
        [[image] for image in batch.image]
        if batch.color is None
        else [*zip(batch.image, batch.color, strict=True)]
    )
    found = digest_groups([*images, *([target] for target in batch.target)])
    return {"image": found[: len(images)], "target": found[len(images) :]}


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def _numbers(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, but for BatchNorm's counters of steps; they live as long as the model."""
    return {
        name: value
        for name, value in model.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }


def _moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    """The optimizer's state of a parameter, in the order of the names; nothing before the first update."""
    kept = optimizer.state.get(parameter, {})
    return [kept[name] for name in sorted(kept) if isinstance(kept[name], Tensor)]


def _each(parts: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> Tensor:
    """Digest of every tensor, or of the tensors of every name, int64 (n,)."""
    return digest_groups(
        [[part] if isinstance(part, Tensor) else part for part in parts],
        channels_last=True,
    )


def keeps_ledger(config: Config) -> bool:
    """Whether the run writes rows: `compute.ledger`, but not in mode off."""
    return config.compute.ledger and config.compute.mode != "off"


def open_watch(
    config: Config,
    group: Group,
    state: TrainState,
    samples: Samples,
    fingerprint: dict[str, Any],
    cache_mib: float = 0.0,
) -> Watch:
    """What watches a run: a Recorder where it keeps a ledger. `cache_mib` as for Watch."""
    if not keeps_ledger(config):
        return Watch(group, state, config.run_dir, cache_mib=cache_mib)
    return Recorder(config, group, state, samples, fingerprint, cache_mib=cache_mib)
