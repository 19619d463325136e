"""The contracts of a data set and of transforms: equal bytes for every process that asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from segpipe import plugins
from segpipe.checks import purity
from segpipe.checks.clause import NOTE, Clause, answers, refusal
from segpipe.checks.elsewhere import UnansweredError, elsewhere
from segpipe.checks.tripwire import preserved, seed_globals
from segpipe.data.augment import Augmenter
from segpipe.data.data_set import DataSet, Samples
from segpipe.data.samples import CachedSamples, open_samples
from segpipe.errors import ConfigError
from segpipe.native import one_thread

if TYPE_CHECKING:
    from segpipe.settings.config import Config

SOME = 6  # samples of a split that are read


class DataContract:
    """Checks the splits of a configuration."""

    def __init__(self, config: Config, split: str) -> None:
        self.config, self.split = config, split

    def clauses(self) -> Iterator[Clause]:
        """All clauses; the first alone when the split cannot be opened."""
        split = self.split
        asked = {
            f"{split}: can be opened": self._opened,
            f"{split}: images, targets and names": self._samples,
            f"{split}: same bytes twice": self._twice,
            f"{split}: same bytes in another process": self._other_process,
        }
        return answers("data", asked.items())

    def _open(self) -> DataSet:
        return open_samples(self.config.data, self.split, self.config.seed)

    def _opened(self) -> str:
        self.samples = self._open()
        self.indices = [
            place * len(self.samples) // SOME
            for place in range(min(SOME, len(self.samples)))
        ]
        return ""

    def _samples(self) -> str:
        problems = self.samples.problems(sorted(set(self.indices)))
        return " ".join(list(problems)[:3])

    def _twice(self) -> str:
        """In another order, by another object, with other global generators."""
        seed_globals(1)
        before = contents(self.samples, self.indices)
        seed_globals(2)
        again = contents(self._open(), self.indices[::-1])[::-1]
        return self._different(
            before,
            again,
            "read twice",
            "Let the index alone decide, and draw nothing at random.",
        )

    def _other_process(self) -> str:
        """A forked one, as loader processes are, and one of another start of the program."""
        expected = contents(self.samples, self.indices)
        for method in ("fork", "spawn"):
            try:
                found = elsewhere(method, contents, self.samples, self.indices)
            except UnansweredError as error:
                return (
                    f"{NOTE}not checked in another process ({method}): {error}. Open files and databases in read, not "
                    "in __init__."
                )
            advice = "Use no hash() of text, process id, clock, parent_process(), or order of a set or of os.listdir."
            if problem := self._different(
                expected, found, "read by another process", advice
            ):
                return problem
        return ""

    def refusal(self) -> str:
        """Why no training should start with this data set; empty when one may."""
        return refusal(self._opened, self._twice, self._other_process)

    def _different(
        self, before: list[str], now: list[str], how: str, advice: str
    ) -> str:
        for index, one, two in zip(self.indices, before, now, strict=True):
            if one != two:
                return f"sample {self.samples.name(index)} has other bytes when {how}. {advice}"
        return ""


@one_thread()  # as loaders give to torch; more do not survive a fork
def contents(samples: Samples, indices: list[int]) -> list[str]:
    """The bytes of these samples with their names, as text."""
    found = []
    for index in indices:
        image, target = samples.read(index)
        told = f"{len(samples)} {samples.name(index)} {image.shape} {image.tobytes()!r}"
        found.append(f"{told} {target.tobytes()!r}")
    return found


def check_data(config: Config) -> None:
    """Raise ConfigError for a training set of the user whose samples have other bytes when read again, or elsewhere."""
    if not plugins.is_path(config.data.name):
        return
    with preserved():
        if problem := DataContract(config, "train").refusal():
            raise ConfigError(f"data.name = {config.data.name}: {problem}")


def augment_clauses(
    config: Config, progress: Callable[..., None] = lambda *_: None
) -> Iterator[Clause]:
    """A clause for each transform, and for all together, by the purity check. Raises ConfigError when it cannot run."""
    samples = CachedSamples(open_samples(config.data, "train", config.seed), 64)
    augmenter = Augmenter(config.augment)
    findings = purity.check(augmenter, samples, progress=progress)
    names = [*(part.name for part in augmenter.parts()), augmenter.name]
    problems = {finding.transform: str(finding) for finding in findings}
    for name in names:
        yield Clause("augment", f"{name} is pure", problems.get(name, ""))
