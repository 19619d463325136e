"""What is typed reaches the configuration, or is refused by name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from segpipe import plugins
from segpipe.cli.commands import COMMANDS, RUN, WHICH
from segpipe.cli.main import main as segpipe
from segpipe.errors import ConfigError
from segpipe.models import MODELS, build_model
from segpipe.settings import compose as composing
from segpipe.settings.compose import command_line, compose, parse, with_settings
from segpipe.settings.config import GROUPS, SETTINGS, Config, check, from_mapping
from segpipe.settings.setting import Setting, terms_elsewhere

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted((ROOT / "conf" / "experiment").glob("*.yaml"))


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(compose(list(overrides)), world_size=1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_those_of_the_dataclasses() -> None:
    expected = from_mapping({"run": {"name": "synthetic-fast_scnn-seed0"}})
    assert compose([]) == expected


def test_overrides_reach_the_configuration() -> None:
    found = compose(
        [
            "optim.lr=0.2",
            "model=pidnet_s",
            "seed=3",
            "data.size=[64,96]",
            "compute.nproc=2",
            "data.classes=a b",
        ]
    )
    assert (found.optim.lr, found.model.name, found.data.size) == (
        0.2,
        "pidnet_s",
        [64, 96],
    )
    assert (found.run.name, found.compute.nproc) == ("synthetic-pidnet_s-seed3", "2")
    assert found.data.classes == "a b"
    assert (
        compose(["data=camvid", "model.name=ddrnet23_slim"]).run.name
        == "camvid-ddrnet23_slim-seed0"
    )


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_every_misspelled_override_names_the_right_one(prefix: str) -> None:
    keys = [key for key in SETTINGS if "." in key][:: 7 if prefix else 1]
    with pytest.raises(ConfigError) as caught:
        compose([f"{prefix}{key}z=1" for key in keys])
    told = str(caught.value).splitlines()
    for key, line in zip(keys, told, strict=True):
        assert f"{key}z is not a setting" in line
        assert f"Did you mean {key}?" in line


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("+unknown=1", "unknown is not a setting"),
        ("+optim.unknown=1", "optim.unknown is not a setting"),
        ("hydrax=1", "hydrax"),
        ("+hydrax=1", "hydrax"),
        ("sed=1", "Did you mean seed?"),
        ("modle=pidnet_s", "Did you mean model?"),
        ("hydra/launcher=nosuch", "pip install 'segpipe[joblib]'"),
        ("model=pidnet", "Did you mean pidnet_s?"),
        ("experiment=no", "experiment = no is not one of"),
        ("experiment=null", "experiment = null is not one of"),
        ("data={name: x}", "data = {name: x} is not one of"),
        ('loss.backend=""', "loss.backend = '' is not one of auto, native"),
        ("model.args=0", "model.args = 0, but a mapping such as"),
        ("model.args={a:1", "Write it like model.args={name: value}."),
        ("optim=5", "optim"),
        ("optim.lr", "'optim.lr' is not of the form key=value."),
        ("optim.lrr", "Did you mean optim.lr?"),
        (
            "data.root=shots",
            "data.root = shots, but data=synthetic, the default, generates its scenes",
        ),
        ("=3", "'=3' is not of the form key=value."),
        (
            "optim.lr=",
            "optim.lr = '', but a number of 0 to 3e+38 was needed, such as 0.05.",
        ),
        (
            "optim.lr=fast",
            "optim.lr = 'fast', but a number of 0 to 3e+38 was needed, such as 0.05.",
        ),
        ("optim.lr=1e308", "optim.lr = 1e+308, but a value of 0 to 3e+38 was needed."),
        ("optim.lr={a:1}", "optim.lr = {'a': 1}, but a number"),
        (
            "train.steps=1.5",
            "train.steps = 1.5, but a whole number of at least 0 was needed, such as 400.",
        ),
        (
            "train.steps=1e3",
            "train.steps = 1000.0, but a whole number of at least 0 was needed, such as 400.",
        ),
        ("train.steps=true", "train.steps = True, but a whole number"),
        (
            "augment.check=maybe",
            "augment.check = 'maybe', but true or false was needed, such as true.",
        ),
        (
            "augment.extra={a:b}",
            "augment.extra = {'a': 'b'}, but a list such as ['name'] was needed.",
        ),
        (
            "data.size=[64,big]",
            "data.size[1] = 'big', but a whole number of 32 to 8192 was needed, such as 192.",
        ),
        (
            "data.size=[64,96",
            "'data.size=[64,96' cannot be parsed. Write it like data.size=[192,384].",
        ),
        ("augment.crop_size=(64,64)", "Write it like augment.crop_size=[192,384]."),
        ("optim.lr==3", "Write it like optim.lr=0.05."),
        ("run.name=???", "run.name: Missing mandatory value: name. Give it a value"),
        (
            "run.name=${nowhere}",
            "'nowhere' not found. Give it a value, or refer to an existing setting",
        ),
        (
            "data.root=${oc.env:SEGPIPE_NOWHERE}",
            "Environment variable 'SEGPIPE_NOWHERE' not found",
        ),
        (
            "seed=1,2,3",
            "For a list, write seed=[1,2,3]; for one run per value, add --multirun.",
        ),
        ("optim.lr=nan", "optim.lr = nan, but a number"),
        ("~data", "data"),
        ("~optim.lr=1", "Did you mean optim.lr?"),
        ("~optim.lr", "is not of the form key=value"),
        (
            "optim=adam",
            "optim is a group of settings. Set one of them, such as optim.name.",
        ),
        (
            "train=null",
            "train is a group of settings. Set one of them, such as train.steps.",
        ),
        (
            "--lr=3",
            "--lr is not an option of segpipe. Settings are written without dashes, as KEY=VALUE. "
            "Did you mean optim.lr?",
        ),
        (
            "data.num_train=1000000000000",
            "data.num_train = 1000000000000, but a value of 1 to 10000000 was needed.",
        ),
        (
            "compute.shards=1000000",
            "compute.shards = 1000000, but a value of 1 to 65536 was needed.",
        ),
        (
            "compute.threads=1000000",
            "compute.threads = 1000000, but a value of 1 to 1024 was needed.",
        ),
    ],
)
def test_wrong_overrides_say_what_is_wrong(override: str, named: str) -> None:
    message = refused(override)
    assert named in message
    for word in (
        "object_type",
        "full_key",
        "DictConfig",
        "expecting",
        "viable",
        "hydra.cc",
        "\n",
    ):
        assert word not in message, "raw words of Hydra or OmegaConf"


@pytest.mark.parametrize(
    "text",
    ["/a(b)", "/a=b", "/a,b", "/d\u00fcn", "'/a", 'a"b', "a\\", 'a\\"b', "010", "null", "a/~/x", "a b "],
)  # fmt: skip
def test_text_is_taken_as_it_was_typed(text: str) -> None:
    assert compose(["data=folder", f"data.root={text}"]).data.root == text
    assert compose(["data=folder", f'data.root="{text}"']).data.root == text
    assert compose(["data=folder", f"+data.root={text}"]).data.root == text


def test_a_folder_below_home_is_found_wherever_it_is_named(
    own_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell expands the ~ of root=~/x, but not that of run.root=~/x: runs went into a folder of the name ~."""
    monkeypatch.setenv("HOME", "/home/me")
    assert compose(["run.root=~/x"]).run.root == "/home/me/x"
    (own_files / "experiment" / "home.yaml").write_text(
        "# @package _global_\nrun: {root: ~/x}\ndata: {mix: [{root: ~/y}], args: {to: ~/z, n: 3, more: [{to: ~/z}]}}\n"
        "export: {critical_classes: [~/c]}\n"
    )
    flags = ["--config-dir", "conf mine", "experiment=home"]
    found = compose(flags)
    assert (found.run.root, found.data.mix) == ("/home/me/x", [{"root": "/home/me/y"}])
    more = [{"to": "/home/me/z"}]
    assert found.data.args == {"to": "/home/me/z", "n": 3, "more": more}
    assert found.export.critical_classes == ["/home/me/c"]
    swept = composing._merged(command_line(flags).overrides, return_hydra_config=True)
    assert swept.hydra.sweep.dir == "/home/me/x"
    monkeypatch.setenv("HOME", str(own_files.parent))
    assert compose(["--config-dir=~/conf mine", "experiment=mine"]).optim.lr == 0.125
    monkeypatch.setenv("HOME", "/home/me")
    typed = compose(['data.mix=[{root: "~/y"}]'])
    assert typed.data.mix == found.data.mix
    keys, given = COMMANDS["evaluate"].known, ["run=~/x", "data.root='~/y'"]
    values = parse(given, keys)
    assert (values["run"], values["data.root"]) == ("/home/me/x", "/home/me/y")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr", "optim.lr"),
        ("train.lr", "optim.lr"),
        ("lrr", "optim.lr"),
        ("shards", "compute.shards"),
        ("data.crop_size", "augment.crop_size"),
        ("optim.clip", "optim.clip_norm"),
        ("batch_size", "compute.samples_per_shard"),
        ("train.batchSize", "compute.samples_per_shard"),
        ("num_workers", "data.workers"),
        ("gpus", "compute.nproc"),
        ("resume", "run.exists"),
        ("output_dir", "run.root"),
        ("optimizer", "optim.name"),
        ("dataset", "data"),
        ("warmup_epochs", "optim.warmup_steps"),
        ("loss.ignore_index", "data.classes"),
        ("model.encoder", "model.args"),
        ("model_ema", "ema.decay"),
    ],
)
def test_hints_are_near(typed: str, meant: str) -> None:
    """Also for a setting in another group, and for what other trainers call it."""
    assert f"{typed} is not a setting" in refused(f"{typed}=1")
    assert f" Did you mean {meant}?" in refused(f"{typed}=1")


def test_terms_of_other_trainers_are_no_settings_of_ours() -> None:
    """A setting that is added under such a name is found by it, not by the hint."""
    terms = {name for names in terms_elsewhere().values() for name in names}
    assert not terms & {*SETTINGS, *GROUPS}


def test_flags_and_sweeps_pass_the_first_check() -> None:
    line = command_line(
        ["--multirun", "seed=1,2,3", "model=fast_scnn,pidnet_s", "optim.lr=range(1,3)"]
    )
    assert line.sweeps
    line = command_line(["--multirun", "seed=1", "--cfg", "job"])
    assert (line.sweeps, line.shows) == (False, True), "it would train"
    with pytest.raises(ConfigError, match=r"add --multirun\. --cfg shows one run"):
        command_line(["-m", "seed=1,2", "--cfg", "job"])
    for kind in ("hydra", "all", ""):
        with pytest.raises(ConfigError, match=f"--cfg = {kind}, .* Write --cfg job"):
            command_line([f"--cfg={kind}"])
    command_line(["-m", "model=glob(*)", "run.name=choice(a,b)", "hydra.verbose=true"])
    with pytest.raises(ConfigError, match="lrr is not a setting"):
        command_line(["-m", "optim.lrr=0.1,0.2"])


def test_all_wrong_settings_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(
            ["optim.lrr=1", "seed=2", "train.steps=x", "model=unet", "--cfg", "job"]
        )
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["optim.lrr", "train.steps", "model"]
    with pytest.raises(ConfigError) as caught:
        check(
            compose(["train.steps=0", "data.pack=auto", "model.freeze=[a]"]),
            world_size=1,
        )
    assert len(str(caught.value).splitlines()) == 3
    with pytest.raises(ConfigError) as caught:
        from_mapping({"optim": {"lrr": 1, "lr": "fast"}, "sed": 3})
    assert len(str(caught.value).splitlines()) == 3


@pytest.fixture
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user with config files, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "experiment/mine.yaml": "# @package _global_\ndefaults:\n  - override /model: mine\noptim: {lr: 0.125}\n",
        "experiment/typo.yaml": "# @package _global_\noptim: {lrr: 0.125}\n",
        "model/mine.yaml": "name: nets.mine:Net\nargs: {width: 3}\n",
    }.items():
        path = tmp_path / "conf mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "conf mine"


@pytest.mark.parametrize(
    "flags",
    [["--config-dir", "conf mine"], ["--config-dir=conf mine"], ["-cd", "conf mine"]],
)
def test_files_of_the_user_are_added_to_ours(own_files: Path, flags: list[str]) -> None:
    found = compose([*flags, "experiment=mine", "model.args.deep=1"])
    assert (found.model.name, found.model.args, found.optim.lr) == (
        "nets.mine:Net",
        {"width": 3, "deep": 1},
        0.125,
    )
    assert found.run.name == "synthetic-Net-seed0"  # a folder without a colon
    assert compose(["model=pidnet_s", *flags]).model.name == "pidnet_s"
    mine = own_files / "experiment" / "mine.yaml"
    mine.rename(mine.with_name("20261129.yaml"))  # a number in Hydra's grammar
    assert compose([*flags, "+experiment=20261129"]).optim.lr == 0.125
    assert plugins.is_trusted("nets.mine:Net")


def test_a_file_of_the_user_that_ours_hides_is_named(own_files: Path) -> None:
    copy = own_files / "model" / "pidnet_s.yaml"
    copy.write_bytes((ROOT / "conf" / "model" / "pidnet_s.yaml").read_bytes())
    flags = ["--config-dir", "conf mine", "experiment=mine"]
    assert compose(flags).optim.lr == 0.125
    copy.write_text("name: erfnet\n")
    for sweep in ([], ["-m"]):
        with pytest.raises(ConfigError, match=f"{copy} is not read"):
            command_line([*flags, *sweep])


def test_typos_in_files_of_the_user_are_refused(own_files: Path) -> None:
    flags = ["--config-dir", "conf mine"]
    with pytest.raises(ConfigError, match=r"optim\.lrr.*Did you mean optim\.lr\?"):
        compose([*flags, "experiment=typo"])
    with pytest.raises(
        ConfigError,
        match=r"experiment = mien is not one of .*mine.*Did you mean mine\?",
    ):
        compose([*flags, "experiment=mien"])
    with pytest.raises(
        ConfigError, match="--config-dir = conf_mine is not a folder in "
    ):
        compose(["--config-dir", "conf_mine"])
    with pytest.raises(ConfigError, match="-cd =  is not a folder"):
        compose(["-cd"])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("# stra\xdfe\n".encode("latin1"), "odd.yaml is not UTF-8 text"),
        ("seed: 3\n".encode("utf16"), "odd.yaml is not UTF-8 text"),
        (b"# @package _global_\ndefaults: [odd]\n", "include the file itself"),
        (b"# @package _gloabl_\nseed: 3\n", "is `# @package _global_`"),
        (b"seed: 3\n", "is `# @package _global_`"),
        ("# @package _global_\nseed: 3\n".encode("utf-8-sig"), "byte order mark"),
        (b"# @package _global_\noptim: {lr: " + b"9" * 400 + b"}\n", "int too large"),
    ],
)
def test_files_that_cannot_be_read_are_named(
    own_files: Path, content: bytes, named: str
) -> None:
    (own_files / "experiment" / "odd.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        compose(["--config-dir", "conf mine", "experiment=odd"])
    assert named in str(caught.value)


def test_on_and_off_in_a_file_are_words(own_files: Path) -> None:
    """YAML reads them as truth values: data.pack was a folder of the name False, compute.mode unknown."""
    (own_files / "experiment" / "words.yaml").write_text(
        "# @package _global_\n"
        "data: {pack: off}\ncompute: {mode: off, cuda_graph: on}\nrun: {name: off}\n"
    )
    found = compose(["--config-dir", "conf mine", "experiment=words"])
    assert (found.data.pack, found.compute.mode, found.compute.cuda_graph) == (
        "off", "off", "on"
    )  # fmt: skip
    assert found.run.name == "False", "the control: a text without these words"
    assert compose(["compute.cuda_graph=false"]).compute.cuda_graph == "off"
    stored = {"compute": {"cuda_graph": False}}  # by earlier versions
    assert from_mapping(stored).compute.cuda_graph == "off"


@pytest.mark.parametrize("key", ["optim.lr", "train.steps", "seed"])
def test_a_number_of_400_digits_is_refused_in_a_short_line(key: str) -> None:
    message = refused(f"{key}={'9' * 400}")
    assert message.startswith(f"{key} = 999")
    assert len(message) < 350


def test_a_sweep_folder_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    place = f"hydra.sweep.dir={tmp_path / 'file' / 'sweep'}"
    assert segpipe(["train", "-m", "seed=1", f"run.root={tmp_path}", place]) == 2
    assert f"{tmp_path / 'file'}" in (said := capsys.readouterr().err)
    assert "writes into hydra.sweep.dir" in said
    root = f"run.root={tmp_path / 'file' / 'runs'}"
    assert segpipe(["train", "-m", "seed=1", root]) == 2
    assert "which is run.root unless it is set" in capsys.readouterr().err


def test_hydra_gets_absolute_folders(own_files: Path) -> None:
    line = command_line(["--config-dir", "conf mine", "-m", "seed=1,2"])
    folders = f"hydra.searchpath=['file://{own_files}']"
    assert line.sweeps
    assert line.overrides == [folders, "seed=1,2"]
    assert command_line(["-m"]).overrides == []


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the conf folder to write experiments into."""
    for path in (ROOT / "conf").rglob("*.yaml"):
        copy = tmp_path / path.relative_to(ROOT / "conf")
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    (tmp_path / "experiment").mkdir(exist_ok=True)
    monkeypatch.setattr(composing, "CONF", tmp_path)
    return tmp_path


def experiment(conf: Path, text: str) -> str:
    (conf / "experiment" / "mine.yaml").write_text("# @package _global_\n" + text)
    return "experiment=mine"


def test_experiment_sets_values_and_the_command_line_wins(conf: Path) -> None:
    chosen = experiment(
        conf, "defaults:\n  - override /model: pidnet_s\noptim:\n  lr: 0.3\nseed: 5\n"
    )
    found = compose([chosen])
    assert (found.optim.lr, found.seed, found.model.name) == (0.3, 5, "pidnet_s")
    assert found.run.name == "synthetic-pidnet_s-seed5"
    assert compose([chosen, "optim.lr=0.4"]).optim.lr == 0.4


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("optim:\n  lrr: 0.3\n", "Did you mean optim.lr?"),
        ("sedd: 1\n", "Did you mean seed?"),
        ("optimm:\n  lr: 0.3\n", "Did you mean optim."),
        ("optim:\n  lr: fast\n", "'fast'"),
        ("optim: 3\n", "OptimConfig"),
        ("data:\n  size: [64, big]\n", "big"),
        ("optim:\n  lr: [0.3\n", "mine.yaml"),
    ],
)
def test_wrong_experiment_is_refused(conf: Path, text: str, named: str) -> None:
    assert named in refused(experiment(conf, text))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiment_is_short_explained_and_valid(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 30
    comments = [
        line for line in lines if line.startswith("#") and "@package" not in line
    ]
    header = " ".join(comments)
    assert f"segpipe train experiment={path.stem}" in header, (
        "the header gives the command"
    )
    assert all(word in header for word in ("Command:", "Hardware:", "Time:"))
    known = "Expected:" in header
    assert known != ("Published:" in header and "Not measured here" in header)
    root = [] if "data: synthetic" in path.read_text() else ["data.root=somewhere"]
    config = compose([f"experiment={path.stem}", *root, "seed=7"])
    check(config, world_size=1)
    assert config.run.name.endswith("-seed7"), "a second seed would be refused"


def recipes() -> list[tuple[str, str]]:
    """Experiments with each network that their headers name."""
    found = []
    for path in EXPERIMENTS:
        for names in re.findall("^# Networks: ([a-z0-9_, ]+)", path.read_text(), re.M):
            found += [(path.stem, name.strip()) for name in names.split(",")]
    return found


@pytest.mark.parametrize(("experiment", "name"), recipes())
def test_a_recipe_fits_each_of_its_networks(experiment: str, name: str) -> None:
    """Crops are multiples of what the network needs, and losses have the heads that they set."""
    config = compose([f"experiment={experiment}", f"model={name}", "data.root=here"])
    check(config, world_size=1)
    assert config.model.name == name
    assert name in config.run.name
    with torch.device("meta"):
        net = build_model(name, 19)
    heads = set(net.train_only)
    crop = config.augment.crop_size
    assert [length % net.size_multiple for length in crop] == [0, 0]
    weights = config.loss.class_weights
    assert isinstance(weights, str) or len(weights) == 19
    detail = config.loss.boundary == "detail"
    assert detail == name.startswith("stdc")
    assert not detail or "boundary" in heads
    if config.loss.aux_weight != Config().loss.aux_weight:
        assert heads - {"boundary"}


@pytest.mark.parametrize(
    ("flags", "precision"),
    [("fma avx512_bf16", "bf16"), ("fp bf16 svebf16", "bf16"), ("fma avx2", "fp32")],
)
def test_recipes_for_a_cpu_train_in_bf16_if_it_can(
    flags: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composing, "proc_lines", lambda name: [f"{name}: {flags}"])
    for name in ("camvid_cpu", "camvid_drives", "camvid_gpu"):
        config = compose([f"experiment={name}", "hydra.mode=RUN"])
        assert config.train.precision == ("bf16" if "gpu" in name else precision), name


def test_recipes_cover_the_networks_with_a_published_schedule() -> None:
    """Others: EfficientViT's is not published, an encoder of timm or a network of smp has none."""
    without = {"efficientvit_seg_b0", "efficientvit_seg_b1", "timm", "smp"}
    assert {name for _, name in recipes()} == set(MODELS) - without


@pytest.mark.parametrize(
    "path", sorted((ROOT / "conf").rglob("*.yaml")), ids=lambda path: path.stem
)
def test_configuration_holds_values_only(path: Path) -> None:
    assert "_target_" not in path.read_text()
    assert "${now" not in path.read_text()


def test_data_choices_are_complete() -> None:
    """One of each group at a time, until each was chosen."""
    names = {
        group: [path.stem for path in (ROOT / "conf" / group).glob("*.yaml")]
        for group in ("model", "data", "track")
    }
    for number in range(max(map(len, names.values()))):
        chosen = {group: stems[number % len(stems)] for group, stems in names.items()}
        given = [f"{group}={name}" for group, name in chosen.items()]
        root = [] if chosen["data"] == "synthetic" else ["data.root=somewhere"]
        config = compose([*given, *root])
        check(config, world_size=1)
        assert {group: getattr(config, group).name for group in names} == chosen


def test_composing_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert compose(["seed=1"]) == compose(["seed=1"])
    assert not list(tmp_path.iterdir())


def test_wrong_values_are_refused_in_a_line_each_without_torch(tmp_path: Path) -> None:
    """Half a second; `loss.name=focal` once took 17."""
    wrong = {
        "optim.lrr=1": "Did you mean optim.lr?",
        "optim.lr=abc": "optim.lr = 'abc', but a number of",
        "compute.mode=fast": "compute.mode = 'fast' is not one of",
        "data=nosuch": "data = nosuch is not one of",
        "train.steps=0": "train.steps = 0, but a number of updates",
        "compute.shards=0": "compute.shards = 0, but a value of 1 to",
    }
    code = (
        "import sys; from segpipe.cli.main import main; "
        "codes = {main(['train', text, 'compute.nproc=auto']) for text in sys.argv[1:]}; "
        "print(codes, [name for name in ('torch', 'cv2', 'albumentations') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, *wrong]
    found = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    said = found.stderr.splitlines()
    assert found.stdout == "{2} []\n", found.stderr
    assert len(said) == len(wrong)
    assert all(named in line for named, line in zip(wrong.values(), said, strict=True))
    assert not list(tmp_path.iterdir())


# --- arguments of the other commands

KEYS = (
    RUN,
    WHICH,
    Setting("spans", 3, "a number", low=1),
    Setting("json", False, "a switch"),
    Setting("only", ["all"], "a list"),
    *(SETTINGS[key] for key in ("data.root", "data.workers", "export.formats")),
)


def parsed(*arguments: str, positional: tuple[str, ...] = ()) -> dict[str, object]:
    return parse(arguments, KEYS, positional)


def test_commands_take_their_keys_with_types_and_defaults() -> None:
    defaults = {
        "run": "runs/a",
        "which": "last",
        "spans": 3,
        "json": False,
        "only": ["all"],
    }
    assert parsed("run=runs/a") == defaults
    assert parsed(
        "run=runs/a", "data.root=x=y", "data.workers=0", "export.formats=[onnx]"
    ) == {
        **defaults,
        "data.root": "x=y",
        "data.workers": 0,
        "export.formats": ["onnx"],
    }


def test_flags_and_values_without_a_key_are_understood() -> None:
    flags = parsed(
        "--run",
        "runs/a",
        "--json",
        "--spans=2",
        "--only",
        "one",
        "two",
        "--which",
        "best",
    )
    assert flags == {
        "run": "runs/a",
        "json": True,
        "spans": 2,
        "only": ["one", "two"],
        "which": "best",
    }
    assert parsed("runs/lr=0.1", positional=("run",))["run"] == "runs/lr=0.1"
    assert parsed("run=runs/a", positional=("run",))["run"] == "runs/a"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run=a", "data.rot=b"], "Did you mean data.root?"),
        (["run=a", "optim.lr=1"], "optim.lr"),
        (["run=a", "--jsom"], "Did you mean json?"),
        (["a"], "keys run, which, spans, json, only, data.root"),
        (["run"], "KEY=VALUE"),
        (["runs/a"], "Did you mean run=runs/a?"),
        ([], "run is missing (folder of the run). Set run=runs/NAME."),
        (["run="], "run is missing"),
        (["--run"], "run is missing"),
        (["run=a", "which=first"], "which = 'first' is not one of last, best"),
        (["run=a", "spans=0"], "spans = 0, but a value of at least 1 was needed"),
        (["run=a", "spans=two"], "spans = 'two', but a whole number"),
        (["run=a", "json=yes"], "json"),
        (["run=a", "data.workers=-1"], "data.workers = -1"),
        (["run=a", "b"], "'b' is not an argument"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(arguments: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(*arguments)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["plain", "1e3", "010", "on", "null", "", "{a", "[b]", "a b", "${x}"]
)
def test_text_settings_stay_as_they_were_typed(text: str) -> None:
    assert (
        with_settings(Config(), {"run": "runs/a", "data.root": text}).data.root == text
    )


def test_other_settings_are_converted_and_checked() -> None:
    given = {
        "data.workers": 0,
        "export.formats": ["onnx"],
        "compute.threads": 3,
        "train.progress": False,
    }
    found = with_settings(Config(), given)
    assert (found.data.workers, found.export.formats, found.compute.threads) == (
        0,
        ["onnx"],
        3,
    )
    assert found.train.progress is False
    assert Config().export.formats == ["onnx", "torchscript"]
    for wrong in (
        {"data.workers": "two"},
        {"data.workers": "0"},
        {"data.workers": -1},
        {"compute.device": "gpu"},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            with_settings(Config(), wrong)
    with pytest.raises(ConfigError, match=r"Did you mean cuda\?"):
        with_settings(Config(), {"compute.device": "gpu"})


def test_entries_of_a_mapping_need_no_plus() -> None:
    composed = compose(
        ["run.name=x", "model.args.width=3", "+model.args.deep.er=[1,2]"]
    )
    assert composed.model.args == {"width": 3, "deep": {"er": [1, 2]}}
    assert compose(["run.name=x", "model.args={head.*: 0.5}"]).model.args == {
        "head.*": 0.5
    }
    with pytest.raises(
        ConfigError, match=r"model\.arg\.width is not a setting.*model.args"
    ):
        compose(["model.arg.width=3"])
    with pytest.raises(ConfigError, match=r"model\.args = 3, but a mapping"):
        from_mapping({"model": {"args": 3}})


def test_an_experiment_that_is_a_sweep_is_known_by_its_mode(own_files: Path) -> None:
    (own_files / "experiment" / "drives.yaml").write_text(
        "# @package _global_\ndefaults: [camvid_drives, _self_]\ntrain: {steps: 9}\n"
    )
    flags = ["--config-dir", "conf mine", "data.root=x"]
    number = own_files / "experiment" / "2026.yaml"
    number.write_bytes((own_files / "experiment" / "drives.yaml").read_bytes())
    for sweep in (
        ["experiment=2026"],
        ["experiment=camvid_drives"],
        ["+experiment=drives"],
        ["hydra.mode=MULTIRUN", "seed=1,2"],
        ["hydra={mode: MULTIRUN}", "seed=1,2"],
    ):
        assert command_line([*flags, *sweep]).sweeps
        assert not command_line([*flags, sweep[0], "hydra.mode=RUN"]).sweeps
    assert not command_line([*flags, "experiment=camvid_cpu"]).sweeps


@pytest.mark.parametrize(
    ("trained", "found"), [("triton", "auto"), ("native", "auto"), ("plain", "plain")]
)
def test_a_run_is_used_on_a_machine_that_could_not_train_it(
    trained: str, found: str
) -> None:
    """`segpipe evaluate` and others do not take loss.backend, so its error would have no way out."""
    config = Config()
    config.loss.backend = trained
    for device in ("cpu", "cuda"):
        assert with_settings(config, {"compute.device": device}).loss.backend == found
