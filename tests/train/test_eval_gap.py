"""A network that eval mode breaks is told at the first validation, with the BatchNorm that breaks it."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runs import metrics, outcome, run
from segpipe.models.layers import SegmentationNet, conv_bn
from segpipe.models.preprocess import Preprocess
from segpipe.settings.config import Config
from segpipe.train import engine, validate


class Pyramid(SegmentationNet):
    """Colors, and the mean of the image behind BatchNorm (a pyramid bin of one pixel) or without it."""

    output_stride = 1
    size_multiple = 1

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.stem = conv_bn(3, 16, 3)
        self.bin = nn.Sequential(
            nn.Conv2d(16, 16, 1, bias=False),
            nn.BatchNorm2d(16) if norm else nn.Identity(),
        )
        self.classify = nn.Conv2d(16, 3, 1)
        self.train_only = nn.ModuleDict()

    def logits(self, image: Tensor, *, aux: bool) -> dict[str, Tensor]:
        x = self.stem(image)
        return {"main": self.classify(F.relu(x + self.bin(x.mean((2, 3), True))))}


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Blocks of three colors, in other places each time, so that all images have nearly one mean."""
    draws = torch.Generator().manual_seed(seed)
    target = torch.arange(64).remainder(3)[None].repeat(2, 1)
    target = torch.stack([row[torch.randperm(64, generator=draws)] for row in target])
    target = target.reshape(2, 8, 8).repeat_interleave(4, 1).repeat_interleave(4, 2)
    colors = torch.tensor([[90, 90, 90], [110, 100, 90], [90, 110, 110]])
    noise = torch.randint(-20, 20, (2, 32, 32, 3), generator=draws)
    return (colors[target] + noise).to(torch.uint8), target.to(torch.uint8)


def trained(*, norm: bool) -> Pyramid:
    torch.manual_seed(0)
    net, preprocess = Pyramid(norm=norm), Preprocess()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for step in range(60):
        image, target = batch(step)
        loss = F.cross_entropy(net(preprocess(image)), target.long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()


def warning(net: Pyramid) -> str:
    """Of a batch that training has not seen."""
    named = net.named_modules()
    layers = [name for name, layer in named if isinstance(layer, nn.BatchNorm2d)]
    before = copy.deepcopy(net.state_dict())
    told = validate.eval_gap(net, Preprocess(), layers, *batch(1000), "fp32")
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])
    assert not net.training
    return told


def test_batchnorm_on_a_map_of_one_pixel_is_named() -> None:
    """An update of the convolution before it moves a mean by many times its spread over images, and eval mode breaks.

    With the batch's statistics the update changes nothing. The control has no BatchNorm there.
    """
    told = []
    for norm in (True, False):
        net = trained(norm=norm)
        with torch.no_grad():
            net.bin[0].weight.mul_(1.5)
        told.append(warning(net))
    running, own = map(float, re.findall(r"([0-9.]+) %", told[0]))
    assert running < 70
    assert own > 84
    assert "furthest from the batch's in bin.1 (" in told[0]
    assert not told[1]


@pytest.mark.parametrize(
    ("steps", "every", "due"),
    [
        (49, 0, 0),
        (50, 0, 50),
        (400, 100, 100),
        (400, 30, 60),
        (60, 40, 60),
        (99, 3, 51),
    ],
)
def test_it_is_due_once(steps: int, every: int, due: int) -> None:
    """At the first validation after 50 updates; the last update always has one."""
    config = Config()
    config.train.steps, config.train.validate_every = steps, every
    validations = {*range(every, steps, every)} if every else set()
    found = [step for step in validations | {steps} if engine._is_settled(config, step)]
    assert found == [due] * bool(due)


def test_a_run_tells_it_and_keeps_its_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the log and on the page. The control has no check."""
    folder, plain = tmp_path / "told", tmp_path / "plain"
    changes = ("train.steps=4", "train.validate_every=2")
    assert run(plain, *changes) == 0
    monkeypatch.setattr(engine, "SETTLED", 1)
    monkeypatch.setattr(validate, "POINTS", -1.0)
    monkeypatch.setattr(validate, "LEAST_SHARE", 9.0)
    assert run(folder, *changes) == 0
    assert outcome(folder) == outcome(plain)
    told = [line for line in metrics(folder) if line["kind"] == "warning"]
    assert [line["step"] for line in told] == [2]
    assert "furthest from the batch's in" in told[0]["text"]
    page = (folder / "report.html").read_text()
    assert "Step 2: in eval mode a training batch has" in page
    assert not [line for line in metrics(plain) if line["kind"] == "warning"]
