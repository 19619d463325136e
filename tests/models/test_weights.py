"""Weights from files: every tensor of network and file is accounted for, and no file runs code."""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from segpipe.errors import CheckpointError, WeightsError, listed
from segpipe.models import build_model
from segpipe.models.plugin_network import PluginNetwork
from segpipe.models.weights import (
    Fit,
    WeightsSource,
    fit,
    published_key,
    read_safetensors,
    read_torch,
    state_dict_in,
)

CLASS_LAYERS = {
    "fast_scnn": ("classifier.3", "train_only.aux.2"),
    "ddrnet23_slim": ("head.conv2", "train_only.aux.conv2"),
    "pidnet_s": ("head.conv2", "train_only.aux_p.conv2"),
    "erfnet": ("head",),  # a transposed convolution
    "dabnet": ("head",),
    "stdc1": ("head.1", "train_only.aux16.1", "train_only.aux32.1"),
}
any_published = pytest.mark.parametrize("name", CLASS_LAYERS)


class Small(nn.Module):
    """A network of somebody else: no class of segpipe, names of its own."""

    def __init__(self, num_classes: int = 5, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Conv2d(width, width, 1)
        )
        self.head = nn.Conv2d(width, num_classes, 1)


def source(tensors: dict[str, Tensor]) -> WeightsSource:
    return WeightsSource(tensors, "x.pth")


def training_file(name: str) -> dict[str, Tensor]:
    """The state dict as the authors' training code saves it: below `model.`, beside the class weights of its losses."""
    weights = {f"model.{key}": value for key, value in state_dict(name).items()}
    if name == "fast_scnn":  # published with an auxiliary head by some
        weights |= {
            "model.auxlayer.0.weight": torch.ones(32, 64, 3, 3),
            "model.auxlayer.4.bias": torch.ones(19),
        }
    return weights | {
        "sem_loss.criterion.weight": torch.ones(19),
        "model.total_ops": torch.zeros(1),
        "n_averaged": torch.tensor(3),
    }


@any_published
def test_files_of_the_authors_training_code_are_read(name: str) -> None:
    net, tensors = build_model(name, 19), training_file(name)
    found = fit(net, source(tensors), num_classes=19)
    left_over = {
        key
        for key in found.left_over
        if not net.unused_keys or not re.search(net.unused_keys, key)
    }
    assert left_over == {
        "sem_loss.criterion.weight",
        "model.total_ops",
        "n_averaged",
    }
    assert all(key.startswith("train_only.") for key in found.fresh)
    assert not found.adapted
    assert sorted((*found.kept, *found.fresh)) == sorted(net.state_dict())
    keys = net.published_keys
    for key, value in net.state_dict().items():
        if key not in found.fresh:
            assert torch.equal(value, tensors[f"model.{published_key(key, keys)}"])
    if name == "fast_scnn":
        assert {"train_only.aux.0.0.weight", "train_only.aux.2.bias"} <= set(found.kept)


def test_the_share_of_the_parameters_is_in_percent_rounded_down() -> None:
    taken = Fit(("a",), (), ("b",), (), None, share=1 / 3)
    assert taken.summary.startswith("kept 1 tensors, 33.3 % of the parameters; ")


@any_published
def test_another_class_count_initializes_the_class_layers_and_nothing_else(
    name: str,
) -> None:
    torch.manual_seed(3)
    net = build_model(name, 7)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    found = fit(net, source(training_file(name)), num_classes=7)
    layers = [
        f"{layer}.{part}"
        for layer in CLASS_LAYERS[name]
        for part in ("weight", "bias")
        if f"{layer}.{part}" in before
    ]
    absent = (
        {"train_only.aux.2.weight"} if name == "fast_scnn" else set()
    )  # training_file has one tensor of two
    assert set(found.adapted) == set(layers) - absent
    assert found.classes == (19, 7)
    assert f"adapted {len(found.adapted)} (" in found.summary
    assert "19 -> 7 classes, initialized" in found.summary
    for key, value in net.state_dict().items():
        kept = key not in (*found.adapted, *found.fresh)
        assert (
            torch.equal(value, before[key]) != kept
            or not value.ndim
            or key.endswith("num_batches_tracked")
        ), key


@pytest.mark.parametrize(
    ("name", "num_classes"), [("fast_scnn", 64), ("fast_scnn", 128), ("pidnet_s", 32)]
)
def test_a_class_count_that_is_a_width_of_the_network_moves_no_layer(
    name: str, num_classes: int
) -> None:
    """By their shapes alone, layers of other parts of the file would fit better than its class layers."""
    net, other = build_model(name, num_classes), build_model(name, 19)
    found = fit(net, source(other.state_dict()), num_classes=num_classes)
    assert set(found.adapted) == {
        f"{layer}.{part}" for layer in CLASS_LAYERS[name] for part in ("weight", "bias")
    }
    assert not found.fresh
    assert not found.left_over


@pytest.mark.parametrize(
    "prefix", ["", "module.", "model.", "module.model.", "_orig_mod."]
)
def test_prefixes_are_dropped_and_a_mixture_is_refused(prefix: str) -> None:
    name, weights = "fast_scnn", state_dict("fast_scnn")
    prefixed = {prefix + key: value for key, value in weights.items()}
    found = fit(build_model(name, 19), source(prefixed), num_classes=19)
    assert not found.left_over
    assert len(found.kept) == len(weights)
    key, *others = weights
    mixed = {
        f"odd.{prefix}{key}": weights[key],
        **{prefix + other: weights[other] for other in others},
    }
    with pytest.raises(
        WeightsError,
        match=f"1 missing \\({prefix}{key}\\); 1 left over \\(odd.{prefix}{key}\\)",
    ):
        fit(build_model(name, 19), source(mixed), num_classes=19)


@pytest.mark.parametrize("name", ["fast_scnn"])
def test_what_does_not_fit_is_named(name: str) -> None:
    weights = state_dict(name)
    key = next(key for key, value in weights.items() if value.ndim == 4)

    def refused(changed: dict[str, Tensor], match: str) -> None:
        net = build_model(name, 19)
        before = {key: value.clone() for key, value in net.state_dict().items()}
        with pytest.raises(WeightsError, match=match):
            fit(net, source(changed), num_classes=19)
        assert all(
            torch.equal(value, before[key]) for key, value in net.state_dict().items()
        )

    other = {other: value for other, value in weights.items() if other != key}
    refused(other, rf"^x\.pth does not fit \w+ with 19 classes: 1 missing \({key}\)\.")
    refused(
        {**weights, "extra.weight": torch.zeros(1)},
        r"1 left over \(extra\.weight\)\..*model\.weights_partial=true",
    )
    refused(
        {**weights, key: torch.zeros(2, 3)},
        rf"1 of another shape or dtype \({key} torch.float32 \(2, 3\), needed torch.float32 \(32, 3, 3, 3\)\)\.",
    )
    for dtype in (torch.int64, torch.int8, torch.complex64):
        refused(
            {**weights, key: weights[key].to(dtype)},
            rf"1 of another shape or dtype \({key} {dtype} .*, needed torch\.float32 ",
        )
    refused(
        {**weights, key: torch.full_like(weights[key], torch.inf)},
        r"x\.pth: \S+ is not finite",
    )
    refused(
        {**weights, key: weights[key].double() + 1e300},
        r"x\.pth: \S+ is not finite in torch\.float32",
    )
    variance = next(name for name in weights if name.endswith("running_var"))
    refused(
        {**weights, variance: -weights[variance]},
        r"x\.pth: \S+\.running_var is .* a negative variance",
    )
    refused(
        {"a": torch.zeros(1), "b": torch.zeros(2)},
        r"no tensor of x\.pth fits .*: it has a, b, the network \S+, \S+, \S+ and \d+ more\.",
    )


def test_class_layers_of_two_class_counts_are_refused() -> None:
    class Two(Small):
        def __init__(self, num_classes: int, num_aux: int) -> None:
            super().__init__(num_classes)
            self.aux = nn.Conv2d(8, num_aux, 1)

    with pytest.raises(
        WeightsError,
        match=r"4 of another shape or dtype \(head\.weight \S+ \(19, 8, 1, 1\), needed \S+ \(5, 8, 1, 1\)",
    ):
        fit(Two(5, 5), source(Two(19, 20).state_dict()), num_classes=5)
    assert (
        len(fit(Two(5, 5), source(Two(19, 19).state_dict()), num_classes=5).adapted)
        == 4
    )


def test_a_layer_of_another_width_is_no_class_layer() -> None:
    with pytest.raises(WeightsError, match="of another shape"):
        fit(Small(5, 5), source(Small(5, 9).state_dict()), num_classes=5)
    # Class embeddings have the classes on the second axis.
    tokens = [
        nn.ParameterDict({"of": torch.zeros(1, n, 4), "x": torch.zeros(2)})
        for n in (5, 9)
    ]
    assert fit(tokens[0], source(tokens[1].state_dict()), num_classes=5).adapted
    # As many channels of the image as classes; the file is for grey images.
    net, grey = nn.Conv2d(3, 8, 3), nn.Conv2d(1, 8, 3)
    with pytest.raises(WeightsError, match="of another shape"):
        fit(net, source(grey.state_dict()), num_classes=3)
    other = {
        **Small(5).state_dict(),
        "head.weight": torch.ones(7, 9, 1, 1),
    }  # another class count, and another width
    with pytest.raises(
        WeightsError, match=r"1 of another shape or dtype \(head\.weight"
    ):
        fit(Small(5), source(other), num_classes=5)


def test_partial_takes_an_encoder_alone_and_names_the_rest() -> None:
    net, other = Small(), Small()
    inner = {
        key.removeprefix("encoder."): value
        for key, value in other.state_dict().items()
        if "encoder" in key
    }
    for tensors in (inner, {f"backbone.{key}": value for key, value in inner.items()}):
        found = fit(
            net,
            source({**tensors, "fc.weight": torch.ones(1000, 8)}),
            num_classes=5,
            partial=True,
        )
        assert set(found.kept) == {
            key for key in net.state_dict() if key.startswith("encoder.")
        }
        assert found.fresh == ("head.weight", "head.bias")
        assert found.left_over == ("fc.weight",)
        assert torch.equal(net.encoder[0].weight, other.encoder[0].weight)  # type: ignore[arg-type]
    with pytest.raises(WeightsError, match=r"2 missing \(head\.weight, head\.bias\)"):
        fit(net, source(inner), num_classes=5)
    prefixed = {f"enc.{key}": value for key, value in inner.items()}
    with pytest.raises(
        WeightsError, match=r"2 missing \(net\.head\.weight, net\.head\.bias\)\. Check"
    ):
        fit(PluginNetwork(Small(), 5, "mine:Small"), source(prefixed), num_classes=5)
    headed = {
        **prefixed,
        **{
            f"enc.{key}": value
            for key, value in other.state_dict().items()
            if "head" in key
        },
    }
    assert not fit(net, source(headed), num_classes=5).fresh
    wide = {**other.state_dict(), "encoder.0.weight": torch.ones(4, 3, 3, 3)}
    found = fit(net, source(wide), num_classes=5, partial=True)
    assert (found.fresh, found.left_over) == (
        ("encoder.0.weight",),
        ("encoder.0.weight",),
    )


def test_a_network_of_the_user_is_read_with_its_own_names() -> None:
    """A plug-in has its names behind "net."; a file has them as the user's code does, or as segpipe wrote them."""
    other = Small()
    wrapped = PluginNetwork(Small(), 5, "mine:Small")
    for tensors in (
        other.state_dict(),
        PluginNetwork(other, 5, "mine:Small").state_dict(),
    ):
        found = fit(wrapped, source(tensors), num_classes=5)
        assert not found.fresh
        assert all(
            torch.equal(value, other.state_dict()[key])
            for key, value in wrapped.net.state_dict().items()
        )
    assert published_key("net.head.bias", wrapped.published_keys) == "head.bias"


def test_the_share_counts_parameters() -> None:
    found = fit(Small(5), source(Small(3).state_dict()), num_classes=5)
    count = sum(parameter.numel() for parameter in Small(5).parameters())
    assert found.share == pytest.approx(1 - 5 * 9 / count)
    assert found.record(source({}))["share_of_parameters"] == round(found.share, 6)


def test_half_precision_is_converted_and_old_files_lack_counters() -> None:
    """A counter in half precision is not taken either: it ends at 65,504."""
    net, weights = Small(), Small().half().state_dict()
    counter = "encoder.1.num_batches_tracked"
    weights[counter] = weights[counter].half()  # as (value.half() for each value)
    assert fit(Small(), source(weights), num_classes=5).fresh == (counter,)
    del weights[counter]
    found = fit(net, source(weights), num_classes=5)
    assert found.fresh == (counter,)
    assert net.head.weight.dtype == torch.float32
    assert torch.equal(net.head.weight, weights["head.weight"].float())


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (lambda value: value.to(torch.float8_e4m3fn), "of another .* dtype .*float8"),
        (lambda value: value.to("meta"), "without values"),
    ],
)
def test_tensors_without_plain_numbers_are_refused(
    changed: Callable[[Tensor], Tensor], match: str
) -> None:
    weights = Small().state_dict()
    weights["encoder.2.weight"] = changed(weights["encoder.2.weight"])
    with pytest.raises(
        WeightsError, match=rf"x\.pth.*encoder\.2\.weight.*{match}|{match}"
    ):
        fit(Small(), source(weights), num_classes=5)


def test_a_sparse_tensor_is_taken() -> None:
    net, weights = Small(), Small().state_dict()
    expected = weights["encoder.2.weight"].clone()
    weights["encoder.2.weight"] = expected.to_sparse()
    fit(net, source(weights), num_classes=5)
    assert torch.equal(net.state_dict()["encoder.2.weight"], expected)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (Small().state_dict(), ""),
        ({"state_dict": Small().state_dict(), "epoch": 3}, "state_dict"),
        (
            {
                "model": Small().state_dict(),
                "optimizer": {"state": {0: {"m": torch.ones(1)}}},
            },
            "model",
        ),
        (
            {"ema": Small().state_dict(), "state_dict": Small().state_dict()},
            "state_dict",
        ),
        ({"mine": {"net": Small().state_dict()}}, "mine.net"),
    ],
)
def test_the_state_dict_is_found(tmp_path: Path, content: Any, part: str) -> None:
    path = tmp_path / "x.pth"
    torch.save(content, path)
    found = state_dict_in(read_torch(path), path)
    assert found.part == part
    assert set(found.tensors) == set(Small().state_dict())
    assert found.where == (
        f"{path} (entry {part}{', not ema' if 'ema' in content else ''})"
        if part
        else str(path)
    )


def test_a_file_without_a_state_dict_says_what_it_holds(tmp_path: Path) -> None:
    for content, held in (
        ({"epoch": 3, "loss": 0.5}, "epoch, loss"), ({**Small().state_dict(), "epoch": 3}, r"epoch\."),
        ([1, 2], "list"), (torch.ones(2), "Tensor"), ({}, "an empty dict"),
    ):  # fmt: skip
        torch.save(content, tmp_path / "x.pth")
        with pytest.raises(
            CheckpointError, match=f"x.pth holds no state dict .*but {held}"
        ):
            state_dict_in(read_torch(tmp_path / "x.pth"), tmp_path / "x.pth")


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.path,)


def test_no_file_runs_code(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    for content, kind in (
        (
            {"state_dict": Small().state_dict(), "args": argparse.Namespace(lr=1)},
            r"argparse\.Namespace",
        ),
        (Small(), r".*Small"),
        ({"state_dict": Small().state_dict(), "args": Evil(tmp_path / "ran")}, r"\S+"),
    ):
        torch.save(content, path)
        with pytest.raises(
            CheckpointError,
            match=f"holds {kind}, a Python object.* none of it was run",
        ) as caught:
            read_torch(path)
        assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
    torch.load(
        path, weights_only=False
    )  # the control: the file does run code where it is allowed to
    assert (tmp_path / "ran").exists()


def test_torchscript_is_told_how_to_be_converted(tmp_path: Path) -> None:
    path = tmp_path / "script.pt"
    with warnings.catch_warnings(action="ignore"):  # the format is deprecated
        traced = torch.jit.trace(nn.Conv2d(3, 3, 1), torch.zeros(1, 3, 8, 8))  # type: ignore[no-untyped-call, attr-defined]
        torch.jit.save(traced, path)  # type: ignore[no-untyped-call, attr-defined]
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(CheckpointError, match=r"torch\.jit\.load\(FILE\)\.state_dict"),
    ):
        read_torch(path)


def test_damaged_files_are_told_apart(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.pth", tmp_path / "cut.pth"
    torch.save(Small().state_dict(), whole)
    cut.write_bytes(whole.read_bytes()[:-200])
    text = tmp_path / "page.pth"
    text.write_text("<!DOCTYPE html>")
    empty = tmp_path / "empty.pth"
    empty.touch()
    for path, reason in (
        (cut, r"\(\d+ bytes\) cannot be read as a torch file: .* \w.* Fetch"),
        (text, "cannot be read"),
        (empty, r"\(0 bytes\) cannot be read as a torch file: EOFError\. .*Fetch"),
        (tmp_path / "n", "not exist"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            read_torch(path)
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    for unreadable in (path, tmp_path / "none.safetensors"):
        with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
            read_safetensors(unreadable)


def test_safetensors_of_others_have_no_class_names(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(Small().state_dict(), path)
    assert read_safetensors(path).class_names == ()
    save_file(
        Small().state_dict(), path, metadata={"format": "pt", "classes": "no JSON"}
    )
    assert read_safetensors(path).class_names == ()
    assert len(fit(Small(), read_safetensors(path), num_classes=5).kept) == len(
        Small().state_dict()
    )


def test_published_key_applies_the_patterns_in_order() -> None:
    patterns = ((r"^b\.(\d)\.", r"c\1."), (r"^c", "long.c"), (r"\.d\.", ".e."))
    assert published_key("b.3.d.weight", patterns) == "long.c3.e.weight"
    assert published_key("a.b.3.weight", patterns) == "a.b.3.weight"


def test_messages_name_five_keys_then_count() -> None:
    assert listed(list("abcde")) == "a, b, c, d, e"
    assert listed(list("abcdefg")) == "a, b, c, d, e and 2 more"
