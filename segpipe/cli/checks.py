"""`segpipe check-augment` and `check-plugin`: check augmentation, networks, losses and data sets against contracts."""

from collections.abc import Iterable, Iterator

from segpipe.checks.contracts import (
    CLASSES,
    Clause,
    DataContract,
    LossContract,
    NetworkContract,
    augment_clauses,
)
from segpipe.cli.commands import Given
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.errors import ConfigError, DataError, ImpureAugmentError
from segpipe.export.publish import trial_export
from segpipe.run.console import CONSOLE, progress, table, verdict
from segpipe.run.launch import with_crop
from segpipe.settings.compose import compose
from segpipe.settings.config import Config, check

# The setting that names each part.
PARTS = {
    "model": "model.name",
    "loss": "loss.name",
    "data": "data.name",
    "augment": "augment.extra",
}


def check_augment(given: Given) -> int:
    """Exit code: ImpureAugmentError's if a probe fails, else 0."""
    config = with_crop(compose(given["overrides"]))
    check(config)
    flags.apply(config.compute.threads, config.compute.mode)
    with progress("checking augment", 3) as show:
        found = list(augment_clauses(config, show))
    return ImpureAugmentError.exit_code if _show(found, "augment") else 0


def check_plugin(given: Given) -> int:
    """Exit code: ConfigError's if a check fails, else 0."""
    arguments = given["overrides"]
    config = with_crop(compose(arguments))
    parts = chosen(arguments, config)
    if not parts:
        examples = ", ".join(f"{key}=..." for key in PARTS.values())
        raise ConfigError(f"nothing to check. Name a plug-in with {examples}.")
    flags.apply(config.compute.threads, "off")
    failed = _show(clauses(config, parts), ", ".join(parts))
    return ConfigError.exit_code if failed else 0


def chosen(arguments: list[str], config: Config) -> list[str]:
    """Parts that the arguments name, and parts that are plug-ins."""
    given = {text.lstrip("+").partition("=")[0] for text in arguments}
    # Parts that a configuration file names are plug-ins if they have an import path.
    own = {key for key, _ in config.import_paths}
    return [part for part, key in PARTS.items() if {part, key} & given or key in own]


def clauses(config: Config, parts: list[str]) -> Iterator[Clause]:
    """Clauses of these parts; each is checked when it is taken from the iterator."""
    if "model" in parts:
        num_classes = _num_classes(config)
        yield from NetworkContract(config, num_classes, export=trial_export).clauses()
    if "loss" in parts:
        yield from LossContract(config).clauses()
    if "data" in parts:
        for split in dict.fromkeys(("train", config.data.split)):
            yield from DataContract(config, split).clauses()
    if "augment" in parts:
        try:
            yield from augment_clauses(config)
        except ConfigError as error:
            yield Clause("augment", "can be checked", str(error))


def _num_classes(config: Config) -> int:
    """Number of classes of the data set, or a default without data, since a network can be checked without any."""
    try:
        return open_samples(config.data, "train", config.seed).classes.num_classes
    except (ConfigError, DataError):
        return CLASSES


def _show(checked: Iterable[Clause], what: str) -> bool:
    """Print a table of the checks, then each problem with what to do. Returns whether a check failed."""
    with CONSOLE.status(f"checking {what}"):
        found = list(checked)
    rows = [
        (x.part, x.name, verdict("failed" if x.problem else "passed"), x.note)
        for x in found
    ]
    CONSOLE.print(table(("part", "check", "", "note"), rows))
    broken = [clause for clause in found if clause.problem]
    for clause in broken:
        CONSOLE.print(f"{clause.part}, {clause.name}: {clause.problem}")
    result = f"{len(broken)} failed" if broken else "all passed"
    CONSOLE.print(f"{len(found)} checks of {what}: {result}")
    return bool(broken)
