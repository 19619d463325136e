"""`segpipe profile`: where the updates of a configuration spend their time, and what to change first."""

from __future__ import annotations

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
    from segpipe.train.profiling import measure

    config = with_steps(config)
    group = processes.join(config.compute, {"configuration": config_hash(config)})
    folder = config.run_dir.with_name(f"{config.run_dir.name}_profile")
    own = folder / f"rank{group.rank:02d}" if group.world_size > 1 else folder
    try:
        found = measure(config, group, own)
    finally:
        processes.leave(group)
    if not group.is_main:
        return 0
    write_atomically(folder / "profile.json", to_json(found))
    console = Console(soft_wrap=True, highlight=False, emoji=False, markup=False)
    table = Table("part of an update", "ms", "share")
    for name, ms in found["parts"].items():
        table.add_row(name, f"{ms:.1f}", f"{ms / found['update_ms']:.1%}")
    console.print(
        f"{config.model.name} on {group.device.type}, shards per process: "
        f"{len(group.own_shards(config.compute.shards))}, of {config.compute.samples_per_shard} samples; processes: "
        f"{group.world_size}. {found['update_ms']:.1f} ms per update, {found['images_per_second']:.1f} images/s per "
        f"process"
    )
    console.print(table)
    console.print(
        f"loader: {found['sample_ms']:.1f} ms to read and augment a sample in one process; "
        f"data.workers={config.data.workers}."
    )
    for sentence in found["advice"]:
        console.print(sentence)
    console.print(f"trace for ui.perfetto.dev: {own / 'trace.json'}")
    return 0
