"""The runtime on a hand-made artifact: every frame has an answer or a reason, and altered files are never used."""

from __future__ import annotations

import ast
import contextlib
import gc
import hashlib
import io
import json
import math
import mmap
import os
import resource
import shutil
import struct
import subprocess
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import onnx
import onnxruntime
import PIL.Image
import pytest
from artifacts import SIZE, answer, frame, toy_manifest, write_artifact, write_sums

from segpipe.files import file_sha256
from segpipe.runtime import (
    ArtifactError,
    EngineError,
    Segmenter,
    SelfTestError,
    Status,
    make_session,
    read_artifact,
)
from segpipe.runtime.__main__ import main, read_image
from segpipe.runtime.artifact import CONFIDENCE_SHARE
from segpipe.runtime.frames import RepeatCounter
from segpipe.runtime.session import Session

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_artifact(tmp_path / "export")


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("toy") / "export")


@pytest.fixture
def segmenter(shared_folder: Path) -> Segmenter:
    return Segmenter.load(shared_folder, clock=lambda: 1000.0)


def refuses(result: Any, status: Status) -> bool:
    """Whether `result` has this status and no answer at all."""
    no_answer = (
        result.mask.shape == SIZE
        and result.mask.dtype == np.uint8
        and (result.mask == 255).all()
    )
    return bool(result.status is status and no_answer and not result.confidence.any())


def answers(segmenter: Segmenter, seed: int) -> bool:
    """Whether a sound frame gets its own answer."""
    image = frame(seed)
    result = segmenter.infer(image, 1000.0)
    mask, confidence = answer(image)
    assert mask.min() < mask.max()
    equal = np.array_equal(result.mask, mask) and np.array_equal(
        result.confidence, confidence
    )
    return result.status is Status.OK and equal


# Frames


def test_names_of_statuses_are_a_contract() -> None:
    names = [
        "OK",
        "BAD_SHAPE",
        "BAD_DTYPE",
        "STALE",
        "TOO_DARK",
        "SATURATED",
        "IMPLAUSIBLE",
        "FROZEN",
        "DEADLINE",
        "ERROR",
    ]
    assert (
        [status.name for status in Status]
        == [status.value for status in Status]
        == names
    )


def test_a_sound_frame_is_answered(segmenter: Segmenter) -> None:
    assert answers(segmenter, 5)
    status, mask, confidence, latency_ms, model_id = segmenter.infer(frame(6))
    assert status == "OK"
    assert mask.shape == SIZE
    assert confidence.shape == (8, 12)
    assert latency_ms > 0
    digest = hashlib.sha256(
        (segmenter.artifact.folder / "model.onnx").read_bytes()
    ).hexdigest()
    assert model_id == f"toy-fp32-{digest[:12]}"


class Shot(NamedTuple):
    """A frame as a camera or a careless driver gives it, and the status that it must get."""

    make: Callable[[], Any]
    status: Status
    stamp: Any = 1000.0
    times: int = 1


BLANK = (*SIZE, 3)
SHOTS = {
    "nan": Shot(lambda: np.full(BLANK, np.nan, np.float32), Status.BAD_DTYPE),
    "infinity": Shot(lambda: np.full(BLANK, np.inf, np.float32), Status.BAD_DTYPE),
    "float": Shot(lambda: frame(7).astype(np.float64), Status.BAD_DTYPE),
    "float 0 to 1": Shot(lambda: (frame(7) / 255).astype(np.float16), Status.BAD_DTYPE),
    "16 bit": Shot(lambda: frame(7).astype(np.uint16), Status.BAD_DTYPE),
    "16 bit big-endian": Shot(lambda: frame(7).astype(">u2"), Status.BAD_DTYPE),
    "signed": Shot(lambda: frame(7).astype(np.int8), Status.BAD_DTYPE),
    "bool": Shot(lambda: frame(7) > 100, Status.BAD_DTYPE),
    "objects": Shot(lambda: np.full(BLANK, None), Status.BAD_DTYPE),
    "records": Shot(lambda: np.zeros(BLANK, [("level", np.uint8)]), Status.BAD_DTYPE),
    "masked": Shot(lambda: np.ma.masked_greater(frame(7), 200), Status.BAD_DTYPE),
    "fully masked": Shot(lambda: np.ma.masked_all(BLANK, np.uint8), Status.BAD_DTYPE),
    "masked nowhere": Shot(lambda: np.ma.array(frame(7)), Status.BAD_DTYPE),
    "none": Shot(lambda: None, Status.BAD_DTYPE),
    "list": Shot(lambda: frame(7).tolist(), Status.BAD_DTYPE),
    "bytes": Shot(lambda: frame(7).tobytes(), Status.BAD_DTYPE),
    "no bytes": Shot(lambda: b"", Status.BAD_DTYPE),
    "cropped": Shot(lambda: frame(7)[:-1], Status.BAD_SHAPE),
    "larger": Shot(lambda: np.repeat(frame(7), 2, axis=0), Status.BAD_SHAPE),
    "transposed": Shot(lambda: frame(7).transpose(1, 0, 2), Status.BAD_SHAPE),
    "channels first": Shot(lambda: frame(7).transpose(2, 0, 1), Status.BAD_SHAPE),
    "gray": Shot(lambda: frame(7)[..., 0], Status.BAD_SHAPE),
    "alpha": Shot(lambda: np.zeros((*SIZE, 4), np.uint8), Status.BAD_SHAPE),
    "batch": Shot(lambda: frame(7)[None], Status.BAD_SHAPE),
    "scalar": Shot(lambda: np.array(7, np.uint8), Status.BAD_SHAPE),
    "0 bytes": Shot(lambda: np.zeros(0, np.uint8), Status.BAD_SHAPE),
    "no rows": Shot(lambda: frame(7)[:0], Status.BAD_SHAPE),
    "black": Shot(lambda: np.zeros(BLANK, np.uint8), Status.TOO_DARK),
    "lens cap": Shot(lambda: frame(7) // 40, Status.TOO_DARK),
    "white": Shot(lambda: np.full(BLANK, 255, np.uint8), Status.SATURATED),
    "sun": Shot(
        lambda: np.where(np.arange(BLANK[1])[:, None] < 40, 255, frame(7)).astype(
            np.uint8
        ),
        Status.SATURATED,
    ),
    "stale": Shot(lambda: frame(7), Status.STALE, stamp=999.0),
    "from the future": Shot(lambda: frame(7), Status.STALE, stamp=1001.0),
    "overtaken": Shot(lambda: frame(7), Status.STALE, stamp=999.9),
    "no time": Shot(lambda: frame(7), Status.STALE, stamp=math.nan),
    "a stamp of text": Shot(lambda: frame(7), Status.ERROR, stamp="now"),
    "frozen": Shot(lambda: frame(7), Status.FROZEN, times=6),
    "run fails": Shot(lambda: frame(7, green=255), Status.ERROR),
    "sound": Shot(lambda: frame(7), Status.OK),
    "sound, no stamp": Shot(lambda: frame(7), Status.OK, stamp=None),
    "sound, column after column": Shot(lambda: np.asfortranarray(frame(7)), Status.OK),
    "sound, every other pixel": Shot(
        lambda: frame(7).repeat(2, 0).repeat(2, 1)[::2, ::2], Status.OK
    ),
    "sound, of four channels three": Shot(
        lambda: np.dstack([frame(7), frame(8)])[..., :3], Status.OK
    ),
    "sound, mapped from a file": Shot(lambda: frame(7).view(np.memmap), Status.OK),
    "sound, read-only": Shot(
        lambda: np.frombuffer(frame(7).tobytes(), np.uint8).reshape(BLANK), Status.OK
    ),
    "sound, negative row stride": Shot(lambda: frame(7)[::-1].copy()[::-1], Status.OK),
    "sound, negative column stride": Shot(
        lambda: frame(7)[:, ::-1].copy()[:, ::-1], Status.OK
    ),
    "sound, negative channel stride": Shot(
        lambda: frame(7)[..., ::-1].copy()[..., ::-1], Status.OK
    ),
    "sound, stride of zero": Shot(
        lambda: np.broadcast_to(frame(7)[:1], BLANK), Status.OK
    ),
}


@pytest.mark.parametrize("name", SHOTS)
def test_every_frame_gets_its_answer_or_a_reason_and_the_next_one_works(
    name: str, segmenter: Segmenter
) -> None:
    shot = SHOTS[name]
    for seed in range(2):
        assert answers(segmenter, seed)
        image = shot.make()
        for _ in range(shot.times):
            result = segmenter.infer(image, shot.stamp)
        if shot.status is Status.OK:
            assert result.status is Status.OK
            assert np.array_equal(result.mask, answer(image)[0])
            assert np.array_equal(result.confidence, answer(image)[1])
        else:
            assert refuses(result, shot.status)
    assert answers(segmenter, 2)
    assert bool(segmenter.last_error) == (shot.status is not Status.OK)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("larger", "(64, 48, 3), but (32, 48, 3) was needed"),
        (
            "gray",
            "(32, 48), but (32, 48, 3) was needed: height, width, 3",
        ),
        ("float", "float64, but uint8 was needed: 0 to 255"),
        ("list", "list, but a numpy array of uint8 was needed"),
        (
            "stale",
            "stamp = 999.0 and the clock says 1000.0, but it must be within 0.5 s of the clock",
        ),
        ("black", "mean = 0, but the export allows 10 to 245"),
        ("frozen", "5 frames in a row equal one of the last different ones"),
    ],
)
def test_a_refused_frame_is_explained(
    name: str, told: str, segmenter: Segmenter
) -> None:
    shot = SHOTS[name]
    for _ in range(shot.times):
        result = segmenter.infer(shot.make(), shot.stamp)
    assert result.status is shot.status
    assert segmenter.last_error.startswith(told)


def test_a_frame_that_cannot_be_read_is_refused(segmenter: Segmenter) -> None:
    assert refuses(segmenter.refuse(Status.BAD_DTYPE), Status.BAD_DTYPE)


@pytest.mark.parametrize("stamp", [999.4, 1000.6, float("nan"), float("-inf"), 0])
def test_a_stale_frame(stamp: float, segmenter: Segmenter) -> None:
    assert segmenter.infer(frame(0), 999.6).status is Status.OK
    assert refuses(segmenter.infer(frame(1), stamp), Status.STALE)
    assert segmenter.infer(frame(2), None).status is Status.OK
    assert refuses(segmenter.infer(frame(3), "now"), Status.ERROR)  # type: ignore[arg-type]


def test_a_frame_before_an_earlier_one_is_stale_until_the_clock_is_set_back(
    shared_folder: Path,
) -> None:
    now = [1000.0]
    segmenter = Segmenter.load(shared_folder, clock=lambda: now[0])

    def statuses(*stamps: float) -> list[Status]:
        return [
            segmenter.infer(frame(int(stamp * 10)), stamp).status for stamp in stamps
        ]

    assert (
        statuses(999.7, 999.9, 999.8, 999.9, 1000.1)
        == [Status.OK] * 2 + [Status.STALE] + [Status.OK] * 2
    )
    assert statuses(1009.0, 1000.0, 1000.1) == [Status.STALE] * 2 + [Status.OK], (
        "a refused stamp moves nothing"
    )
    now[0] = 500.0
    assert statuses(500.0, 499.9, 500.1) == [Status.OK, Status.STALE, Status.OK]
    now[0] = 500.2
    assert statuses(500.0, 500.2) == [Status.STALE, Status.OK]


def test_a_frozen_camera(shared_folder: Path) -> None:
    segmenter = Segmenter.load(shared_folder, frozen_after=3)
    buffer = frame(0)
    found = [segmenter.infer(buffer).status for _ in range(5)]
    assert found == [Status.OK] * 3 + [Status.FROZEN] * 2
    assert refuses(segmenter.infer(buffer), Status.FROZEN)
    buffer[-1, -1, -1] ^= 1  # drivers reuse their buffers
    assert [segmenter.infer(buffer).status for _ in range(4)] == [Status.OK] * 3 + [
        Status.FROZEN
    ]
    for step in range(10):
        buffer[-1, -1, -1] = step
        assert segmenter.infer(buffer).status is Status.OK
    patient = Segmenter.load(shared_folder, frozen_after=0)
    assert {patient.infer(buffer).status for _ in range(20)} == {Status.OK}


@pytest.mark.parametrize("num_buffers", [1, 2, 3, 4])
def test_a_driver_that_sends_its_buffers_in_turn_is_frozen(
    num_buffers: int, shared_folder: Path
) -> None:
    segmenter = Segmenter.load(shared_folder, frozen_after=3)
    buffers = [frame(seed) for seed in range(num_buffers)]
    found = [segmenter.infer(buffer).status for buffer in buffers * 6]
    last_ok = num_buffers + 2
    assert found == [Status.OK] * last_ok + [Status.FROZEN] * (len(found) - last_ok)
    assert segmenter.infer(frame(9)).status is Status.OK, "the camera is back"
    assert segmenter.infer(buffers[-1]).status is Status.OK


def test_a_camera_is_not_frozen_when_one_byte_changes() -> None:
    image = np.zeros((512, 512, 3), np.uint8)
    repetition = RepeatCounter()
    assert [repetition.count(image) for _ in range(3)] == [0, 1, 2]
    image[1, 1, 1] = 1
    assert [repetition.count(image) for _ in range(3)] == [0, 1, 2]
    smaller = image[:100]
    assert [repetition.count(smaller) for _ in range(2)] == [0, 1]


def test_an_id_that_no_class_has_is_an_error(tmp_path: Path) -> None:
    manifest = toy_manifest()
    del manifest["classes"][1]
    segmenter = Segmenter.load(write_artifact(tmp_path / "export", manifest))
    assert refuses(segmenter.infer(frame(3)), Status.ERROR)
    assert "mask holds id 1, but there are 1 classes" in segmenter.last_error
    assert segmenter.infer(frame(3) // 2).status is Status.OK


@pytest.mark.parametrize(
    "change", [lambda mask: mask.astype(np.int32), lambda mask: mask[:, :-1]]
)
def test_an_output_of_another_shape_or_type_is_an_error(
    change: Any, segmenter: Segmenter, monkeypatch: Any
) -> None:
    prepare = segmenter.session.engine.prepare

    def other(outputs: list[str]) -> Any:
        run, end = prepare(outputs)
        return lambda batch: [change(run(batch)[0]), run(batch)[1]], end

    with monkeypatch.context() as patch:
        patch.setattr(segmenter.session.engine, "prepare", other)
        assert refuses(segmenter.infer(frame(1)), Status.ERROR)
        assert "but uint8 (1, 32, 48) was needed" in segmenter.last_error
    assert answers(segmenter, 2)


def test_an_answer_is_not_overwritten_by_the_next(segmenter: Segmenter) -> None:
    first = segmenter.infer(frame(0))
    kept = first.mask.copy(), first.confidence.copy()
    segmenter.infer(frame(1))
    segmenter.infer(np.zeros((*SIZE, 3), np.uint8)).mask[:] = 0
    assert np.array_equal(first.mask, kept[0])
    assert np.array_equal(first.confidence, kept[1])
    assert refuses(segmenter.infer(np.zeros((*SIZE, 3), np.uint8)), Status.TOO_DARK)


# The deadline


def test_a_run_ends_at_its_deadline_and_the_next_one_works(shared_folder: Path) -> None:
    segmenter = Segmenter.load(shared_folder, clock=lambda: 1000.0)

    def timed(seed: int) -> tuple[Any, float]:
        """Answer to a slow frame, and how long this thread computed for it, in ms; the run has no other thread."""
        begun = time.thread_time()
        result = segmenter.infer(frame(seed, blue=100))
        return result, (time.thread_time() - begun) * 1e3

    shares = []
    for seed in range(3):
        segmenter.deadline_ms = None
        whole, whole_cpu_ms = timed(2 * seed)
        assert whole.status is Status.OK
        assert whole_cpu_ms > 100, "the control: the run is slow enough to be ended"
        segmenter.deadline_ms = (
            whole_cpu_ms / 5
        )  # not of the latency: on a busy machine the next run may be faster
        ended, ended_cpu_ms = timed(2 * seed + 1)
        assert refuses(ended, Status.DEADLINE)
        assert ended.latency_ms >= segmenter.deadline_ms
        assert ended_cpu_ms < 0.7 * whole_cpu_ms
        shares.append(ended.latency_ms / whole.latency_ms)
        segmenter.deadline_ms = 60_000
        assert answers(segmenter, seed)
    assert min(shares) < 0.7, (
        "by the clock too, where the machine was as busy with one as with the other"
    )
    segmenter.deadline_ms = 1e-6
    assert refuses(segmenter.infer(frame(7)), Status.DEADLINE)
    segmenter.deadline_ms = None
    assert timed(8)[0].status is Status.OK


def test_an_answer_that_is_late_is_none(
    segmenter: Segmenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = segmenter.session.run
    segmenter.deadline_ms = 100

    def late(image: np.ndarray, due: float) -> Any:
        time.sleep(0.2)
        return run(image)

    monkeypatch.setattr(segmenter.session, "run", late)
    assert refuses(segmenter.infer(frame(0)), Status.DEADLINE)


def test_the_deadline_thread_ends_with_the_segmenter(shared_folder: Path) -> None:
    segmenter = Segmenter.load(shared_folder, deadline_ms=60_000)
    assert segmenter.infer(frame(0)).status is Status.OK
    thread = segmenter.session._watchdog.thread
    assert thread.is_alive()
    del segmenter
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    idle = Segmenter.load(shared_folder)
    assert idle.infer(frame(0)).status is Status.OK
    assert "_watchdog" not in vars(idle.session), (
        "without a deadline there is no thread"
    )


def test_the_deadline_thread_sleeps_through_frames_in_time(shared_folder: Path) -> None:
    segmenter = Segmenter.load(shared_folder, clock=lambda: 1000.0, deadline_ms=60_000)
    assert answers(segmenter, 0)
    watchdog = segmenter.session._watchdog
    while math.isinf(watchdog._wakes):  # until the thread has come that far
        time.sleep(0.001)
    notes: list[None] = []
    notify = watchdog._condition.notify
    watchdog._condition.notify = lambda: (notes.append(None), notify())  # type: ignore[method-assign, assignment]
    assert all(answers(segmenter, seed) for seed in range(20))
    assert not notes
    slow = frame(0, blue=100)
    segmenter.deadline_ms = 5
    # The control: an earlier time wakes it, unless the time is over before the run starts.
    while not notes:
        assert refuses(segmenter.infer(slow), Status.DEADLINE)


def test_calls_from_several_threads_get_their_own_answers(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segmenter = Segmenter.load(shared_folder, clock=lambda: 1000.0, deadline_ms=60_000)
    right: list[bool] = []
    running, most = 0, 0
    run = segmenter.session.run

    def counted(image: np.ndarray, due: float) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.001)
        found = run(image, due)
        running -= 1
        return found

    monkeypatch.setattr(segmenter.session, "run", counted)
    threads = [
        threading.Thread(
            target=lambda first: right.extend(
                answers(segmenter, first + n) for n in range(20)
            ),
            args=[s],
        )
        for s in (0, 100, 200)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 60
    assert most == 1


def test_the_deadline_holds_for_the_wait_for_another_thread(
    segmenter: Segmenter, monkeypatch: Any
) -> None:
    entered, leave = threading.Event(), threading.Event()
    run = segmenter.session.run
    monkeypatch.setattr(
        segmenter.session,
        "run",
        lambda *given: (entered.set(), leave.wait(20), run(given[0]))[2],
    )
    first: list[Any] = []
    thread = threading.Thread(target=lambda: first.append(segmenter.infer(frame(0))))
    thread.start()
    assert entered.wait(60)
    segmenter.deadline_ms = 1
    assert refuses(segmenter.infer(frame(1)), Status.DEADLINE)
    assert not first, "it did not wait for the first frame, which waits for us"
    leave.set()
    thread.join()
    assert first[0].status is Status.OK
    segmenter.deadline_ms = 60_000
    assert answers(segmenter, 2)


def test_a_child_process_is_told_to_load_its_own(shared_folder: Path) -> None:
    segmenter = Segmenter.load(shared_folder, clock=lambda: 1000.0, deadline_ms=60_000)
    assert answers(segmenter, 0)
    reader, writer = os.pipe()
    with (
        warnings.catch_warnings(),
        segmenter._lock,
    ):  # held by another thread of the parent, which the child lacks
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12 warns of every fork beside threads
        child = os.fork()
    if child == 0:
        try:
            refused = refuses(segmenter.infer(frame(1), 1000.0), Status.ERROR)
            own = Segmenter.load(
                shared_folder, clock=lambda: 1000.0, deadline_ms=60_000
            )
            os.write(
                writer, f"{refused} {answers(own, 2)} {segmenter.last_error}".encode()
            )
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    told = os.read(reader, 1000).decode()
    assert told.startswith(
        f"True True RuntimeError: this Segmenter was loaded in process {os.getpid()}"
    ), told
    assert answers(segmenter, 3), "the parent goes on"


# Engines


@pytest.mark.parametrize(
    "providers", [["CUDAExecutionProvider"], ["CPUExecutionProvider", "Nonsense"], []]
)
def test_a_provider_that_is_not_here_is_no_silent_cpu(
    providers: list[str], shared_folder: Path
) -> None:
    with pytest.raises(
        EngineError,
        match=f"providers = .*{onnxruntime.__version__} has .*CPUExecutionProvider",
    ):
        Segmenter.load(
            shared_folder, providers=providers
        ) if providers else make_session(b"", providers=providers)
    assert main(["selftest", str(shared_folder), "--providers", "Nonsense"]) == 2
    assert answers(
        Segmenter.load(
            shared_folder, clock=lambda: 1000.0, providers=["CPUExecutionProvider"]
        ),
        1,
    )


def test_a_provider_that_does_not_start_is_no_silent_cpu(
    shared_folder: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDA", "CPUExecutionProvider"]
    )

    class OnTheCpu:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def get_providers(self) -> list[str]:
            return ["CPUExecutionProvider"]

    monkeypatch.setattr(onnxruntime, "InferenceSession", OnTheCpu)
    with pytest.raises(
        EngineError,
        match=r"providers = CUDA, but onnxruntime .* started CPUExecutionProvider only",
    ):
        Segmenter.load(shared_folder, providers=["CUDA"])


def test_an_onnxruntime_that_is_too_old_is_named(
    folder: Path, monkeypatch: Any
) -> None:
    change_manifest(folder, requires={"onnxruntime": "1.14"})
    write_sums(folder)
    for version, fits in (
        ("1.14.0", True),
        ("1.100", True),
        ("2.0", True),
        ("1.13.1", False),
        ("1.9.0", False),
    ):
        monkeypatch.setattr(onnxruntime, "__version__", version)
        if fits:
            assert Segmenter.load(folder).infer(frame(0)).status is Status.OK
        else:
            with pytest.raises(
                EngineError,
                match=f"onnxruntime {version} is too old .* version 1.14 or later",
            ):
                Segmenter.load(folder)


# The folder


@pytest.mark.parametrize(
    "name", ["model.onnx", "manifest.json", "golden/image.npy", "golden/confidence.npy"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "link", "pipe"])
def test_damaged_files_are_never_loaded(
    name: str, damage: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage in ("delete", "link", "pipe"):
        moved = path.rename(path.with_suffix(".moved"))
        if damage == "link":
            path.symlink_to(moved)
        elif damage == "pipe":  # opening it would wait for a writer for ever
            os.mkfifo(path)
    else:
        path.write_bytes(content if damage == "flip" else content[:-1])
    monkeypatch.setattr(
        onnxruntime,
        "InferenceSession",
        lambda *_, **__: pytest.fail("a session was made"),
    )
    with pytest.raises(ArtifactError, match=name) as caught:
        Segmenter.load(folder)
    assert caught.value.exit_code == 7


def test_a_file_that_nobody_reads_here_is_compared_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.pt2").write_bytes(b"for another program")
    write_sums(folder)
    runs: list[Any] = []
    run = Session.run
    monkeypatch.setattr(
        Session,
        "run",
        lambda self, image, *due: (runs.append(image), run(self, image, *due))[1],
    )
    Segmenter.load(folder)
    assert len(runs) == 5, "two golden frames, and three to warm up"
    (folder / "model.pt2").write_bytes(b"for another Program")
    with pytest.raises(ArtifactError, match=r"model\.pt2 has sha256"):
        Segmenter.load(folder)


def change_manifest(folder: Path, **entries: Any) -> None:
    manifest = {**json.loads((folder / "manifest.json").read_text()), **entries}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def giant_array() -> bytes:
    """The head of an array of 9 PiB."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": "|u1", "fortran_order": False, "shape": (10**8, 10**5, 1000)}
    )
    return head.getvalue()


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "other format": (
        lambda folder: change_manifest(folder, format="segpipe-export/9"),
        "has format 'segpipe-export/9'",
    ),
    "other profile": (
        lambda folder: change_manifest(folder, profile="isaac"),
        "profile isaac, .* needs robot",
    ),
    "no io": (
        lambda folder: change_manifest(folder, io={}),
        "manifest.json does not follow",
    ),
    "no limits": (
        lambda folder: change_manifest(folder, frame_limits={}),
        "manifest.json does not follow",
    ),
    "NaN as a limit": (  # every comparison with it is false
        lambda folder: change_manifest(
            folder,
            frame_limits={**toy_manifest()["frame_limits"], "mean": [math.nan, 200]},
        ),
        "does not follow .*NaN is not a JSON number",
    ),
    "an infinite limit": (
        lambda folder: change_manifest(
            folder,
            frame_limits={**toy_manifest()["frame_limits"], "mean": [0, math.inf]},
        ),
        "Infinity is not a JSON number",
    ),
    "no requirements": (
        lambda folder: change_manifest(folder, requires="1.15"),
        "manifest.json does not follow",
    ),
    "no input": (
        lambda folder: change_manifest(
            folder, io={**toy_manifest()["io"], "inputs": []}
        ),
        "does not follow",
    ),
    "deep": (
        lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
        "manifest.json does not follow",
    ),
    "an archive for an array": (
        lambda folder: (folder / "golden" / "mask.npy").write_bytes(
            b"PK\x03\x04" + bytes(50)
        ),
        "is not a numpy array",
    ),
    "a giant array": (
        lambda folder: (folder / "golden" / "mask.npy").write_bytes(giant_array()),
        "is not a numpy array|does not follow",
    ),
    "no json": (
        lambda folder: (folder / "manifest.json").write_text("{"),
        "manifest.json does not follow",
    ),
    "no model": (
        lambda folder: change_manifest(folder, files={}),
        "has no ONNX file of precision fp32, only: none",
    ),
    "no onnx": (
        lambda folder: (folder / "model.onnx").write_bytes(b"x" * 99),
        "cannot load the ONNX file",
    ),
    "no array": (
        lambda folder: (folder / "golden" / "mask.npy").write_bytes(b"x" * 99),
        "is not a numpy array",
    ),
    "fewer": (
        lambda folder: np.save(
            folder / "golden" / "mask.npy", np.zeros((1, *SIZE), np.uint8)
        ),
        r"golden holds .*\(1, 32, 48\).* but .*\(2, 32, 48\).* was needed",
    ),
    "none": (
        lambda folder: [
            np.save(path, np.load(path)[:0])
            for path in (folder / "golden").glob("*.npy")
        ],
        r"golden holds \[\(0, .* but \[\(1, ",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_folders_that_are_whole_but_wrong(name: str, folder: Path) -> None:
    fault, message = FAULTS[name]
    fault(folder)
    write_sums(folder)
    with pytest.raises(ArtifactError, match=message):
        Segmenter.load(folder)


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        (
            None,
            "is not an exported folder: it has no SHA256SUMS. Give the folder that segpipe export wrote",
        ),
        ("", "does not list manifest.json"),
        (f"{'0' * 64}  ../secret\n", "has the line"),
        (f"{'0' * 64}  /secret\n", "has the line"),
        ("manifest.json\n", "has the line"),
        (f"{'0' * 63}  manifest.json\n", "has the line"),
    ],
)
def test_checksums_that_say_nothing(
    sums: str | None, message: str, folder: Path
) -> None:
    if sums is None:
        (folder / "SHA256SUMS").unlink()
    else:
        (folder / "SHA256SUMS").write_text(sums)
    with pytest.raises(ArtifactError, match=message):
        read_artifact(folder)


def test_the_folder_of_a_run_is_answered_with_that_of_its_export(
    shared_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["selftest", str(shared_folder.parent)]) == 2
    assert f"Give {shared_folder}." in capsys.readouterr().err


def test_usage_is_no_altered_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["selftest", str(folder), "--precision", "int8"]) == 2
    assert "no ONNX file of precision int8" in capsys.readouterr().err
    assert main(["selftest", str(folder / "model.onnx")]) == 2
    assert "model.onnx is not an exported folder" in capsys.readouterr().err
    assert (
        main(
            [
                "run",
                str(tmp_path / "nothing"),
                "image.npy",
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 2
    )
    change_manifest(folder, profile="isaac")
    write_sums(folder)
    assert main(["selftest", str(folder)]) == 2
    assert "has profile isaac" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["-h"])
    assert capsys.readouterr().out.startswith("usage: segpipe-runtime ")
    (folder / "SHA256SUMS").unlink()
    assert main(["selftest", str(folder)]) == 7, (
        "the control: an export that lost a file"
    )


def test_a_file_with_new_checksums_is_not_the_one_of_the_manifest(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "model.onnx"
    change_manifest(
        folder,
        files={
            "model.onnx": {
                **toy_manifest()["files"]["model.onnx"],
                "sha256": file_sha256(path),
            }
        },
    )
    write_sums(folder)
    assert main(["selftest", str(folder)]) == 0, "the control"
    model = onnx.load(path)
    model.doc_string = "edited"
    onnx.save(model, path)
    write_sums(folder)
    capsys.readouterr()
    assert main(["selftest", str(folder)]) == 7
    assert (
        f"{path} is the file of SHA256SUMS, but manifest.json describes one with"
        in capsys.readouterr().err
    )


def test_an_interrupted_command_ends_in_a_line(
    shared_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Segmenter, "infer", interrupt)
    assert main(["bench", str(shared_folder)]) == 130
    assert capsys.readouterr().err == "interrupted.\n"


@pytest.mark.parametrize(
    ("part", "by", "passes"),
    [("mask", 1, False), ("confidence", 1, True), ("confidence", 2, False)],
)
def test_other_answers_than_at_export_are_refused(
    part: str, by: int, passes: bool, folder: Path
) -> None:
    path = folder / "golden" / f"{part}.npy"
    array = np.load(path)
    array[1, :4] ^= by
    np.save(path, array)
    write_sums(folder)
    if passes:
        Segmenter.load(folder)
        return
    with pytest.raises(SelfTestError, match="golden mask is equal") as caught:
        Segmenter.load(folder)
    assert caught.value.exit_code == 4


def test_golden_frames_that_cannot_be_run_here_are_refused(folder: Path) -> None:
    path = folder / "golden" / "image.npy"
    np.save(path, np.stack([frame(0), frame(1, green=255)]))
    write_sums(folder)
    with pytest.raises(SelfTestError, match="a golden frame fails") as caught:
        Segmenter.load(folder)
    assert caught.value.exit_code == 4


def test_a_file_of_reduced_precision_may_be_as_far_as_it_was_at_export(
    folder: Path,
) -> None:
    path = folder / "golden" / "mask.npy"
    mask = np.load(path)
    mask[1, :4] ^= 1  # 4 of 32 rows
    np.save(path, mask)
    files = toy_manifest()["files"]
    for agreement, passes in ((0.9, False), (0.875, True)):
        files["model.onnx"] |= {
            "precision": "int8",
            "golden_agreement": agreement,
            "golden_confidence_levels": 0,
        }
        change_manifest(folder, files=files)
        write_sums(folder)
        if passes:
            assert Segmenter.load(
                folder, precision="int8"
            ).artifact.model_id.startswith("toy-int8-")
        else:
            with pytest.raises(SelfTestError, match=r"87\.500 %"):
                Segmenter.load(folder, precision="int8")


@pytest.mark.parametrize(
    ("precision", "off", "passes"),
    [("fp16", 2, False), ("int8", 9, True), ("int8", 10, False)],
)
def test_confidence_of_int8_may_be_rounded_by_another_version(
    precision: str, off: int, passes: bool, folder: Path
) -> None:
    path = folder / "golden" / "confidence.npy"
    np.save(path, np.load(path) - np.uint8(off))
    files = toy_manifest()["files"]
    files["model.onnx"] |= {
        "precision": precision,
        "golden_agreement": 1.0,
        "golden_confidence_levels": 0,
    }
    change_manifest(folder, files=files)
    write_sums(folder)
    with (
        contextlib.nullcontext()
        if passes
        else pytest.raises(SelfTestError, match=f"differs by {off} levels")
    ):
        Segmenter.load(folder, precision=precision)


@pytest.mark.parametrize(
    ("precision", "cells", "passes"),
    [("fp32", 1, False), ("int8", 1, True), ("int8", 4, False)],
)
def test_single_cells_of_a_reduced_precision_may_be_less_sure(
    precision: str,
    cells: int,
    passes: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A limit on the largest difference of an int8 file allowed 84 of 255 levels."""
    path = folder / "golden" / "confidence.npy"
    confidence = np.load(path)
    confidence[0].ravel()[:cells] ^= 128
    monkeypatch.setitem(CONFIDENCE_SHARE, "int8", 1 - 2 / confidence[0].size)
    np.save(path, confidence)
    files = toy_manifest()["files"]
    files["model.onnx"] |= {
        "precision": precision,
        "golden_agreement": 1.0,
        "golden_confidence_levels": 0,
    }
    change_manifest(folder, files=files)
    write_sums(folder)
    with (
        contextlib.nullcontext()
        if passes
        else pytest.raises(SelfTestError, match="differs by")
    ):
        Segmenter.load(folder, precision=precision)


def test_a_tolerance_that_is_no_number_passes_nothing(folder: Path) -> None:
    files = toy_manifest()["files"]
    files["model.onnx"] |= {"golden_agreement": math.nan}
    change_manifest(folder, files=files)
    write_sums(folder)
    with pytest.raises(ArtifactError, match="NaN is not a JSON number"):
        Segmenter.load(folder)


@pytest.mark.parametrize(
    "given",
    [
        {"threads": 0}, {"deadline_ms": 0}, {"deadline_ms": math.inf}, {"deadline_ms": math.nan}, {"max_age_s": -1},
        {"max_age_s": 0}, {"max_age_s": math.nan}, {"frozen_after": -1},
    ],
)  # fmt: skip
def test_settings_out_of_range(given: dict[str, Any], shared_folder: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        Segmenter.load(shared_folder, **given)


def test_waiting_threads_sleep(shared_folder: Path) -> None:
    options = Segmenter.load(
        shared_folder, threads=2
    ).session.engine.inner.get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert options.get_session_config_entry("session.inter_op.allow_spinning") == "0"
    assert options.intra_op_num_threads == 2


def test_the_graph_is_optimized_unless_told_otherwise(shared_folder: Path) -> None:
    model, level = (
        (shared_folder / "model.onnx").read_bytes(),
        onnxruntime.GraphOptimizationLevel,
    )
    for optimize, expected in (
        (True, level.ORT_ENABLE_ALL),
        (False, level.ORT_DISABLE_ALL),
    ):
        options = make_session(model, optimize=optimize).get_session_options()
        assert options.graph_optimization_level == expected
        assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)


# What it needs


def test_numpy_and_onnxruntime_are_enough(shared_folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "frame.npy", frame(4))
    (tmp_path / "frame.png").write_bytes(b"nobody decodes it")
    code = f"""
import sys
BLOCKED = ("torch", "torchvision", "openvino", "cv2", "PIL", "omegaconf", "hydra", "rich", "yaml", "onnx", "scipy")
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(name)
sys.meta_path.insert(0, Blocker())
for name in BLOCKED:
    try:
        __import__(name)
    except ImportError:
        continue
    sys.exit(f"the control: {{name}} is blocked")
from segpipe.runtime.__main__ import main, read_image
assert main(["selftest", {str(shared_folder)!r}]) == 0
assert main(["run", {str(shared_folder)!r}, "frame.npy", "--out", "out"]) == 0
assert main(["run", {str(shared_folder)!r}, "frame.png", "--out", "png"]) == 1
rest = [name for name in sys.modules if name.startswith("segpipe.") and not name.startswith("segpipe.runtime")]
sys.exit(str(rest) if rest else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "without Pillow, only .npy is supported" in done.stderr
    assert np.array_equal(
        np.load(tmp_path / "out" / "frame_mask.npy"), answer(frame(4))[0]
    )
    assert np.load(tmp_path / "out" / "frame_mask.npy").shape == SIZE


def test_imports_nothing_else_of_the_project() -> None:
    allowed = {
        "numpy",
        "onnxruntime",
        "PIL",
        "openvino",
        *sys.stdlib_module_names,
    }  # the latter two where installed
    files = list((ROOT / "segpipe" / "runtime").glob("*.py"))
    assert len(files) > 5
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            if isinstance(node, ast.ImportFrom):
                assert node.level < 2, f"{path} reaches out of the folder"
                names = [str(node.module)] if node.level == 0 else []
            for name in names:
                assert name.partition(".")[0] in allowed, f"{path}: {name}"


def test_works_under_another_package_name(shared_folder: Path, tmp_path: Path) -> None:
    """A wheel of its own installs this folder without the rest of segpipe."""
    shutil.copytree(
        ROOT / "segpipe" / "runtime", tmp_path / "elsewhere" / "runtime_only"
    )
    command = [
        sys.executable,
        "-P",
        "-m",
        "runtime_only",
        "selftest",
        str(shared_folder),
    ]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "elsewhere")}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2 golden frames" in done.stdout
    usage = subprocess.run(
        [*command[:4], "-h"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert usage.stdout.startswith("usage: python -m runtime_only ")


def test_statuses_print_as_their_value_on_every_python() -> None:
    """enum changed how mixed-in strings print in 3.11 and 3.12; logs and diagnostics must not depend on it."""
    assert f"{Status.TOO_DARK} {Status.TOO_DARK!s}" == "TOO_DARK TOO_DARK"
    assert f"{Status.OK:>4}" == "  OK"
    assert json.dumps({Status.OK: Status.OK}) == '{"OK": "OK"}'


# The command line


def test_selftest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", str(folder)]) == 0
    assert (
        "2 golden frames: at least 100 % of the pixels equal" in capsys.readouterr().out
    )
    (folder / "model.onnx").write_bytes(b"")
    assert main(["selftest", str(folder)]) == 7
    assert "altered or truncated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "warned"),
    [("verified", 0), ("VERIFIED_FEW_IMAGES", 1), ("UNVERIFIED_REAL_DATA", 2)],
)
def test_an_export_that_is_not_verified_says_so(
    status: str, warned: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_manifest(folder, status=status)
    write_sums(folder)
    assert main(["selftest", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert f"as exported, status {status}\n" in out
    assert err.startswith(
        f"warning: {folder} has the status {status}, but verified"
    ) == bool(warned)
    assert err.count("\n") == bool(warned)
    with (
        pytest.warns(UserWarning, match=status)
        if warned > 1
        else contextlib.nullcontext()
    ):
        Segmenter.load(folder)


def test_run(
    shared_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "good.npy", frame(3))
    np.save(tmp_path / "black.npy", np.zeros((*SIZE, 3), np.uint8))
    cv2.imwrite(str(tmp_path / "three.PNG"), frame(5)[..., ::-1])

    def started(out: str, *names: str) -> int:
        paths = [str(tmp_path / name) for name in names]
        return main(["run", str(shared_folder), *paths, "--out", str(tmp_path / out)])

    assert started("out", "good.npy", "three.PNG") == 0
    for name, seed in (("good", 3), ("three", 5)):
        mask = read_image(tmp_path / "out" / f"{name}_mask.png")
        assert np.array_equal(mask[..., 0], answer(frame(seed))[0])
    assert started("out", "good.npy") == 2, "nothing is overwritten"
    assert "good_mask.png exists" in capsys.readouterr().err
    assert started("dark", "good.npy", "black.npy") == 1
    assert "black.npy TOO_DARK" in capsys.readouterr().out
    np.save(tmp_path / "small.npy", np.zeros((8, 9, 3), np.uint8))
    assert started("small", "small.npy") == 1
    told = capsys.readouterr()
    assert "small.npy BAD_SHAPE" in told.out
    assert f"small.npy: (8, 9, 3), but {(*SIZE, 3)} was needed" in told.err
    assert started("missing", "missing.npy") == 1
    assert "missing.npy" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".npy", ".png"])
def test_a_mask_that_cannot_be_written_is_named_and_leaves_no_part(
    suffix: str,
    shared_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    np.save(tmp_path / "good.npy", frame(3))
    if suffix == ".npy":
        monkeypatch.setattr("segpipe.runtime.__main__.Image", None)
    given = ["run", str(shared_folder), str(tmp_path / "good.npy")]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))  # as on a full disk
    try:
        code = main([*given, "--out", str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    assert f"good_mask{suffix} cannot be written" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_an_image_is_read_as_it_is_stored(tmp_path: Path) -> None:
    turned = PIL.Image.Exif()
    turned[274] = 6  # a phone held upright
    PIL.Image.fromarray(frame(5)).save(tmp_path / "phone.png", exif=turned)
    deep = tmp_path / "deep.png"
    cv2.imwrite(str(deep), frame(5)[..., 0].astype(np.uint16) * 256)
    assert np.array_equal(read_image(tmp_path / "phone.png"), frame(5))
    with pytest.raises(ValueError, match="8 bits per channel were needed"):
        read_image(deep)


def torn_pictures() -> dict[str, bytes]:
    """Files as a full disk or a broken card leaves them, by name."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body))
            + kind
            + body
            + struct.pack(">I", zlib.crc32(kind + body))
        )

    def png(size: tuple[int, int], *data: bytes) -> bytes:
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", *size[::-1], 8, 2, 0, 0, 0))
        return b"\x89PNG\r\n\x1a\n" + head + b"".join(data) + chunk(b"IEND", b"")

    pixels = zlib.compress(b"".join(b"\0" + row.tobytes() for row in frame(3)))
    half = len(pixels) // 2
    whole = png(SIZE, chunk(b"IDAT", pixels))
    array = io.BytesIO()
    np.save(array, frame(3))
    return {
        "torn.ppm": b"P6\n48 32\n255\n123",
        "torn.npy": array.getvalue()[:-1],
        "wide.npy": array.getvalue().replace(b"(32, 48, 3)", b"(32,48,3**"),
        "empty.png": b"",
        "half.png": whole[: len(whole) // 2],
        "no_chunk.png": png(
            SIZE, chunk(b"IDAT", pixels[:half]), chunk(b"\0\0\0\0", pixels[half:])
        ),
        "bomb.png": png((40_000, 40_000), chunk(b"IDAT", pixels)),
        "text.jpg": b"no picture",
    }


def test_a_torn_picture_is_no_answer_and_the_next_one_is(
    shared_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As on a robot: the trainer, which other tests import, takes Pillow's limit away.
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 89_478_485)
    torn = torn_pictures()
    for name, content in torn.items():
        (tmp_path / name).write_bytes(content)
    np.save(tmp_path / "good.npy", frame(3))
    names = [*torn, "good.npy"]
    out = tmp_path / "out"
    given = [
        "run",
        str(shared_folder),
        *(str(tmp_path / name) for name in names),
        "--out",
        str(out),
    ]
    assert len({Path(name).stem for name in names}) < len(names)
    assert main(given) == 2, "torn.ppm and torn.npy have one stem"
    assert "torn_mask.png exists, or two images" in capsys.readouterr().err
    assert not out.exists(), "nothing was begun"
    del given[2 + names.index("torn.npy")]
    assert main(given) == 1
    captured = capsys.readouterr()
    for name in torn:
        if name != "torn.npy":
            assert f"{name} ERROR" in captured.out, name
            assert f"{name} cannot be read" in captured.err, name
            mask = read_image(out / f"{Path(name).stem}_mask.png")
            assert mask.shape == (*SIZE, 3)
            assert (mask == 255).all()
    assert "good.npy OK" in captured.out
    assert np.array_equal(
        read_image(out / "good_mask.png")[..., 0], answer(frame(3))[0]
    )


def test_bench(shared_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(shared_folder), "--frames", "30", "--threads", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["statuses"] == {"OK": 40}, "10 to warm up"
    assert found["size"] == list(SIZE)
    times = found["infer"]
    assert 0 < times["p50_ms"] <= times["p90_ms"] <= times["p99_ms"]
    assert times["n"] == 30
    assert main(["bench", str(shared_folder), "--frames", "0"]) == 2
    late = ("--frames", "3", "--deadline-ms", "1e-6")
    assert main(["bench", str(shared_folder), *late]) == 1


def test_bench_times_answers_where_the_limits_refuse_the_golden_frames(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in an export of a size that no image has: its golden frames are noise."""
    limits = json.loads((folder / "manifest.json").read_text())["frame_limits"]
    change_manifest(folder, frame_limits={**limits, "mean": [0, 1]})
    write_sums(folder)
    assert main(["bench", str(folder), "--frames", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["statuses"] == {"OK": 13}


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_no_frame_takes_memory(shared_folder: Path) -> None:
    segmenter = Segmenter.load(shared_folder, clock=lambda: 1000.0, deadline_ms=60_000)
    kept: list[mmap.mmap] = []

    def growth(keep: bool) -> float:
        """MiB over a few hundred frames of every kind."""
        before = resident_mib()
        for number in range(400):
            shot = list(SHOTS.values())[number % len(SHOTS)]
            result = segmenter.infer(shot.make(), shot.stamp)
            if (
                keep and number % 4 == 0
            ):  # not by malloc, which first gives what earlier tests gave back
                kept.append(mmap.mmap(-1, 1 << 20))
                kept[-1].write(np.resize(result.mask, 1 << 20).tobytes())
        return resident_mib() - before

    growth(keep=False)
    assert growth(keep=False) < 4
    assert growth(keep=True) > 50, "the control: kept masks are seen"


def test_the_self_test_needs_no_later_numpy_than_is_promised(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numpy 1.21 has another signature of quantile."""
    monkeypatch.delattr(np, "quantile")
    Segmenter.load(folder)


FIRST_IMPORT = """
import os, sys
class Seen:
    def find_spec(self, name, path=None, target=None):
        if name == "onnxruntime":
            print(os.environ.get("ORT_DISABLE_TELEMETRY"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Seen())
sys.path.insert(0, sys.argv[1])
__import__(sys.argv[2])
"""


@pytest.mark.parametrize(
    "package", ["runtime", "segpipe.export.graph.lowprec", "onnxruntime"]
)
def test_onnxruntime_is_imported_without_its_telemetry(package: str) -> None:
    """Alone, as on a robot, and with the rest of segpipe; the last one is the control."""
    env = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    place = ROOT / "segpipe" if package == "runtime" else ROOT
    command = [sys.executable, "-c", FIRST_IMPORT, str(place), package]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    wanted = None if package == "onnxruntime" else 1
    assert done.stdout.strip() == str(wanted)
