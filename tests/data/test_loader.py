"""Loader: the same bits for any workers and start method, distinct samples, errors from workers, and no hang."""

import errno
import hashlib
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing import resource_tracker, spawn
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch

from segpipe.checks.elsewhere import UnansweredError, elsewhere
from segpipe.data import loader, ring
from segpipe.data.augment import Augmenter
from segpipe.data.loader import eval_images, train_batches
from segpipe.data.order import Order
from segpipe.data.samples import open_samples
from segpipe.errors import DataError
from segpipe.keys import sample_key
from segpipe.settings.groups import AugmentConfig, DataConfig
from segpipe.train.canary import Canary

ROOT = Path(__file__).resolve().parents[2]
CROP = AugmentConfig(
    crop_size=[32, 48], canary=5
)  # so that every layout here makes samples again
ORDER = Order(seed=3, num_samples=10, shards=2, samples_per_shard=3)
PATIENCE_S = 200.0  # for what takes a second on an idle machine; what must not be waited for takes longer


class OneImage:
    """The same frame under every index: whatever differs in a batch came from the augmentation."""

    classes = None

    def __len__(self) -> int:
        return 10

    def name(self, index: int) -> str:
        return f"frame_{index}"

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        draws = np.random.Generator(np.random.Philox(1))
        return draws.integers(0, 256, (60, 80, 3), np.uint8), draws.integers(
            0, 11, (60, 80), np.uint8
        )


class Sleepy(OneImage):
    """Workers that are late by different times."""

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(hash((os.getpid(), index)) % 7 / 500)
        return super().read(index)


class Torn(OneImage):
    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index == 4:
            raise DataError(
                f"{self.name(index)}.png is torn at byte 77. Copy it again."
            )
        return super().read(index)


class Buggy(OneImage):
    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        raise ZeroDivisionError("our own mistake")


class Exhausted(OneImage):
    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return next(iter(()))


class TwoParts(DataError):
    """Unpickled with one argument."""

    def __init__(self, path: str, place: int) -> None:
        super().__init__(f"{path} is torn at byte {place}. Copy it again.")


class Locked(DataError):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Raising(OneImage):
    def __init__(self, *what) -> None:
        self.what = what

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        raise self.what[0](*self.what[1:])


class Sizes(OneImage):
    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full((5 + index, 7, 3), index, np.uint8), np.full(
            (5 + index, 7), index + 1, np.uint8
        )


LATE = ORDER.shard(0, 0)[2][1]  # the last sample of the first batch


class Deadly(OneImage):
    """A file that kills whoever reads it, as a bug of a decoder does."""

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index == LATE:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(index)


class Stuck(OneImage):
    """A disk that stops answering."""

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index == 4:
            time.sleep(600)
        return super().read(index)


class Worker(OneImage):
    """Reports the state of the process that reads. Unpickling it sets threads and draws, as some modules do."""

    def __reduce__(self):
        return set_threads_and_draw, ()

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        interrupts = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        seeds = random.random(), np.random.random(), float(torch.rand(()))
        state = [
            interrupts,
            cv2.getNumThreads(),
            torch.get_num_threads(),
            *(int(255 * seed) for seed in seeds),
        ]
        return np.zeros((1, len(state), 3), np.uint8), np.array([state], np.uint8)


def set_threads_and_draw():
    cv2.setNumThreads(3)
    torch.set_num_threads(3)
    random.random(), np.random.random(), torch.rand(())
    return Worker()


def batches(
    samples=None,
    config=CROP,
    order=ORDER,
    shards=range(2),
    steps=range(4),
    workers=0,
    how="fork",
    prefetch=2,
    **more,
):
    samples = samples or OneImage()
    return train_batches(
        samples,
        Augmenter(config),
        order,
        shards=shards,
        steps=steps,
        workers=workers,
        start_method=how,
        prefetch=prefetch,
        pin_memory=False,
        repeats=Canary(samples),
        **more,
    )


def digests(items) -> list[str]:
    """One digest per batch over everything in it."""
    found = []
    for batch in items:
        parts = [
            str((batch.step, batch.shard)).encode(),
            *(part.numpy().tobytes() for part in batch[2:] if part is not None),
        ]
        found.append(hashlib.sha256(b"".join(parts)).hexdigest())
    return found


@pytest.fixture(scope="module")
def expected() -> list[str]:
    return digests(batches())


def test_a_batch(expected):
    found = list(batches())
    assert [(batch.step, batch.shard) for batch in found] == [
        (step, shard) for step in range(4) for shard in range(2)
    ]
    batch = found[3]
    assert (batch.image.shape, batch.image.dtype) == ((3, 32, 48, 3), torch.uint8)
    assert (batch.target.shape, batch.target.dtype) == ((3, 32, 48), torch.uint8)
    assert batch.epoch.dtype == batch.index.dtype == torch.int64
    assert list(
        zip(batch.epoch.tolist(), batch.index.tolist(), strict=True)
    ) == ORDER.shard(1, 1)
    assert len(set(expected)) == 8


@pytest.mark.parametrize("workers", [0, 1])
def test_every_row_has_the_key_of_its_seed_epoch_and_index(workers):
    augmenter, frame = Augmenter(CROP), OneImage().read(0)
    for batch in batches(workers=workers):
        for image, target, epoch, index in zip(
            *(part.numpy() for part in batch[2:6]), strict=True
        ):
            alone = augmenter(
                *frame, sample_key(ORDER.seed, int(epoch), int(index), "augment")
            )
            assert np.array_equal(image, alone[0])
            assert np.array_equal(target, alone[1])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_may_fill_its_memory_again(expected, workers, monkeypatch):
    """Such as one that a user trains with under augment.check=false."""
    kept = np.empty((32, 48, 3), np.uint8), np.empty((32, 48), np.uint8)
    augment = Augmenter.__call__

    def reusing(self, *given):
        for memory, part in zip(kept, augment(self, *given), strict=True):
            memory[:] = part
        return kept

    monkeypatch.setattr(Augmenter, "__call__", reusing)
    assert digests(batches(workers=workers)) == expected


@pytest.mark.parametrize(
    ("how", "workers", "prefetch"),
    [
        *(("fork", workers, prefetch) for workers in (1, 2, 3) for prefetch in (1, 4)),
        ("fork", 8, 2),
        ("fork", 1, 1024),
        ("forkserver", 3, 2),
        ("spawn", 1, 2),
    ],
)
def test_workers_and_start_methods_do_not_enter(expected, how, workers, prefetch):
    found = digests(batches(Sleepy(), workers=workers, how=how, prefetch=prefetch))
    assert found == expected


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> DataConfig:
    root, random = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    for number in range(ORDER.num_samples):
        for kind, pixels in (
            ("images", random.integers(0, 256, (60, 80, 3))),
            ("masks", random.integers(0, 3, (60, 80))),
        ):
            (root / kind / "train").mkdir(parents=True, exist_ok=True)
            cv2.imwrite(
                str(root / kind / "train" / f"{number}.png"), pixels.astype(np.uint8)
            )
    (root / "classes.yaml").write_text("names: [a, b, c]\n")
    return DataConfig(name="folder", root=str(root))


@pytest.mark.parametrize(("how", "workers"), [("fork", 0), ("fork", 3)])
def test_a_pack_does_not_enter(files, how, workers, tmp_path):
    plain = open_samples(files, "train", 0)
    packed = open_samples(replace(files, pack=str(tmp_path)), "train", 0)
    expected = digests(batches(plain))
    for _ in range(2):  # built, then read
        assert digests(batches(packed, workers=workers, how=how)) == expected
    assert len(list(tmp_path.iterdir())) == ORDER.num_samples


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_equals_continuing(expected, workers):
    assert digests(batches(steps=range(2, 4), workers=workers)) == expected[4:]


def test_ranks_divide_the_shards(expected):
    parts = [digests(batches(shards=range(rank, rank + 1))) for rank in range(2)]
    assert [parts[shard][step] for step in range(4) for shard in range(2)] == expected


def test_hostile_global_seeds(expected):
    for hostile in (1, 2):
        random.seed(hostile)
        np.random.seed(hostile)
        torch.manual_seed(hostile)
        assert digests(batches(workers=1)) == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_the_trainers_random_state_is_left_alone(workers):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    list(batches(workers=workers))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def distinct(
    config: AugmentConfig, ranks: int, workers: int, steps: range
) -> tuple[int, int]:
    """Distinct and all outputs of one frame on `ranks` ranks, one sample per shard."""
    order = Order(seed=0, num_samples=10, shards=ranks, samples_per_shard=1)
    outputs = [
        batch.image.numpy().tobytes()
        for rank in range(ranks)
        for batch in batches(
            config=config,
            order=order,
            shards=range(rank, rank + 1),
            steps=steps,
            workers=workers,
        )
    ]
    return len(set(outputs)), len(outputs)


def test_sixteen_ranks_see_different_augmentations():
    found, total = distinct(CROP, ranks=16, workers=2, steps=range(8))
    assert total == 128
    assert found >= 0.99 * total


def test_the_control_repeats_itself():
    """albumentations' own seeding: 8 samples from 4 workers are 2 distinct ones, and every rank has the same 2."""
    control = AugmentConfig(crop_size=[32, 48], keyed=False)
    assert distinct(control, ranks=1, workers=4, steps=range(8)) == (2, 8)
    assert distinct(control, ranks=4, workers=4, steps=range(8)) == (2, 32)


@pytest.mark.parametrize("workers", [0, 2])
def test_whole_images_in_the_order_asked_for(workers):
    found = list(eval_images(Sizes(), [7, 0, 3], workers=workers, start_method="fork"))
    assert [index for index, _, _ in found] == [7, 0, 3]
    for index, image, target in found:
        assert image.shape == (1, 5 + index, 7, 3)
        assert target.shape == (1, 5 + index, 7)
        assert (image == index).all()
        assert (target == index + 1).all()


def test_workers_are_isolated():
    first, second = (
        [
            target.flatten().tolist()
            for _, _, target in eval_images(Worker(), [0], workers=1, start_method=how)
        ]
        for how in ("fork", "forkserver")
    )
    interrupts, opencv_threads, torch_threads = first[0][:3]
    assert (interrupts, opencv_threads, torch_threads) == (1, 1, 1)
    assert first == second  # global generators start from a constant


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_file_is_named_in_its_turn(workers):
    before = (
        ORDER.shard(0, 0) + ORDER.shard(0, 1) + ORDER.shard(1, 0) + ORDER.shard(1, 1)
    )
    turn = [index for _, index in before].index(4) // 3
    seen = []
    with pytest.raises(DataError) as caught:
        seen.extend(batches(Torn(), workers=workers))
    assert str(caught.value) == "frame_4.png is torn at byte 77. Copy it again."
    assert not multiprocessing.active_children()
    assert len(seen) == turn


def test_a_bug_keeps_its_type_and_place():
    with pytest.raises(ZeroDivisionError, match="our own mistake"):
        next(batches(Buggy(), workers=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_sample_raises_never_ends_the_stream_as_if_it_were_over(workers):
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(batches(Exhausted(), workers=workers, timeout_s=PATIENCE_S))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(eval_images(Exhausted(), range(3), workers=workers, start_method="fork"))


@pytest.mark.parametrize(
    ("what", "said"),
    [((TwoParts, "a.png", 7), "torn at byte 7"), ((Locked, "a.png"), "a.png")],
)
def test_an_error_that_cannot_be_pickled_keeps_its_message(what, said):
    with pytest.raises(DataError, match=said):
        list(batches(Raising(*what), workers=1, timeout_s=PATIENCE_S))


def test_a_killed_worker_is_named():
    items = batches(steps=range(1000), workers=2)
    next(items)
    victim = multiprocessing.active_children()[0]
    os.kill(victim.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(
        DataError,
        match=r"loader worker [01] was killed by signal 9.*: often out of memory.*run\.exists=resume",
    ):
        list(items)
    assert time.monotonic() - start < PATIENCE_S
    assert not multiprocessing.active_children()


def test_a_worker_that_a_sample_kills_is_named_with_it():
    named = rf"killed by signal 9 while it made sample .*{LATE} \(frame_{LATE}\) of epoch 0.*: often out of memory"
    with pytest.raises(DataError, match=named):
        list(batches(Deadly(), workers=2))
    assert not multiprocessing.active_children()


def test_a_limit_on_processes_is_named(monkeypatch):
    def denied(process):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", denied)
    with pytest.raises(DataError, match=r"data\.workers = 2: .*ulimit -u"):
        next(batches(workers=2))


@pytest.mark.timeout(60)
def test_a_spawned_process_that_ends_as_it_starts_is_no_hang(monkeypatch):
    """As in a script without `if __name__ == "__main__":`. More than a pipe holds waited for it forever."""
    resource_tracker.ensure_running()
    monkeypatch.setattr(spawn, "_python_exe", b"/bin/false")
    with pytest.raises(DataError, match=r"worker [01] ended with exit code 1"):
        list(batches(Raising(bytes(2**20)), workers=1, how="spawn"))
    with pytest.raises(UnansweredError, match="without an answer"):
        elsewhere("spawn", len, bytes(2**20))


def test_a_worker_that_was_stopped_is_named():
    items = batches(steps=range(1000), workers=2, timeout_s=3.0)
    next(items)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGSTOP)
    with pytest.raises(
        DataError,
        match=r"nothing for 3 s while it made sample \d .*except stopped ones",
    ):
        list(items)
    assert not multiprocessing.active_children()


def test_time_in_which_the_whole_job_was_stopped_does_not_count(expected, monkeypatch):
    """Each wait for a worker takes an hour by the trainer's clock."""
    hours = itertools.count(step=3600.0)
    clock = SimpleNamespace(monotonic=lambda: next(hours), sleep=time.sleep)
    monkeypatch.setattr(ring, "time", clock)
    assert digests(batches(Sleepy(), workers=2, timeout_s=300.0)) == expected


@pytest.mark.parametrize("how", ["fork", "forkserver"])
def test_workers_leave_the_signals_of_the_whole_job_to_the_trainer(expected, how):
    """Schedulers send them to every process; the trainer finishes its step with what the workers still bring."""
    items = batches(workers=2, how=how)
    first = [next(items), next(items)]
    for child in multiprocessing.active_children():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGQUIT):
            os.kill(child.pid, number)
    time.sleep(0.05)
    assert digests([*first, *items]) == expected
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_workers_that_nobody_ends_do_not_hold_up_the_exit():
    without = next(
        step
        for step in range(9)
        if 4 not in [index for _, index in ORDER.shard(step, 0)]
    )
    code = f"""
import test_loader
items = test_loader.batches(test_loader.Stuck(), workers=2, steps=range({without}, 9))
next(items)
"""
    folders = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "tests" / "data"))
    environment = os.environ | {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_hangs_is_named_with_its_sample_and_stack(workers, capfd):
    named = r"worker [01] \(process \d+\) has sent nothing for 4 s while it made sample .*4 \(frame_4\) of epoch 0"
    with pytest.raises(DataError, match=named):
        list(batches(Stuck(), workers=workers, timeout_s=4.0))
    _, *stacks = capfd.readouterr().err.split("stack of loader worker ")
    # A single worker gets a second one, which makes its samples again.
    assert [stack[0] for stack in stacks] == ["0", "1"]
    assert any("test_loader.py" in stack and " in read" in stack for stack in stacks)
    assert not multiprocessing.active_children()


def test_a_dying_worker_does_not_interrupt_other_code():
    """torch's own handler would raise here, in the middle of whatever the trainer is doing."""
    items = batches(steps=range(1000), workers=1)
    next(items)
    victim = multiprocessing.active_children()[0].pid
    os.kill(victim, signal.SIGKILL)
    os.waitid(
        os.P_PID, victim, os.WEXITED | os.WNOWAIT
    )  # dead, and not yet reaped: the handler would look for it
    time.sleep(0.01)
    items.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_closing_half_way(workers):
    items = batches(steps=range(100000), workers=workers)
    next(items)
    start, threads, children = (
        time.monotonic(),
        threading.active_count(),
        multiprocessing.active_children(),
    )
    items.close()
    assert time.monotonic() - start < PATIENCE_S
    assert [child.exitcode for child in children] == [-signal.SIGKILL] * workers
    assert not multiprocessing.active_children()
    assert threading.active_count() <= threads


def test_descriptors_do_not_pile_up():
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    items = batches(steps=range(60), workers=2)
    next(items)
    before = num_open()
    assert max(num_open() - before for _ in items) < 20


class Watched(ring.Ring):
    made: "list[Watched]" = []  # noqa: RUF012

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.made.append(self)


@pytest.mark.parametrize("keep", [1, 4, 40])
def test_a_slot_is_used_again_when_its_batch_is_dropped_and_not_before(
    keep, monkeypatch
):
    """Two shards: 5 slots are to spare. Who keeps more batches gets copies."""
    monkeypatch.setattr(ring, "Ring", Watched)
    expected, kept, places, inside = digests(batches(steps=range(20))), [], set(), 0
    for number, batch in enumerate(batches(steps=range(20), workers=2)):
        kept.append((number, batch))
        block = Watched.made[-1]._block.bytes
        place = batch.image.untyped_storage().data_ptr() - block.ctypes.data
        if 0 <= place < block.size:
            inside += 1
            places.add(place)
        del batch
        if len(kept) == keep:
            assert digests([one for _, one in kept]) == [
                expected[one] for one, _ in kept
            ]
            kept.clear()
    assert inside == (40 if keep < 5 else 5)
    assert len(places) <= 2 * 2 + 5


def test_an_image_that_does_not_fit_in_a_slot_is_refused(monkeypatch):
    monkeypatch.setattr(loader, "WHOLE_BYTES", 200)
    images = eval_images(Sizes(), [3, 200], workers=1, start_method="fork")
    assert next(images)[0] == 3
    with pytest.raises(DataError, match=r"a slot of the loader has 4096\. Set data\.w"):
        next(images)


def test_nothing_is_left_when_the_trainer_is_killed():
    """One worker was started with the trainer's end of the other's socket, and is stopped: it cannot close it."""
    code = """
import multiprocessing, time, test_loader
from segpipe.data import ring
ring.LOOK_S = 0.1
items = test_loader.batches(workers=1, steps=range(1000))
next(items)
print(*sorted(child.pid for child in multiprocessing.active_children()), flush=True)
time.sleep(600)
"""
    folders = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "tests" / "data"))
    environment = os.environ | {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}
    before = set(os.listdir("/dev/shm"))
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    first, last = (int(pid) for pid in trainer.stdout.readline().split())
    named = {
        name
        for name in set(os.listdir("/dev/shm")) - before
        if str(trainer.pid) in name
    }
    os.kill(last, signal.SIGSTOP)
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + PATIENCE_S
    try:
        while Path(f"/proc/{first}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.kill(last, signal.SIGKILL)
        trainer.stdout.close()
    assert not named


class Event:
    """Of a GPU that copies until it is told to be done."""

    done: "list[Event]" = []  # noqa: RUF012

    def record(self):
        pass

    def query(self):
        return self in self.done

    def synchronize(self):
        self.done.append(self)


def fill(block: ring.SharedBlock) -> None:
    block.slot(1)[:] = 7


def test_a_block_that_was_used_is_shared_with_a_process_that_starts_later():
    block = ring.SharedBlock(2, 8)
    assert not block.slot(1).any()
    context = multiprocessing.get_context("forkserver")  # which does not have it
    process = context.Process(target=fill, args=(block,))
    process.start()
    process.join(PATIENCE_S)
    assert (block.slot(1) == 7).all()
    block.close()


def test_memory_that_cannot_be_page_locked_is_used_as_it_is(monkeypatch):
    cleared = []
    runtime = SimpleNamespace(cudaHostRegister=lambda *given: 2)  # out of memory
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", lambda *given, **named: cleared.append(named))
    block = ring.SharedBlock(2, ring.PAGE_BYTES)
    with pytest.warns(UserWarning, match=r"0 MiB .* could not be page-locked"):
        ring_slots = ring.Slots(block, 2, True)
    assert cleared == [{"device": "cuda"}]  # CUDA's last error
    assert ring_slots.tensor(ring_slots.pop(), 10).numel() == 10
    assert len(ring_slots) == 2  # free at once, without an event of CUDA
    block.close()


def test_a_slot_is_not_used_again_while_the_gpu_copies_from_it(monkeypatch):
    locked = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *given: locked.append(given) or 0,
        cudaHostUnregister=locked.append,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    block = ring.SharedBlock(3, ring.PAGE_BYTES)
    ring_slots = ring.Slots(block, 3, True)
    place = block.bytes.ctypes.data
    assert locked == [(place, block.bytes.size, 0)]
    tensor = ring_slots.tensor(ring_slots.pop(), 10)
    view = tensor[3:]
    del tensor
    assert len(ring_slots) == 2
    del view  # the host is done with slot 0
    assert [ring_slots.pop(), ring_slots.pop()] == [1, 2]
    assert not Event.done
    assert ring_slots.pop() == 0  # there is no other: waits for the GPU
    assert len(Event.done) == 1
    block.close()
    del ring_slots, block
    assert locked[1:] == [place]
