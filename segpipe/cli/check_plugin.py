"""`segpipe check-plugin`: the contracts of networks, losses, data sets and transforms, ours and the user's own."""

from __future__ import annotations

from collections.abc import Iterator

from segpipe.checks.clause import Clause
from segpipe.checks.data_contract import DataContract, augment_clauses
from segpipe.checks.export_contract import exported
from segpipe.checks.loss_contract import CLASSES, LossContract
from segpipe.checks.network_contract import NetworkContract
from segpipe.cli.check_augment import show
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.errors import ConfigError, DataError
from segpipe.run.console import CONSOLE
from segpipe.settings.compose import compose
from segpipe.settings.config import Config

# The setting that names each part.
PARTS = {
    "model": "model.name",
    "loss": "loss.name",
    "data": "data.name",
    "augment": "augment.extra",
}


def main(arguments: list[str]) -> int:
    """Exit code: that of a wrong setting if a check fails."""
    config = compose(arguments)
    parts = chosen(arguments, config)
    if not parts:
        examples = ", ".join(f"{key}=..." for key in PARTS.values())
        raise ConfigError(f"nothing to check. Name a plug-in with {examples}.")

    flags.apply(config.compute.threads, "off")
    found = []
    with CONSOLE.status("checking") as status:
        for clause in clauses(config, parts):
            found.append(clause)
            status.update(f"{clause.part}: {clause.name}")

    return ConfigError.exit_code if show(found, ", ".join(parts)) else 0


def chosen(arguments: list[str], config: Config) -> list[str]:
    """Parts that the arguments name, and those that are plug-ins."""
    given = {text.lstrip("+").partition("=")[0] for text in arguments}
    # Those of a configuration file are plug-ins by their import paths.
    own = {key for key, _ in config.import_paths}
    return [part for part, key in PARTS.items() if {part, key} & given or key in own]


def clauses(config: Config, parts: list[str]) -> Iterator[Clause]:
    """Clauses of these parts, as they are checked."""
    if "model" in parts:
        num_classes = _num_classes(config)
        yield from NetworkContract(config, num_classes, export=exported).clauses()

    if "loss" in parts:
        yield from LossContract(config).clauses()

    if "data" in parts:
        for split in dict.fromkeys(("train", config.data.split)):
            yield from DataContract(config, split).clauses()

    if "augment" in parts:
        yield from augment_clauses(config)


def _num_classes(config: Config) -> int:
    """Classes of the data set, or of an example where there is none: a network is checked without data too."""
    try:
        return open_samples(config.data, "train", config.seed).classes.num_classes
    except (ConfigError, DataError):
        return CLASSES
