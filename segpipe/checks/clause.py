"""One clause of a contract, and whether it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from segpipe import plugins
from segpipe.errors import SegpipeError


@dataclass(frozen=True)
class Clause:
    """A clause, and what came of its check."""

    part: str  # model, loss, data or augment
    name: str
    problem: str = ""  # what is wrong and what to do; empty when it is kept
    note: str = ""  # worth knowing, though it is kept
    checked: bool = True  # False: it could only repeat the problem of another clause


# The name of a clause, and a function that returns its problem, or an empty text; "note: ..." does not fail.
Question = tuple[str, Callable[[], str]]
NOTE = "note: "


def answers(part: str, questions: Iterable[Question]) -> Iterator[Clause]:
    """A clause for each question, or for the first alone if that has a problem.

    An error of the user's code is a problem, with its file and line.
    """
    for place, (name, ask) in enumerate(questions):
        try:
            found = ask()
        except SegpipeError as error:
            found = str(error)
        except Exception as error:
            found = f"{plugins.located(error)}."
        if found.startswith(NOTE):
            yield Clause(part, name, note=found.removeprefix(NOTE))
        else:
            yield Clause(part, name, found)
            if found and place == 0:
                return
