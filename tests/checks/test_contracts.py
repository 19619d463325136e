"""Each clause of a contract is broken by one network, loss or data set, and kept by ours."""

import random
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tables import CAMVID

from runs import ROOT, result, run, torch_restored
from segpipe import plugins
from segpipe.checks.contracts import (
    Clause,
    DataContract,
    LossContract,
    NetworkContract,
    answers,
    check_data,
    check_network,
)
from segpipe.checks.contracts import check_plugin as check_network_of
from segpipe.checks.elsewhere import UnansweredError
from segpipe.cli import checks
from segpipe.cli.main import main
from segpipe.distributed.group import Group
from segpipe.errors import ConfigError
from segpipe.export.publish import trial_export
from segpipe.run import launch
from segpipe.settings.compose import compose
from segpipe.settings.config import Config, from_mapping
from segpipe.train import checkpoint

Write = Callable[[str, str], None]
AFRESH = NetworkContract._afresh
NET = """
    import os
    import random
    import numpy as np
    import torch
    from torch import nn
    import torch.nn.functional as F

    HASH = 1 + hash("net") / 2**63
    torch.rand(3)  # as users try their network at the end of its file

    class Net(nn.Module):
        def __init__(self, num_classes, fault=""):
            super().__init__()
            if fault == "raises":
                raise ValueError("no")
            self.fault, self.calls = fault, 0
            self.conv = nn.Conv2d(3, num_classes, 3, padding=1)
            self.other = nn.Conv2d(3, num_classes, 3) if fault == "unused" else None
            if fault == "list":
                self.layers = [nn.Conv2d(3, 3, 1)]
            if fault == "hook":
                self.conv.register_forward_hook(lambda *call: setattr(self, "seen", call[2]))
            if fault == "sync":
                self.norm = nn.SyncBatchNorm(3)
            if fault == "frozen":
                self.requires_grad_(False)
            if fault == "double":
                self.conv.bias.data = self.conv.bias.data.double()
            if fault == "weights":
                self.conv.weight.data = torch.from_numpy(np.random.rand(num_classes, 3, 3, 3)).float()

        def forward(self, x):
            self.calls += 1
            if self.fault == "written":
                x.mul_(2)
            if self.fault == "list":
                x = self.layers[0](x)
            out = self.conv(x)
            if self.fault == "hook":
                out = self.seen
            if self.fault == "channels":
                return out[:, 1:]
            if self.fault == "odd":
                out = out + F.interpolate(F.avg_pool2d(out, 32), scale_factor=32)
            if self.fault == "detached":
                return out.detach() + self.conv.bias[:, None, None]
            if self.fault == "python" and self.training:
                out = out * random.random()
            if self.fault == "counter" and self.training:
                out = out + self.calls
            if self.fault == "running" and self.training:
                mean = out.mean().detach()
                self.mean = mean if self.calls == 1 else 0.9 * self.mean + 0.1 * mean
                out = out - self.mean
            if self.fault == "eval":  # only there, as in a BatchNorm
                if self.training:
                    self.mean = out.mean().detach()
                else:
                    out = out - getattr(self, "mean", 0)
            if self.fault == "cache" and not self.training:
                self.kept = getattr(self, "kept", self.conv.bias.detach().clone())
                out = out + self.kept[:, None, None]
            if self.fault == "sigmoid" or (self.fault == "sigmoid in eval" and not self.training):
                return out.sigmoid()
            if self.fault == "softmax of columns":
                return out.softmax(-1)
            if self.fault == "no gradient in eval" and not self.training:
                return torch.mul(out, 2, out=torch.empty_like(out))
            if self.fault == "relu":  # values from 0 to 1, as those of a sigmoid
                return 0.1 * out.relu()
            if self.fault == "late layer" and not hasattr(self, "late"):
                self.late = nn.Conv2d(3, 3, 1)
            if self.fault == "late layer":
                out = self.conv(self.late(x))
            if self.fault == "attribute":
                x = self.steam(x)
            if self.fault == "view":
                x = x.view(2, 7, -1)
            if self.fault == "flat":  # as if pixels of a channel lay next to each other
                out = out * out.view(len(x), -1).mean(1)[:, None, None, None]
            if self.fault == "cuda":
                raise RuntimeError("no kernel")
            if self.fault == "dropout":
                out = F.dropout(out, 0.5)
            if self.fault == "batch":
                out = out - out.mean((0, 2, 3), keepdim=True)
            if self.fault == "op":
                out = F.grid_sample(out, torch.zeros(len(x), 4, 4, 2), align_corners=False)
            if self.fault == "slow":
                out = F.interpolate(out, scale_factor=2, mode="bilinear")
            if self.fault == "state":
                out = out * getattr(self, "scale", 1.0)
            if self.fault == "drift" and self.training:
                self.conv.bias.data.add_(1)
            if self.fault == "late" and self.training and np.random.rand() < 1e-9:
                out = 2 * out
            if self.fault == "gradient" and self.training:
                out.register_hook(lambda gradient: gradient * self.calls)
            if self.fault == "rank":
                out = out * (1 + (torch.distributed.is_initialized() and torch.distributed.get_rank()))
            if self.fault == "variable" and self.training:
                out.register_hook(lambda gradient: gradient * (1 + int(os.environ.get("RANK", "0"))))
            if self.fault == "hash":
                out = out * HASH
            if self.fault == "softmax" or (self.fault == "softmax in eval" and not self.training):
                out = out.softmax(1)
            if self.fault == "mode":
                out = (out * (1 + torch.are_deterministic_algorithms_enabled())).bfloat16()
            return out

        def train(self, mode=True):
            self.scale = 1.0 + self.calls
            return super().train(mode)

    def running(num_classes):
        return Net(num_classes, "running")

    class Large(Net):
        def __init__(self, num_classes, fault=""):
            super().__init__(num_classes, fault)
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            if len(x[0, 0]) < 80:
                raise RuntimeError("too small")
            return super().forward(self.norm(x))
"""
LOSS = """
    import numpy as np
    import torch
    import torch.nn.functional as F

    def loss(logits, target, *, ignore_index, class_weights=None, fault=""):
        if fault == "mean":
            return F.cross_entropy(logits, target, ignore_index=ignore_index)
        losses = F.cross_entropy(logits, target, class_weights, ignore_index=ignore_index, reduction="none")
        valid = target != ignore_index
        if fault == "mean of each image":
            return (losses.flatten(1).sum(1) / valid.flatten(1).sum(1).clamp_min(1)).sum()
        if fault == "infinite":
            return losses / 0
        if fault == "square":
            return losses.sum() ** 2
        if fault == "ignored":
            return losses.sum() + logits.pow(2).sum()
        if fault == "counts":
            return losses.sum() / valid.sum() * valid.sum()
        if fault == "log":
            p = logits.softmax(1).gather(1, target.clamp_max(logits.shape[1] - 1)[:, None])[:, 0]
            return torch.where(valid, -p.log(), 0.0)
        if fault == "random":
            return losses * float(np.random.rand())
        if fault == "weights":
            return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")
        if fault == "detached":
            return losses.detach()
        return losses

    def plain(logits, target, *, ignore_index):
        return loss(logits, target, ignore_index=ignore_index)
"""
DATA = """
    import multiprocessing
    import numpy as np
    import os
    import threading
    import torch

    HASH = list(hash("data").to_bytes(8, "little", signed=True)[:3])

    class Data:
        classes, palette = ("a", "b"), ((0, 0, 0), (9, 9, 9))

        def __init__(self, root, split, fault=""):
            self.fault, self.order = fault, np.random.rand()
            self.held = threading.Lock() if fault == "open" else None  # as an open file, it cannot be pickled

        def __len__(self):
            return 3

        def name(self, index):
            return str(index)

        def read(self, index):
            image = np.full((4, 6, 3), index, np.uint8)
            if self.fault == "random" or (self.fault == "last" and index == 2):
                image[0] = np.random.randint(256)
            if self.fault == "init":
                image[0] = int(255 * self.order)
            if self.fault == "process":
                image[0] = os.getpid() % 251
            if self.fault == "child":
                image[0] = int(multiprocessing.parent_process() is not None)
            if self.fault == "hash":
                image[0, 0] = HASH
            if not self.fault:
                image[0] = abs(int(torch.arange(200_000.0).sin().sum())) % 256
            return image, np.full((4, 6), 2 if self.fault == "ids" else 0, np.uint8)

        def files(self, index):
            return 1 / 0 if self.fault == "files" else []
"""


@pytest.fixture(autouse=True)
def code(project: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's files, and no spawned process for each network, which costs seconds."""

    def not_asked(*_: object) -> None:
        raise UnansweredError("not asked")

    monkeypatch.setattr(NetworkContract, "_afresh", not_asked)
    project("net.py", NET)
    project("loss.py", LOSS)
    project("data.py", DATA)


def broken(clauses: Iterable[Clause]) -> dict[str, str]:
    return {clause.name: clause.problem for clause in clauses if clause.problem}


def network(monkeypatch: pytest.MonkeyPatch, **model: Any) -> dict[str, Clause]:
    """Clauses of a network but for the export, which takes seconds."""
    config = from_mapping({"model": model, "augment": {"crop_size": [64, 96]}})
    return {clause.name: clause for clause in NetworkContract(config, 5).clauses()}


@pytest.mark.parametrize(
    ("fault", "clause", "says"),
    [
        ("raises", "is built", r"net.py, line \d+ .*ValueError: no"),
        ("frozen", "is built", "no parameter requires a gradient"),
        (
            "double",
            "is built",
            "net.conv.bias is torch.float64, but float32 was needed",
        ),
        (
            "weights",
            "equal seeds give equal weights",
            "Draw initial weights from torch's generator",
        ),
        (
            "softmax",
            "logits of every head in training",
            "head main is probabilities.*Leave out softmax",
        ),
        ("sigmoid", "logits of every head in training", "Leave out softmax"),
        (
            "late layer",
            "randomness only from torch's generator",
            r"its forward makes net\.late\.weight, .*Make layers in __init__",
        ),
        ("sync", "is built", "Use BatchNorm2d, .*model.norm=sync"),
        (
            "channels",
            "logits of every head in training",
            r"\(2, 4, 64, 96\).*\(2, 5, h, w\)",
        ),
        ("odd", "odd image sizes", "images of 51x69 fail .*pad inside forward"),
        (
            "unused",
            "gradients reach all parameters",
            "net.other.weight, net.other.bias get no gradient",
        ),
        (
            "detached",
            "gradients reach all parameters",
            "net.conv.weight get no gradient",
        ),
        (
            "python",
            "randomness only from torch's generator",
            "Draw only from torch's generator",
        ),
        (
            "counter",
            "randomness only from torch's generator",
            "keep nothing from one call to the next",
        ),
        (
            "running",
            "randomness only from torch's generator",
            "keep nothing from one call to the next",
        ),
        (
            "written",
            "randomness only from torch's generator",
            "its forward writes into its image",
        ),
        (
            "drift",
            "randomness only from torch's generator",
            "backward changes net.conv.bias. Only the optimizer",
        ),
        (
            "late",
            "randomness only from torch's generator",
            "draws from the global generator of numpy.random: shards",
        ),
        (
            "gradient",
            "randomness only from torch's generator",
            "two passes of the same images in training mode differ",
        ),
        ("dropout", "no randomness in eval mode", "F.dropout training=self.training"),
        (
            "op",
            "ops that CUDA repeats",
            r"net.py:\d+ calls aten.grid_sampler_2d_backward.*raises under deterministic",
        ),
        ("state", "copies and state dict", "Keep all state in parameters and buffers"),
        (
            "list",
            "copies and state dict",
            "persistent=False, layers in nn.ModuleList",
        ),
        ("cache", "copies and state dict", r"computed from weights beyond train\(\)"),
        (
            "hook",
            "copies and state dict",
            r"a copy.deepcopy fails: \S+net.py, line.*seen",
        ),
    ],
)
def test_a_network_that_breaks_a_clause_is_told_which(
    monkeypatch: pytest.MonkeyPatch, fault: str, clause: str, says: str
) -> None:
    found = broken(network(monkeypatch, name="net:Net", args={"fault": fault}).values())
    assert re.search(says, found[clause])


def test_a_sound_network_keeps_all_clauses_and_a_slow_op_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for fault in ("", "relu", "no gradient in eval"):
        clauses = network(monkeypatch, name="net:Net", args={"fault": fault})
        assert not broken(clauses.values())
    found = network(monkeypatch, name="net:Net", args={"fault": "slow"})
    assert not broken(found.values())
    assert "aten.upsample_bilinear2d_backward" in found["ops that CUDA repeats"].note


def test_what_wrong_shapes_would_break_too_is_not_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clauses = list(
        network(monkeypatch, name="net:Net", args={"fault": "channels"}).values()
    )
    assert [clause.name for clause in clauses if clause.problem] == [
        "logits of every head in training"
    ]
    assert len(clauses) == 3
    monkeypatch.setattr(checks.flags, "apply", lambda threads, mode: None)
    overrides = [
        "model.name=net:Net",
        "model.args.fault=channels",
        "augment.crop_size=[32,32]",
    ]
    assert checks.check_plugin({"overrides": overrides}) == 2
    shown = capsys.readouterr().out
    assert "3 checks of model: 1 failed" in shown


@pytest.mark.parametrize(
    ("name", "fault", "says"),
    [
        (
            "Net",
            "weights",
            "net.conv.weight differs. Draw initial weights from torch's generator",
        ),
        ("Net", "python", "Draw only from torch's generator"),
        ("Net", "running", "keep nothing from one call to the next"),
        ("Net", "eval", "Keep all state in parameters and buffers"),
        ("Net", "dropout", "F.dropout training=self.training"),
        ("Net", "channels", "head main is torch.float32"),
        ("Net", "late layer", "Make layers in __init__"),
        ("Large", "running", "keep nothing from one call to the next"),
    ],
)
def test_no_training_starts_with_a_network_that_keeps_state(
    name: str, fault: str, says: str
) -> None:
    config = from_mapping(
        {
            "model": {"name": f"net:{name}", "args": {"fault": fault}},
            "augment": {"crop_size": [96, 128]},
        }
    )
    with pytest.raises(ConfigError, match=rf"model\.name = net:{name}: .*{says}"):
        check_network_of(config, 5)


@pytest.mark.parametrize("fault", ["rank", "variable", "hash"])
def test_no_training_starts_with_a_network_of_another_start(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The rank in logits, an environment variable in gradients, a hash at import; alone, each repeats itself."""
    config = from_mapping({"model": {"name": "net:Net", "args": {"fault": fault}}})
    check_network_of(config, 5)
    monkeypatch.setattr(NetworkContract, "_afresh", AFRESH)
    with pytest.raises(
        ConfigError, match="differ in a process that was started again, as rank 1 of 2"
    ):
        check_network_of(config, 5)


def test_a_sound_network_computes_the_same_in_another_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, project: Write
) -> None:
    """One from outside the project, which the user named, under the switches of torch that are set here.

    Its logits are bfloat16, as those of an own autocast.
    """
    project("../outside/outside.py", NET)
    monkeypatch.syspath_prepend(tmp_path / "outside")
    plugins.trust(["outside"])
    torch.set_deterministic_debug_mode("warn")
    monkeypatch.setattr(NetworkContract, "_afresh", AFRESH)
    config = from_mapping({"model": {"name": "outside:Net", "args": {"fault": "mode"}}})
    check_network_of(config, 5)
    contract = NetworkContract(config, 5, 64)
    assert contract._another_start() == ""


@pytest.mark.parametrize(
    ("fault", "says", "on_gpu"),
    [
        ("attribute", "has no attribute 'steam'", True),
        ("view", "is invalid for input of size", False),
        ("flat", "Use .reshape", False),
    ],
)
def test_a_network_that_runs_at_no_size_starts_no_training(
    monkeypatch: pytest.MonkeyPatch, fault: str, says: str, on_gpu: bool
) -> None:
    """Its file and line are told. A GPU, which this process may not use, excuses all but plain mistakes."""
    config = from_mapping({"model": {"name": "net:Net", "args": {"fault": fault}}})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        ConfigError, match=rf"model\.name = net:Net: .*net\.py, line \d+ \(.*{says}"
    ):
        check_network_of(config, 5)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError) if on_gpu else nullcontext():
        check_network_of(config, 5)


def test_the_check_before_a_training_lets_others_pass_and_draws_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    for name, fault in (("Net", ""), ("Large", ""), ("Net", "cuda"), ("Net", "unused")):
        check_network_of(
            from_mapping({"model": {"name": f"net:{name}", "args": {"fault": fault}}}),
            5,
        )
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    classes: Any = SimpleNamespace(num_classes=5, names=())
    with pytest.raises(ConfigError, match="net:running: two passes of the same images"):
        check_network(from_mapping({"model": {"name": "net:running"}}), classes)


BARE = """
    from torch import nn
    from segpipe.models.layers import SegmentationNet, conv_bn

    class Bare(SegmentationNet):
        def __init__(self, num_classes):
            super().__init__()
            self.body = nn.Sequential(conv_bn(3, 8, 3, stride=8), nn.ReLU(), nn.Conv2d(8, num_classes, 1))

        def features(self, image):
            return self.body(image), {}

    class Sorted(Bare):
        def logits(self, image, *, aux):
            found = self.body(image)
            return {"main": found[image[:, :1].amax((1, 2, 3)) > -9]}

    class Branch(Bare):  # cannot be converted
        def features(self, image):
            return self.body(image if image.sum() > 0 else -image), {}

    class Wide(Bare):
        def __init__(self, num_classes):
            super().__init__(num_classes + 2)
"""


def test_the_export_is_tried(
    project: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a network without auxiliary heads works; one whose file fails a gate is told, not after a training.

    A folder stays where a message names the report in it.
    """
    project("bare.py", BARE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    clauses, left = {}, {}
    for name in ("Bare", "Branch", "Sorted"):
        config = from_mapping(
            {
                "model": {"name": f"bare:{name}"},
                "augment": {"crop_size": [64, 64]},
                "export": {"formats": ["onnx"]},
            }
        )
        contract = NetworkContract(config, 5, export=trial_export)
        [*answered] = answers(
            "model", {"built": contract._is_built, "export": contract._export}
        )
        # Also its heads for training, of which it has none.
        assert not contract.failure()
        clauses[name] = answered[-1]
        left[name] = [*tmp_path.glob("segpipe-contract-*")]
    assert (left["Bare"], left["Branch"]) == ([], [])
    assert str(left["Sorted"][0]) in clauses["Sorted"].problem
    assert clauses["Branch"].problem
    assert (clauses["Bare"].problem, clauses["Bare"].note) == ("", "onnx")
    assert "G1 integrity" in clauses["Sorted"].problem


@pytest.mark.parametrize(
    "fault",
    [
        "softmax",
        "softmax in eval",
        "softmax of columns",
        "sigmoid",
        "sigmoid in eval",
    ],
)
def test_no_training_starts_with_probabilities_for_logits(fault: str) -> None:
    config = from_mapping({"model": {"name": "net:Net", "args": {"fault": fault}}})
    with pytest.raises(
        ConfigError, match=r"model\.name = net:Net: head main.* is probabilities"
    ):
        check_network_of(config, 5)


def test_a_network_with_other_channels_than_classes_starts_no_training(
    project: Write,
) -> None:
    """Also one of our own interface, behind which nothing looks at its outputs."""
    project("wide.py", BARE)
    config = from_mapping({"model": {"name": "wide:Wide"}})
    with pytest.raises(ConfigError, match=r"wide:Wide: head main is .*\(2, 7, .*, 5,"):
        check_network_of(config, 5)


def test_a_network_of_ours_keeps_all_clauses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not broken(network(monkeypatch, name="fast_scnn").values())


def loss(**settings: Any) -> dict[str, str]:
    """What is wrong with a loss; without another start, which takes seconds."""
    with mock.patch.object(LossContract, "_another_start", return_value=""):
        return broken(LossContract(from_mapping({"loss": settings})).clauses())


LIAR = """
    import numpy as np

    class Data:
        classes, palette = ["a", "b"], [(0, 0, 0), (9, 9, 9)]
        def __init__(self, root, split): pass
        def __len__(self): return 2
        def name(self, index): return f"n{index}"
        def size(self, index): return 64, 64 + 32 * index
        def read(self, index): return np.zeros((64, 64, 3), np.uint8), np.zeros((64, 64), np.uint8)
"""


def test_a_size_that_read_does_not_keep_is_named(project: Write) -> None:
    project("liar.py", LIAR)
    contract = DataContract(from_mapping({"data": {"name": "liar:Data"}}), "train")
    said = contract.refusal()
    assert said == "size(1) is (64, 96), but sample n1 is (64, 64)"


def test_images_of_random_sizes_are_not_blamed_on_a_size_method(project: Write) -> None:
    body, _, _ = LIAR.partition("        def size")
    project(
        "drifting.py",
        f"""{body}
        def read(self, index):
            self.calls = getattr(self, "calls", 0) + 1
            return np.zeros((64, 63 + self.calls, 3), np.uint8), np.zeros((64, 63 + self.calls), np.uint8)
""",
    )
    contract = DataContract(from_mapping({"data": {"name": "drifting:Data"}}), "train")
    assert "has different bytes when read twice" in contract.refusal()


def test_samples_that_cannot_be_copied_are_read_in_this_process(
    project: Write,
) -> None:
    """With data.workers=0 nothing else reads them; with workers, `check_workers` refuses them."""
    lock = "def __init__(self, root, split): import threading; self.lock = threading.Lock()"
    kept = LIAR.replace("64 + 32 * index", "64")
    project("lockbox.py", kept.replace("def __init__(self, root, split): pass", lock))
    config = from_mapping({"data": {"name": "lockbox:Data"}})
    assert DataContract(config, "train").refusal() == ""


IMPURE_LOSSES = """
    import os
    from torch.nn.functional import cross_entropy

    def plain(logits, target, *, ignore_index):
        return cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")

    def ranked(logits, target, *, ignore_index):
        return plain(logits, target, ignore_index=ignore_index) * (1 + int(os.environ.get("RANK", 0)))

    def unordered(logits, target, *, ignore_index):
        return plain(logits, target, ignore_index=ignore_index) * hash("floor")

    CALLS = [0]

    def counted(logits, target, *, ignore_index):
        CALLS[0] += 1
        return plain(logits, target, ignore_index=ignore_index) * (1 if CALLS[0] < 1000 else 2)

    def written(logits, target, *, ignore_index):
        return plain(logits.clamp_(-1, 1), target, ignore_index=ignore_index)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ranked", "in a process that was started again, as rank 1 of 2"),
        ("unordered", "in a process that was started again"),
        ("counted", "keeps something from call to call"),
        ("written", "writes into its logits"),
        ("plain", ""),
    ],
)
def test_no_training_starts_with_a_loss_that_depends_on_its_process(
    name: str, says: str, project: Write
) -> None:
    """Runs would differ with the number of processes, or from one start to the next."""
    project("impureloss.py", IMPURE_LOSSES)
    config = from_mapping({"loss": {"name": f"impureloss:{name}"}})
    try:
        found = LossContract(config).refusal()
    except ConfigError as error:
        found = str(error)
    assert says in found
    assert bool(found) == bool(says)


@pytest.mark.parametrize(
    ("fault", "clause", "says"),
    [
        (
            "mean",
            "shards add up",
            'It looks like a mean. Return the loss of each pixel (reduction="none")',
        ),
        ("mean of each image", "shards add up", "It looks like a mean. Return"),
        ("square", "shards add up", "its halves together"),
        ("ignored", "ignored pixels do not count", "Mask out target == ignore_index"),
        ("counts", "a batch without labels", "Do not divide by counts"),
        ("log", "gradients are finite", "Use log_softmax"),
        ("random", "no randomness", "Draw nothing at random"),
        (
            "weights",
            "class weights",
            "Multiply the loss of a pixel by the weight of its class",
        ),
        ("mean", "ops that CUDA repeats", "aten.nll_loss2d_forward"),
        ("detached", "ignored pixels do not count", "does not require grad"),
        (
            "infinite",
            "shards add up",
            "not finite: inf for a batch, inf and inf for its halves",
        ),
        ("none", "can be called", "loss.args.falt is not an argument of loss:loss"),
    ],
)
def test_a_loss_that_breaks_a_clause_is_told_which(
    fault: str, clause: str, says: str
) -> None:
    found = loss(name="loss:loss", args={"falt" if fault == "none" else "fault": fault})
    assert says in found[clause]


def test_sound_losses_keep_all_clauses(project: Write) -> None:
    """That of docs/plugins.md, too."""
    page = (ROOT / "docs" / "plugins.md").read_text()
    shown = page.partition("## A loss\n\n```python\n")[2].partition("```")[0]
    project("shown.py", "import torch.nn.functional as F\n" + shown)
    for name in ("cross_entropy", "ohem", "loss:loss", "loss:plain", "shown:focal"):
        assert not loss(name=name)
    assert (
        "must accept the keyword class_weights"
        in loss(name="loss:plain", class_weights="log")["can be called"]
    )


def test_no_training_starts_with_a_mean_or_a_wrong_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        launch,
        "claim_folder",
        lambda config: pytest.fail("the training would have started"),
    )
    for overrides, says in (
        (["loss.name=loss:loss", "loss.args.fault=mean"], "It looks like a mean"),
        (["loss.name=loss:loss", "loss.args.fault=random"], "Draw nothing at random"),
        (
            ["loss.name=loss:plain", "loss.class_weights=log"],
            "must accept the keyword class_weights",
        ),
        (
            [
                "loss.name=loss:loss",
                "loss.args.fault=weights",
                "loss.class_weights=log",
            ],
            "loss:loss: class_weights have no effect",
        ),
        (
            ["model.name=net:Net", "model.args.falt=x"],
            "model.args.falt is not an argument of net:Net",
        ),
        (["model.name=net:Nett"], "net has no Nett"),
        (["data.name=data:Dat"], "data has no Dat"),
        (
            ["data.name=data:Data", "data.root=.", "data.args.fault=random"],
            "sample 0 has different bytes when read twice",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            launch.prepare(compose(overrides), 1)


def data(split: str = "train", **args: Any) -> dict[str, str]:
    config = Config()
    config.data.name, config.data.args = "data:Data", args
    return broken(DataContract(config, split).clauses())


@pytest.mark.parametrize(
    ("fault", "clause", "says"),
    [
        ("files", "can be opened", "ZeroDivisionError"),
        ("ids", "images, targets and names", "sample 0 has class id 2"),
        ("random", "same bytes twice", "draw nothing at random"),
        ("last", "same bytes twice", "sample 2 has different bytes when read twice"),
        ("init", "same bytes twice", "A sample must depend only on its index"),
        (
            "process",
            "same bytes in another process",
            "has different bytes when read by another process",
        ),
    ],
)
def test_data_that_break_a_clause_are_told_which(
    monkeypatch: pytest.MonkeyPatch, fault: str, clause: str, says: str
) -> None:
    if fault != "process":  # a process takes seconds to start
        monkeypatch.setattr(DataContract, "_other_process", lambda self: "")
    assert says in data(fault=fault)[f"train: {clause}"]


@pytest.mark.parametrize("fault", ["random", "init", "process", "child", "hash", ""])
def test_no_training_starts_with_samples_that_depend_on_the_process(fault: str) -> None:
    config = Config()
    config.data.name, config.data.args = "data:Data", {"fault": fault}
    if fault:
        with pytest.raises(
            ConfigError,
            match=r"data\.name = data:Data: sample 0 has different bytes when read (twice|by)",
        ):
            check_data(config)
    else:
        with torch_restored():
            torch.set_num_threads(3)  # for which a forked process would wait
            check_data(config)
            assert not any(
                clause.problem or clause.note
                for clause in DataContract(config, "train").clauses()
            )
        check_data(Config())


def test_the_command_checks_what_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks.flags, "apply", lambda threads, mode: None)
    monkeypatch.setattr(DataContract, "_other_process", lambda self: "")
    assert (
        checks.check_plugin(
            {"overrides": ["loss.name=loss:loss", "loss.args.fault=mean"]}
        )
        == 2
    )
    shown = capsys.readouterr().out
    assert "loss, shards add up: loss.name = loss:loss: a batch has loss" in shown
    assert "10 checks of loss: 4 failed" in shown
    assert checks.check_plugin({"overrides": ["data.name=data:Data"]}) == 0
    assert "10 checks of data: all passed" in capsys.readouterr().out
    assert checks.chosen(["model=pidnet_s", "augment.extra=[noise]"], Config()) == [
        "model",
        "augment",
    ]
    with pytest.raises(
        ConfigError, match=r"nothing to check. Name a plug-in with model.name=..."
    ):
        checks.check_plugin({"overrides": ["seed=1"]})


def test_what_plug_ins_set_when_they_are_made_does_not_last(
    project: Write, tmp_path: Path
) -> None:
    """Processes import and build at other times: one would train, or audit, with other switches than another."""
    project(
        "greedy.py",
        """
        import albumentations
        import torch
        from torch import nn

        torch.set_num_threads(2)
        SEEN, BUILT = [], []

        class Flip(albumentations.HorizontalFlip):
            def __init__(self):
                super().__init__()
                torch.set_num_threads(3)
                torch.backends.cudnn.benchmark = True

        class Net(nn.Conv2d):
            def __init__(self, num_classes):
                super().__init__(3, num_classes, 3, padding=1)
                BUILT.append(torch.get_num_threads())
                torch.set_num_threads(2)
                torch.backends.cudnn.benchmark = True

            def forward(self, x):
                SEEN.append((torch.get_num_threads(), torch.backends.cudnn.benchmark))
                return super().forward(x)
        """,
    )
    changes = ("model.name=greedy:Net", "augment.extra=[greedy:Flip]", "train.steps=1")
    assert run(tmp_path / "run", *changes) == 0
    import greedy  # type: ignore[import-not-found]

    assert greedy.SEEN[-1] == (1, False)
    assert (2, True) in greedy.SEEN, "the control: as it was made"
    assert result(tmp_path / "run")["versions"]["threads"] == 1
    with torch_restored():
        assert main(["audit", f"run={tmp_path / 'run'}"]) == 0
        torch.set_num_threads(3)  # as a rank that has just imported the plug-in
        config, alone = (
            from_mapping({"model": {"name": "greedy:Net"}, "compute": {"threads": 1}}),
            Group(0, 1, torch.device("cpu")),
        )
        checkpoint.state_of(config, alone, CAMVID, None)
        assert greedy.BUILT[-1] == torch.get_num_threads() == 1


def test_a_transform_that_cannot_be_checked_hides_no_other_check(
    project: Write,
) -> None:
    project(
        "adds.py",
        """
        class AddsAnId:
            def __call__(self, image, target, rng):
                return image, target + 100
        """,
    )
    augment = {"extra": ["adds:AddsAnId"], "crop_size": [64, 64]}
    config = from_mapping({"augment": augment})
    *others, last = checks.clauses(config, ["loss", "augment"])
    assert {clause.part for clause in others} == {"loss"}
    assert "(CallableTransform) makes the id 1" in last.problem
    assert "or 255 to ignore a pixel" in last.problem
