"""Every setting is checked by name, type and range before anything is built."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from segpipe.errors import ConfigError
from segpipe.models import MODELS
from segpipe.settings.compose import compose
from segpipe.settings.config import (
    SETTINGS,
    Config,
    changed_course,
    check,
    config_hash,
    course,
    from_mapping,
    recipe,
    to_mapping,
)
from segpipe.settings.groups import MODEL_NAMES
from segpipe.settings.setting import nearest

ALL = list(SETTINGS)


def nested(key: str, value: Any) -> dict[str, Any]:
    group, _, name = key.partition(".")
    return {group: {name: value}} if name else {group: value}


def with_value(key: str, value: Any) -> Config:
    return from_mapping(nested(key, value))


def value_of(config: Config, key: str) -> Any:
    found: Any = to_mapping(config)
    for part in key.split("."):
        found = found[part]
    return found


def another(value: Any, key: str = "") -> Any:
    """A value of the same type that differs."""
    if key == "data.mix":
        return [{"weight": 2.0}]
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {**value, "other": 1}
    if isinstance(value, list):
        return [another(item) for item in value] or ["x"]
    return value + "x" if isinstance(value, str) else value + 1


def refused(config: Config, *, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config, world_size=world_size)
    return str(caught.value)


def test_defaults_pass() -> None:
    check(Config(), world_size=1)
    check(Config(), world_size=4)
    assert from_mapping({}) == from_mapping({"data": {}}) == Config()
    assert from_mapping(to_mapping(Config())) == Config()
    assert Config().global_batch == 16
    assert Config().run_dir == Path("runs/run")


def test_model_names_are_those_that_can_be_built() -> None:
    assert tuple(MODELS) == MODEL_NAMES


@pytest.mark.parametrize("key", ALL)
def test_every_misspelled_key_is_refused_with_the_right_one(key: str) -> None:
    group, _, name = key.rpartition(".")
    for wrong in {name + "z", name[:-1] + "_" + name[-1], name.upper()}:
        typo = f"{group}.{wrong}".lstrip(".")
        with pytest.raises(ConfigError, match=f"{typo} is not a setting") as caught:
            with_value(typo, value_of(Config(), key))
        if wrong == name + "z":
            assert f"Did you mean {key}?" in str(caught.value)


@pytest.mark.parametrize(
    "mapping",
    [
        {"optimizer": {"lr": 1}},
        {"optim": {1: 2}},
        {"optim": {"lr": {"a": 1}}},
        {"": 1},
        {1: {}},
    ],
)
def test_odd_mappings_are_refused(mapping: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        from_mapping(mapping)


def test_a_recipe_of_an_earlier_version_is_the_same_course() -> None:
    """It lacks later settings, which then had their defaults."""
    now = recipe(Config())
    earlier = {key: value for key, value in now.items() if key != "ema.decay"}
    assert course(earlier) == course(now)
    assert changed_course(earlier, now) == ""
    assert course({**earlier, "optim.lr": 7.0}) != course(now)


def test_nearest_does_not_claim_what_is_far() -> None:
    assert nearest("optim.lrr", ALL) == " Did you mean optim.lr?"
    assert nearest("qqqq", ["alpha", "beta"]) == ""
    assert nearest("x", []) == ""


WRONG = {
    int: ("a", 1.5, True, None, [1], {"a": 1}),
    float: ("a", "1", True, None, [1.0], float("nan"), float("inf"), 10**400),
    bool: ("true", 0, 1, None, []),
    str: (True, None, ["a"], {"a": 1}),
    list: ("a", 1, [], None, {"a": 1}),
    dict: (1, "x", [], None, {1: 2}),
}


@pytest.mark.parametrize("key", ALL)
def test_wrong_types_are_refused_by_name(key: str) -> None:
    kind = type(value_of(Config(), key))
    default = value_of(Config(), key)
    for value in WRONG[kind]:
        no_list = default == [] or SETTINGS[key].auto  # [] is valid
        if (value == [] and no_list) or (
            value in (["a"], [1.0]) and kind is str and SETTINGS[key].item is not None
        ):  # there, refused as no number or choice, or for its length
            continue
        if value is True and "on" in SETTINGS[key].choices:
            assert value_of(with_value(key, value), key) == "on"
            continue
        with pytest.raises(ConfigError, match=f"^{key}"):
            with_value(key, value)
    if kind is list:
        with pytest.raises(ConfigError, match=rf"^{key}\[1\]"):
            with_value(
                key,
                [*(default or [{} if SETTINGS[key].item == {} else "name"])[:1], None],
            )


def test_a_setting_of_several_choices_takes_one_or_a_list() -> None:
    both = with_value("track.name", ["wandb", "tensorboard"])
    assert both.track.names == ["wandb", "tensorboard"]
    assert with_value("track.name", "wandb").track.names == ["wandb"]
    assert Config().track.names == []
    for wrong in (["wandb", "wandbb"], ["wandb", "wandb"]):
        assert SETTINGS["track.name"].problem(wrong)


def test_numbers_become_the_declared_type() -> None:
    lr = with_value("optim.lr", 1).optim.lr
    assert (lr, type(lr)) == (1.0, float)
    assert with_value("compute.nproc", 4).compute.nproc == "4"
    assert with_value("augment.scale", (1, 2)).augment.scale == [1.0, 2.0]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("seed", (-1, 2**63)),
        ("train.steps", (0, -5, 10**18)),
        ("train.log_every", (0,)),
        ("train.validate_every", (-1,)),
        ("checkpoint.every", (-1,)),
        ("compute.shards", (0, -4, 131072)),
        ("compute.samples_per_shard", (1, 0, -1, 10**6)),
        ("compute.threads", (0, 10**6)),
        ("compute.timeout_s", (0.0, -1.0)),
        ("compute.nproc", ("0", "-1", "two", "1.5", "", "²")),
        ("data.workers", (-1, 1000)),
        ("data.prefetch", (0,)),
        ("data.cache_mib", (-1,)),
        ("data.num_train", (0, 10**12)),
        ("data.num_val", (0, 10**12)),
        ("data.size", ([64], [64, 64, 3], [16, 64], [100000, 100000])),
        ("augment.crop_size", ([64], [10**6, 64], [64, 64, 3], [64, 31], [-64, -64])),
        (
            "augment.scale",
            ([1.0], [2.0, 1.0], [0.0, 1.0], [0.5, 11.0], [1.0, 1.0, 1.0]),
        ),
        ("augment.gamma", ([1.0], [2.0, 1.0], [0.0, 1.0])),
        ("augment.contrast", (1.1, -0.1)),
        ("augment.flip", (-0.1, 1.1)),
        ("augment.hue", (0.6,)),
        ("optim.lr", (-0.1, 1e308)),
        ("optim.momentum", (-0.1, 1.1)),
        ("optim.betas", ([0.9], [0.9, 1.0], [-0.1, 0.9], [0.9, 0.9, 0.9])),
        ("optim.weight_decay", (-1.0,)),
        ("optim.power", (-1.0,)),
        ("optim.warmup_steps", (-1,)),
        ("optim.clip_norm", (-1.0,)),
        ("ema.decay", (-0.1, 1.1)),
        ("data.balance", (-0.1, 1.1)),
        ("augment.rare_crop", (-0.1, 1.1)),
        ("loss.stride", (0, 9)),
        ("loss.aux_stride", (0, 9)),
        ("loss.aux_weight", (-1.0,)),
        ("loss.dice_weight", (-1.0, 1e300)),
        ("loss.boundary_weight", (-1.0,)),
        ("loss.ohem_threshold", (-0.1, 1.1)),
        ("loss.ohem_min_kept", (-0.1, 1.1)),
        ("export.images", (0,)),
        (
            "run.name",
            ("", ".", "..", "../x", "a/../../b", "/x", "/", "a/..", "a\0b", "a\nb"),
        ),
        ("run.exists", ("overwrite",)),
        ("export.formats", (["onnx", "tflite"],)),
        ("train.precision", ("fp64",)),
    ],
)
def test_values_out_of_range_are_refused_by_name(
    key: str, values: tuple[Any, ...]
) -> None:
    for value in values:
        message = refused(with_value(key, value))
        assert message.startswith(key), (value, message)
        assert "needed" in message or "not one of" in message or "must name" in message


def test_weights_of_classes_are_a_name_or_a_list_of_numbers() -> None:
    weights = with_value("loss.class_weights", [1, 0.5]).loss.class_weights
    assert (weights, type(weights[0])) == ([1.0, 0.5], float)
    check(with_value("loss.class_weights", [2, 0]), world_size=1)
    for wrong in (["a"], [None], [True], [[1]], {"a": 1}, []):
        with pytest.raises(ConfigError, match=r"^loss\.class_weights.* needed"):
            with_value("loss.class_weights", wrong)
    names = ("sqr", "1", "log1", "log1.0", "log2.1", "log0.5", "loga")
    for wrong in (*names, [-0.5], [float("inf")]):
        with pytest.raises(
            ConfigError, match=r"^loss\.class_weights.*(not one of|needed)"
        ):
            check(with_value("loss.class_weights", wrong), world_size=1)
    assert compose(["loss.class_weights=[1,2.5]"]).loss.class_weights == [1.0, 2.5]
    for name in ("sqrt", "log", "log1.02", "log1.1", "log2"):
        config = compose([f"loss.class_weights={name}"])
        check(config, world_size=1)
        assert config.loss.class_weights == name


MIX = {"root": "a", "weight": 2, "map": {"man": "person"}}


def test_a_mixture_is_set_on_the_command_line_or_in_yaml() -> None:
    found = compose(
        [
            "data.mix=[{root: a, weight: 2, map: {man: person}},{name: synthetic, weight: 0.5}]"
        ]
    ).data.mix
    assert found == [MIX, {"name": "synthetic", "weight": 0.5}]
    assert type(found[0]["map"]) is dict
    again = from_mapping(
        json.loads(json.dumps(to_mapping(from_mapping({"data": {"mix": found}}))))
    )
    assert again.data.mix == found
    check(again, world_size=1)


def test_the_recipe_of_a_mixture_holds_all_but_its_folders() -> None:
    here, there = (
        with_value("data.mix", [{**MIX, "root": root, "classes": f"{root}.yaml"}])
        for root in "ab"
    )
    assert recipe(here) == recipe(there)
    for change in ({"weight": 3}, {"map": {}}, {"split": "old"}, {"name": "camvid"}):
        assert recipe(with_value("data.mix", [{**MIX, **change}])) != recipe(here), (
            change
        )


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([{"root": "a", "wieght": 2}], "wieght is not one of root, name, weight, map, classes, split. Did you mean"),
        ([MIX, {"root": "b"}], "gives some sets a weight and others none"),
        ([{"root": "a", "weight": 0}], "weight = 0.0, but a value of at least 1e-09 was needed"),
        ([{"root": "a", "weight": float("nan")}], "weight = nan, but a number"),
        ([{"root": "a", "weight": True}], "weight = True, but a number"),
        ([{"root": "a", "map": {"x": 3}}], "map = {'x': 3}, but"),
        ([{"root": 3}], "root = 3, but text was needed"),
        ([{"weight": 1}], "data.mix[0] has no root"),
        ([{"name": "folder"}], "data.mix[0] has no root"),
        ([{"root": "a", "name": "camvit"}], "data.mix[0].name = 'camvit' is not one of"),
    ],
)  # fmt: skip
def test_wrong_mixtures_are_refused(entries: list[dict[str, Any]], words: str) -> None:
    assert words in refused(with_value("data.mix", entries))


def test_choices_name_the_nearest() -> None:
    assert "Did you mean pidnet_s?" in refused(with_value("model.name", "pidnet"))
    found = refused(with_value("model.name", "unet"))
    assert "is not one of fast_scnn, ddrnet23_slim, " in found
    assert "Did you mean smp?" in found  # erfnet is spelled like it
    assert "Did you mean resume?" in refused(with_value("run.exists", "resumed"))


@pytest.mark.parametrize("name", ["a", "camvid/seed1", "ä b", "..x", "v1.2"])
def test_run_names_below_the_root_are_accepted(name: str) -> None:
    config = with_value("run.name", name)
    check(config, world_size=1)
    assert Path("runs").resolve() in config.run_dir.resolve().parents


@pytest.mark.parametrize("mode", ["elastic", "audit", "ddp", "off"])
@pytest.mark.parametrize("shards", [1, 4, 6, 16])
def test_which_numbers_of_processes_a_mode_takes(mode: str, shards: int) -> None:
    """Elastic ones take any number up to that of the shards, the others only equal shares."""
    config = from_mapping({"compute": {"mode": mode, "shards": shards}})
    for world_size in range(1, 18):
        if world_size > shards:
            message = refused(config, world_size=world_size)
            assert message.startswith(
                f"compute.shards = {shards}, but there are {world_size} processes"
            )
            assert (
                f"at most {shards} processes, or set compute.shards={world_size}"
                in message
            )
        elif mode in ("ddp", "off") and shards % world_size:
            message = refused(config, world_size=world_size)
            assert message.startswith(
                f"compute.shards = {shards} cannot be divided among {world_size} processes"
            )
            assert "compute.mode=elastic" in message
        else:
            check(config, world_size=world_size)


def test_a_schedule_may_be_left_early_but_not_outlived() -> None:
    config = from_mapping({"train": {"steps": 100}, "optim": {"schedule_steps": 99}})
    assert refused(config).startswith(
        "optim.schedule_steps = 99, but the run has train.steps = 100"
    )
    for steps in (0, 100, 200):
        config.optim.schedule_steps = steps
        check(config, world_size=1)


def test_the_length_of_a_run_is_given_once() -> None:
    both = from_mapping({"train": {"steps": 4200, "epochs": 3}})
    assert refused(both).startswith(
        "train.steps = 4200 and train.epochs = 3. Set one of them"
    )
    both.train.steps = 0  # as that message says
    check(both, world_size=1)
    check(with_value("train.epochs", 3), world_size=1)
    assert refused(with_value("train.steps", 0)).startswith("train.steps = 0, but")


def test_patience_that_could_not_act_is_refused() -> None:
    assert refused(with_value("train.patience", 2)).startswith(
        "train.patience = 2, but train.validate_every = 0"
    )
    config = from_mapping(
        {"train": {"patience": 3, "validate_every": 100, "steps": 400}}
    )
    assert "could stop early only after 400 updates" in refused(config)
    config.train.steps = 401
    check(config, world_size=1)


def test_with_patience_the_validations_belong_to_the_recipe() -> None:
    patient, often = ({"patience": 1, "validate_every": every} for every in (10, 20))
    assert recipe(from_mapping({"train": patient})) != recipe(
        from_mapping({"train": often})
    )
    rare, usual = ({"validate_every": every} for every in (10, 20))
    assert recipe(from_mapping({"train": rare})) == recipe(
        from_mapping({"train": usual})
    )


def test_a_run_of_an_earlier_version_is_read() -> None:
    """Its recipe has settings that are gone or free by now, and lacks later ones."""
    old = {
        "augment": {"color_on": "worker"},
        "compute": {"cuda_graph": False},
        "track": {"register": "segmenter"},
    }
    assert from_mapping(old).compute.cuda_graph == "off"
    with pytest.raises(ConfigError, match=r"augment\.color_on is not a setting"):
        from_mapping({"augment": {"color_on": "device"}})
    now = recipe(Config())
    before = now | {"augment.color_on": "worker", "compute.cuda_graph": False}
    del before["augment.gamma"]
    assert course(before) == course(now)
    assert course(before | {"seed": 7}) != course(now)


def test_data_in_files_needs_a_folder() -> None:
    for name in ("camvid", "folder"):
        assert refused(with_value("data.name", name)).startswith("data.root is empty")
        check(from_mapping({"data": {"name": name, "root": "somewhere"}}), world_size=1)


# Written out, since a setting that is free by mistake lets a resumed run change its numbers.
FREE = {
    "loss.teacher",
    "run.name", "run.root", "run.exists", "run.allow_fingerprint_change", "data.root", "data.classes", "data.verify",
    "data.allow_overlap", "data.hash", "data.workers", "data.start_method", "data.prefetch", "data.timeout_s",
    "data.cache_mib", "data.max_pixels", "data.pack",
    "loss.backend",
    "augment.check", "augment.canary", "train.log_every", "train.log_every_s", "train.validate_every", "train.progress",
    "compute.nproc", "compute.cuda_graph",
    "compute.timeout_s", "compute.ledger", "checkpoint.every", "checkpoint.every_s", "checkpoint.keep_every",
    "checkpoint.keep_last",
    "track.name", "track.project", "track.entity", "track.metrics", "track.mode", "model.weights",
    "track.group", "track.job_type", "track.tags", "track.notes",
}  # fmt: skip


def test_free_keys_are_those_that_cannot_reach_the_numbers_and_the_recipe_is_all_the_others() -> (
    None
):
    free_keys = {key for key, entry in SETTINGS.items() if entry.free}
    assert {key for key in free_keys if not key.startswith("export.")} == FREE
    assert {key for key in ALL if key.startswith("export.")} <= free_keys
    assert set(recipe(Config())) == set(ALL) - free_keys


@pytest.mark.parametrize("key", ALL)
def test_recipe_changes_with_every_setting_that_is_not_free_and_the_hash_with_all(
    key: str,
) -> None:
    changed = with_value(key, another(value_of(Config(), key), key))
    assert (recipe(changed) != recipe(Config())) == (not SETTINGS[key].free)
    assert config_hash(changed) != config_hash(Config())


def test_hash_is_a_function_of_the_values() -> None:
    backwards = dict(
        reversed(to_mapping(from_mapping({"optim": {"lr": 0.3}, "seed": 2})).items())
    )
    assert config_hash(from_mapping(backwards)) == config_hash(
        from_mapping({"seed": 2, "optim": {"lr": 0.3}})
    )
    assert len(config_hash(Config())) == 32


def test_defaults_are_not_shared() -> None:
    first = Config()
    first.augment.crop_size.append(3)
    first.optim.lr = 9
    assert len(Config().augment.crop_size) == 2
    assert Config().optim.lr != 9


def test_every_group_is_a_dataclass_with_defaults() -> None:
    assert {entry.name for entry in fields(Config)} == {
        key.partition(".")[0] for key in ALL
    }


def test_hard_pixels_are_not_found_in_smoothed_losses() -> None:
    """Each would exceed the threshold: `ohem` would be cross-entropy. Focal cannot take class weights out of them."""
    ohem = {"name": "ohem"}
    for loss in (ohem, {"name": "focal", "class_weights": "log"}):
        smoothed = {"loss": {"label_smoothing": 0.1, **loss}}
        wanted = f"{loss['name']} needs the probability of a pixel's class without.* focal: or no class weights"
        with pytest.raises(ConfigError, match=wanted):
            check(from_mapping(smoothed), world_size=1)
    focal = {"name": "focal", "label_smoothing": 0.1, "class_weights": "none"}
    check(from_mapping({"loss": focal}), world_size=1)
