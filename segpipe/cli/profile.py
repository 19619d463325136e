"""`segpipe profile`: where the updates of a configuration spend their time, and what to change first."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from segpipe.determinism import flags
from segpipe.distributed import environment
from segpipe.files import to_json, write_atomically
from segpipe.run.launch import with_steps
from segpipe.settings.check import check
from segpipe.settings.compose import compose
from segpipe.settings.config import config_hash


def main(overrides: list[str]) -> int:
    """Exit code."""
    config = compose(overrides)
    check(config, world_size=1)
    flags.set_environment(
        environment.local_world_size() * config.compute.threads, config.compute.mode
    )
    from segpipe.distributed import group as processes
    from segpipe.train.profiling import TIMED, StepProfile, measure

    config = with_steps(config)
    group = processes.join(config.compute, {"configuration": config_hash(config)})
    folder = config.run_dir.with_name(f"{config.run_dir.name}_profile")
    try:
        own = folder / f"rank{group.rank:02d}" if group.world_size > 1 else folder
        found: StepProfile = measure(config, group, own)
    finally:
        processes.leave(group)
    if not group.is_main:
        return 0
    write_atomically(folder / "profile.json", to_json(asdict(found)))
    console = Console(soft_wrap=True, highlight=False, emoji=False)
    table = Table("part of an update", "ms", "share")
    for part in found.parts:
        table.add_row(part.name, f"{part.ms:.1f}", f"{part.share:.1%}")
    console.print(
        f"{config.model.name} on {group.device.type}, shards per process: "
        f"{len(group.own_shards(config.compute.shards))}, of {config.compute.samples_per_shard} samples; processes: "
        f"{group.world_size}. {found.update_ms:.1f} ms per update, {found.images_per_second:.1f} images/s per process "
        f"({TIMED} updates)"
    )
    console.print(table)
    console.print(
        f"loader: {found.read_ms:.1f} ms to read a sample, {found.augment_ms:.1f} ms to augment it, in one process; "
        f"{found.repeated:.2%} are made again for the canary; data.workers={config.data.workers}."
    )
    for sentence in found.advice:
        console.print(sentence, markup=False)
    console.print(
        f"trace for chrome://tracing or ui.perfetto.dev: {own / 'trace.json'}",
        markup=False,
    )
    return 0
