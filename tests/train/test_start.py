"""Start from weights: pinned by their hash, not needed to resume; frozen parts and scaled rates over whole runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tables import CAMVID
from torch import Tensor

from ranks import launched
from runs import outcome, result, run, torch_restored
from segpipe.cli.main import main as segpipe
from segpipe.data.catalog import STREET
from segpipe.distributed.group import Group
from segpipe.errors import CheckpointError, ConfigError, WeightsError
from segpipe.files import file_sha256
from segpipe.models import build_model
from segpipe.settings.config import Config, check, from_mapping, recipe
from segpipe.train import checkpoint
from segpipe.train.start import pin_weights, weights_summary
from segpipe.train.state import build_state

CPU = torch.device("cpu")
TUNED = (
    "model.freeze=[detail.*,context.0.*]",
    "optim.lr_scale={classifier.*: 10}",
    "optim.clip_norm=1.0",
)


def config(path: Path | str, **model: Any) -> Config:
    return from_mapping(
        {
            "model": {"weights": str(path), **model},
            "run": {"root": str(Path(path).parent)},
        }
    )


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that others start from."""
    folder = tmp_path_factory.mktemp("pretrained") / "run"
    assert run(folder, "train.steps=2", "seed=7") == 0
    return folder


@pytest.fixture(scope="module")
def tensors_file(pretrained: Path) -> Path:
    """Its averaged weights, as `segpipe weights` writes them."""
    path = pretrained.parent / "street.safetensors"
    assert segpipe(["weights", f"run={pretrained}", f"out={path}"]) == 0
    return path


def test_weights_say_how_images_are_normalized_and_a_run_that_does_otherwise_is_told(
    tmp_path: Path,
) -> None:
    found = {}
    for standardize in (True, False):
        run_dir, out = (
            tmp_path / f"{standardize}",
            tmp_path / f"{standardize}.safetensors",
        )
        changes = (f"model.standardize={standardize}", "train.steps=1")
        assert run(run_dir, *changes) == 0
        assert segpipe(["weights", f"run={run_dir}", f"out={out}"]) == 0
        with safe_open(out, framework="pt") as file:
            found[standardize] = file.metadata()["input"]
        for path, other in ((run_dir, True), (out, True), (out, False)):
            settings = config(path, standardize=standardize is not other)
            start = checkpoint.read_start(settings)
            notes = build_state(settings, STREET, CPU, start).notes
            text = f"was trained with model.standardize={standardize}"
            assert any(text in note for note in notes) is other
    assert "mean 0 and variance 1 of each image" in found[True]
    assert "mean 0.485 0.456 0.406, std 0.229 0.224 0.225" in found[False]


def test_written_weights_are_the_averaged_ones_with_all_that_a_reader_needs(
    pretrained: Path, tensors_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ema = checkpoint.load(pretrained / "last.pt")["ema"]
    found = load_file(tensors_file)
    assert found.keys() == ema.keys()
    assert all(torch.equal(value, ema[name]) for name, value in found.items())
    with safe_open(tensors_file, framework="pt") as file:
        about = file.metadata()
    assert (about["model"], about["step"]) == ("fast_scnn", "2")
    assert json.loads(about["classes"]) == list(STREET.names)
    assert about["ema_digest"] == result(pretrained)["ema_digest"]
    assert segpipe(["weights", f"run={pretrained}", f"out={tensors_file}"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_weights_that_are_written_again_have_the_same_hash(
    pretrained: Path, tensors_file: Path, tmp_path: Path
) -> None:
    """It is part of the recipe of a run that starts from them."""
    assert (
        segpipe(["weights", f"run={pretrained}", f"out={tmp_path / 'x.safetensors'}"])
        == 0
    )
    assert (tmp_path / "x.safetensors").read_bytes() == tensors_file.read_bytes()


def test_names_of_the_authors_are_written_and_read_back(
    pretrained: Path, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    assert (
        segpipe(["weights", f"run={pretrained}", f"out={path}", "names=original"]) == 0
    )
    assert "learning_to_downsample.conv.conv.0.weight" in load_file(path)
    state = build_state(config(path), STREET, CPU, checkpoint.read_start(config(path)))
    ema = checkpoint.load(pretrained / "last.pt")["ema"]
    assert all(
        torch.equal(value, ema[name])
        for name, value in state.model.state_dict().items()
    )


def test_both_files_of_a_run_start_the_same_state(
    pretrained: Path, tensors_file: Path
) -> None:
    ema = checkpoint.load(pretrained / "last.pt")["ema"]
    for path in (pretrained, pretrained / "last.pt", tensors_file):
        settings = config(path)
        state = build_state(settings, STREET, CPU, checkpoint.read_start(settings))
        for model in (state.model, state.ema.model):
            assert all(
                torch.equal(value, ema[name])
                for name, value in model.state_dict().items()
            )
        assert state.weights is not None
        expected = file_sha256(path / "last.pt" if path == pretrained else path)
        assert state.weights["sha256"] == settings.model.weights_sha256 == expected
        assert f"kept {len(ema)} tensors, 100.0 %" in state.notes[0]
        assert len(state.notes) == 1
    fresh = build_state(
        settings, STREET, CPU
    )  # for a checkpoint to be restored into: the file is not read
    assert fresh.weights is None
    assert any(
        not torch.equal(value, ema[name])
        for name, value in fresh.model.state_dict().items()
    )


def test_other_classes_are_initialized_from_the_seed_or_told(
    tensors_file: Path,
) -> None:
    settings = config(tensors_file)
    state = build_state(settings, CAMVID, CPU, checkpoint.read_start(settings))
    scratch = build_state(Config(), CAMVID, CPU).model.state_dict()
    assert state.weights is not None
    assert len(state.weights["adapted"]) == 4
    assert state.weights["classes"] == {"file": 10, "network": 11}
    for name in state.weights["adapted"]:
        assert torch.equal(state.model.state_dict()[name], scratch[name])
    renamed = type(STREET)(
        "street", ("way", *STREET.names[1:]), STREET.palette, STREET.train_ids
    )
    notes = build_state(settings, renamed, CPU, checkpoint.read_start(settings)).notes
    assert "were kept, but its classes are road, " in notes[1]


def test_weights_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "of_others.pth"
    path.write_bytes(b"")

    def refused(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("segpipe.train.start.file_sha256", refused)
    with pytest.raises(CheckpointError, match=r"of_others\.pth cannot be read: Permis"):
        pin_weights(config(path))


def test_the_hash_is_part_of_the_recipe_and_the_path_is_not(tmp_path: Path) -> None:
    one, two, other = tmp_path / "1.pth", tmp_path / "2.pth", tmp_path / "3.pth"
    torch.save(build_model("fast_scnn", 10).state_dict(), one)
    shutil.copy(one, two)
    torch.save(build_model("fast_scnn", 10).state_dict(), other)
    pinned = [config(path) for path in (one, two, other)]
    for each in pinned:
        pin_weights(each)
    assert recipe(pinned[0]) == recipe(pinned[1]) != recipe(pinned[2])
    expected = config(one, weights_sha256=file_sha256(other))
    with pytest.raises(
        CheckpointError,
        match=r"1\.pth has SHA-256 \w{64}, but model\.weights_sha256 = ",
    ):
        pin_weights(expected)
    one.unlink()
    with pytest.raises(ConfigError, match=r"1\.pth does not exist"):
        pin_weights(config(one))
    wrong = from_mapping({"model": {"name": "pidnet_s", "weights": str(two)}})
    start = checkpoint.read_start(wrong)
    with pytest.raises(
        WeightsError, match=r"no tensor of .*2\.pth fits PIDNet: it has detail"
    ):
        build_state(wrong, STREET, CPU, start)


def test_settings_without_a_file_are_refused() -> None:
    for model, match in (
        (
            {"weights_sha256": "0" * 64},
            "weights_sha256 is set, but model.weights is empty",
        ),
        ({"weights_partial": True}, "weights_partial is set, but"),
        ({"freeze": ["detail.*"]}, "would stay at their random initial values"),
    ):
        with pytest.raises(ConfigError, match=match):
            check(from_mapping({"model": model}), world_size=1)
    for factor in ("fast", True):
        with pytest.raises(ConfigError, match=r"a number of at least 1e-09 was needed"):
            check(
                from_mapping({"optim": {"lr_scale": {"head.*": factor}}}), world_size=1
            )
    with pytest.raises(ConfigError, match="lr_scale"):
        check(from_mapping({"optim": {"lr_scale": {"head.*": 0}}}), world_size=1)


def test_a_damaged_checkpoint_of_segpipe_is_not_used(
    pretrained: Path, tmp_path: Path
) -> None:
    saved = torch.load(pretrained / "last.pt", weights_only=True)
    saved["ema"]["ppm.out.0.weight"][0] += 1e-3
    torch.save(saved, tmp_path / "last.pt")
    with pytest.raises(CheckpointError, match="ema were altered"):
        checkpoint.read_start(config(tmp_path / "last.pt"))


def state_of(folder: Path) -> dict[str, Tensor]:
    return dict(checkpoint.load(folder / "last.pt")["model"])


@pytest.mark.slow
def test_frozen_parts_keep_their_bits_and_a_resumed_run_needs_no_file(
    tensors_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, statistics and averages of frozen parts; the others move. In one go and in two sessions."""
    path = tmp_path / "start.safetensors"
    shutil.copy(tensors_file, path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = (
        *TUNED,
        f"model.weights={path}",
        "train.steps=4",
        "optim.lr=0.5",  # so that even the weights of norms leave 1.0
        "checkpoint.keep_every=2",
    )
    assert run(whole, *settings, "train.progress=true") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "kept 276 tensors" in told
    assert "frozen: " in told
    before, after = load_file(path), state_of(whole)
    ema = checkpoint.load(whole / "last.pt")["ema"]
    for name, value in before.items():
        if name in (
            "fusion.low.0.bias",
            "fusion.high.0.bias",
        ):  # BatchNorm behind them takes their gradient away
            continue
        frozen = name.startswith(("detail.", "context.0."))
        assert torch.equal(after[name], value) == frozen, name
        assert not frozen or torch.equal(ema[name], value)
    recorded = result(whole)["weights"]
    assert (recorded["kept"], recorded["adapted"], recorded["sha256"]) == (
        276,
        0,
        file_sha256(path),
    )
    shutil.copytree(whole, parts)
    for name in ("last.pt", "best.pt", "result.json"):
        (parts / name).unlink()
    path.rename(tmp_path / "gone")
    assert run(parts, *settings, "run.exists=resume") == 0
    assert outcome(parts) == outcome(whole)
    assert result(parts)["weights"] == recorded
    torch.save(build_model("fast_scnn", 10).state_dict(), tmp_path / "other.pth")
    capsys.readouterr()
    assert (
        run(
            parts,
            *settings,
            "run.exists=resume",
            f"model.weights={tmp_path / 'other.pth'}",
        )
        == 2
    )
    assert "model.weights_sha256: " in capsys.readouterr().err


def _in_its_folder(rank: int, folder: str, key: str, *changes: str) -> int:
    """A rank of a run whose file of weights has the same name on the disk of every machine."""
    os.chdir(Path(folder) / str(rank))
    return run(Path(folder) / "run", f"{key}=start.pt", "train.steps=1", *changes)


@pytest.mark.parametrize("key", ["model.weights", "loss.teacher"])
def test_a_rank_with_another_file_of_that_name_is_refused_before_the_first_step(
    pretrained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], key: str
) -> None:
    files = [tmp_path / str(rank) / "start.pt" for rank in range(2)]
    for path in files:
        path.parent.mkdir()
    shutil.copy(pretrained / "last.pt", files[0])
    torch.save(torch.load(files[0], weights_only=True), tmp_path / "other.pt")
    (tmp_path / "other.pt").rename(files[1])  # the same tensors in other bytes
    assert launched(2, _in_its_folder, str(tmp_path), key) == [2, 2]
    said = capfd.readouterr().err
    assert f"{key} = start.pt" in said
    for rank, path in enumerate(files):
        assert f"rank {rank} {file_sha256(path)[:12]}" in said
    assert "Copy one file to all" in said
    assert not (tmp_path / "run" / "last.pt").exists()
    shutil.copy(*files)
    changed = ("run.exists=replace",)
    assert launched(2, _in_its_folder, str(tmp_path), key, *changed) == [0, 0]


@pytest.mark.slow
def test_an_audit_replays_step_0_where_the_file_is_at_hand(
    tensors_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "start.safetensors"
    shutil.copy(tensors_file, path)
    assert (
        run(
            tmp_path / "run",
            f"model.weights={path}",
            "train.steps=2",
            "model.freeze=[detail.*]",
        )
        == 0
    )

    def audited(name: str) -> dict[str, Any]:
        with torch_restored():
            code = segpipe(
                ["audit", f"run={tmp_path / 'run'}", f"out={tmp_path / name}"]
            )
        lines = json.loads((tmp_path / name / "report.json").read_text())["lines"]
        return {"exit": code, **{line["part"]: line["status"] for line in lines}}

    found = audited("with")
    assert (found["exit"], found["weights"], found["replay"]) == (0, "passed", "passed")
    path.unlink()
    found = audited("without")
    assert (found["weights"], found["replay"]) == ("not checked", "not checked")


def test_a_file_that_does_not_fit_is_refused_before_the_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(build_model("pidnet_s", 10).state_dict(), tmp_path / "x.pth")
    torch.save(build_model("fast_scnn", 10).state_dict(), tmp_path / "y.pth")
    save_file({}, tmp_path / "empty.safetensors")
    for settings, message in (
        (
            (f"model.weights={tmp_path / 'empty.safetensors'}",),
            "empty.safetensors holds no tensor",
        ),
        (
            ("export.enabled=true", "export.critical_classes=[road,nosuch]"),
            "nosuch is not a class: road,",
        ),
        (
            (f"model.weights={tmp_path / 'x.pth'}",),
            "x.pth fits FastSCNN: it has ",
        ),
        (
            ("model.freeze=[detial.*]", f"model.weights={tmp_path / 'y.pth'}"),
            "matches no parameter of FastSCNN",
        ),
        (
            ("optim.lr_scale={head.*: 10}",),
            "matches no parameter of FastSCNN, which has detail.*",
        ),
    ):
        assert run(tmp_path / "run", *settings) == 2
        assert message in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "run").exists()


def test_the_summary_survives_a_deleted_record(tmp_path: Path) -> None:
    settings = config(tmp_path / "x.pth", weights_sha256="0" * 64)
    assert weights_summary(settings)["weights"]["sha256"] == "0" * 64
    assert weights_summary(Config()) == {}


@pytest.mark.parametrize(
    ("precision", "instructions", "loss", "told"),
    [
        ("bf16", "avx_vnni", "native", "no bf16 instructions"),
        ("bf16", "", "native", "no bf16 instructions"),
        ("bf16", "avx512_bf16 amx_int8", "native", ""),
        ("bf16", None, "native", ""),  # nobody knows
        ("fp32", "", "native", ""),
        ("fp32", "", "plain", "no C compiler"),
        ("fp32", "", "plain", ""),  # as loss.backend wants
    ],
)
def test_what_makes_a_cpu_slow_is_told(
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    instructions: str | None,
    loss: str,
    told: str,
) -> None:
    config = Config()
    config.model.name, config.train.precision = "fast_scnn", precision
    config.loss.backend = loss if not told else "auto"
    monkeypatch.setattr(
        checkpoint,
        "common_fingerprint",
        lambda *_: ({"instructions": instructions, "loss": loss}, []),
    )
    seen = []

    def built(*given: Any) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(False)  # as a user's network may do
        return build_state(*given)

    monkeypatch.setattr(checkpoint, "build_state", built)
    group = Group(0, 1, torch.device("cpu"))
    torch.use_deterministic_algorithms(False)  # as a user's module may do
    *_, warnings = checkpoint.state_of(config, group, STREET, None)
    assert [*seen, torch.are_deterministic_algorithms_enabled()] == [True, True]
    assert len(warnings) == bool(told)
    assert told in "".join(warnings)


def test_what_no_file_has_set_is_not_frozen(tensors_file: Path) -> None:
    """The file has other classes, so those of the class layers would stay random."""
    settings = config(tensors_file, freeze=["classifier.*", "detail.*"])
    with pytest.raises(ConfigError, match=r"classifier\.\S+ at random initial values"):
        build_state(settings, CAMVID, CPU, checkpoint.read_start(settings))
    build_state(settings, STREET, CPU, checkpoint.read_start(settings))  # the control
