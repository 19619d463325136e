"""Start a run: in this process, in child processes, or as one of the processes that torchrun started.

This module does not import torch: the environment of the processes must be set first.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

import segpipe
from segpipe import plugins
from segpipe.determinism import flags
from segpipe.distributed import environment
from segpipe.distributed.contract import exit_code_of, lost_another_rank, lost_rank
from segpipe.errors import ConfigError, DataError, Interrupted, SegpipeError
from segpipe.files import ADVICE, not_written, read_json
from segpipe.run.console import CONSOLE, ERRORS, TrainView, iou_table, sequence_table
from segpipe.run.folder import claim_folder, clear_folder, owned
from segpipe.run.lock import remove_dead
from segpipe.run.report import PAGE, page_data, run_predictor, write_report
from segpipe.run.trackers import check_tracking
from segpipe.run.tracking import (
    FILE_NAME,
    Failure,
    Tracker,
    failure,
    note_failure,
    note_lost,
    open_tracker,
    read_metrics,
)
from segpipe.settings.config import SETTINGS, Config, check, config_hash
from segpipe.settings.setting import Values
from segpipe.train.start import check_pins, pin_weights
from segpipe.train.stop import (
    Stopped,
    asking,
    signals_deferred_by_children,
    stops_raised,
)

if TYPE_CHECKING:
    from segpipe.data.data_set import DataSet
    from segpipe.data.samples import Splits
    from segpipe.distributed.group import Group
    from segpipe.train.engine import Run
    from segpipe.train.metrics import Validation

STOPPED = "stopped. Continue with run.exists=resume."
BYTES_PER_PIXEL = 4  # RGB and class id
MUCH_PADDING = 0.2  # share of the pixels of crops
LONGEST_SOCKET = 107  # bytes of a path, on Linux
SOCKET_NAME = len("/pymp-12345678/listener-12345678")  # as multiprocessing makes it
_HERE, _USERS = threading.Condition(), list[tuple[int, bool]]()
_DEFAULTS = list[object]()  # torch's default dtype as each of them found it


@contextlib.contextmanager
def alone(*, reads: bool = False) -> Iterator[None]:
    """Raises ConfigError while another thread of this process trains or, unless this one only `reads`, reads a network.

    torch's generators and switches are global. Waits up to a second, enough for another thread to load a network.
    """
    me = threading.get_ident(), reads
    with _HERE:
        if not _HERE.wait_for(
            lambda: all(who == me[0] or reads & too for who, too in _USERS), timeout=1
        ):
            raise ConfigError(
                "another thread of this process trains or reads a network. Wait for it, or start another process."
            )
        _USERS.append(me)
    try:
        with contextlib.ExitStack() as held:
            # What the caller has set must reach no network. If torch is not imported, nothing is set.
            if torch := sys.modules.get("torch"):
                _DEFAULTS.append(torch.get_default_dtype())
                torch.set_default_dtype(torch.float32)
                held.enter_context(torch.inference_mode(mode=False))
                if torch.get_default_device().type != "cpu":
                    held.enter_context(torch.device("cpu"))
            yield
    finally:
        with _HERE:
            _USERS.remove(me)
            # Threads share the dtype: the last one gives back what the first one found.
            while _DEFAULTS and not _USERS:
                sys.modules["torch"].set_default_dtype(_DEFAULTS.pop())
            _HERE.notify_all()


@alone()
def launch(config: Config) -> int:
    """Train with this configuration; returns the exit code of the command.

    Raises SegpipeError when a check fails before the processes start.
    """
    environment.check_tasks()
    check(config)  # checks that do not import torch come first
    stopped = STOPPED
    try:
        if environment.under_launcher():
            return work(config)
        stopped = "stopped before the first step; nothing was written."
        with stops_raised():
            # Before anything imports torch.
            flags.set_environment(config.compute.threads, config.compute.mode)
            config, world_size, splits = _prepared(config)
            stopped = STOPPED
            if world_size == 1:
                return work(config, prepared=True, splits=splits)
            return _spawn(config, world_size)
    except KeyboardInterrupt:
        if environment.rank() == 0:
            ERRORS.print(stopped)
        return Interrupted.exit_code


def launch_apart(config: Config) -> int:
    """Train in child processes, even if only one, so that the runs of a sweep share no state.

    Returns the exit code. Raises SegpipeError when a check fails before the processes start.
    """
    return _spawn(*_prepared(config)[:2])


def _prepared(config: Config) -> tuple[Config, int, Splits]:
    """The configuration with its steps, the number of processes, and the data, after `prepare`."""
    config, splits = with_steps(config)
    world_size = _world_size(config)
    return config, world_size, prepare(config, world_size, splits)


def _world_size(config: Config) -> int:
    """Number of processes to start: `compute.nproc`, or one per GPU, as far as there are shards, or one."""
    number, device, gpus = config.compute.nproc, config.compute.device, 1
    if device == "cuda" or device == number == "auto":
        import torch

        # Counts through NVML, without a CUDA context in the parent.
        gpus = torch.cuda.device_count()
        if device == "cuda" and not gpus:
            raise ConfigError(
                "compute.device = cuda, but torch sees no GPU. Set compute.device=cpu, or check the driver."
            )
    if number != "auto":
        return int(number)
    shards = config.compute.shards
    if shards < gpus:
        ERRORS.print(
            f"{shards} of {gpus} GPUs are used: each process needs a shard of the batch, and compute.shards = {shards}."
        )
    return min(gpus or 1, shards)


def with_steps(config: Config) -> tuple[Config, Splits | None]:
    """`config` with crop_size=auto and `train.epochs` resolved to a crop and steps, and the data if it was opened.

    Checkpoints and ranks see only the resolved values.
    """
    if config.augment.crop_size and not config.train.epochs:
        return config, None
    from segpipe.data.samples import open_splits

    splits = open_splits(config)
    train = config.train
    if train.epochs:
        images = train.epochs * len(splits.train)
        train = replace(train, steps=math.ceil(images / config.global_batch), epochs=0)
    return replace(with_crop(config, splits.train), train=train), splits


def with_crop(config: Config, samples: DataSet | None = None) -> Config:
    """`config` with augment.crop_size=auto resolved: 0.9 of the median sides, rounded down to multiples of 32, max 512.

    At the default scales, 3 % of the crops of 360x480 images are padding then; with crops of 512x512 it is 29 %.
    """
    if config.augment.crop_size:
        return config
    from segpipe.data.samples import image_sizes, open_samples

    samples = samples or open_samples(config.data, "train", config.seed)
    sides = np.median(list(image_sizes(samples).elements()), axis=0)
    crop = np.clip(0.9 * sides // 32 * 32, 32, 512).astype(int)
    return replace(config, augment=replace(config.augment, crop_size=crop.tolist()))


def prepare(config: Config, world_size: int, splits: Splits | None = None) -> Splits:
    """Check everything that can be checked before the first process starts, then claim the run's folder.

    Returns the data, opened here unless `splits` has it.
    """
    check(config, world_size=world_size)
    pin_weights(config)
    splits = examine(config, splits)
    claim_folder(config)
    return splits


def check_job(config: Config) -> Config:
    """Check the settings and the folder of a sweep's job before it starts; `examine` checks its data.

    Returns the configuration with its crop and steps.
    """
    environment.check_tasks()
    check(config)
    config, _ = with_steps(config)
    check(config, world_size=_world_size(config))
    pin_weights(config)
    claim_folder(config, create=False)
    return config


def examine(config: Config, splits: Splits | None = None) -> Splits:
    """Check everything that a run needs besides its settings and folder; returns the opened data.

    Raises the error of the first check that fails.
    """
    from segpipe.checks import contracts, purity
    from segpipe.data.augment import Augmenter
    from segpipe.data.samples import open_splits
    from segpipe.datasets.problems import verify
    from segpipe.export.artifact.place import check_place

    check_tracking(config)
    contracts.check_plugins(config)
    splits = splits or open_splits(config)
    train, val = splits
    # First: data that changes between reads has no fixed sizes and classes.
    contracts.check_data(config)
    verify(config.data, {"train": train, config.data.split: val})
    for one in checks(config, splits):
        one()
    check_crop(config, train)
    contracts.check_network(config, train.classes)
    check_workers(config, train, val)
    if config.compute.mode != "off":
        skipped = purity.quick(Augmenter(config.augment), train)
        if skipped:
            ERRORS.print(skipped)
    # Now, not after hours of training; run.exists=replace clears the run's own folder.
    export, own = config.export, config.run_dir / "export"
    stays = os.path.exists(own) and config.run.exists != "replace"
    if export.enabled and (export.dir or stays):
        check_place(Path(export.dir or own))
    return splits


def checks(config: Config, splits: Splits) -> Iterator[Callable[[], object]]:
    """Checks that raise DataError or ConfigError for intact data that would spoil a run."""
    from segpipe.data.order import check_given_weights
    from segpipe.data.samples import check_labelled, check_scorable, sequences
    from segpipe.datasets.problems import check_overlap

    data, (train, val) = config.data, splits
    yield partial(check_labelled, train)
    if data.split != "train":
        yield partial(check_scorable, val, data.split, train.classes.names)
        if not data.allow_overlap:
            yield partial(check_overlap, train, val, data.split)
    if data.sequence:  # reported scores are grouped by it
        for samples in splits:
            yield partial(sequences, samples, data.sequence)
    if isinstance(weights := config.loss.class_weights, list):
        yield partial(check_given_weights, weights, train.classes.names)


def refusals(checks: Iterable[Callable[[], object]]) -> list[str]:
    """Messages of the checks that fail."""
    found = []
    for one in checks:
        try:
            one()
        except (ConfigError, DataError) as error:
            found.append(str(error))
    return found


def check_crop(config: Config, samples: DataSet) -> None:
    """Raise ConfigError for a crop larger than every image at its largest scale; warn if much of it is padding."""
    from segpipe.data.samples import image_sizes

    sizes = image_sizes(samples)
    smallest, largest = config.augment.scale
    height, width = np.max(list(sizes), axis=0)
    crop, scaled = config.augment.crop_size, [height * largest, width * largest]
    fitting = np.minimum(crop, scaled).astype(int).tolist()
    fix = f"Set augment.crop_size=auto, or 'augment.crop_size={fitting}' or smaller."
    if min(fitting) < SETTINGS["augment.crop_size"].low:
        fix = "Use larger images, or raise the second number of augment.scale."
    if crop != fitting:
        raise ConfigError(
            f"augment.crop_size = {crop}, but the training images have at most {height}x{width} pixels (height x width)"
            f" and augment.scale reaches {largest}. {fix}"
        )
    factors = np.geomspace(smallest, largest, 64)[:, None]
    shown = sum(
        number * np.minimum(factors * size / crop, 1).prod(1).mean()
        for size, number in sizes.items()
    )
    padding = 1 - shown / sizes.total()
    if padding > MUCH_PADDING:
        ERRORS.print(
            f"Warning: {padding:.0%} of the crops of augment.crop_size = {crop} is padding, as images are smaller. "
            "Smaller crops waste less; augment.crop_size=auto takes nine tenths of the median size."
        )


def check_workers(config: Config, *samples: DataSet) -> None:
    """Raise ConfigError for settings and objects that would stop loader processes."""
    from segpipe.data.augment import Augmenter

    data, method = config.data, config.data.start_method
    # The kernel silently kills a process whose shared memory no page backs.
    crop = math.prod(config.augment.crop_size) * BYTES_PER_PIXEL
    needed = data.workers * data.prefetch * config.compute.samples_per_shard * crop
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise ConfigError(
            f"data.workers = {data.workers} and data.prefetch = {data.prefetch} need {needed / 2**20:.0f} MiB of "
            f"shared memory, but this machine has {memory / 2**20:.0f} MiB. Lower one of the two."
        )
    if not data.workers:
        return
    sent: dict[str, object] = {f"data.name = {config.data.name}": samples}
    if method != "fork":  # which copies data sets of users alone
        sent[f"augment.extra = {config.augment.extra}"] = Augmenter(config.augment)
    for setting, value in sent.items():
        try:
            ForkingPickler.dumps(value)
        except Exception as error:  # whatever a class raises in __reduce__
            raise ConfigError(
                f"{setting} cannot be pickled ({type(error).__name__}: {error}), but data.start_method = {method} "
                f"copies it into every loader process. Open files and databases in read, leave them out in "
                f"__getstate__, and define functions at the top of a module; or set data.workers=0."
            ) from error


def _spawn(config: Config, world_size: int) -> int:
    """Run `world_size` child processes on this machine; this process never touches the GPU.

    They are forks of a server that has only imported torch: a start costs one import (4 s of CPU time) instead of
    `world_size`, and they share its memory.
    """
    from unittest.mock import patch

    from torch.multiprocessing import (  # type: ignore[attr-defined]
        ProcessExitedException,
        start_processes,
    )

    from segpipe.distributed.group import local_store

    before = failure(config.run_dir)  # of an earlier session
    others = set(multiprocessing.active_children())
    disabled, code = logging.root.manager.disable, 0
    # The ranks report errors; torch would repeat them.
    logging.disable(logging.CRITICAL)
    try:
        store = local_store()
        multiprocessing.set_forkserver_preload(["segpipe.train.engine"])
        # The children need it before their own code runs; the next job of a sweep sets its own.
        with patch.dict(os.environ), stops_raised():
            flags.set_environment(
                world_size * config.compute.threads, config.compute.mode
            )
            try:
                with signals_deferred_by_children():
                    children = start_processes(  # type: ignore[no-untyped-call]
                        _child,
                        (config, world_size, store.port),
                        nprocs=world_size,
                        join=False,
                        start_method=_start_method(),
                    )
                while not children.join():
                    pass
            except Stopped as stop:
                _pass_on(
                    stop.args[0],
                    set(multiprocessing.active_children()) - others,
                    config.compute.timeout_s,
                )
                raise
    except ProcessExitedException as error:
        code = error.exit_code
        if code < 0:
            code = note_lost(config, error.error_index, -code, before)
    except Stopped:
        code = Interrupted.exit_code
    finally:
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        logging.disable(disabled)
        # The next run of this process may have other variables and outputs. Other children may also be forks of the
        # server, and stopping it would wait for them.
        if not others:
            forkserver._forkserver._stop()  # type: ignore[attr-defined]
        # Rank 0 may have been killed; other machines cannot know that.
        remove_dead(config.run_dir)
    # The ranks may have ended before they could say so, and rank 0 deletes the record of an earlier session.
    if code == Interrupted.exit_code and failure(config.run_dir) in (before, Failure()):
        ERRORS.print(STOPPED)
    return code


def _start_method() -> str:
    """How ranks start: forked, unless the path of the server's socket exceeds the system's limit (107 bytes)."""
    fits = len(os.fsencode(tempfile.gettempdir())) + SOCKET_NAME <= LONGEST_SOCKET
    return "forkserver" if fits else "spawn"


def _pass_on(number: int, children: set[BaseProcess], patience_s: float) -> None:
    """Send a signal to the ranks, and wait for the end of their step or validation."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid or 0, number)
    end = time.monotonic() + patience_s
    for child in children:
        child.join(max(0.0, end - time.monotonic()))


def _child(rank: int, config: Config, world_size: int, port: int) -> None:
    environment.enter_rank(rank, world_size, port)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        # A signal that arrived meanwhile is raised here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, asking())
        code = work(config, prepared=True)
    except KeyboardInterrupt:
        code = Interrupted.exit_code
    except Exception:
        traceback.print_exc()
        code = 1
    sys.exit(code)


def _end_with_parent() -> None:
    """Stop after this step when the process that started the run is gone; the fork server outlives it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGINT)


def work(
    config: Config, *, prepared: bool = False, splits: Splits | None = None
) -> int:
    """Train as one process of the run, and on rank 0 report and export; returns the exit code.

    `prepared`: `prepare` has run, in this process (`splits` is its result) or in a parent process.
    """
    # The user named them when starting the parent process.
    plugins.trust(path for _, path in config.import_paths)
    try:
        return _work(config, prepared, splits)
    except SegpipeError as error:
        return _report(error, rank=environment.rank())
    except RuntimeError as error:
        if not lost_another_rank(error):
            raise
        code = _report(
            lost_rank(error, f"rank {environment.rank()} on {platform.node()}")
        )
        # A launcher reports the rank that ends first: that must be the lost one, not this one.
        environment.wait_to_be_ended()
        return code


def _work(config: Config, prepared: bool, splits: Splits | None) -> int:
    threads, mode = config.compute.threads, config.compute.mode
    flags.set_environment(environment.local_world_size() * threads, mode)
    from segpipe.distributed import group as processes

    try:
        if not prepared:
            config, splits = with_steps(config)
        flags.apply(threads, mode)  # before the group: NCCL reads its variables there
        same = {
            "segpipe": _version(),
            "number of training images": str(splits and len(splits.train)),
            "configuration": config_hash(config),
        }
        group = processes.join(config.compute, same)
    except (ConfigError, DataError) as error:
        processes.give_up(error)
        # Most are those of all ranks of this machine: then the first one ends, and the launcher the others.
        if environment.local_rank():
            environment.wait_to_be_ended()
        raise

    def own() -> None:
        """Rank 0 owns the folder that it writes; the parent of spawned processes may die before them."""
        if not prepared or group.world_size > 1:  # else `launch` has
            held.enter_context(stops_raised())
        if group.is_main:
            held.enter_context(owned(config))

    try:
        # Rank 0 owns the folder until it has finished its work after the training.
        with contextlib.ExitStack() as held, _failure_told(group, config):
            if not prepared:
                splits = _prepare_together(config, group, splits)
            group.together(own)
            group.contract.on_verdict = partial(note_failure, config)
            return _train(config, group, splits)
    finally:
        processes.leave(group)


def _version() -> str:
    """Version of segpipe and hash of its sources, which ranks compare: checkouts may differ."""
    from segpipe.ledger.inputs import combined, source_hashes  # cv2

    return f"{segpipe.__version__} (sources {combined(source_hashes())[:12]})"


def _prepare_together(
    config: Config, group: Group, splits: Splits | None
) -> Splits | None:
    """`prepare` on rank 0 of a run that a launcher started; the others pin the same weights."""
    started = environment.local_world_size()

    def prepare_here() -> tuple[str, str]:
        nonlocal splits
        if config.compute.nproc not in ("auto", str(started)):
            raise ConfigError(
                f"compute.nproc = {config.compute.nproc}, but the launcher started {started} processes on "
                f"{platform.node()}. Remove compute.nproc, or start without the launcher."
            )
        if group.is_main:
            splits = prepare(config, group.world_size, splits)
        else:
            pin_weights(config)
        return config.model.weights_sha256, config.loss.teacher_sha256

    check_pins(config, group.together(prepare_here))
    return splits


@contextlib.contextmanager
def _disk_named(config: Config) -> Iterator[None]:
    """Raises NotWritten, with what to do, for an OSError that says that a disk is full or cannot be written to."""
    try:
        yield
    except OSError as error:
        if error.errno not in ADVICE:
            raise
        path = Path(error.filename or config.run_dir)
        raise not_written(path, error) from error


@contextlib.contextmanager
def _failure_told(group: Group, config: Config) -> Iterator[None]:
    """Tells the other ranks why this one ends, and records it in the run's folder once that is owned.

    Raises the ranks' common verdict in place of the error, if there is one.
    """
    try:
        try:
            with _disk_named(config):
                yield
        except KeyboardInterrupt as error:
            if verdict := group.contract.verdict(error):
                raise verdict from None
            raise
        except Exception as error:
            if not getattr(error, "common", False):
                group.contract.fail(error)
            raise
    except Exception as error:
        told = error
        if not isinstance(told, SegpipeError):
            told = SegpipeError(plugins.located(error))
        if _speaks(told, group.rank) and not lost_another_rank(error):
            group.contract.on_verdict(told)
        raise


def _train(config: Config, group: Group, splits: Splits | None) -> int:
    from segpipe.distributed import group as processes

    run, validation, result = train(config, group, CONSOLE, splits)
    processes.leave(group)  # the other ranks need not wait for what rank 0 does next
    if group.is_main:
        assert isinstance(run.log, Tracker)
        exit_code = 0
        try:
            finish(run, validation, result)
        except BaseException as error:
            exit_code = exit_code_of(error, group.contract)
            raise
        finally:
            run.log.end(config, result, exit_code)
    return 0


def finish(run: Run, found: Validation, result: Values) -> None:
    """Print the results and write the report, then export. Raises ExportMismatch if an exported file differs.

    The export comes last, so that a refusal does not hide the results of the training.
    """
    from segpipe.train.metrics import flattering, headline

    CONSOLE.print(iou_table(result, found.total.sum(1).tolist()))
    if len(result["sequences"]) > 1:
        CONSOLE.print(sequence_table(result["sequences"]))
    if note := flattering(result["sequences"]):
        CONSOLE.print(note)
    config = run.config
    date = time.strftime("%Y-%m-%d %H:%M")
    shown = {**result, "device": str(run.group.device), "date": date}
    data = page_data(config, run.val_samples, found, shown, run_predictor(run))
    write_report(
        run.folder / PAGE, replace(data, history=read_metrics(run.folder / FILE_NAME))
    )
    images = f"{config.data.split} images"
    if config.data.hold_out:
        images = f"images of {config.data.hold_out}, held out"
    CONSOLE.print(
        f"{headline(result)} on {len(run.val_samples)} {images}\n"
        f"run {run.folder}  (open {PAGE}; curves in {FILE_NAME})\n"
        f"next {_this_command()} evaluate {shlex.quote(f'run={run.folder}')}"
    )
    if config.export.enabled:
        _export(run)
        return
    folder = run.folder / "export"  # perhaps of an earlier session
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        source = read_json(folder / "manifest.json")["source"]
        if source["ema_digest"] != result["ema_digest"]:
            again = f"segpipe export {shlex.quote(f'run={run.folder}')}"
            CONSOLE.print(
                f"{folder} holds other weights, of an earlier export: {again}"
            )


def _export(run: Run) -> None:
    """Export the checkpoint that was just written, as the export command does."""
    from segpipe.export.dataset import spread
    from segpipe.export.publish import export_checkpoint
    from segpipe.train.checkpoint import load_network

    started = time.perf_counter()
    CONSOLE.print(
        f"exporting to {' and '.join(run.config.export.formats)} and comparing the files with the trained network on "
        f"up to {run.config.export.quality_images} images (export=off skips this) ..."
    )
    done = export_checkpoint(
        run.folder,
        load_network(run.folder, "last"),
        run.config,
        validation=run.val_samples,
        training=spread(run.train_samples),
    )
    CONSOLE.print(done.table())
    CONSOLE.print(f"{done.line('EXPORT')} ({time.perf_counter() - started:.0f} s)")


def _this_command() -> str:
    """Command for `segpipe` as the user can type it: by name if it is on the path, else with this Python."""
    if shutil.which("segpipe") == sys.argv[0]:
        return "segpipe"
    # Symlinks are kept: the interpreter of a virtual environment is one.
    return f"{shlex.quote(sys.executable.removeprefix(f'{os.getcwd()}/'))} -m segpipe"


def train(
    config: Config, group: Group, console: Console, splits: Splits | None = None
) -> tuple[Run, Validation, Values]:
    """`segpipe.train.engine.train`, reporting to the terminal and to metrics.jsonl; the caller ends `run.log`."""
    from segpipe.files import ROOT, git_state
    from segpipe.train import engine

    def open_outputs(step: int | None) -> tuple[TrainView, Tracker]:
        if group.is_main and step is None:
            clear_folder(config)
        view = TrainView(
            console,
            name=config.run.name,
            done=step or 0,
            total=config.train.steps,
            enabled=group.is_main and config.train.progress,
        )
        return view, open_tracker(config, config.run_dir, step, rank=group.rank)

    # Read at the start: the checkout may change during the training.
    git = git_state(ROOT) if group.is_main else None
    if git:
        del git["known_at"]
    return engine.train(config, group, open_outputs, splits=splits, git=git)


def _report(error: SegpipeError, *, rank: int = 0) -> int:
    """Exit code of an error. One rank prints it; the others wait to be ended, so that the launcher blames that rank."""
    if _speaks(error, rank):
        where = f"rank {rank}: " if rank else ""
        ERRORS.print(f"{where}{error}", style="bold red")
    else:
        environment.wait_to_be_ended()
    return error.exit_code


def _speaks(error: SegpipeError, rank: int) -> bool:
    """Whether this rank is the one that reports the error."""
    return not error.told and not (rank and error.common)
