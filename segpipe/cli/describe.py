"""`segpipe describe`: parameters, operations, memory and latency of a network, without data."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.table import Table

from segpipe.errors import ConfigError
from segpipe.run.console import CONSOLE
from segpipe.settings.check import check
from segpipe.settings.compose import compose

if TYPE_CHECKING:
    import torch

    from segpipe.settings.config import Config

SMALLEST = 32  # side of an image
WARM_UP = 2  # forwards that are not timed


def main(given: dict[str, Any]) -> int:
    """Exit code."""
    config = compose(given["overrides"])
    check(config, world_size=1)
    size = _size(given["size"])
    found = describe(config, size, given["classes"], given["batch"])
    if given["runs"]:
        found |= latency(config, size, given["classes"], given["runs"])
    if given["json"]:
        print(json.dumps(found))
    else:
        table = Table(show_header=False)
        for name, value in found.items():
            plain = f"{value:,}" if isinstance(value, int) else str(value)
            table.add_row(name.replace("_", " "), plain)
        CONSOLE.print(table)
    return 0


def describe(
    config: Config, size: tuple[int, int], num_classes: int, batch: int
) -> dict[str, Any]:
    """Sizes of the network for images of `size`: exact, and found without computing anything.

    A MAC is one multiplication with its addition, in convolutions and matrix products. Activations are the values that
    convolutions give. Memory is that of tensors alive at once, weights included, without an optimizer.
    """
    import torch

    from segpipe.models import build_model

    model = config.model
    with torch.device("meta"):
        net = build_model(model.name, num_classes, model.args)
        one = torch.empty(1, 3, *size)
        several = torch.empty(batch, 3, *size)
    params = sum(value.numel() for value in net.parameters())
    auxiliary = sum(value.numel() for value in net.train_only.parameters())
    with torch.no_grad():
        macs, activations = _operations(net.eval(), one)
        inference = _peak(lambda: net(one))

    def update() -> None:
        heads = net.train().logits(several, aux=True)
        total = torch.stack([logits.float().sum() for logits in heads.values()]).sum()
        total.backward()  # type: ignore[no-untyped-call]

    training = _peak(update)
    weights = sum(
        value.numel() * value.element_size() for value in net.state_dict().values()
    )
    return {
        "model": model.name,
        "image": f"{size[0]}x{size[1]}",
        "classes": num_classes,
        "parameters": params - auxiliary,
        "parameters_in_training": params,
        "macs": macs,
        "activations": activations,
        "output_stride": net.output_stride,
        "size_multiple": net.size_multiple,
        "inference_memory_mib": _mib(inference + weights),
        f"training_memory_mib_at_batch_{batch}": _mib(training + weights),
    }


def latency(
    config: Config, size: tuple[int, int], num_classes: int, runs: int
) -> dict[str, Any]:
    """Median time of one forward of one fp32 image on this machine, in ms. Other processes slow it down."""
    import torch

    from segpipe.determinism import flags
    from segpipe.distributed.group import choose_device
    from segpipe.models import build_model

    device = choose_device(config.compute.device, 0)
    flags.apply(config.compute.threads, "off")
    net = (
        build_model(config.model.name, num_classes, config.model.args).to(device).eval()
    )
    image = torch.zeros(1, 3, *size, device=device)
    times = []
    with torch.inference_mode():
        for _ in range(WARM_UP + runs):
            start = time.perf_counter()
            net(image)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return {
        "latency_ms": round(1e3 * statistics.median(times[WARM_UP:]), 2),
        "latency_runs": runs,
        "device": str(device),
        "threads": torch.get_num_threads(),
    }


def _operations(net: torch.nn.Module, image: torch.Tensor) -> tuple[int, int]:
    """MACs and activations of one forward."""
    from torch.nn.modules.conv import _ConvNd
    from torch.utils.flop_counter import FlopCounterMode

    values = 0

    def count(module: torch.nn.Module, given: Any, out: torch.Tensor) -> None:
        nonlocal values
        values += out.numel()

    layers = [layer for layer in net.modules() if isinstance(layer, _ConvNd)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    with FlopCounterMode(display=False) as counter:
        net(image)
    for hook in hooks:
        hook.remove()
    return counter.get_total_flops() // 2, values


def _peak(call: Callable[[], object]) -> int:
    """Most bytes of the tensors that `call()` makes and that are alive at the same time."""
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.alive: dict[int, tuple[Any, int]] = {}
            self.peak = 0

        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = op(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if hasattr(leaf, "untyped_storage"):
                    storage = leaf.untyped_storage()
                    ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                    self.alive[storage._cdata] = ref, storage.nbytes()
            for key, (ref, _) in list(self.alive.items()):
                if ref.expired():
                    del self.alive[key]
            self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
            return out

    with Memory() as memory:
        call()
    return int(memory.peak)


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match or min(map(int, match.groups())) < SMALLEST:
        raise ConfigError(
            f"size = {text!r}, but HEIGHTxWIDTH from {SMALLEST}x{SMALLEST} up was needed, such as size=512x1024."
        )
    return int(match[1]), int(match[2])


def _mib(num_bytes: int) -> float:
    return round(num_bytes / 2**20, 1)
