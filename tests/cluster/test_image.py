"""The container image: built by buildah on a base of the user's, and a training in it.

    BASE=debian:12-slim python -m pytest tests/cluster/test_image.py -s
    BASE=debian:12-slim TORCH='torch>=2.11' python -m pytest tests/cluster/test_image.py -s    # without CUDA

Takes minutes and gigabytes: skipped without BASE. BUILD has further options of `buildah bud`, such as a volume.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE, TORCH = os.environ.get("BASE", ""), os.environ.get("TORCH", "")
NAME = "localhost/segpipe-tested"
ISOLATED = "--isolation=chroot"  # needs no rights beyond those of this user
RUN = (
    "data=synthetic model=fast_scnn augment.crop_size=[64,64] compute.device=cpu compute.shards=2 "
    "compute.samples_per_shard=2 compute.threads=1 export.enabled=false"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.daemons,
    pytest.mark.skipif(not BASE, reason="BASE names no image to build on"),
    pytest.mark.skipif(not shutil.which("buildah"), reason="buildah is not installed"),
]
Within = Callable[..., "subprocess.CompletedProcess[str]"]


def buildah(*arguments: str) -> str:
    """What buildah prints; its errors go to the console."""
    command = ["buildah", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the files that git knows, as they are now."""
    context = tmp_path_factory.mktemp("context")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        target = context / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    how = ["CPU=1", f"TORCH={TORCH}"] if TORCH else []
    given = [f"--build-arg={each}" for each in (f"BASE={BASE}", *how)]
    more = shlex.split(os.environ.get("BUILD", ""))
    buildah("bud", ISOLATED, *more, *given, f"--tag={NAME}", str(context))
    return NAME


@pytest.fixture
def within(image: str) -> Iterator[Within]:
    """Runs a command in a container of the image."""
    container = buildah("from", image).strip()

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        line = ["buildah", "run", ISOLATED, container, "--", *command]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    yield run
    buildah("rm", container)


def test_what_it_is(image: str, within: Within) -> None:
    about = json.loads(buildah("inspect", "--type=image", image))["OCIv1"]
    assert about["config"]["Entrypoint"] == ["tini", "--", "segpipe"]
    assert within("id", "-u").stdout.strip() == about["config"]["User"] == "10001"
    sizes = within("sh", "-c", "du -sm .venv /usr | cut -f1").stdout.split()
    print(f"MiB of .venv and /usr: {', '.join(sizes)}")
    copies = within("find", "/", "-xdev", "-name", "libcudart.so*", "-type", "f")
    assert len(copies.stdout.split()) == (0 if TORCH else 1)
    denied = within("touch", "/usr/bin/segpipe")
    assert denied.returncode


def test_a_training_in_it_gives_the_same_bits_by_one_process_and_by_two(
    within: Within,
) -> None:
    for name, nproc in (("one", 1), ("two", 2)):
        given = f"{RUN} run.name={name} train.steps=3 compute.nproc={nproc}"
        ran = within("tini", "--", "segpipe", "train", *given.split())
        assert ran.returncode == 0, ran.stdout + ran.stderr
    compared = within("segpipe", "compare", "runs/one", "runs/two")
    assert compared.returncode == 0, compared.stdout


def test_sigterm_to_its_first_process_saves(within: Within) -> None:
    """As `docker stop` sends it."""
    train = f"tini -- segpipe train {RUN} run.name=stopped train.steps=100000 train.log_every=1"
    script = f"{train} & until test -s runs/stopped/metrics.jsonl; do sleep 0.2; done; kill -TERM $!; wait $!"
    stopped = within("sh", "-c", script)
    assert stopped.returncode == 130, stopped.stdout + stopped.stderr
    assert within("test", "-f", "runs/stopped/last.pt").returncode == 0
