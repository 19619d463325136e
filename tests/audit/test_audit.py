"""An audit passes a run that is what it says, and names what changed afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from ranks import trained_by
from runs import run, settings, torch_restored, write_camvid
from segpipe.audit import evidence
from segpipe.audit import examine as examination
from segpipe.audit.evidence import FAILED, NOTED, PASSED, UNCHECKED, Line
from segpipe.audit.examine import Audit, Progress, examine
from segpipe.cli import audit as command
from segpipe.cli.main import main as segpipe
from segpipe.data.samples import open_splits
from segpipe.determinism import flags
from segpipe.distributed.group import Group
from segpipe.errors import DataError, IntegrityError
from segpipe.ledger import inputs
from segpipe.ledger.reader import changes, read_inputs, read_run
from segpipe.ledger.rows import (
    SHARD,
    STEP,
    encode,
    encode_rows,
    ledger_path,
    read_file,
    slots,
)
from segpipe.settings.compose import compose
from segpipe.settings.config import Config, from_mapping
from segpipe.train import checkpoint, engine

pytestmark = pytest.mark.slow

STEPS, KEPT = 4, 2
LAST_SPAN = 0  # a seed that chooses the last span


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    """An audit sets the switches of the run that it trains again."""
    with torch_restored():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and a finished run: checkpoints after 2 and 4 updates."""
    folder = tmp_path_factory.mktemp("audit")
    write_camvid(folder / "data")
    changes = (
        "data=camvid",
        f"data.root={folder / 'data'}",
        f"train.steps={STEPS}",
        f"checkpoint.keep_every={KEPT}",
    )
    assert run(folder / "run", *changes, "compute.shards=2", "checkpoint.every=3") == 0
    return folder


def compose_of(folder: Path) -> Config:
    """The run's configuration."""
    return from_mapping(json.loads((folder / "run" / "config.json").read_text()))


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """The same, to be altered."""
    for name in ("run", "data"):
        shutil.copytree(whole / name, tmp_path / name)
    return tmp_path


def audited(
    folder: Path,
    progress: Progress = lambda what, done, total: None,
    **wishes: object,
) -> Audit:
    """Audit with one update of one span, in this process."""
    asked: dict[str, object] = {
        "seed": 1,
        "spans": 1,
        "span_steps": 1,
        "settings": {"data.root": str(folder / "data")},
    }
    return examine(folder / "run", progress, **{**asked, **wishes})  # type: ignore[arg-type]


def failures(audit: Audit) -> dict[str, str]:
    """Text of the lines that failed, by part."""
    found: dict[str, str] = {}
    for line in audit.lines:
        if line.status == FAILED:
            found[line.part] = f"{found.get(line.part, '')} {line.text}".strip()
    return found


def test_rows_that_a_process_lost_are_a_fault_of_the_checkpoints_that_follow_them(
    copy: Path,
) -> None:
    """No whole step comes after these rows, as in a killed run; but all ranks had written them before last.pt."""
    path = ledger_path(copy / "run", 0)
    content, session = path.read_bytes(), read_file(path).sessions[0]
    rows = session.rows
    kept = (rows["kind"] != SHARD) | (rows["step"] < STEPS - 1) | (rows["shard"] != 1)
    path.write_bytes(content[: session.start] + rows[kept].tobytes())
    lost = f"the ledger lacks shards of step {STEPS - 1}"
    assert failures(audited(copy)).keys() == {"ledger", "best.pt", "last.pt"}
    (copy / "run" / "result.json").unlink()  # as if it had been killed
    found = failures(audited(copy))
    assert found.keys() == {"best.pt", "last.pt"}  # not step_000002.pt
    assert all(lost in text for text in found.values())
    kept &= (rows["kind"] != STEP) | (rows["step"] < STEPS - 1)
    path.write_bytes(content[: session.start] + rows[kept].tobytes())
    ahead = failures(audited(copy)).get("last.pt", "")
    assert lost not in ahead, "of a step that the ledger does not reach"


def test_a_sound_run_passes_from_the_first_image_to_the_final_file(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["spans=3", "span_steps=0", "seed=4", f"out={tmp_path}"]
    assert segpipe(["audit", f"run={whole / 'run'}", *arguments]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    counts = report["verdict"], report["replayed"], report["updates"]
    assert counts == ("passed", STEPS, STEPS)
    parts = [line["part"] for line in report["lines"]]
    assert parts == [
        *["data", "code", "ledger", "config"],
        *["best.pt", "last.pt", "step_000002.pt", "replay", "replay", "states"],
        *["result", "export"],
    ]
    statuses = {line["part"]: line["status"] for line in report["lines"]}
    assert statuses.pop("export") == NOTED, "export.enabled=false"
    assert set(statuses.values()) == {PASSED}
    assert "4 of 4 updates (100%)" in capsys.readouterr().out
    texts = {line["part"]: line["text"] for line in report["lines"]}
    recorded = read_inputs(whole / "run" / "inputs.json")
    digests = checkpoint.load(whole / "run" / "last.pt")["digests"]
    assert recorded["data"]["sha256"] in texts["data"]
    assert recorded["code"]["sha256"] in texts["code"]
    assert "step_000002.pt, best.pt, last.pt" in texts["states"]
    assert digests["model"] in texts["last.pt"]
    assert digests["ema"] in texts["last.pt"]


def test_a_run_of_two_processes_is_replayed_by_one(copy: Path) -> None:
    shutil.rmtree(copy / "run")
    changes = (
        "data=camvid",
        f"data.root={copy / 'data'}",
        f"train.steps={STEPS}",
        f"checkpoint.keep_every={KEPT}",
    )
    trained_by(2, copy / "run", *changes, "compute.shards=2")
    audit = audited(copy, span_steps=0, seed=LAST_SPAN)
    assert (audit.verdict, audit.replayed) == ("passed in part", KEPT), audit.sentence
    states = [line for line in audit.lines if line.part == "states"]
    assert [line.status for line in states] == [PASSED, UNCHECKED]
    assert "last.pt" in states[0].text
    assert "step_000002.pt" in states[1].text


def flip(path: Path, place: int) -> None:
    """Change one bit of one byte."""
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


def edit(path: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=2))


def in_row(folder: Path) -> None:
    """Another digest of the weights of update 1, in a row that is whole."""
    path = ledger_path(folder / "run", 0)
    (session,) = read_file(path).sessions
    rows = session.rows.copy()
    place = np.flatnonzero((rows["step"] == 1) & (rows["kind"] == STEP))[0]
    rows["digest"][place, slots(STEP, 2)["weights"]] ^= 1
    start = path.read_bytes()[: session.start]
    path.write_bytes(start + encode_rows(rows))


def in_ledger(folder: Path) -> None:
    path = ledger_path(folder / "run", 0)
    (session,) = read_file(path).sessions
    flip(path, session.start + 5 * session.rows.itemsize + 70)


def cut_ledger(folder: Path) -> None:
    path = ledger_path(folder / "run", 0)
    (session,) = read_file(path).sessions
    path.write_bytes(path.read_bytes()[: -3 * session.rows.itemsize])


def in_weights(folder: Path) -> None:
    path = folder / "run" / "step_000002.pt"
    flip(path, path.stat().st_size // 2)


def edit_checkpoint(
    folder: Path,
    change: Callable[[dict[str, Any]], object],
    name: str = "step_000002.pt",
) -> None:
    """Change what a checkpoint holds; it is whole."""
    path = folder / "run" / name
    state = checkpoint.load(path)
    change(state)
    checkpoint.save(path, state)


def other_weights(folder: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        next(iter(state["model"].values()))[0, 0, 0, 0] += 1

    edit_checkpoint(folder, change)


def in_count(folder: Path) -> None:
    """A buffer of whole numbers, of which the ledger has no digest."""

    def change(state: dict[str, Any]) -> None:
        counts = [v for k, v in state["model"].items() if k.endswith("tracked")]
        counts[0].add_(1)

    edit_checkpoint(folder, change)


def in_classes(folder: Path) -> None:
    """The table of last.pt alone, by which the robot's file names its classes."""

    def change(state: dict[str, Any]) -> None:
        state["classes"]["names"] = state["classes"]["names"][::-1]

    edit_checkpoint(folder, change, "last.pt")


def other_setting(group: str, **values: object) -> Callable[[Path], None]:
    """Settings inside last.pt, as in a checkpoint of another run."""

    def change(state: dict[str, Any]) -> None:
        state["config"][group].update(values)

    return lambda folder: edit_checkpoint(folder, change, "last.pt")


def stale_checkpoint(folder: Path) -> None:
    """An earlier last.pt, put back."""
    shutil.copy(folder / "run" / "step_000002.pt", folder / "run" / "last.pt")


def without_rank(folder: Path) -> None:
    """A session of two processes of which one file is left."""
    path = ledger_path(folder / "run", 0)
    raw = path.read_bytes()
    (session,) = read_file(path).sessions
    header = replace(session.header, world_size=2)
    path.write_bytes(encode(header) + raw[session.start :])


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


def in_result(folder: Path) -> None:
    edit(
        folder / "run" / "result.json",
        lambda content: content.update(ema_digest="0" * 32),
    )


# Change: parts of the report that fail, and what they name. Every other part passes.
CHANGES: dict[str, tuple[Callable[[Path], object], dict[str, str]]] = {
    "a byte of a checkpoint": (in_weights, {"step_000002.pt": "step_000002.pt"}),
    "an earlier checkpoint": (stale_checkpoint, {"result": "last.pt is of step 2"}),
    "the data set inside last.pt": (
        other_setting("data", root="elsewhere"), {"last.pt": "settings match no session"}
    ),
    "the learning rate inside last.pt": (
        other_setting("optim", lr=1.0), {"last.pt": "settings match no session"}
    ),
    "a setting of no version": (
        lambda folder: edit_checkpoint(folder, lambda state: state["config"].update(surprise=1)),
        {"step_000002.pt": "settings match no session"},
    ),
    "a checkpoint without settings": (
        lambda folder: edit_checkpoint(folder, lambda state: state.update(config=7)),
        {"step_000002.pt": "settings match no session"},
    ),
    "weights of another training": (
        other_weights,
        {"step_000002.pt": "differs from what the replayed updates give", "replay": "step 1: weights differ"},
    ),
    "the names of the classes": (
        in_classes, {"last.pt": "classes.names differs from what the replayed updates give"}
    ),
    "a buffer that no row covers": (in_count, {"step_000002.pt": "num_batches_tracked differs from what the replayed"}),
    "a byte of the ledger": (in_ledger, {"ledger": "row 5 of session 0 (after step 1, shard 0) was altered"}),
    "a digest in the ledger": (in_row, {"replay": "step 1: weights differ"}),
    "the file of a process": (without_rank, {"ledger": "rank 1 of 2 lacks session 0"}),
    "the end of the ledger": (
        cut_ledger, {"result": "last.pt is of step 4, but the ledger has 3 updates"}
    ),
    "some pixels of an image": (in_image, {"data": "train/frame03.png was altered", "replay": "sample 3 (frame03)"}),
    "bytes of a validation image": (in_file, {"data": "val/frame01.png was altered"}),
    "a digest of the result": (in_result, {"result": "ema_digest is '00000000"}),
    "a setting": (in_setting, {"config": "optim.lr is 0.05 in the ledger (session 0) and 0.051 in config.json"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_afterwards_fails_and_is_named(copy: Path, name: str) -> None:
    change, expected = CHANGES[name]
    change(copy)
    whole_run = change in (other_weights, in_count, in_classes, in_row, in_image)
    audit = audited(copy, **{"spans": 9, "span_steps": 0} if whole_run else {})
    found = failures(audit)
    assert (audit.verdict, audit.exit_code) == ("failed", 13)
    assert found.keys() == expected.keys(), found
    for part, words in expected.items():
        assert words in found[part], found
    assert all(f"{part}: " in audit.sentence for part in expected)


def test_exported_files_pass_where_all_gates_do(tmp_path: Path) -> None:
    config = compose(settings(tmp_path))
    config.export.enabled = True
    assert evidence.check_export(tmp_path, config, None).status == UNCHECKED
    config.export.enabled = False
    assert evidence.check_export(tmp_path, config, None).status == NOTED
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.onnx").touch()

    def refuse(config: Config, folder: Path) -> str:
        raise IntegrityError(f"{folder}: model.onnx was altered")

    line = evidence.check_export(tmp_path, config, lambda config, folder: "verified")
    assert line == Line("export", PASSED, "verified")
    line = evidence.check_export(tmp_path, config, refuse)
    assert (line.status, "model.onnx was altered" in line.text) == (FAILED, True)
    assert evidence.check_export(tmp_path, config, None).status == UNCHECKED


def test_the_copy_itself_passes(copy: Path) -> None:
    """The control of all alterations."""
    found = audited(copy)
    assert (found.verdict, found.exit_code) == ("passed in part", 14)
    assert "1 of 4 updates (25%)" in found.sentence


def test_a_resume_may_set_what_reaches_no_number(copy: Path) -> None:
    """Config.json and its checkpoints then have other settings than the header of the first session."""
    again = (
        "data=camvid",
        f"data.root={copy / 'data'}",
        f"train.steps={STEPS}",
        "compute.shards=2",
        "data.workers=1",
    )
    before = compose_of(copy).data.workers
    for name in ("last.pt", "best.pt"):
        (copy / "run" / name).unlink()
    assert run(copy / "run", *again, "run.exists=resume") == 0
    saved = checkpoint.load(copy / "run" / "last.pt")["config"]
    after = compose_of(copy).data.workers
    assert (before, saved["data"]["workers"], after) == (0, 1, 1)
    assert failures(audited(copy)) == {}


def test_every_source_is_hashed_the_c_of_the_digests_too() -> None:
    assert {
        "train/engine.py",
        "ledger/digest.c",
        "run/report.html.j2",
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
        flags, "fingerprint", lambda **_: {**found, "torch": "9.9", "threads": 1}
    )
    audit = audited(whole)
    assert (audit.verdict, audit.exit_code, failures(audit)) == ("cannot audit", 2, {})
    assert "and '9.9' in this environment" in audit.sentence
    assert audited(whole, any_environment=True).verdict == "passed in part"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("no run", "holds no run"),
        ("no ledger", "has no readable ledger"),
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
    ledger = read_run(whole / "run")
    words = examination._obstacle(config, ledger, any_environment=False)
    assert f"compute.mode = {mode} does not promise" in words


@pytest.mark.parametrize(
    "argument",
    ["spans=0", "seed=x", "optim.lr=1", "any_environment=yes"],
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
        f"{tmp_path / 'file'} is not a writable folder. Set out=FOLDER"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("made_of", ["last.pt", "best.pt"])
def test_an_export_is_compared_with_the_checkpoint_that_it_was_made_of(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_of: str
) -> None:
    asked: list[str] = []

    def verify(given: dict[str, Any]) -> Any:
        asked.append(given["which"])
        return SimpleNamespace(line=lambda _: "verified")

    def export_alone(*_: Any, verify: Any, **__: Any) -> Audit:
        line = Line("export", PASSED, verify(Config(), tmp_path))
        return Audit("run", (line,), "", 0, 0, 0, 0.0)

    manifest = {"source": {"checkpoint": {"file": made_of}}}
    monkeypatch.setattr(command, "read_manifest", lambda folder: manifest)
    monkeypatch.setattr(command, "verify", verify)
    monkeypatch.setattr(command, "examine", export_alone)
    segpipe(["audit", f"run={whole / 'run'}", f"out={tmp_path}"])
    assert asked == [made_of.removesuffix(".pt")]


@pytest.mark.parametrize(("status", "code"), [("passed", 2), (FAILED, 13)])
def test_a_verdict_is_told_though_its_report_cannot_be_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: str,
    code: int,
) -> None:
    found = Audit(
        str(tmp_path), (Line("config", status, "what it is."),), "", 0, 1, 1, 0.0
    )
    monkeypatch.setattr(
        command, "examine", lambda *_, **__: (tmp_path / "audit").touch() or found
    )
    assert segpipe(["audit", f"run={tmp_path}"]) == code
    told = capsys.readouterr()
    assert "what it is" in told.out
    assert f"{found.sentence.rstrip('.')}.\n" in told.out
    assert "report.json" in told.err
    assert "Set out=FOLDER" in told.err


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
    inputs.record(config, open_splits(config))
    in_image(copy)
    with pytest.raises(
        DataError, match=r"train/frame03.png was altered since the run .* was started"
    ):
        inputs.record(config, open_splits(config))


@pytest.mark.parametrize(("local", "shared"), [(0, True), (1, True), (0, False)])
def test_a_machine_whose_files_differ_ends_the_run_before_its_first_step(
    copy: Path, monkeypatch: pytest.MonkeyPatch, local: int, shared: bool
) -> None:
    """The first rank of each other machine compares them with what rank 0 has recorded.

    Without a common disk the machine may still have the record of an earlier run.
    """
    config = compose(
        settings(copy / "run", "data=camvid", f"data.root={copy / 'data'}")
    )
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "-")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(Group, "own_shards", lambda group, shards: range(shards))
    of_rank_0 = hashlib.sha256((copy / "run/inputs.json").read_bytes() * shared)

    def gathered(_: Group, item: Any) -> list[Any]:
        return [of_rank_0.hexdigest() if isinstance(item, str) else item]

    monkeypatch.setattr(Group, "gather", gathered)
    monkeypatch.setattr(Group, "barrier", lambda _: None)

    def opened() -> None:
        group = Group(1, 2, torch.device("cpu"))
        with contextlib.closing(group.contract):
            run, stream, _ = engine._open(config, group, lambda _: (None, None), None)  # type: ignore[arg-type, return-value]
            stream.close()
            run.watch.close()

    opened()
    in_image(copy)
    if local or not shared:
        opened()
    else:
        with pytest.raises(DataError, match=r"train/frame03.png was altered"):
            opened()


@pytest.mark.parametrize(
    "without", ["data.hash=false", "compute.ledger=false", "compute.mode=off"]
)
def test_a_resume_without_hashes_refuses_other_names_and_sizes(
    tmp_path: Path,
    without: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before its trackers hear of the session."""
    data, folder = write_camvid(tmp_path / "data"), tmp_path / "run"
    changes = (
        "data=camvid",
        f"data.root={data}",
        "optim.schedule_steps=9",
        "compute.shards=1",
        without,
    )
    assert run(folder, *changes, "train.steps=1") == 0
    kept = (folder / "config.json").read_bytes()
    monkeypatch.delattr("segpipe.run.launch.open_tracker")
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
            f"data.root = {data} on {platform.node()}: {name} was altered since the run"
            in capsys.readouterr().err
        )
        assert (folder / "config.json").read_bytes() == kept
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
    monkeypatch.undo()
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
    inputs.record(sized, open_splits(sized))
    inputs.record(hashed, open_splits(hashed), ledger=False)
    with pytest.raises(DataError, match=r"val/frame01.png was altered"):
        inputs.record(hashed, open_splits(hashed))
    cv2.imwrite(
        str(copy / "data" / "train" / "frame00.png"), np.zeros((72, 96, 3), np.uint8)
    )
    with pytest.raises(
        DataError, match=r"train/frame00.png was altered since .* \(1 changes\)"
    ):
        inputs.record(sized, open_splits(sized))


def test_the_sizes_of_files_that_were_not_hashed_are_audited(copy: Path) -> None:
    path, config = copy / "run" / "inputs.json", compose_of(copy)
    config.data.root = str(copy / "data")

    def unhashed(content: dict[str, Any]) -> None:
        content["data"].update(files={}, hashed=False)

    edit(path, unhashed)
    line = evidence.check_inputs(copy / "run", config)[0]
    assert (line.status, "sizes are unchanged" in line.text) == (UNCHECKED, True)
    image = np.zeros((72, 96, 3), np.uint8)
    cv2.imwrite(str(copy / "data" / "train" / "frame03.png"), image)
    line = evidence.check_inputs(copy / "run", config)[0]
    assert (line.status, "train/frame03.png was altered" in line.text) == (FAILED, True)


def test_sizes_that_are_not_known_are_not_compared(tmp_path: Path) -> None:
    """Of samples that name no files, and of files that a user's class fetches later."""
    sources = {
        "a": str(tmp_path / "absent"),
        "b": lambda: pytest.fail("it was read"),
        "c": str(tmp_path / "c"),
    }
    (tmp_path / "c").write_bytes(b"123")
    data = SimpleNamespace(inputs=lambda: sources)
    found = inputs.sizes_of(inputs.inputs_of([data]))
    assert found == {"a": None, "b": None, "c": 3}
    (tmp_path / "absent").write_bytes(b"fetched")

    def changed(**sizes: int | None) -> list[str]:
        recorded = {"sizes": {**found, **sizes}, "files": {}}
        return inputs.changed_inputs(recorded, inputs.inputs_of([data]))

    assert changed() == []
    assert changed(c=None, d=None) == ["d is missing"]
    assert changed(c=4) == ["c was altered"]


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


def test_changed_code_of_a_network_is_named_and_not_imported(
    project: Callable[[str, str], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project(
        "mynet.py",
        """
        from torch import nn

        class Net(nn.Conv2d):
            def __init__(self, num_classes):
                super().__init__(3, num_classes, 3, padding=1)
        """,
    )
    assert run(tmp_path / "run", "model.name=mynet:Net", "train.steps=1") == 0
    project("mynet.py", "raise SystemExit('was imported')")
    del sys.modules["mynet"]
    capsys.readouterr()
    with torch_restored():
        code = segpipe(["audit", f"run={tmp_path / 'run'}"])
    said = "".join(capsys.readouterr())
    assert code == 2, said
    assert "mynet.py" in said
    assert "was imported" not in said
