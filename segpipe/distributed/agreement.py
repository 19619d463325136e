"""Checks that all ranks hold the same state: environment and checkpoint at the start, a digest at every update."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segpipe import plugins
from segpipe.determinism import flags
from segpipe.distributed.group import Group
from segpipe.errors import CheckpointError, ConfigError, DivergenceError
from segpipe.settings.config import Config


def common_fingerprint(
    config: Config, group: Group, loss: str
) -> tuple[dict[str, Any], list[str]]:
    """Environment fingerprint of rank 0, and a phrase for each value that differs on another rank.

    `loss`: what computes the loss on this rank. Raises ConfigError on every rank when ranks differ in it, or in the
    code of a plug-in.
    """
    own = own_fingerprint(config, loss)
    if config.compute.mode not in ("elastic", "audit"):
        own["world_size"] = group.world_size
    first, *others = group.gather(own)
    phrases = []
    for rank, other in enumerate(others, 1):
        if changed := flags.changed_plugins(first, other):
            raise ConfigError(
                f"{', '.join(changed[:4])} on rank {rank} differs from rank 0. Copy the plug-in code to all machines, "
                f"or start from a shared folder."
            )
        if config.compute.mode != "off" and first[flags.LOSS] != other[flags.LOSS]:
            raise ConfigError(
                f"loss.backend = {config.loss.backend} is {other[flags.LOSS]} on rank {rank} and {first[flags.LOSS]} "
                f"on rank 0, which gives different bits. Install a C compiler (CPU) or triton (CUDA) on all machines, "
                f"or set loss.backend=plain."
            )
        for name, (value, theirs) in flags.differences(first, other).items():
            phrases.append(f"rank {rank}: {name} {theirs}, rank 0: {value}")
    return first, phrases


def own_fingerprint(config: Config, loss: str) -> dict[str, Any]:
    """Fingerprint of this process: environment, plug-in code if there is any, and what computes the loss."""
    found = flags.fingerprint() | {flags.LOSS: loss}
    if code := plugins.sources(config.import_paths):
        found[flags.PLUGINS] = code
    return found


def agree_on_step(last: Path, step: int, group: Group) -> None:
    """Raises CheckpointError unless all ranks found the same checkpoint, or none did."""
    steps = group.gather(step)
    if set(steps) != {step}:
        raise CheckpointError(
            f"{last} is not the same file on every machine: ranks 0, 1, ... would start at steps {steps}. "
            f"Set run.root to a folder that all machines share."
        )


class Agreement:
    """Compares the calls and states of the ranks inside a sum that an update needs anyway.

    After the gradients are reduced, every rank does the same arithmetic. A rank with different bits therefore has a
    fault: a flipped bit, a nondeterministic kernel, or code that depends on the rank. Each rank adds the digest of its
    state to the sum. If the sum is not the rank's own digest times the number of ranks, the states differ, and all
    ranks see it in the same step. (If one rank of R differs, the others always see it. That rank misses it only if the
    difference times R - 1 is a multiple of 2^64: impossible for even R; for odd R up to 17, probability at most 2^-60.)
    """

    # Digest of the state after the last update; equal on all ranks. None: states are not compared.
    state_digest: Tensor | None = None

    def __init__(self, group: Group, state: Any) -> None:
        """`state` has the `step` of the update."""
        self.group = group
        self.state = state
        self._unequal = torch.zeros((), dtype=torch.bool, device=group.device)

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
