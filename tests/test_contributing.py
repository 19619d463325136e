"""CONTRIBUTING.md says which files a new part touches: every built-in part is held against it."""

import re
import shlex
from pathlib import Path

import pytest

from segpipe.cli.commands import COMMANDS
from segpipe.data.augment import TRANSFORMS
from segpipe.data.catalog import PUBLISHED
from segpipe.errors import ConfigError
from segpipe.models import MODELS
from segpipe.run.trackers import TRACKERS
from segpipe.settings.compose import command_line, parse
from segpipe.settings.config import SETTINGS

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| an? ([a-z ]+?) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
PATH = re.compile(r"`((?:segpipe|conf|docs|tests|examples)/[\w./]+)`")
RECIPES = {
    kind: (PATH.findall(written), PATH.findall(named), PATH.findall(tested))
    for kind, written, named, tested in ROW.findall(
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf8")
    )
}
BUILT_IN = {
    "setting": SETTINGS,
    "network": MODELS,
    "loss of pixels": SETTINGS["loss.name"].choices,
    "transform": TRANSFORMS,
    "published data set": PUBLISHED,
    "command": COMMANDS,
    "tracker": TRACKERS,
}
TYPED = re.compile(
    rf"(?:^[ #:\w]*|`)segpipe ({'|'.join(COMMANDS)})\b *([^`\n]*=[^`\n]*)", re.MULTILINE
)
# What a reader puts something else for, files that a page has written, and plug-ins of Hydra.
NOT_TYPED = re.compile(
    r".*\.\.\.\]?$|KEY=VALUE|model=NAME|experiment=(mine|crates)|hydra[./].*"
)
# Widths of one architecture share its file, decoders that of their encoder, adapters to libraries one file.
SHARES_A_FILE = {
    "ddrnet23": "ddrnet",
    "ddrnet23_slim": "ddrnet",
    "ddrnet39": "ddrnet",
    "pidnet_s": "pidnet",
    "pidnet_m": "pidnet",
    "pidnet_l": "pidnet",
    "regseg_exp53": "regseg",
    "stdc1": "stdc",
    "stdc2": "stdc",
    "pp_liteseg_t": "stdc",
    "pp_liteseg_b": "stdc",
    "efficientvit_seg_b0": "efficientvit",
    "efficientvit_seg_b1": "efficientvit",
    "lraspp": "packages",
    "timm": "packages",
    "smp": "packages",
}


def missing(kind: str, name: str) -> list[str]:
    """What the recipe of `kind` asks for and the built-in part `name` lacks."""
    written, named, _ = RECIPES[kind]
    file_name = SHARES_A_FILE.get(name, name).replace("-", "_")
    if kind == "command" and name in COMMANDS and COMMANDS[name].starts:
        file_name = COMMANDS[name].starts.partition(":")[0]
    lacking = []
    for path in written:
        own = name if path.startswith("conf") else file_name
        if "NAME" in path and not (ROOT / path.replace("NAME", own)).exists():
            lacking.append(path.replace("NAME", own))
    last = name.rpartition(".")[2]
    for path in named:
        if not re.search(rf"\b{last}\b", (ROOT / path).read_text(encoding="utf8")):
            lacking.append(f"{name} in {path}")
    return lacking


def test_the_tests_that_a_page_names_exist() -> None:
    """Pages say which test shows a claim; tests are renamed and merged."""
    paths = [*(ROOT / "tests").rglob("test_*.py")]
    known = {path.stem for path in paths}
    for path in paths:
        known |= set(re.findall(r"def (test_\w+)", path.read_text(encoding="utf8")))
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text(encoding="utf8")
        for name in set(re.findall(r"\btest_\w+", text)):
            several = name.endswith("_") and [x for x in known if x.startswith(name)]
            assert several or name in known, f"{page.name}: {name}"


def test_commands_of_the_pages_are_accepted() -> None:
    """As they are typed: a key, a value or a quote that is wrong ends them with exit code 2."""
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "conf/experiment").glob("*.yaml"),
    ]
    refused = []
    for page in pages:
        text = page.read_text(encoding="utf8").replace("\\\n", "")
        for name, line in TYPED.findall(text):
            try:
                words = [
                    word.strip("[]") if word[0] == "[" else word
                    for word in shlex.split(line, comments=True)
                    if not NOT_TYPED.match(word)
                ]
                command = COMMANDS[name]
                given = parse(
                    words,
                    command.known,
                    command.positional,
                    overrides=bool(command.overrides),
                )
                command_line(given.get("overrides", []))
            except (ConfigError, ValueError) as error:
                refused.append(f"{page.name}: segpipe {name} {line}: {error}")
    assert refused == []


def test_every_kind_has_a_recipe_whose_files_exist() -> None:
    assert RECIPES.keys() == BUILT_IN.keys()
    paths = [
        path for columns in RECIPES.values() for column in columns for path in column
    ]
    assert not [
        path for path in paths if "NAME" not in path and not (ROOT / path).exists()
    ]


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_built_in_part_follows_its_recipe(kind: str) -> None:
    lacking = {name: missing(kind, name) for name in BUILT_IN[kind]}
    assert not {name: what for name, what in lacking.items() if what}


def test_every_setting_is_read() -> None:
    """One that nobody reads would be taken, and do nothing."""
    paths = (ROOT / "segpipe").rglob("*.py")
    code = "".join(path.read_text() for path in paths if path.stem != "groups")
    leaves = [*(key.rpartition(".")[2] for key in SETTINGS), "nesterov"]
    unread = [leaf for leaf in leaves if not re.search(rf'[."]{leaf}\b', code)]
    assert unread == ["nesterov"]


def test_a_part_that_was_forgotten_somewhere_is_found() -> None:
    assert missing("network", "nonet") == [
        "segpipe/models/nonet.py",
        "conf/model/nonet.yaml",
        "nonet in segpipe/models/__init__.py",
        "nonet in segpipe/settings/groups.py",
        "nonet in docs/models.md",
    ]
