"""Attacks on the promises that no digest shows: a job in the same folder, another environment, changed evidence, impure
transforms. Each must be refused with its cause named, and each has a control that passes."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import measure as measuring
from segpipe.checks import purity as checker
from segpipe.data.augment import TRANSFORMS, Augmenter
from segpipe.errors import ImpureAugmentError
from segpipe.settings.groups import AugmentConfig
from segpipe.train import checkpoint

sys.path.append(
    str(measuring.ROOT / "tests")
)  # the plants are those that the tests find
import impure

RECIPE = (
    "model=fast_scnn", "data=synthetic", "data.size=[64,96]", "data.num_train=16", "data.num_val=4", "data.workers=0",
    "augment.crop_size=[64,64]", "train.progress=false", "compute.device=cpu", "compute.shards=2", "compute.threads=1",
    "compute.samples_per_shard=2", "checkpoint.keep_every=2", "augment.check=false", "export.enabled=false",
)  # fmt: skip
STEPS, LONG = 4, 100_000
EXISTS = ("error", "resume", "replace")
VARIABLE = {"ONEDNN_MAX_CPU_ISA": "AVX2"}  # another path of oneDNN's kernels
Row = dict[str, Any]


def command(
    name: str, *settings: str, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "segpipe", name, *settings], cwd=measuring.ROOT, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400", **(environment or {})},
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and words of a process; one that hangs is killed and has exit code 124."""
    try:
        said, _ = process.communicate(timeout=600)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        measuring.kill_with_children(process)
        return 124, process.communicate()[0]


def train(
    folder: Path,
    *changes: str,
    steps: int = STEPS,
    environment: dict[str, str] | None = None,
) -> Any:
    return command(
        "train", *RECIPE, f"train.steps={steps}", f"run.root={folder.parent}", f"run.name={folder.name}", *changes,
        environment=environment,
    )  # fmt: skip


def row(attack: str, found: tuple[int, str], code: int, *words: str) -> Row:
    """What was said; passed when the exit code is right, all words are there, and there is no traceback."""
    right = (
        found[0] == code
        and all(word in found[1] for word in words)
        and "Traceback" not in found[1]
    )
    lines = [
        line.strip()
        for line in found[1].splitlines()
        if any(word in line for word in words)
    ] or found[1][-600:]
    return {"attack": attack, "exit_code": found[0], "said": lines, "passed": right}


def second_owner(folder: Path) -> Iterator[Row]:
    """Two jobs with one name; the first is then killed, and the next takes over."""
    first = train(folder / "run", "checkpoint.keep_every=0", steps=LONG)
    while first.poll() is None and not (folder / "run" / "metrics.jsonl").exists():
        time.sleep(0.1)
    for exists in EXISTS:
        found = ended(train(folder / "run", f"run.exists={exists}"))
        yield row(
            f"another job in the folder, run.exists={exists}", found, 2, f"{first.pid}"
        )
    alive = first.poll() is None
    measuring.kill_with_children(first)
    first.communicate()
    yield {"attack": "the first job trains on", "passed": alive}
    found = ended(train(folder / "run", "run.exists=replace", steps=1))
    yield row(
        "control: the owner was killed with SIGKILL, and the next job takes over",
        found,
        0,
        "taken over",
    )


def other_environment(sound: Path, folder: Path) -> Iterator[Row]:
    """A variable that picks kernels: the fingerprint names it, so neither a resume nor an audit takes it for equal."""
    shutil.copytree(sound, folder / "run")
    (name, _), *_ = VARIABLE.items()
    (folder / "run" / "last.pt").unlink()  # so that there is something left to do
    found = ended(train(folder / "run", "run.exists=resume", environment=VARIABLE))
    yield row("resume with another ISA", found, 2, name)
    audit = ended(
        command(
            "audit",
            f"run={sound}",
            "spans=1",
            "seed=1",
            f"out={folder / 'audit'}",
            environment=VARIABLE,
        )
    )
    yield row("audit with another ISA", audit, 2, name)
    again = ended(train(folder / "again"))
    same = json.loads((folder / "again" / "result.json").read_text())["weights_digest"]
    wanted = json.loads((sound / "result.json").read_text())["weights_digest"]
    yield {
        **row("control: the same environment gives the same weights", again, 0),
        "passed": same == wanted,
    }


def _weights(run: Path) -> None:
    state = checkpoint.load(run / "last.pt")
    for value in state["ema"].values():
        if value.is_floating_point():
            value.add_(1e-3)
    checkpoint.save(run / "last.pt", state)


def _ledger(run: Path) -> None:
    path = run / "ledger" / "rank00.bin"
    path.write_bytes(path.read_bytes()[:-200])


def _export(run: Path) -> None:
    folder = run / "export"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"any bytes at all")


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights, with digests and hashes that fit them": (_weights, "ema_digest"),
    "the end of the ledger": (_ledger, "ledger"),
    "an export of any bytes at all": (_export, "export"),
}


def changed(sound: Path, folder: Path) -> Iterator[Row]:
    """Evidence that was changed after the training: the audit names the part."""
    for what, (change, word) in CHANGES.items():
        copy = folder / "".join(letter for letter in what if letter.isalpha())
        shutil.copytree(sound, copy)
        change(copy)
        arguments = (
            f"run={copy}",
            "spans=1",
            "span_steps=1",
            "seed=1",
            f"out={folder / 'audit'}",
        )
        yield row(f"changed: {what}", ended(command("audit", *arguments)), 13, word)
    found = ended(
        command(
            "audit",
            f"run={sound}",
            "spans=9",
            "span_steps=0",
            "seed=1",
            f"out={folder / 'audit'}",
        )
    )
    yield {
        **row("control: nothing was changed", found, found[0], "audit"),
        "passed": found[0] in (0, 14),
    }


def impure_transforms() -> Iterator[Row]:
    """Every plant of the tests is named by the check at the start; the honest caches pass all of its probes."""
    for kind in [*impure.CORPUS, *impure.HONEST]:
        impure.forget()
        TRANSFORMS["planted"] = kind
        said = ""
        try:
            checker.quick(
                Augmenter(AugmentConfig(crop_size=[48, 48], extra=["planted"])),
                impure.Noise(),
            )
        except ImpureAugmentError as error:
            said = str(error)
        finally:
            del TRANSFORMS["planted"]
        wanted = (
            f"planted ({kind.__name__})" in said and impure.NAMED.get(kind, "") in said
        )
        what = "impure" if kind in impure.CORPUS else "control: honest"
        yield {
            "attack": f"{what}: {kind.__name__}",
            "said": said,
            "passed": wanted if kind in impure.CORPUS else not said,
        }


def sound(root: Path) -> Path:
    """A run that is as it should be, trained when the first part asks for it."""
    if not (root / "sound").exists():
        ended(train(root / "sound"))
    return root / "sound"


# What is tried, each in a folder of its own.
PARTS: tuple[Callable[[Path], Iterable[Row]], ...] = (
    lambda root: impure_transforms(),
    lambda root: second_owner(root / "owners"),
    lambda root: other_environment(sound(root), root / "environment"),
    lambda root: changed(sound(root), root / "changed"),
)
SMOKE = {"PARTS": PARTS[1:2], "EXISTS": ("resume",)}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """All attacks and controls; passed when each attack is refused by name and each control goes through."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for part in PARTS:
            for found in part(root):
                told = (
                    json.dumps(found)
                    .replace(name, "FOLDER")
                    .replace(sys.executable, "python")
                )
                rows.append(json.loads(told))
                Console(stderr=True).print(rows[-1], soft_wrap=True, markup=False)
    return {
        "what": " ".join(RECIPE),
        "machine": measuring.machine(),
        "impure": len(impure.CORPUS),
        "honest": len(impure.HONEST),
        "rows": rows,
        "passed": all(each["passed"] for each in rows),
    }
