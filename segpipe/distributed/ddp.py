"""torch's DistributedDataParallel, made to give the same bits after a resume."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def wrap(network: nn.Module, device: torch.device) -> DistributedDataParallel:
    """`network` with gradients that are means over the ranks after backward; buffers stay each rank's own."""
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(network, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True)


def warm_up(network: DistributedDataParallel, batch: Tensor) -> None:
    """Two passes without an update, so that the buckets get their final order before the first real step.

    DDP packs gradients by parameter order at first and by order of arrival from the second step on. A sum over ranks
    depends on the place in the bucket, so a resumed run, whose first step is an old one's third, would differ.
    Statistics of norms are left as they were.
    """
    before = [buffer.clone() for buffer in network.buffers()]
    for _ in range(2):
        heads = network(batch)
        torch.stack([logits.float().mean() for logits in heads.values()]).sum().backward()  # type: ignore[no-untyped-call]
        network.zero_grad(set_to_none=True)
    for buffer, value in zip(network.buffers(), before, strict=True):
        buffer.copy_(value)
