"""Encoders of timm: what they are fed, where their weights come from, and what is said when something is missing."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from segpipe.data.catalog import STREET
from segpipe.errors import CheckpointError, ConfigError
from segpipe.models import build_model
from segpipe.models.preprocess import IMAGENET_MEAN, IMAGENET_STD
from segpipe.models.weights import published_key
from segpipe.settings.config import check, from_mapping
from segpipe.train import checkpoint
from segpipe.train.start import weights_summary
from segpipe.train.state import build_state

CPU = torch.device("cpu")
SMALL = "mobilenetv4_conv_small_035"  # expects mean 0.5 and deviation 0.5


@pytest.fixture
def timm() -> Any:
    """Imported by the process that needs it, since it takes 2 s, and not by each that collects tests."""
    return import_module("timm")


def config(encoder: str = SMALL, *, pretrained: bool = False, **model: Any) -> Any:
    args = {"encoder": encoder, "pretrained": pretrained}
    return from_mapping({"model": {"name": "timm", "args": args, **model}})


@torch.no_grad()
def test_the_encoder_sees_images_normalized_as_it_was_trained() -> None:
    net = build_model("timm", 5, {"encoder": SMALL}).eval()
    seen: list[torch.Tensor] = []
    net.encoder.register_forward_pre_hook(lambda _, args: seen.append(args[0]))  # type: ignore[operator, union-attr]
    raw = torch.rand(1, 3, 64, 64)
    ours = (raw - torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1)) / torch.tensor(
        IMAGENET_STD
    ).view(1, 3, 1, 1)
    net(ours)
    torch.testing.assert_close(seen[0], (raw - 0.5) / 0.5, rtol=0, atol=1e-5)
    assert (seen[0] - ours).abs().max() > 0.1, "another normalization than ours"
    with pytest.MonkeyPatch.context() as on_a_gpu:
        on_a_gpu.setattr(torch.Tensor, "is_cuda", True)
        on_a_gpu.setattr(
            torch.Tensor,
            "new_tensor",
            lambda *args: pytest.fail("the host waits for this copy"),
        )
        net.logits(ours, aux=False)
    assert torch.equal(seen.pop(), seen[0])
    usual = build_model("timm", 5, {"encoder": "mobilenetv3_small_050"}).eval()
    usual.encoder.register_forward_pre_hook(lambda _, args: seen.append(args[0]))  # type: ignore[operator, union-attr]
    usual(ours)
    assert seen[1] is ours


@pytest.mark.parametrize(
    "encoder", [SMALL, "convnext_atto"]
)  # timm flattens the stages of the second
def test_a_file_of_the_whole_classifier_gives_the_encoder(
    encoder: str, tmp_path: Path, timm: Any
) -> None:
    whole = timm.create_model(encoder, num_classes=10)
    path = tmp_path / "model.safetensors"
    save_file(whole.state_dict(), path)
    settings = config(encoder, weights=str(path), weights_partial=True)
    state = build_state(settings, STREET, CPU, checkpoint.read_start(settings))
    assert state.weights is not None
    names = [name for name in state.model.state_dict() if name.startswith("encoder.")]
    assert set(names) == set(state.weights["kept"])
    assert not any(
        name.startswith(("stages", "blocks", "conv_stem"))
        for name in state.weights["left_over"]
    )
    settings.model.weights_partial = False
    with pytest.raises(
        CheckpointError, match=r"lateral\.0\.0\.weight.*model\.weights_partial=true"
    ):
        build_state(settings, STREET, CPU, checkpoint.read_start(settings))


def test_an_encoder_that_should_be_pretrained_does_not_stay_random(
    tmp_path: Path,
) -> None:
    decoder = {
        name: value
        for name, value in build_model("timm", 19, {"encoder": SMALL})
        .state_dict()
        .items()
        if not name.startswith("encoder.")
    }
    path = tmp_path / "decoder.safetensors"
    save_file(decoder, path)
    settings = config(pretrained=True, weights=str(path), weights_partial=True)
    start = checkpoint.read_start(settings)
    with pytest.raises(
        ConfigError, match=r"pretrained = true, but .* lacks tensors of"
    ):
        build_state(settings, STREET, CPU, start)
    settings.model.args = {"encoder": SMALL}
    build_state(settings, STREET, CPU, start)


@pytest.mark.parametrize(
    "encoder",
    [
        "resnetv2_50",
        "cs3darknet_s",
        "densenet121",
        "inception_resnet_v2",
        "twins_svt_small",
    ],
)
def test_tensors_of_an_encoder_have_the_names_of_timms_files(
    encoder: str, timm: Any
) -> None:
    """timm flattens modules of the first three, below a stem too, and wraps the last."""
    with torch.device("meta"):
        net = build_model("timm", 5, {"encoder": encoder})
        whole = timm.create_model(encoder).state_dict()
    ours = [key for key in net.state_dict() if key.startswith("encoder.")]
    names = {published_key(key, net.published_keys) for key in ours}
    assert len(names) == len(ours)
    assert names <= whole.keys()


@torch.no_grad()
def test_an_encoder_whose_features_have_channels_last_sees_an_odd_size() -> None:
    net = build_model("timm", 5, {"encoder": "mambaout_femto"}).eval()
    heads = net.logits(torch.rand(1, 3, 65, 97), aux=True)
    assert [logits.shape[:2] for logits in heads.values()] == [(1, 5), (1, 5)]
    assert heads["main"].shape == heads["aux"].shape


def test_pretrained_weights_are_loaded_for_step_0_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, timm: Any
) -> None:
    create, asked = timm.create_model, []

    def with_weights(name: str, *, pretrained: bool = False, **kind: Any) -> Any:
        asked.append(pretrained)
        net = create(name, **kind)
        if pretrained:
            net.load_state_dict(
                {
                    key: torch.full_like(value, 2)
                    for key, value in net.state_dict().items()
                }
            )
        return net

    monkeypatch.setattr(timm, "create_model", with_weights)
    settings = config(pretrained=True)
    settings.run.root = str(tmp_path)
    state = build_state(settings, STREET, CPU, checkpoint.read_start(settings))
    assert asked == [False, True]
    encoder = [
        value
        for name, value in state.ema.model.state_dict().items()
        if name.startswith("encoder.")
    ]
    assert all((value == 2).all() for value in encoder)
    assert state.weights is not None
    assert len(state.weights["kept"]) == len(encoder)
    assert state.weights["file"] == f"timm's {SMALL}"
    assert len(state.weights["sha256"]) == 64
    assert f"kept {len(encoder)} tensors" in state.notes[0]
    build_state(settings, STREET, CPU)  # to resume, to evaluate, to export
    assert asked == [False, True, False]
    assert weights_summary(settings) == {}


def test_without_a_network_it_is_said_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    settings = config("mobilenetv3_small_050", pretrained=True)
    start = checkpoint.read_start(settings)
    with pytest.raises(
        ConfigError,
        match=r"neither in timm's cache nor.*HF_HOME.*weights_partial=true",
    ):
        build_state(settings, STREET, CPU, start)


def test_without_timm_the_message_names_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"pip install 'segpipe\[timm\]'"):
        build_model("timm", 5)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (
            {"encoder": "resnet81"},
            "'resnet81' is not a timm encoder. Did you mean resnet",
        ),
        (
            {"encoder": "vit_tiny_patch16_224"},
            "strides 16, 16, 16, but one each at 8, 16 and 32",
        ),
        ({"pretrained": "x.pth"}, "model.weights=x.pth and model.weights_partial=true"),
        (
            {"depth": 3},
            "model.args.depth is not an argument of timm, which takes encoder, pretrained, width",
        ),
    ],
)
def test_wrong_arguments_are_explained(args: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        build_model("timm", 5, args)


@pytest.mark.parametrize("name", ["timm", "efficientvit_seg_b0"])
def test_two_sources_of_weights_are_refused(name: str) -> None:
    model = {"name": name, "args": {"pretrained": True}, "weights": "x.pth"}
    with pytest.raises(ConfigError, match="a run starts from one of them"):
        check(from_mapping({"model": model}), world_size=1)
