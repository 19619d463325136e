"""An audit passes a run that is what it says, with any number of processes, and names what was altered afterwards."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from runs import run, settings, torch_restored, write_camvid
from segpipe.audit import evidence, outcomes
from segpipe.audit import examine as examination
from segpipe.audit.evidence import CheckedCheckpoint
from segpipe.audit.examine import AuditRequest, Progress, examine
from segpipe.audit.outcomes import check_best
from segpipe.audit.verdict import FAILED, NOTED, UNCHECKED, Audit, Line, markdown
from segpipe.audit.worker import run_task
from segpipe.cli import audit as command
from segpipe.cli.main import main as segpipe
from segpipe.determinism import flags
from segpipe.errors import DataError
from segpipe.ledger import digest, inputs
from segpipe.ledger.reader import last_seals, read_run
from segpipe.ledger.results import changes, read_inputs
from segpipe.ledger.rows import (
    SHARD,
    STEP,
    LedgerSession,
    Rows,
    SessionHeader,
    encode,
    ledger_path,
    read_file,
    seal,
    slots,
)
from segpipe.ledger.writer import RunningHash
from segpipe.settings.compose import compose
from segpipe.settings.config import Config, config_hash, from_mapping
from segpipe.train import checkpoint

STEPS, KEPT = 4, 2
LAST_SPAN, FIRST_SPAN = (
    0,
    4,
)  # seeds that choose them; the span to last.pt is replayed anyway


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    """An audit sets the switches of the run that it trains again."""
    with torch_restored():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and a finished run: checkpoints after 2 and 4 updates, and an exported folder."""
    folder = tmp_path_factory.mktemp("audit")
    write_camvid(folder / "data")
    changes = (
        "data=camvid",
        f"data.root={folder / 'data'}",
        f"train.steps={STEPS}",
        f"checkpoint.keep_every={KEPT}",
    )
    assert run(folder / "run", *changes, "compute.shards=2", "checkpoint.every=3") == 0
    (
        folder / "run" / "best.pt"
    ).unlink()  # the same state as last.pt, and as slow to look at
    write_export(folder / "run")
    return folder


def compose_of(folder: Path) -> Config:
    """The run's configuration."""
    return from_mapping(json.loads((folder / "run" / "config.json").read_text()))


def write_export(run_folder: Path, **source: object) -> None:
    """What an audit reads of an exported folder; `source` says otherwise where it comes from."""
    folder, last = run_folder / "export", run_folder / "last.pt"
    folder.mkdir()
    origin = {"file": "last.pt", "sha256": inputs.sha256(last)}
    weights = checkpoint.load(last)["digests"]["ema"]
    (folder / "model.onnx").write_bytes(b"a network")
    source = {"weights_digest": weights, "checkpoint": origin, **source}
    (folder / "manifest.json").write_text(json.dumps({"source": source}))
    lines = [
        f"{inputs.sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """The same, to be altered."""
    for name in ("run", "data"):
        shutil.copytree(whole / name, tmp_path / name)
    return tmp_path


def audited(
    folder: Path, progress: Progress = lambda what, done, total: None, **wishes: object
) -> Audit:
    """Audit with one update of one span, in this process."""
    asked: dict[str, object] = {
        "seed": 1,
        "spans": 1,
        "span_steps": 1,
        "settings": {"data.root": str(folder / "data")},
    }
    request = AuditRequest(folder / "run", **{**asked, **wishes})  # type: ignore[arg-type]
    given = {"run": str(folder / "run"), "data.root": str(folder / "data")}
    measured = partial(command._evaluate, given)
    return examine(request, progress, run_task, evaluate=measured)


def failures(audit: Audit) -> dict[str, str]:
    """Text of the lines that failed, by part."""
    found: dict[str, str] = {}
    for line in audit.lines:
        if line.status == FAILED:
            found[line.part] = f"{found.get(line.part, '')} {line.text}".strip()
    return found


def test_a_sound_run_passes_from_the_first_image_to_the_final_file(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        f"run={whole / 'run'}",
        "spans=3",
        "span_steps=0",
        "seed=4",
        "verify=false",
        f"out={tmp_path}",
    ]
    assert segpipe(["audit", *arguments]) == 14, (
        capsys.readouterr()
    )  # the gates were not run again
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["verdict"], report["replayed"], report["updates"]) == (
        "passed in part",
        STEPS,
        STEPS,
    )
    parts = ["data", "code", "config", "ledger", "last.pt", "step_000002.pt"]
    trained = ["updates", "replay", "replay", "states"]
    ends = ["result", "scores", "best", "export", "gates"]
    assert [line["part"] for line in report["lines"]] == [*parts, *trained, *ends]
    assert {
        line["status"]
        for line in report["lines"]
        if line["part"] not in ("code", "gates")
    } == {"passed"}
    page = (tmp_path / "report.md").read_text()
    assert page.startswith(f"# Audit of {whole / 'run'}: passed")
    assert report["evidence"] in page
    assert (
        "passed in part: 4 of 4 updates (100%) were trained again and gave the same bits"
        in capsys.readouterr().out
    )
    texts = {line["part"]: line["text"] for line in report["lines"]}
    recorded, last = (
        read_inputs(whole / "run" / "inputs.json"),
        checkpoint.load(whole / "run" / "last.pt"),
    )
    named = {
        "data": [recorded["data"]["sha256"]],
        "code": [recorded["code"]["sha256"]],
        "config": [config_hash(compose_of(whole))],
        "states": [
            "every tensor is bitwise that of the replay: step_000002.pt, last.pt"
        ],
        "last.pt": [
            f"weights {last['digests']['model']}",
            f"averaged weights {last['digests']['ema']}",
        ],
    }
    assert all(
        value in texts[part] for part, values in named.items() for value in values
    ), texts


def test_another_number_of_processes_gives_the_same_rows(whole: Path) -> None:
    seen = []
    audit = audited(
        whole,
        lambda what, done, total: seen.append((done, total)),
        span_steps=0,
        nproc=2,
        seed=LAST_SPAN,
    )
    assert (audit.verdict, audit.replayed) == ("passed in part", KEPT), audit.sentence
    assert set(seen) - {(0, 0)} == {(done, KEPT) for done in range(KEPT + 1)}, (
        "the processes tell how far they are"
    )
    assert [
        (line.status, line.text.partition(". ")[0])
        for line in audit.lines
        if line.part == "states"
    ] == [
        ("passed", "every tensor is bitwise that of the replay: last.pt"),
        (
            "not checked",
            "only by digest, which can be forged, since no replayed span ends there: step_000002.pt",
        ),
    ]


def flip(path: Path, place: int) -> None:
    """Change one bit of one byte."""
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


def edit(path: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=2))


def forge_row(folder: Path, step: int, name: str = "weights", *, sealed: bool) -> None:
    """Change a value of a step together with the checksum of its row; `sealed`: and with the seals."""
    path = ledger_path(folder / "run", 0)
    (session,) = read_file(path).sessions
    rows = session.rows.copy()
    place = np.flatnonzero(
        (rows["step"] == step) & (rows["kind"] == (SHARD if name == "sample" else STEP))
    )[0]
    if name == "sample":
        rows["sample"][place, 1] ^= 1
    else:
        rows["digest"][place, slots(STEP, 2)[name]] ^= 1
    raw = path.read_bytes()
    path.write_bytes(
        raw[: session.start] + seal(rows) + raw[session.start + rows.nbytes :]
    )
    if sealed:
        path.with_suffix(".seal").unlink()
        RunningHash(path).seal()


def rewrite_ledger(
    folder: Path, change: Callable[[LedgerSession], list[tuple[SessionHeader, Rows]]]
) -> None:
    """Other sessions and rows, with all that vouches for them."""
    path = ledger_path(folder / "run", 0)
    (session,) = read_file(path).sessions
    path.write_bytes(
        b"".join(encode(header) + seal(rows.copy()) for header, rows in change(session))
    )
    path.with_suffix(".seal").unlink()
    RunningHash(path).seal()
    edit(
        folder / "run" / "result.json",
        lambda content: content.update(ledger=last_seals(folder / "run")),
    )


def empty_rows(session: LedgerSession) -> list[tuple[SessionHeader, Rows]]:
    """Rows that say of every field that it was not recorded."""
    rows = session.rows.copy()
    rows["present"] = 0
    return [(session.header, rows)]


def without_last_shards(session: LedgerSession) -> list[tuple[SessionHeader, Rows]]:
    rows = session.rows
    return [(session.header, rows[(rows["kind"] == STEP) | (rows["step"] < STEPS - 1)])]


def in_two_sessions(
    session: LedgerSession, **changes: str
) -> list[tuple[SessionHeader, Rows]]:
    later = session.rows["step"] >= KEPT
    header = replace(session.header, session=1, first_step=KEPT, **changes)  # type: ignore[arg-type]
    return [(session.header, session.rows[~later]), (header, session.rows[later])]


def in_ledger(folder: Path) -> None:
    path = ledger_path(folder / "run", 0)
    (session,) = read_file(path).sessions
    flip(path, session.start + 5 * session.rows.itemsize + 70)


def cut_ledger(folder: Path) -> None:
    path = ledger_path(folder / "run", 0)
    (session,) = read_file(path).sessions
    path.write_bytes(path.read_bytes()[: -3 * session.rows.itemsize])


def remove_hashes(folder: Path) -> None:
    (folder / "run" / "ledger/rank00.seal").unlink()


def in_weights(folder: Path) -> None:
    path = folder / "run" / "step_000002.pt"
    flip(path, path.stat().st_size // 2)


def other_weights(folder: Path) -> None:
    """A checkpoint that is whole, listed, and of another training."""
    path = folder / "run" / "step_000002.pt"
    state = checkpoint.load(path)
    next(iter(state["model"].values()))[0, 0, 0, 0] += 1
    checkpoint.save(path, state)


def collide(tensors: Sequence[torch.Tensor]) -> None:
    """Change two words of 8 bytes of the first vector so that the ledger's digest of all tensors stays.

    H adds up mix64(word xor index), so two words may be swapped if each takes the other's index along.
    """
    before, place = (
        digest.digest_many(tensors, channels_last=True),
        next(number for number, each in enumerate(tensors) if each.ndim == 1),
    )
    start = (
        sum(len(digest._words(each, channels_last=True)) for each in tensors[:place])
        % digest.BLOCK
    )
    words, indices = (
        tensors[place].view(torch.int64),
        digest._block_indices(torch.device("cpu")),
    )
    words[:2] = words[:2].flip(0) ^ indices[start] ^ indices[start + 1]
    assert digest.digest_many(tensors, channels_last=True) == before


def collision(folder: Path) -> None:
    """Other weights in last.pt, and nothing that does not vouch for them."""
    shutil.rmtree(folder / "run" / "export")
    path = folder / "run" / "last.pt"
    state = checkpoint.load(path)
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    collide(
        [value for name, value in state["model"].items() if not name.endswith(buffers)]
    )
    checkpoint.save(path, state)
    digests = checkpoint.load(path)["digests"]
    edit(
        folder / "run" / "result.json",
        lambda content: content.update(weights_digest=digests["model"]),
    )
    write_export(folder / "run")


def in_count(folder: Path) -> None:
    """A buffer of whole numbers, of which the ledger has no digest."""
    forged(
        folder,
        lambda state: next(
            v for k, v in state["model"].items() if k.endswith("tracked")
        ).add_(1),
    )


def in_image(folder: Path) -> None:
    path = folder / "data" / "train" / "frame03.png"
    pixels = cv2.imread(str(path))
    pixels[30:50, 40:60] ^= 255
    cv2.imwrite(str(path), pixels)


def in_file(folder: Path) -> None:
    """A bit of a file that says nothing about its pixels' values, or ends its reading."""
    path = folder / "data" / "val" / "frame01.png"
    flip(path, path.stat().st_size // 2)


def in_setting(folder: Path) -> None:
    edit(
        folder / "run" / "config.json",
        lambda content: content["optim"].update(lr=0.051),
    )


def in_free_setting(folder: Path) -> None:
    edit(
        folder / "run" / "config.json",
        lambda content: content["data"].update(workers=1),
    )


def in_inputs(folder: Path) -> None:
    """An image, and its hash in inputs.json with it."""
    in_image(folder)
    edit(
        folder / "run" / "inputs.json",
        lambda content: content["data"]["files"].update(
            {"train/frame03.png": inputs.sha256(folder / "data/train/frame03.png")}
        ),
    )


def in_result(folder: Path) -> None:
    edit(
        folder / "run" / "result.json",
        lambda content: content.update(ema_digest="0" * 32),
    )


def in_export(folder: Path) -> None:
    flip(folder / "run" / "export" / "model.onnx", 3)


def forge_origin(content: Any) -> None:
    """Another machine and mode, and an end that no setting asks for."""
    content["versions"]["torch"] = "9.9.9"
    content["switches"]["deterministic_algorithms"] = False
    content.update(world_size=64, mode="audit", name="other", stopped_early=True)


# Alteration: parts of the report that fail, and what they name. Every other part passes.
ALTERATIONS: dict[str, tuple[Callable[[Path], object], dict[str, str]]] = {
    "a byte of a checkpoint": (in_weights, {"step_000002.pt": "step_000002.pt"}),
    "a byte between the weights, and a setting that reaches no number": (
        in_free_setting,
        {
            "config": "does not affect the numbers (data.workers is 0 in a checkpoint and 1 in config.json)",
        },
    ),
    "a checkpoint of another training": (
        other_weights, {"step_000002.pt": "weights do not match the ledger's row of step 1"}
    ),
    "weights with the digest of those that were trained": (
        collision, {"last.pt": "model/detail.0.1.weight is not what the replayed updates give"}
    ),
    "a buffer that no digest covers": (in_count, {"step_000002.pt": "num_batches_tracked is not what the replayed"}),
    "a byte of the ledger": (in_ledger, {"ledger": "row 5 of session 0 (after step 1, shard 0) was altered"}),
    "a row with its checksum": (
        lambda folder: forge_row(folder, 1, sealed=False),
        {"ledger": "(steps -1 to 1)", "step_000002.pt": "weights do not match", "replay": "step 1: weights differ"},
    ),
    "a row with its seals": (
        lambda folder: forge_row(folder, 2, sealed=True),
        {"replay": "step 2: weights differ", "result": "ledger/rank00.bin was sealed"},
    ),
    "a learning rate that no setting gives": (
        lambda folder: forge_row(folder, 1, "lr", sealed=True),
        {"updates": "step 1: learning rate", "result": "was sealed"},
    ),
    "a sample that is not the seed's": (
        lambda folder: forge_row(folder, 3, "sample", sealed=True),
        {"updates": "step 3, shard 0, place 1: sample", "result": "was sealed"},
    ),
    "weights that are not the seed's": (
        lambda folder: forge_row(folder, -1, sealed=True),
        {"updates": "did not start from the state that its settings give: weights differ", "result": "was sealed"},
    ),
    "rows that say nothing": (
        lambda folder: rewrite_ledger(folder, empty_rows),
        {
            "step_000002.pt": "the ledger's row of step 1 lacks optimizer, weights, statistics, ema",
            "last.pt": "the ledger's row of step 3 lacks optimizer",
            "updates": "the ledger lacks optimizer, weights, statistics, ema of the state before the first update",
            "replay": "the ledger lacks image, target, batch, logits, statistics, loss, gradient",
        },
    ),
    "the samples of the last update": (
        lambda folder: rewrite_ledger(folder, without_last_shards),
        {"updates": "the ledger has the samples of 6 shards, but 4 updates have 8"},
    ),
    "a session of other data": (
        lambda folder: rewrite_ledger(folder, partial(in_two_sessions, inputs="0" * 64)),
        {"data": "inputs.json is not the file whose hash the ledger has (session 1)"},
    ),
    "a score": (
        lambda folder: edit(folder / "run" / "result.json", lambda content: content.update(miou=0.9)),
        {"scores": "miou is 0.9 in result.json and 0."},
    ),
    "the best score, and an interval": (
        lambda folder: edit(
            folder / "run" / "result.json", lambda content: content.update(best_miou=0.9, interval_95=[0.8, 0.9])
        ),
        {"scores": "interval_95 is [0.8, 0.9] in result.json", "result": "best_miou is 0.9, but last.pt has 0."},
    ),
    "a figure that no run writes": (
        lambda folder: edit(folder / "run" / "result.json", lambda content: content.update(test_miou=0.9)),
        {"scores": "test_miou is nothing that a run writes"},
    ),
    "where and how it was trained": (
        lambda folder: edit(folder / "run" / "result.json", forge_origin),
        {
            "result": "name is 'other', but config.json has 'run'; mode is 'audit', but config.json has 'elastic'; "
            "deterministic_algorithms is False, but compute.mode = elastic has True; stopped_early is true, but "
            "train.patience = 0 never stops a run; torch is '9.9.9', but the ledger has '"
        },
    ),
    "the checksums of an export that was replaced": (
        lambda folder: (in_export(folder), (folder / "run" / "export" / "SHA256SUMS").unlink()),
        {"export": "export lacks SHA256SUMS, without which nothing shows what it holds"},
    ),
    "a run that claims to be shorter": (
        lambda folder: edit(folder / "run" / "result.json", lambda content: content.update(steps=3)),
        {"result": "steps is 3, but the settings ask for 4"},
    ),
    "the end of the ledger": (
        cut_ledger,
        {"ledger": "altered, or cut, between", "last.pt": "update 3 is missing", "result": "the ledger has 3"},
    ),
    "hashes that are gone": (
        remove_hashes,
        {"ledger": "rank00.seal is missing", "result": "was sealed with"},
    ),
    "some pixels of an image": (in_image, {"data": "train/frame03.png was altered", "replay": "sample 3 (frame03)"}),
    "bytes of a validation image and of the exported file, and a digest of the result": (
        lambda folder: (in_file(folder), in_export(folder), in_result(folder)),
        {
            "data": "val/frame01.png was altered",
            "export": "model.onnx was altered",
            "result": "ema_digest is '00000000",
            "scores": "cannot be measured again",
        },
    ),
    "a setting": (in_setting, {"config": "optim.lr is 0.05 in the ledger (session 0) and 0.051 in config.json"}),
    "an image and its hash": (in_inputs, {"data": "inputs.json is not the file", "replay": "sample 3 (frame03)"}),
}  # fmt: skip


@pytest.mark.parametrize("name", ALTERATIONS)
def test_what_was_altered_afterwards_fails_and_is_named(copy: Path, name: str) -> None:
    alter, expected = ALTERATIONS[name]
    alter(copy)
    replayed = {"spans": 9, "span_steps": 0} if "replay" in expected else {}
    if alter in (collision, in_count):
        replayed = {"span_steps": 0, "seed": FIRST_SPAN}
    audit = audited(copy, **replayed)
    found = failures(audit)
    assert (audit.verdict, audit.exit_code) == ("failed", 13)
    assert found.keys() == expected.keys(), found
    for part, words in expected.items():
        assert words in found[part], found
    assert all(f"{part}: " in audit.sentence for part in expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"world_size": 64}, "world_size is 64, but the ledger has 1"),
        (
            {"ledger": {}},
            "ledger lacks rank00, whose hash at the end of the run belongs there",
        ),
        ({"ledger": None}, "ledger lacks rank00"),
        (
            {"weights": {"file": "imagenet.pt"}},
            "weights has file, which a start from the seed does not give",
        ),
    ],
)
def test_a_result_says_what_the_ledger_and_the_start_say(
    copy: Path, change: dict[str, Any], words: str
) -> None:
    edit(copy / "run" / "result.json", lambda content: content.update(change))
    checkpoints, _ = evidence.check_checkpoints(copy / "run", None, None)
    line = outcomes.check_result(
        copy / "run", compose_of(copy), checkpoints, read_run(copy / "run"), {}
    )
    assert (line.status, words in line.text) == (FAILED if words else "passed", True), (
        line
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"kept": 9}, "kept is 9, but the start of the run has 3"),
        ({"loaded": 1}, "weights has loaded, which its file does not give"),
        ({"sha256": "0" * 64}, "00000..., but the start of the run has '1111"),
        (
            {"file": "imagenet.pt"},
            "file is 'imagenet.pt', but the start of the run has 'a.pt'",
        ),
    ],
)
def test_weights_of_a_result_are_those_of_the_file_and_what_it_gives(
    copy: Path, change: dict[str, Any], words: str
) -> None:
    config, start = compose_of(copy), {"file": "a.pt", "sha256": "1" * 64}
    config.model.weights, config.model.weights_sha256 = (
        "moved/a.pt",
        start["sha256"],
    )  # as a longer run may have it
    edit(copy / "run" / "inputs.json", lambda content: content.update(weights=start))
    edit(
        copy / "run" / "result.json",
        lambda content: content.update(weights={**start, "kept": 3, **change}),
    )
    fresh = {"file": "auditor/a.pt", "sha256": start["sha256"], "kept": 3}
    line = outcomes.check_result(copy / "run", config, [], None, fresh)
    assert (line.status, words in line.text) == (
        FAILED if words else UNCHECKED,
        True,
    ), line


@pytest.mark.parametrize(
    ("name", "invented", "words"),
    [
        ("miou", None, ""),
        ("mean", {"boundary_iou": 0.987}, "mean is {"),
        ("iou", {"boundary_iou": 0.99}, "iou is {"),
        ("sequences", {"park": 1.0}, "in result.json and None measured again"),
    ],
)
def test_a_score_that_the_measurement_lacks_fails(
    copy: Path, name: str, invented: Any, words: str
) -> None:
    """Only the mean of the measurement has one more, of a score that the training does not measure."""
    path = copy / "run" / "result.json"
    again = json.loads(path.read_text())
    again["mean"]["boundary_iou"] = 0.3
    if invented:
        again.pop(name) if name == "sequences" else None
        edit(
            path,
            lambda content: content.update(
                {name: {**(content[name] or {}), **invented}}
            ),
        )
    line = outcomes.check_scores(copy / "run", lambda which, precision: again, "")
    assert (line.status, words in line.text) == (FAILED if words else "passed", True), (
        line
    )


def test_a_state_that_no_replay_reaches_is_known_by_a_digest_that_can_be_forged(
    copy: Path,
) -> None:
    """The control of the collision: nothing else sees it, and the report says that this was not compared."""
    collision(copy)
    audit = audited(copy)
    assert (audit.verdict, failures(audit)) == ("passed in part", {})
    (line,) = [line for line in audit.lines if line.part == "states"]
    assert (line.status, "step_000002.pt, last.pt" in line.text) == (UNCHECKED, True), (
        line
    )


def test_the_copy_itself_passes(copy: Path) -> None:
    """The control of all alterations."""
    found = audited(copy)
    assert (found.verdict, found.exit_code) == ("passed in part", 14)
    assert "1 of 4 updates (25%)" in found.sentence


def make_older(folder: Path) -> None:
    """The files of a version that had `data.shuffle_labels`, and not yet `ema.decay`."""

    def older(settings: dict[str, Any]) -> None:
        settings["data"]["shuffle_labels"] = False
        del settings["ema"]["decay"]

    edit(folder / "run" / "config.json", older)
    saved = config_hash(json.loads((folder / "run" / "config.json").read_text()))

    def headers(session: LedgerSession) -> list[tuple[SessionHeader, Rows]]:
        recipe = {**session.header.recipe, "data.shuffle_labels": False}
        del recipe["ema.decay"]
        return [
            (replace(session.header, recipe=recipe, config_hash=saved), session.rows)
        ]

    rewrite_ledger(folder, headers)
    edit(
        folder / "run" / "result.json",
        lambda content: content.update(config_hash=saved),
    )
    for path in (folder / "run").glob("*.pt"):
        state = checkpoint.load(path)
        older(state["config"])
        checkpoint.save(path, state)
        assert checkpoint.load_network(path).config_hash == saved, (
            "that of an export which the same version made"
        )
    shutil.rmtree(folder / "run" / "export")
    write_export(folder / "run")


def test_a_run_of_an_earlier_version_passes_and_can_be_resumed(copy: Path) -> None:
    make_older(copy)
    assert failures(audited(copy, spans=9, span_steps=0)) == {}
    edit(
        copy / "run" / "config.json", lambda content: content["data"].update(workers=1)
    )
    assert (
        "setting that does not affect the numbers (data.workers is 0"
        in failures(audited(copy))["config"]
    )
    edit(
        copy / "run" / "config.json", lambda content: content["data"].update(workers=0)
    )
    final = checkpoint.load(copy / "run" / "last.pt")["digests"]["ema"]
    (copy / "run" / "last.pt").unlink()
    changes = (
        "data=camvid",
        f"data.root={copy / 'data'}",
        f"train.steps={STEPS}",
        f"checkpoint.keep_every={KEPT}",
    )
    resumed = ("compute.shards=2", "checkpoint.every=3", "run.exists=resume")
    assert run(copy / "run", *changes, *resumed) == 0
    assert checkpoint.load(copy / "run" / "last.pt")["digests"]["ema"] == final
    shutil.rmtree(copy / "run" / "export")
    write_export(copy / "run")
    assert failures(audited(copy)) == {}


def test_an_export_that_the_settings_ask_for_and_is_gone_was_not_checked(
    copy: Path,
) -> None:
    shutil.rmtree(copy / "run" / "export")
    config = compose_of(copy)
    for enabled, status in ((True, UNCHECKED), (False, NOTED)):
        config.export.enabled = enabled
        assert evidence.check_export(copy / "run", config, []).status == status
    (copy / "run" / "export").mkdir()
    assert evidence.check_export(copy / "run", None, []).status == NOTED


def test_what_the_files_alone_contradict(copy: Path) -> None:
    """An early stop that no setting asks for."""
    folder = copy / "run"
    passed, _ = evidence.check_checkpoints(folder, None, None)
    edit(
        folder / "result.json",
        lambda content: content.update(steps=3, stopped_early=True),
    )
    assert (
        "train.patience = 0 never stops a run"
        in outcomes.check_result(folder, compose_of(copy), [], None).text
    )
    for change, words in (
        ({"weights_digest": "0" * 32}, "its weights are 00000000"),
        (
            {"checkpoint": {"file": "last.pt", "sha256": "0" * 64}},
            "it was made from another last.pt",
        ),
    ):
        shutil.rmtree(folder / "export")
        write_export(folder, **change)
        assert words in evidence.check_export(folder, None, passed).text


def test_every_source_is_hashed_the_c_of_the_digests_too() -> None:
    assert {
        "train/engine.py",
        "ledger/digest.c",
        "audit/report.md.j2",
    } <= inputs.source_hashes().keys()


def test_other_sources_are_noted_and_fail_nothing_while_the_bits_are_the_same(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = inputs.source_hashes
    monkeypatch.setattr(
        inputs, "source_hashes", lambda: {**hashes(), "train/engine.py": "other"}
    )
    audit = audited(whole)
    (code,) = [line for line in audit.lines if line.part == "code"]
    assert (audit.verdict, code.status) == ("passed in part", "noted")
    assert "train/engine.py was altered" in code.text


def test_another_environment_cannot_audit_unless_asked_to(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = flags.fingerprint()
    monkeypatch.setattr(
        flags, "fingerprint", lambda: {**found, "torch": "9.9", "threads": 1}
    )
    audit = audited(whole)
    assert (audit.verdict, audit.exit_code, failures(audit)) == ("cannot audit", 2, {})
    assert "and '9.9' in this environment" in audit.sentence
    assert audited(whole, any_environment=True).verdict == "passed in part"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("no run", "holds no run"),
        ("no ledger", "without config.json and a ledger"),
        ("no data", "does not exist here. Set data.root=FOLDER"),
    ],
)
def test_what_cannot_be_audited_says_why(
    copy: Path, change: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, root = copy / "run", copy / "data"
    if change == "no run":
        folder = copy / "absent"
    elif change == "no ledger":
        shutil.rmtree(folder / "ledger")
    else:
        root = copy / "absent"
    assert segpipe(["audit", f"run={folder}", "spans=1", f"data.root={root}"]) == 2
    told = capsys.readouterr()
    assert words in told.out + told.err


@pytest.mark.parametrize("mode", ["ddp", "off"])
def test_modes_that_promise_less_cannot_be_audited(whole: Path, mode: str) -> None:
    config = compose(settings(whole / "run", f"compute.mode={mode}"))
    words = examination._obstacle(
        config, read_run(whole / "run"), AuditRequest(whole / "run", seed=0)
    )
    assert f"compute.mode = {mode} does not promise" in words


@pytest.mark.parametrize(
    "argument",
    ["spans=0", "compute.nproc=0", "seed=x", "optim.lr=1", "any_environment=yes"],
)
def test_wishes_that_make_no_sense_are_refused(
    whole: Path, argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert segpipe(["audit", f"run={whole / 'run'}", argument]) == 2
    assert argument.partition("=")[0] in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_told_before_the_work(
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        command, "examine", lambda *_, **__: pytest.fail("the work was begun")
    )
    (tmp_path / "file").touch()
    assert (
        segpipe(["audit", f"run={whole / 'run'}", f"out={tmp_path / 'file' / 'audit'}"])
        == 2
    )
    assert (
        f"nothing can be written to {tmp_path / 'file'}. Set out=FOLDER"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(("status", "code"), [("passed", 2), (FAILED, 13)])
def test_a_verdict_is_told_though_its_report_cannot_be_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: str,
    code: int,
) -> None:
    found = Audit(
        str(tmp_path), (Line("config", status, "what it is"),), "", 0, 1, 1, 1, "", 0.0
    )
    monkeypatch.setattr(
        command, "examine", lambda *_, **__: (tmp_path / "audit").touch() or found
    )
    assert segpipe(["audit", f"run={tmp_path}"]) == code
    told = capsys.readouterr()
    assert "what it is" in told.out
    assert f"{found.sentence}." in told.out
    assert "report.json" in told.err
    assert "Set out=FOLDER" in told.err


def test_a_page_keeps_one_row_of_three_cells_for_each_line() -> None:
    lines = tuple(
        Line("data", status, "a|b <c> & {{ d }}") for status in ("passed", FAILED)
    )
    page = markdown(Audit("runs/x", lines, "", 7, 5, 9, 2, "0" * 64, 12.6)).splitlines()
    assert page[0] == "# Audit of runs/x: failed"
    assert page[4:8] == ["| part | verdict | finding |", "|---|---|---|"] + [
        f"| data | {status} | a/b <c> & {{{{ d }}}} |" for status in ("passed", FAILED)
    ]
    assert page[9].startswith(
        "- Replayed: 5 of 9 updates by 2 processes, 13 s in all. Seed 7 "
    )


def forged(folder: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    """Change what a checkpoint holds together with all that vouches for it."""
    path = folder / "run" / "step_000002.pt"
    state = checkpoint.load(path)
    change(state)
    checkpoint.save(path, state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state["config"].update(surprise=1), "surprise is not a setting"),
        (
            lambda state: state["config"]["optim"].update(lr=1.0),
            "optim.lr is 0.05 in the ledger and 1.0 in step_000002",
        ),
        (
            lambda state: state.update(config=7),
            "its step or its configuration is malformed",
        ),
        (
            lambda state: state["optimizer"].update(param_groups=[]),
            "does not fit the run's network and optimizer",
        ),
    ],
)
def test_a_checkpoint_that_no_run_writes_fails_and_ends_nothing(
    copy: Path,
    change: Callable[[dict], object],
    words: str,  # type: ignore[type-arg]
) -> None:
    forged(copy, change)
    audit = audited(copy)
    assert words in failures(audit)["step_000002.pt"]
    assert audit.exit_code == 13


def test_a_resumed_run_refuses_data_that_changed(copy: Path) -> None:
    config = compose(
        settings(
            copy / "run",
            "data=camvid",
            f"data.root={copy / 'data'}",
            "run.exists=resume",
            "compute.shards=2",
        )
    )
    inputs.record(config, ("train", "val"))
    in_image(copy)
    with pytest.raises(
        DataError, match=r"train/frame03.png was altered since the run .* was started"
    ):
        inputs.record(config, ("train", "val"))


@pytest.mark.parametrize(
    "without", ["data.hash=false", "compute.ledger=false", "compute.mode=off"]
)
def test_a_resume_without_hashes_refuses_other_names_and_sizes(
    tmp_path: Path, without: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data, folder = write_camvid(tmp_path / "data"), tmp_path / "run"
    changes = (
        "data=camvid",
        f"data.root={data}",
        "optim.schedule_steps=9",
        "compute.shards=1",
        without,
    )
    assert run(folder, *changes, "train.steps=1") == 0
    recorded = read_inputs(folder / "inputs.json")["data"]
    assert (recorded["files"], recorded["hashed"], len(recorded["sizes"])) == (
        {},
        False,
        20,
    )
    image, mask = data / "train" / "frame03.png", data / "valannot" / "frame01.png"
    for path, shape in ((image, (72, 96, 3)), (mask, (72, 96))):
        content = path.read_bytes()
        cv2.imwrite(str(path), np.full(shape, 1, np.uint8))
        capsys.readouterr()
        assert (
            run(folder, *changes, "train.steps=2", "run.exists=resume")
            == DataError.exit_code
        )
        name = path.relative_to(data).as_posix()
        assert (
            f"data.root = {data}: {name} was altered since the run"
            in capsys.readouterr().err
        )
        path.write_bytes(content)
    shutil.copy(image, data / "train" / "frame99.png")
    shutil.copy(
        data / "trainannot" / "frame03.png", data / "trainannot" / "frame99.png"
    )
    assert (
        run(folder, *changes, "train.steps=2", "run.exists=resume")
        == DataError.exit_code
    )
    assert "train/frame99.png was added" in capsys.readouterr().err
    for name in ("train", "trainannot"):
        (data / name / "frame99.png").unlink()
    edit(
        folder / "inputs.json", lambda content: content["data"].pop("sizes")
    )  # of an older segpipe
    assert run(folder, *changes, "train.steps=2", "run.exists=resume") == 0


def test_a_resume_that_no_longer_hashes_sees_sizes_and_one_that_does_sees_contents(
    copy: Path,
) -> None:
    changes = (
        "data=camvid",
        f"data.root={copy / 'data'}",
        "run.exists=resume",
        "compute.shards=2",
    )
    hashed, sized = (
        compose(settings(copy / "run", *changes, f"data.hash={on}"))
        for on in ("true", "false")
    )
    in_file(copy)  # a bit, so the size is the same: the limit of comparing sizes
    inputs.record(sized, ("train", "val"))
    inputs.record(hashed, ("train", "val"), ledger=False)
    with pytest.raises(DataError, match=r"val/frame01.png was altered"):
        inputs.record(hashed, ("train", "val"))
    cv2.imwrite(
        str(copy / "data" / "train" / "frame00.png"), np.zeros((72, 96, 3), np.uint8)
    )
    with pytest.raises(
        DataError, match=r"train/frame00.png was altered since .* \(1 changes\)"
    ):
        inputs.record(sized, ("train", "val"))


def test_the_sizes_of_files_that_were_not_hashed_are_audited(copy: Path) -> None:
    path, config = copy / "run" / "inputs.json", compose_of(copy)
    config.data.root = str(copy / "data")
    edit(path, lambda content: content["data"].update(files={}))
    line = evidence.check_inputs(copy / "run", config, None)[0]
    assert (line.status, "names and sizes are unchanged" in line.text) == (
        "not checked",
        True,
    )
    cv2.imwrite(
        str(copy / "data" / "train" / "frame03.png"), np.zeros((72, 96, 3), np.uint8)
    )
    line = evidence.check_inputs(copy / "run", config, None)[0]
    assert (line.status, "train/frame03.png was altered" in line.text) == (FAILED, True)
    edit(path, lambda content: content["data"].pop("sizes"))
    assert (
        "the files were not recorded"
        in evidence.check_inputs(copy / "run", config, None)[0].text
    )


def test_sizes_that_are_not_known_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of samples that name no files, and of files that a user's class fetches later."""
    config = compose(settings(tmp_path / "run"))
    sources = {
        "a": tmp_path / "absent",
        "b": lambda: pytest.fail("it was read"),
        "c": tmp_path / "c",
    }
    (tmp_path / "c").write_bytes(b"123")
    monkeypatch.setattr(inputs, "_inputs", lambda data, splits: sources)
    found = inputs.data_sizes(config.data, ["train"])
    assert found == {"a": None, "b": None, "c": 3}
    (tmp_path / "absent").write_bytes(b"fetched")
    assert inputs.resized({"sizes": found}, config.data, ["train"]) == []
    assert inputs.resized(
        {"sizes": {**found, "c": None, "d": None}}, config.data, ["train"]
    ) == ["d is missing"]
    assert inputs.resized({"sizes": {**found, "c": 4}}, config.data, ["train"]) == [
        "c was altered"
    ]


def test_hashes_of_many_files_are_one_that_sees_names_and_contents() -> None:
    files = {"b": "2", "a": "1"}
    assert inputs.combined(files) == hashlib.sha256(b"1  a\n2  b\n").hexdigest()
    assert (
        len(
            {
                inputs.combined(each)
                for each in (files, {"a": "2", "b": "1"}, {"a": "1"})
            }
        )
        == 3
    )
    assert changes({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == [
        "b was altered",
        "a is missing",
        "c was added",
    ]


# --- the best score, and an early stop


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped early: on noise, one of a few seeds does."""
    folder = tmp_path_factory.mktemp("stopped")
    write_camvid(folder / "data")
    patience = (
        "train.steps=9",
        "train.validate_every=2",
        "train.patience=2",
        "optim.lr=0.02",
        "ema.decay=0.0",
    )
    changes = (
        "data=camvid",
        f"data.root={folder / 'data'}",
        *patience,
        "compute.shards=1",
        "run.exists=replace",
    )
    for seed in (3, 4, 5, 1, 2, 6, 7):
        assert run(folder / "run", *changes, "optim.name=adamw", f"seed={seed}") == 0
        if json.loads((folder / "run" / "result.json").read_text())["stopped_early"]:
            break
    return folder


def test_a_best_score_that_was_forged_in_all_files_is_measured_again(
    stopped: Path, tmp_path: Path
) -> None:
    (honest,) = [line for line in audited(stopped).lines if line.part == "best"]
    assert honest.status == "passed"
    best, last = (
        checkpoint.load(stopped / "run" / name) for name in ("best.pt", "last.pt")
    )
    assert f"of best.pt, after {best['step']} updates, measured again" in honest.text
    assert last["step"] - best["step"] == 4
    for name in ("run", "data"):
        shutil.copytree(stopped / name, tmp_path / name)
    edit(
        tmp_path / "run" / "result.json", lambda content: content.update(best_miou=0.9)
    )
    for name in ("best.pt", "last.pt"):
        path = tmp_path / "run" / name
        checkpoint.save(path, {**checkpoint.load(path), "best_miou": 0.9})
    audit = audited(tmp_path)
    assert failures(audit).keys() == {"best"}, audit.sentence
    assert "best_miou is 0.9 in result.json and 0.0" in failures(audit)["best"]
    assert audit.exit_code == 13


def ended(name: str, step: int, **changes: object) -> CheckedCheckpoint:
    """A checkpoint of a run that stops 2 validations, each after 2 updates, after the best one."""
    fields = {
        "digests": {"ema": name},
        "best_miou": 0.5,
        "stale": 2 * (name == "last.pt"),
        "final": False,
        **changes,
    }
    return CheckedCheckpoint(Path(name), step, **fields)  # type: ignore[arg-type]


LAST, BEST = ended("last.pt", 6), ended("best.pt", 2)
SAME = {"ema": "last.pt"}
# Checkpoints, changes of result.json, status, words, precision at which best.pt is measured.
COURSES: dict[str, tuple[list[CheckedCheckpoint], dict[str, object], str, str, str]] = {
    "as it is": ([LAST, BEST], {}, "passed", "(bf16) of best.pt, after 2 updates", "bf16"),
    "the final validation is the best": (
        [LAST, ended("best.pt", 6, stale=2, digests=SAME)], {"miou": 0.5}, "passed", "(fp32) of last.pt, after 6", ""
    ),
    "the end of a run that was made longer is the best": (
        [LAST, ended("best.pt", 3, final=True)], {}, "passed", "(fp32) of best.pt, after 3 updates", "fp32"
    ),
    "equal weights at another precision": ([LAST, ended("best.pt", 2, digests=SAME)], {}, "passed", "(bf16)", "bf16"),
    "another score": ([LAST, BEST], {"best_miou": 0.6}, FAILED, "best_miou is 0.6 in result.json and 0.5", "bf16"),
    "another score of equal weights": (
        [LAST, ended("best.pt", 6, stale=2, digests=SAME)], {"miou": 0.4}, FAILED, "0.4 measured again (fp32)", ""
    ),
    "another score in best.pt": (
        [LAST, ended("best.pt", 2, best_miou=0.4)], {}, FAILED, "best.pt has 0.4 at step 2, last.pt 0.5 at step 6", ""
    ),
    "best.pt is newer": ([LAST, ended("best.pt", 8)], {}, FAILED, "at step 8, last.pt 0.5 at step 6", ""),
    "best.pt is of no validation": (
        [LAST, ended("best.pt", 3)], {}, FAILED, "of step 3, stale 0, but train.validate_every = 2", ""
    ),
    "best.pt counts what no validation gives it": (
        [LAST, ended("best.pt", 4, stale=1)], {}, FAILED, "of step 4, stale 1, but train.validate_every = 2", ""
    ),
    "too few validations": (
        [LAST, ended("best.pt", 4)], {}, FAILED, "1 validations lie between best.pt (step 4, stale 0) and", ""
    ),
    "too few are counted": (
        [LAST._replace(stale=1), BEST], {}, FAILED, "stopped_early is True, but last.pt counts 1 validations", ""
    ),
    "it should have stopped": (
        [LAST, BEST], {"stopped_early": False}, FAILED, "stopped_early is False, but last.pt counts 2 validations", ""
    ),
    "between validations": (
        [ended("last.pt", 7), BEST], {}, FAILED, "stopped_early is true at step 7, but it stops at a multiple", ""
    ),
    "at its end": ([ended("last.pt", 20), ended("best.pt", 16)], {}, FAILED, "below train.steps = 20", ""),
    "best.pt is gone": ([LAST], {"miou": 0.5}, "not checked", "best.pt is missing, or did not pass", ""),
    "last.pt is gone": ([BEST], {}, "not checked", "last.pt or config.json was not checked", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", COURSES)
def test_a_best_score_and_an_early_stop_fit_the_checkpoints(
    tmp_path: Path, name: str
) -> None:
    checkpoints, changes, status, words, precision = COURSES[name]
    result = {"best_miou": 0.5, "miou": 0.3, "stopped_early": True, **changes}
    (tmp_path / "result.json").write_text(json.dumps(result))
    config = compose(
        settings(
            tmp_path, "train.patience=2", "train.validate_every=2", "train.steps=20"
        )
    )
    config.train.precision = "bf16"
    asked = []

    def evaluate(which: str, precision: str) -> dict[str, float]:
        asked.append((which, precision))
        return {"miou": 0.5}

    line = check_best(tmp_path, config, checkpoints, evaluate, "")
    assert (line.part, line.status) == ("best", status), line.text
    assert words in line.text
    assert asked == ([("best", precision)] if precision else [])
    if (
        status == "passed"
    ):  # also where it need not be measured: the other line did not measure last.pt either
        for without in ((None, ""), (evaluate, "no data")):
            line = check_best(tmp_path, config, checkpoints, *without)
            assert (line.status, without[1] or "evaluate=false") == (
                "not checked",
                line.text.rpartition(": ")[2],
            )
