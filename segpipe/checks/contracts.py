"""Contracts of networks, losses, data sets and transforms: their clauses, and checks of each.

They run on the CPU: all clauses on demand; before a training, those whose breach would silently spoil it.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from segpipe import IGNORE_INDEX, plugins
from segpipe.checks import tripwire
from segpipe.checks.elsewhere import UnansweredError, elsewhere
from segpipe.checks.tripwire import preserved, seed_globals
from segpipe.data.catalog import ClassTable
from segpipe.data.data_set import CachedSamples, DataSet, Samples
from segpipe.data.order import spaced
from segpipe.data.samples import open_samples
from segpipe.determinism.opgate import SLOW, check_ops
from segpipe.errors import ConfigError, SegpipeError, listed
from segpipe.losses import total as losses
from segpipe.losses.total import shard_loss, valid_pixels
from segpipe.models import KEY, build_model, check_model
from segpipe.models.layers import SegmentationNet
from segpipe.models.plugin_network import ShardGuard, check_heads
from segpipe.native import one_thread
from segpipe.plugins import is_path
from segpipe.settings.config import Config, check_critical_classes
from segpipe.train import checkpoint
from segpipe.train.state import build_state

NOTE = "note: "
# Returns the problem of a clause, or an empty text; "note: ..." is not a failure.
Question = Callable[[], str]

SOME = 6  # samples to read per split

CLASSES = 5
SHAPE = (4, 12, 16)  # images, height, width
CLOSE = 1e-4  # relative tolerance
CONFIDENT = 40.0  # logit factor at which probabilities round to 0 and 1

LARGEST = 256  # maximum image height and width, if the crop is larger
QUICK = 64  # the same, before a training
MISTAKES = (AttributeError, LookupError, NameError, TypeError)  # also occur on a GPU
ODD = (13, 27)  # rows and columns by which an odd image is smaller than the crop


@dataclass(frozen=True)
class Clause:
    """A clause and the result of its check."""

    part: str  # model, loss, data or augment
    name: str
    problem: str = ""  # what is wrong and what to do; empty if the clause is kept
    note: str = ""  # a remark on a clause that is kept


def answer(ask: Question) -> str:
    """The answer to a question. An error in the user's code becomes a problem, with its file and line."""
    try:
        return ask()
    except UnansweredError as error:
        return f"{NOTE}not checked in another process: {error}"
    except SegpipeError as error:
        return str(error)
    except Exception as error:
        return f"{plugins.located(error)}."


def answers(
    part: str, questions: Mapping[str, Question], vital: int = 1
) -> Iterator[Clause]:
    """A clause for each question; stops after a problem in one of the first `vital`, which the others would repeat."""
    for place, (name, ask) in enumerate(questions.items()):
        found = answer(ask)
        if found.startswith(NOTE):
            yield Clause(part, name, note=found.removeprefix(NOTE))
            continue
        yield Clause(part, name, found)
        if found and place < vital:
            return


def refusal(*questions: Question) -> str:
    """The first problem among the answers; empty if there is none."""
    found = map(answer, questions)
    return next((each for each in found if each and not each.startswith(NOTE)), "")


def forbidden_ops(call: Callable[[], object]) -> str:
    """Problem or note if a call uses ops that are not deterministic, or are slow, on CUDA; else empty."""
    found = check_ops(call)
    if refused := [str(one) for one in found if one.rule.state != SLOW]:
        return " ".join(refused[:3])
    return f"{NOTE}slow on GPUs: {found[0]}" if found else ""


class DataContract:
    """The contract of a configuration's split: equal bytes in every process that reads it."""

    def __init__(self, config: Config, split: str) -> None:
        self.config, self.split = config, split

    def clauses(self) -> Iterator[Clause]:
        """All clauses; only the first if the split cannot be opened."""
        split = self.split
        questions = {
            f"{split}: can be opened": self._opened,
            f"{split}: images, targets and names": self._samples,
            f"{split}: same bytes twice": self._twice,
            f"{split}: sizes": self._sizes,
            f"{split}: same bytes in another process": self._other_process,
        }
        return answers("data", questions)

    def refusal(self) -> str:
        """Why a training must not start with this data set; empty if it may."""
        return refusal(self._opened, self._twice, self._sizes, self._other_process)

    def _open(self) -> DataSet:
        return open_samples(self.config.data, self.split, self.config.seed)

    def _opened(self) -> str:
        self.samples = self._open()
        self.indices = spaced(range(len(self.samples)), SOME)
        self.samples.inputs()  # calls files of the user's class
        return ""

    def _samples(self) -> str:
        return " ".join([*self.samples.problems(self.indices)][:3])

    def _sizes(self) -> str:
        """Whether `size` says what `read` returns."""
        for index in self.indices:
            told, read = self.samples.size(index), self.samples.read(index)[1].shape
            if tuple(told) != read:
                return f"size({index}) is {told}, but sample {self.samples.name(index)} is {read}"
        return ""

    def _twice(self) -> str:
        """Read again in another order, by another object, with other states of the global generators."""
        seed_globals(1)

        before = contents(self.samples, self.indices)
        seed_globals(2)
        again = contents(self._open(), self.indices[::-1])[::-1]

        return self._different(
            before,
            again,
            "read twice. A sample must depend only on its index; draw nothing at random.",
        )

    def _other_process(self) -> str:
        """Read in a forked process, like a loader process, and in another start of the program."""
        expected = contents(self.samples, self.indices)
        for method in (
            "spawn",
            "fork",
        ):  # only what can be pickled has loader processes
            found = elsewhere(method, contents, self.samples, self.indices)
            how = (
                "read by another process. Use no hash() of text, process id, clock, parent_process(), or order of a "
                "set or of os.listdir."
            )
            if problem := self._different(expected, found, how):
                return problem
        return ""

    def _different(self, before: list[str], now: list[str], how: str) -> str:
        for index, one, two in zip(self.indices, before, now, strict=True):
            if one != two:
                return (
                    f"sample {self.samples.name(index)} has different bytes when {how}"
                )
        return ""


@one_thread()  # as in loaders; torch's other threads do not survive a fork
def contents(samples: Samples, indices: list[int]) -> list[str]:
    """Names, shapes and bytes of these samples, as text."""
    found = []
    for index in indices:
        image, target = samples.read(index)
        found.append(
            f"{len(samples)} {samples.name(index)} {image.shape} {image.tobytes()!r} {target.tobytes()!r}"
        )
    return found


def check_data(config: Config) -> None:
    """Raise ConfigError if samples of the user's training set differ when read again or in another process."""
    if not is_path(config.data.name):
        return
    with preserved():
        if problem := DataContract(config, "train").refusal():
            raise ConfigError(f"data.name = {config.data.name}: {problem}")


def augment_clauses(
    config: Config, progress: Callable[..., None] = lambda *_: None
) -> Iterator[Clause]:
    """A purity clause for each transform and for all together. Raises ConfigError if the check cannot run."""
    # Here: albumentations takes a second, in every process that checks a network or a loss.
    from segpipe.checks import purity
    from segpipe.data.augment import Augmenter

    samples = CachedSamples(open_samples(config.data, "train", config.seed), 64)
    augmenter = Augmenter(config.augment)
    findings = purity.check(augmenter, samples, progress=progress)
    problems = {finding.transform: str(finding) for finding in findings}
    for part in (*augmenter.parts(), augmenter):
        yield Clause("augment", f"{part.name} is pure", problems.get(part.name, ""))


class LossContract:
    """The contract of a configuration's loss, checked on random logits.

    Shards add up, ignored pixels do not count, gradients are finite.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.name = config.loss.name
        draws = torch.Generator().manual_seed(0)
        batch, height, width = SHAPE
        self.logits = torch.randn(batch, CLASSES, height, width, generator=draws) * 0.5
        self.target = torch.randint(
            0, CLASSES, SHAPE, generator=draws, dtype=torch.uint8
        )
        # Halves with valid pixels in the ratio 2 to 1, so that a mean differs from a sum by its weights, too.
        self.target[batch // 2 :, : height // 2] = IGNORE_INDEX

    def clauses(self) -> Iterator[Clause]:
        """All clauses; only the first if the function cannot be called."""
        questions = {
            "can be called": self._call,
            "no randomness": self._randomness,  # early, since it breaks others, too
            "nothing is kept": self._state,
            "the same in another start, on rank 1 of 2": self._another_start,
            "shards add up": self._sums,
            "ignored pixels do not count": self._ignored,
            "a batch without labels": self._unlabelled,
            "gradients are finite": self._finite,
            "class weights": self._weights,
            "ops that CUDA repeats": lambda: forbidden_ops(
                lambda: self._gradient(self.logits)
            ),
        }
        return answers("loss", questions)

    def refusal(self) -> str:
        """Why a training must not start with this loss; empty if it may."""
        questions = [
            self._call,
            self._randomness,
            self._state,
            self._sums,
            self._another_start,
        ]
        if self.config.loss.class_weights != "none":
            questions.append(self._weights)
        with preserved():
            return refusal(*questions)

    def total(self, weights: Tensor | None = None, **given: Tensor) -> Tensor:
        """Loss of the batch, or of the `logits` and `target` given, divided by the valid pixels of the batch."""
        return shard_loss(
            {"main": given.get("logits", self.logits)},
            given.get("target", self.target),
            replace(
                self.config.loss, backend="plain", dice_weight=0.0, lovasz_weight=0.0
            ),
            class_weights=weights,
            global_valid=torch.tensor(valid_pixels(self.target)),
            align_corners=False,
        )["total"]

    def _call(self) -> str:
        """Whether it accepts these arguments. Raises what the call raises."""
        if is_path(self.name):
            losses.check_call(self.config.loss)
        self.total()
        return ""

    def _state(self) -> str:
        """Whether the user's function keeps something from call to call, beyond what the first call caches."""
        if not is_path(self.name):
            return ""
        function = plugins.load(losses.KEY, self.name)
        self.total()
        before = tripwire.object_state(function)
        self.total()
        if kept := tripwire.changed(before, tripwire.object_state(function)):
            return (
                f"{losses.KEY} = {self.name} keeps something from call to call: {listed(kept, 3)}. Ranks call it a "
                "different number of times."
            )
        return ""

    def _another_start(self) -> str:
        """Whether another start of the program, as rank 1 of 2, gives the same loss and gradient."""
        if not is_path(self.name):
            return ""
        if elsewhere("spawn", loss_afresh, self.config) == loss_afresh(self.config):
            return ""
        return (
            f"{losses.KEY} = {self.name}: loss or gradient of the same logits differ in a process that was started "
            "again, as rank 1 of 2. Use no rank, process id, clock, hash() of text, order of a set, or environment "
            "variable."
        )

    def _sums(self) -> str:
        """Whether the loss of a batch is the sum of those of its halves, and grows with the size of the images."""
        whole = float(self.total())

        pairs = zip(self.logits.chunk(2), self.target.chunk(2), strict=True)
        one, two = (float(self.total(logits=part, target=own)) for part, own in pairs)
        if not math.isfinite(whole + one + two):
            return (
                f"{losses.KEY} = {self.name}: the loss of random logits is not finite: {whole:.6g} for a batch, "
                f"{one:.6g} and {two:.6g} for its halves. Look for divisions by 0 and logarithms of 0."
            )

        wide = float(
            self.total(
                logits=self.logits.repeat(1, 1, 1, 2),
                target=self.target.repeat(1, 1, 2),
            )
        )
        is_mean = abs(wide - whole) < CLOSE * abs(whole)
        if abs(one + two - whole) <= CLOSE * abs(whole) and not is_mean:
            return ""
        return (
            f"{losses.KEY} = {self.name}: a batch has loss {whole:.6g}, its halves together {one + two:.6g}, and "
            f"images twice as wide {wide:.6g}.{' It looks like a mean.' * is_mean} Return the loss of each pixel "
            f'(reduction="none"), or their sum: segpipe divides by the number of valid pixels of the whole update.'
        )

    def _gradient(self, logits: Tensor, **given: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and its gradient. Raises ConfigError if there is no gradient."""
        logits = logits.clone().requires_grad_()
        loss = self.total(logits=logits, **given)
        loss.backward()  # type: ignore[no-untyped-call]
        if logits.grad is None:
            raise ConfigError(
                "the loss has no gradient. Compute it from the logits, without detach or numpy."
            )
        return loss.detach(), logits.grad

    def _ignored(self) -> str:
        """Whether the loss is independent of the logits of ignored pixels."""
        ignored = self.target == IGNORE_INDEX
        changed = self.logits * (1 + ignored.unsqueeze(1))

        loss, gradient = self._gradient(self.logits)
        moved, _ = self._gradient(changed)
        if not torch.equal(loss, moved):
            return f"logits of ignored pixels move it from {loss:.6g} to {moved:.6g}. Mask out target == ignore_index."
        if gradient.movedim(1, -1)[ignored].any():
            return "ignored pixels have a gradient. Mask out target == ignore_index."
        return "" if gradient.any() else "the gradient is 0 everywhere."

    def _unlabelled(self) -> str:
        """Whether loss and gradient are 0 without a valid pixel."""
        ignored = torch.full_like(self.target, IGNORE_INDEX)
        loss, gradient = self._gradient(self.logits, target=ignored)
        if loss != 0 or gradient.any():
            return f"without a valid pixel it is {loss:.6g}, but 0 with gradient 0 was needed. Do not divide by counts."
        return ""

    def _finite(self) -> str:
        """Whether loss and gradient are finite, also for very confident logits."""
        sure = {1.0: "", CONFIDENT: " of a very confident network"}
        for factor, which in sure.items():
            loss, gradient = self._gradient(factor * self.logits)
            if not (loss.isfinite() and gradient.isfinite().all()):
                return f"not finite, or its gradient, for logits{which}. Use log_softmax, and clamp before log and pow."
        return ""

    def _randomness(self) -> str:
        """Whether the loss is independent of the global generators."""
        if _moved_by_seeds(self.total):
            return f"{losses.KEY} = {self.name}: two calls with the same logits differ. Draw nothing at random."
        return ""

    def _weights(self) -> str:
        """Whether class weights change the loss."""
        if (
            is_path(self.name)
            and "class_weights"
            not in inspect.signature(plugins.load(losses.KEY, self.name)).parameters
        ):
            return f"{NOTE}it has no class_weights, so loss.class_weights must be none"
        if torch.equal(self.total(torch.arange(1.0, CLASSES + 1)), self.total()):
            return (
                f"{losses.KEY} = {self.name}: class_weights have no effect. Multiply the loss of a pixel by the weight "
                "of its class."
            )
        return ""


def check_plugins(config: Config) -> None:
    """Import the code that the configuration names; raise ConfigError for problems that show before a training.

    These are arguments that a signature does not have, and a loss whose shards do not add up.
    """
    losses._loss.cache_clear()  # its module may have been loaded again
    for key, path in config.import_paths:
        plugins.check_current(key, path)
    if config.model.args:
        check_model(config.model.name, config.model.args)
    if is_path(config.loss.name) and (problem := LossContract(config).refusal()):
        raise ConfigError(problem)


class NetworkContract:
    """Assumptions of training, validation and export about the network of a configuration.

    The network gets random images of the crop's size, at most `largest` rows and columns. `export` is
    `export.publish.trial_export`.
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
        draws = torch.Generator().manual_seed(0)
        # In the format of training, where a view() that merges channels and pixels fails.
        self.image = torch.randn(3, 3, *self.size, generator=draws).to(
            memory_format=torch.channels_last
        )
        self.target = torch.randint(
            0, num_classes, (2, *self.size), generator=draws, dtype=torch.uint8
        )
        self.target[:, :3] = IGNORE_INDEX

    def clauses(self) -> Iterator[Clause]:
        """All clauses; stops if the network cannot be built, has new weights each time, or wrong shapes."""
        return answers("model", self.questions(), vital=3)

    def questions(self) -> dict[str, Callable[[], str]]:
        """The question behind each clause; its answer is a problem, or empty."""
        return {
            "is built": self._is_built,
            "equal seeds give equal weights": self._equal_weights,
            "logits of every head in training": self._training_shapes,
            "odd image sizes": self._odd_sizes,
            "gradients reach all parameters": self._gradients,
            "randomness only from torch's generator": self._training_randomness,
            "the same in another start, on rank 1 of 2": self._another_start,
            "no randomness in eval mode": self._eval_randomness,
            "ops that CUDA repeats": lambda: forbidden_ops(self._backward),
            "copies and state dict": self._round_trip,
            "the export passes its gates": self._export,
        }

    def failure(self) -> Exception | None:
        """Build the network; the error that it raises for these images on the CPU. Raises SegpipeError for bad outputs.

        Many networks need larger images, and some need a GPU.
        """
        self._is_built()
        try:
            self._heads()
            self._logits(self.image)
        except SegpipeError:
            raise
        except Exception as error:
            return error
        return None

    def refusal(self) -> str:
        """Why a training must not start with a network that has no `failure`; empty if it may."""
        return refusal(
            self._is_built,  # again, since forward passes changed its statistics
            self._equal_weights,
            self._training_shapes,
            self._training_randomness,
            self._eval_randomness,
            self._round_trip,
            self._another_start,
        )

    def passed(self) -> list[Tensor]:
        """Logits of all heads and gradients of all parameters from one forward and backward pass in training mode."""
        heads, grads = self._backward()
        # In float32, since numpy has no bfloat16.
        return [
            value.detach().float()
            for value in (*heads.values(), *grads.values())
            if value is not None
        ]

    def _build(self, seed: int = 0) -> SegmentationNet:
        """The network with its initial weights."""
        model = self.config.model
        return build_model(model.name, self.num_classes, model.args, seed)

    def _is_built(self) -> str:
        """Build the network for the other questions. Trained parameters must be fp32, like the sums of gradients."""
        self.net = self._build()
        trained = [
            (name, own.dtype)
            for name, own in self.net.named_parameters()
            if own.requires_grad
        ]
        if not trained:
            return (
                "no parameter requires a gradient, so nothing would be trained. Layers in a list are not found: use "
                "nn.ModuleList."
            )
        if any(isinstance(layer, nn.SyncBatchNorm) for layer in self.net.modules()):
            return (
                "SyncBatchNorm would wait for other ranks, which may have fewer shards. Use BatchNorm2d, which "
                "model.norm=sync converts."
            )
        for name, dtype in trained:
            if dtype != torch.float32:
                return f"{name} is {dtype}, but float32 was needed."
        return ""

    def _equal_weights(self) -> str:
        """Whether torch's seed determines the initial weights."""
        seed_globals(1)
        again = self._build().state_dict()
        for name, value in self.net.state_dict().items():
            if not torch.equal(value, again[name]):
                return f"{name} differs. Draw initial weights from torch's generator, not from numpy or random."
        return ""

    def _heads(self, image: Tensor | None = None) -> dict[str, Tensor]:
        """Logits of all heads in training mode for two images."""
        torch.manual_seed(0)
        images = self.image[:2] if image is None else image
        heads = self.net.train().logits(images, aux=True)
        check_heads(heads, images, self.num_classes, self.config.model.name)
        return heads

    def _logits(self, image: Tensor, net: nn.Module | None = None) -> Tensor:
        """Main logits in eval mode."""
        with torch.no_grad():
            return (net or self.net).eval()(image)  # type: ignore[no-any-return]

    def _training_shapes(self) -> str:
        """Whether the heads have valid shapes and are logits, in eval mode too; a note with their sizes."""
        heads = self._heads()
        sizes = [f"{name} {tuple(own.shape[-2:])}" for name, own in heads.items()]
        # With gradients, which tell a sigmoid; some code, such as numpy() or out=, runs only without them.
        with suppress(RuntimeError):
            heads["main (in eval mode)"] = self.net.eval()(self.image)
        for name, logits in heads.items():
            adds_up = (
                logits.min() >= 0 and (logits.float().sum(1) - 1).abs().max() < 0.01
            )
            # By its name: values of a fresh network with a ReLU at its end lie between 0 and 1, too.
            if adds_up or str(logits.grad_fn).startswith(("<Sigmoid", "<Softmax")):
                return (
                    f"head {name} is probabilities, but logits were needed. Leave out softmax or sigmoid: the loss and "
                    "the exported file have their own softmax."
                )
        return f"{NOTE}{', '.join(sizes)} for images of {self.size}"

    def _odd_sizes(self) -> str:
        """Whether images of a different size than the crop work, as in validation."""

        height, width = (self.size[axis] - ODD[axis] for axis in range(2))
        try:
            self._logits(self.image[:1, :, :height, :width])
        except Exception as error:
            return (
                f"images of {height}x{width} fail ({' '.join(str(error).split())[:200]}). Validation reads whole "
                f"images at their own size: pad inside forward, or resize features with size=other.shape[-2:]."
            )
        return ""

    def _backward(self) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        """Logits of the heads and gradients of the trained parameters, from an update as in training."""
        self.net.zero_grad(set_to_none=True)
        heads = self._heads()
        loss = shard_loss(
            heads,
            self.target,
            self.config.loss,
            class_weights=None,
            global_valid=torch.tensor(valid_pixels(self.target)),
            align_corners=self.net.align_corners,
        )["total"]

        loss.backward()  # type: ignore[no-untyped-call]
        grads = {
            name: own.grad
            for name, own in self.net.named_parameters()
            if own.requires_grad
        }
        self.net.zero_grad(set_to_none=True)
        return heads, grads

    def _gradients(self) -> str:
        """Whether the loss has a finite gradient for each trained parameter."""
        _, grads = self._backward()
        without = [name for name, grad in grads.items() if grad is None]
        if without:
            return (
                f"{listed(without, 4)} get no gradient. Use them in forward, delete them, or set requires_grad=False; "
                f"compute.mode=ddp would stop."
            )
        for name, grad in grads.items():
            if grad is not None and not grad.isfinite().all():
                return f"the gradient of {name} is not finite."
        return ""

    def _training_randomness(self) -> str:
        """Whether training mode repeats its results after other images and with other states of other generators."""
        self._is_built()
        state = copy.deepcopy(self.net.state_dict())
        guard = ShardGuard(self.config, self.net)
        seed_globals(1)
        guard.start()
        passed = self.passed()
        if problem := guard.found():
            return problem

        for name, parameter in self.net.named_parameters():
            if name not in state:
                return f"its forward makes {name}, which nothing would train. Make layers in __init__."
            if not _same(parameter, state[name]):
                # Changed through .data, which does not increase the version counter.
                return f"its forward or backward changes {name}. Only the optimizer may change parameters."

        # Other images in between, then the same with other global generators.
        self._heads(2 * self.image[1:] + 1)
        self.net.load_state_dict(state)
        seed_globals(2)
        if _differ(passed, self.passed()):
            if self.image._version:
                return "its forward writes into its image. Use operations that return a new tensor: mul, not mul_."
            return (
                "two passes of the same images in training mode differ under the same torch seed. Draw only from "
                "torch's generator, and keep nothing from one call to the next."
            )
        return ""

    def _afresh(self) -> list[NDArray[Any]]:
        """The result of `passed` in another start of the program."""
        return elsewhere(  # type: ignore[no-any-return]
            "spawn",
            passed_afresh,
            self.config,
            self.num_classes,
            self.largest,
            torch.get_deterministic_debug_mode(),
        )

    def _another_start(self) -> str:
        """Whether another start of the program, as rank 1 of 2, gives the same results."""
        self._is_built()
        there = list(map(torch.from_numpy, self._afresh()))
        if _differ(self.passed(), there):
            return (
                "logits or gradients of the same images differ in a process that was started again, as rank 1 of "
                "2. Use no rank, process id, clock, uuid, hash() of text, environment variable or sys.argv, not even "
                "at import."
            )
        return ""

    def _eval_randomness(self) -> str:
        """Whether the logits in eval mode are independent of the global generators."""
        if _moved_by_seeds(lambda: self._logits(self.image)):
            return "two forward passes in eval mode differ. Give F.dropout training=self.training, or use nn.Dropout."
        return ""

    def _round_trip(self) -> str:
        """Whether copies compute the same; the averaged weights and the exported network are copies."""
        expected = self._logits(self.image)
        other = self._build(1)
        for what, net in (
            # As the average: before a forward, which sets what the copy's hooks would set in the original.
            ("a copy.deepcopy", copy.deepcopy(other)),
            ("another network", other),
        ):
            try:
                self._logits(self.image, net)  # may keep something until train()
                net.train()
                net.load_state_dict(self.net.state_dict())
                if _same(self._logits(self.image, net), expected):
                    continue
            except Exception as error:
                return f"{what} fails: {plugins.located(error)}. Copies need hooks that are methods, not lambdas."
            return (
                f"{what} that loads its state dict computes different logits. Keep all state in parameters and "
                "buffers, none of them drawn with persistent=False, layers in nn.ModuleList, not in a list, and "
                "nothing computed from weights beyond train()."
            )
        return ""

    def _export(self) -> str:
        """Whether an export of these weights, with images of this size, would be published."""
        return NOTE + self.export(self.config, self.net, self.num_classes, self.size)


def _same(one: Tensor, two: Tensor) -> bool:
    """Whether all values are equal; NaN equals NaN."""
    return torch.equal(one.nan_to_num(), two.nan_to_num())


def _differ(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two lists differ in values or in number of tensors."""
    return len(ones) != len(others) or not all(map(_same, ones, others))


def _moved_by_seeds(call: Callable[[], Tensor]) -> bool:
    """Whether the result of a call depends on the global generators."""
    seed_globals(1)
    first = call()
    seed_globals(2)
    return not _same(first, call())


def loss_afresh(config: Config) -> tuple[float, bytes]:
    """Loss and gradient of random logits; to be called in its own process, too."""
    plugins.trust([config.loss.name])
    contract = LossContract(config)
    loss, gradient = contract._gradient(contract.logits)
    return loss.item(), gradient.numpy().tobytes()


def passed_afresh(
    config: Config, num_classes: int, largest: int, mode: int
) -> list[NDArray[Any]]:
    """The result of `NetworkContract.passed`; to be called in its own process."""
    torch.set_deterministic_debug_mode(mode)
    plugins.trust([config.model.name, config.loss.name])
    contract = NetworkContract(config, num_classes, largest)
    contract._is_built()
    return [value.numpy() for value in contract.passed()]


def check_network(config: Config, classes: ClassTable) -> None:
    """Refuse networks that would stop or spoil a training, before any process starts.

    Refuses the user's networks with hidden state or foreign randomness, weights that do not fit, patterns that match no
    parameter, and classes of export.critical_classes that the data set does not have.
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
    """Raise ConfigError for a plug-in network whose training or validation would not be repeatable.

    Runs it on the CPU with small images, or else with images of the crop's size; one of the two must run. Only a
    training on a GPU may use a network that does not run on the CPU, unless its code has an obvious mistake.
    """
    with preserved():
        for largest in (QUICK, max(config.augment.crop_size)):
            contract = NetworkContract(config, num_classes, largest)
            if not (error := contract.failure()):
                if problem := contract.refusal():
                    raise ConfigError(f"{KEY} = {config.model.name}: {problem}")
                return

    on_gpu = config.compute.device != "cpu" and torch.cuda.device_count() > 0
    if error and (isinstance(error, MISTAKES) or not on_gpu):
        raise ConfigError(
            f"{KEY} = {config.model.name}: {plugins.located(error)}."
        ) from error
