"""The contract of a network: what training, validation and export take for granted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from segpipe import IGNORE_INDEX, plugins
from segpipe.checks.clause import (
    NOTE,
    Clause,
    Question,
    answers,
    forbidden_ops,
    refusal,
)
from segpipe.checks.elsewhere import UnansweredError, elsewhere, started
from segpipe.checks.tripwire import preserved, seed_globals
from segpipe.errors import ConfigError, SegpipeError, listed
from segpipe.losses.total import shard_loss, valid_pixels
from segpipe.models import KEY, build_model
from segpipe.models.plugin_network import ShardGuard
from segpipe.plugins import is_path
from segpipe.settings.config import check_critical_classes
from segpipe.train import checkpoint
from segpipe.train.state import build_state

if TYPE_CHECKING:
    from segpipe.data.catalog import ClassTable
    from segpipe.models.layers import SegmentationNet
    from segpipe.settings.config import Config

LARGEST = 256  # side of the images, where the crop is larger
QUICK = 64  # the same before a training
MISTAKES = (AttributeError, LookupError, NameError, TypeError)  # on a GPU the same
ODD = (13, 27)  # rows and columns that an odd image has less than the crop


class NetworkContract:
    """Checks the network of a configuration with `num_classes` classes, on the CPU, with random images.

    The images have the size of the crop, at most `largest` rows and columns. `export` is `export.publish.trial_export`.
    """

    def __init__(
        self,
        config: Config,
        num_classes: int,
        largest: int = LARGEST,
        export: Callable[..., str] = lambda *_: "",
    ) -> None:
        self.config, self.num_classes, self.largest = config, num_classes, largest
        self.export = export
        self.size = tuple(min(length, largest) for length in config.augment.crop_size)
        self.failed: Exception | None = None  # why it does not run
        draws = torch.Generator().manual_seed(0)
        self.image = torch.randn(3, 3, *self.size, generator=draws)
        self.target = torch.randint(
            0, num_classes, (2, *self.size), generator=draws, dtype=torch.uint8
        )
        self.target[:, :3] = IGNORE_INDEX

    def clauses(self) -> Iterator[Clause]:
        """All clauses; none further when there is no network, or one of other weights each time or of wrong shapes."""
        return answers("model", self._questions(), vital=3)

    def runs(self) -> bool:
        """Whether the network, which this builds, takes these images on the CPU. Raises SegpipeError for its outputs.

        Many networks need more rows, and some need a GPU.
        """
        self._is_built()
        try:
            self._heads()
            self._logits(self.image)
        except SegpipeError:
            raise
        except Exception as error:
            self.failed = error
            return False
        return True

    def refusal(self, afresh: Callable[[], Any]) -> str:
        """Why no training should start with a network that `runs`; empty when one may.

        `afresh` returns what `passed_afresh` does, in another process.
        """
        self._is_built()  # again, since forwards moved its statistics
        return refusal(
            self._equal_weights,
            self._training_randomness,
            self._eval_randomness,
            self._round_trip,
            lambda: self._another_start(afresh),
        )

    def _questions(self) -> list[Question]:
        return [
            ("is built", self._is_built),
            ("equal seeds give equal weights", self._equal_weights),
            ("logits of every head in training", self._training_shapes),
            ("odd image sizes", self._odd_sizes),
            ("gradients reach all parameters", self._gradients),
            ("randomness of torch's generator alone", self._training_randomness),
            (
                "the same in another start, on rank 1 of 2",
                lambda: self._another_start(self._afresh),
            ),
            ("no randomness in eval mode", self._eval_randomness),
            ("ops that CUDA repeats", self._ops),
            ("copies and state dict", self._round_trip),
            ("the export passes its gates", self._export),
        ]

    def _build(self) -> SegmentationNet:
        """The network with its weights of step 0."""
        torch.manual_seed(0)
        model = self.config.model
        return build_model(model.name, self.num_classes, model.args)

    def _is_built(self) -> str:
        """Build the network that the other questions ask."""
        self.net = self._build()
        return ""

    def _equal_weights(self) -> str:
        """Whether the seed of torch decides the initial weights."""
        seed_globals(1)
        again = self._build().state_dict()
        for name, value in self.net.state_dict().items():
            if not torch.equal(value, again[name]):
                return f"{name} differs. Draw initial weights from torch's generator, not from numpy or random."
        return ""

    def _heads(self, image: Tensor | None = None) -> dict[str, Tensor]:
        """Heads in training mode for two images."""
        torch.manual_seed(0)
        images = self.image[:2] if image is None else image
        return self.net.train().logits(images, aux=True)

    def _logits(self, image: Tensor, net: nn.Module | None = None) -> Tensor:
        """Main logits in eval mode."""
        with torch.no_grad():
            logits: Tensor = (net or self.net).eval()(image)
        return logits

    def _training_shapes(self) -> str:
        """Whether the heads fit; a note of their sizes."""
        sizes = [
            f"{name} {tuple(logits.shape[-2:])}"
            for name, logits in self._heads().items()
        ]
        return f"{NOTE}{', '.join(sizes)} for images of {self.size}"

    def _odd_sizes(self) -> str:
        """Whether images of another size than the crop pass, as they do in a validation."""
        height, width = (self.size[axis] - ODD[axis] for axis in range(2))
        try:
            self._logits(self.image[:1, :, :height, :width])
        except Exception as error:
            return (
                f"images of {height}x{width} fail ({' '.join(str(error).split())[:200]}). Validation reads whole "
                f"images at their own size: pad inside forward, or resize features with size=other.shape[-2:]."
            )
        return ""

    def _backward(self) -> None:
        """Forward, loss and backward, as in training."""
        loss = shard_loss(
            self._heads(),
            self.target,
            self.config.loss,
            class_weights=None,
            global_valid=torch.tensor(valid_pixels(self.target)),
            align_corners=self.net.align_corners,
        )["total"]
        loss.backward()  # type: ignore[no-untyped-call]

    def _gradients(self) -> str:
        """Whether the loss has a finite gradient for each trained parameter."""
        self.net.zero_grad(set_to_none=True)
        self._backward()
        grads = {
            name: parameter.grad
            for name, parameter in self.net.named_parameters()
            if parameter.requires_grad
        }
        self.net.zero_grad(set_to_none=True)

        without = [name for name, grad in grads.items() if grad is None]
        if without:
            return (
                f"{listed(without, 4)} get none. Use them in forward, delete them, or set requires_grad=False; "
                f"compute.mode=ddp would stop."
            )
        for name, grad in grads.items():
            if grad is not None and not grad.isfinite().all():
                return f"the gradient of {name} is not finite."
        return ""

    def passed(self) -> list[Tensor]:
        """Logits of all heads and gradients of all parameters, of one forward and backward in training mode."""
        heads = list(self._heads().values())
        scalar = torch.stack([logits.float().square().mean() for logits in heads]).sum()
        if scalar.requires_grad:
            scalar.backward()  # type: ignore[no-untyped-call]
        grads = [parameter.grad for parameter in self.net.parameters()]
        self.net.zero_grad(set_to_none=True)
        return [value.detach() for value in (*heads, *grads) if value is not None]

    def _training_randomness(self) -> str:
        """Twice the same in training mode, though all other generators moved and other images came between."""
        state = copy.deepcopy(self.net.state_dict())
        guard = ShardGuard(self.config, self.net)
        seed_globals(1)
        guard.start()
        passed = self.passed()
        if problem := guard.found():
            return problem
        for name, parameter in self.net.named_parameters():
            if not _same(parameter, state[name]):
                # By way of .data, which counts no version.
                return f"its forward or backward changes {name}. Leave parameters to the optimizer."

        # Other images in between, then the same with other global generators.
        self._heads(2 * self.image[1:] + 1)
        self.net.load_state_dict(state)
        seed_globals(2)
        if _differ(passed, self.passed()):
            return (
                "two passes of the same images in training mode differ under one seed of torch. Draw from torch's "
                "generator alone, and keep nothing from one call to the next."
            )
        return ""

    def _afresh(self) -> Any:
        """What `passed` returns in another start of the program."""
        sizes, mode = [self.largest], torch.get_deterministic_debug_mode()
        return elsewhere(
            "spawn", passed_afresh, self.config, self.num_classes, sizes, mode
        )

    def _another_start(self, afresh: Callable[[], Any]) -> str:
        """Whether another start of the program, as rank 1 of 2, computes the same."""
        self._is_built()
        try:
            there = [torch.from_numpy(value) for value in afresh()]
        except UnansweredError as error:
            return f"{NOTE}not checked in a spawned process: {error}"
        if _differ(self.passed(), there):
            return (
                "logits or gradients of the same images are others in a process that was started again, as rank 1 of "
                "2. Use no rank, process id, clock, uuid, hash() of text, environment variable or sys.argv, not even "
                "at import."
            )
        return ""

    def _eval_randomness(self) -> str:
        """Whether other global generators leave the logits in eval mode as they are."""
        seed_globals(1)
        one = self._logits(self.image)
        seed_globals(2)
        if not _same(one, self._logits(self.image)):
            return "two forwards in eval mode differ. Give F.dropout training=self.training, or use nn.Dropout."
        return ""

    def _ops(self) -> str:
        """Whether its ops repeat themselves on a GPU."""
        answer = forbidden_ops(self._backward)
        self.net.zero_grad(set_to_none=True)
        return answer

    def _round_trip(self) -> str:
        """Whether copies compute the same: the average of the weights is one, and so is what is exported."""
        expected = self._logits(self.image)
        loaded = self._build()
        loaded.load_state_dict(self.net.state_dict())
        copies = {
            "a copy.deepcopy": copy.deepcopy(self.net),
            "a network that loads its state dict": loaded,
        }
        for what, net in copies.items():
            if not _same(self._logits(self.image, net), expected):
                return f"{what} computes other logits. Keep all state in parameters and buffers."
        return ""

    def _export(self) -> str:
        """Whether the export of these weights, with images of this size, would be published."""
        formats = self.export(self.config, self.net, self.num_classes, self.size)
        return f"{NOTE}{formats}"


def _same(one: Tensor, two: Tensor) -> bool:
    """Whether all values are equal, also those that are no numbers."""
    return torch.equal(one.nan_to_num(), two.nan_to_num())


def _differ(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two lists hold other values, or another number of tensors."""
    return len(ones) != len(others) or not all(map(_same, ones, others))


def passed_afresh(
    config: Config, num_classes: int, sizes: Sequence[int], mode: int
) -> list[NDArray[Any]]:
    """What `NetworkContract.passed` returns for the first size of images that runs, in a process of its own."""
    torch.set_deterministic_debug_mode(mode)
    plugins.trust([config.model.name])
    for size in sizes:
        contract = NetworkContract(config, num_classes, size)
        if contract.runs():
            break
    contract._is_built()
    return [value.numpy() for value in contract.passed()]


def check_network(config: Config, classes: ClassTable) -> None:
    """Refuse what stops or spoils a training, before any process starts.

    Networks of the user with state or foreign randomness, weights that do not fit, patterns that match no parameter,
    and classes of export.critical_classes that the data set does not have.
    """
    check_critical_classes(config.export.critical_classes, classes.names)
    checkpoint.check_teacher(config, classes.names)
    if is_path(config.model.name):
        check_plugin(config, classes.num_classes)

    model = config.model
    if model.weights or model.freeze or config.optim.lr_scale or model.args:
        resumes = config.run.exists == "resume" and checkpoint.candidates(
            config.run_dir
        )
        start = None if resumes else checkpoint.read_start(config)
        on_cpu = replace(config, model=replace(model, norm="batch"))  # no SyncBatchNorm
        build_state(on_cpu, classes, torch.device("cpu"), start)


def check_plugin(config: Config, num_classes: int) -> None:
    """Raise ConfigError for a plug-in network whose training or validation would not be repeated.

    Runs it on the CPU with small images, or with those of the crop, and one of the sizes must run. Only a training on a
    GPU may start with a network that this process, without a GPU, cannot run, unless its code has a plain mistake.
    """
    sizes = (QUICK, max(config.augment.crop_size))
    mode = torch.get_deterministic_debug_mode()
    again = started("spawn", passed_afresh, config, num_classes, sizes, mode)
    with preserved(), again as afresh:
        for largest in sizes:
            contract = NetworkContract(config, num_classes, largest)
            if contract.runs():
                if problem := contract.refusal(afresh):
                    raise ConfigError(f"{KEY} = {config.model.name}: {problem}")
                return

    error = contract.failed
    on_gpu = config.compute.device != "cpu" and torch.cuda.device_count() > 0
    if error and (isinstance(error, MISTAKES) or not on_gpu):
        where = plugins.located(error)
        raise ConfigError(f"{KEY} = {config.model.name}: {where}.") from error
