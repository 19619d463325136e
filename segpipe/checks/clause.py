"""One clause of a contract, and whether it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from segpipe import plugins
from segpipe.determinism.opgate import SLOW, check_ops
from segpipe.errors import SegpipeError


@dataclass(frozen=True)
class Clause:
    """A clause, and what came of its check."""

    part: str  # model, loss, data or augment
    name: str
    problem: str = ""  # what is wrong and what to do; empty when it is kept
    note: str = ""  # worth knowing, though it is kept


# The name of a clause, and a function that returns its problem, or an empty text; "note: ..." does not fail.
Question = tuple[str, Callable[[], str]]
NOTE = "note: "


def answers(
    part: str, questions: Iterable[Question], vital: int = 1
) -> Iterator[Clause]:
    """A clause for each question; after a problem of one of the first `vital`, the others could only repeat it.

    An error of the user's code is a problem, with its file and line.
    """
    for place, (name, ask) in enumerate(questions):
        try:
            answer = ask()
        except SegpipeError as error:
            answer = str(error)
        except Exception as error:
            answer = f"{plugins.located(error)}."
        if answer.startswith(NOTE):
            yield Clause(part, name, note=answer.removeprefix(NOTE))
        else:
            yield Clause(part, name, answer)
            if answer and place < vital:
                return


def refusal(*questions: Callable[[], str]) -> str:
    """The first problem that an answer tells; empty when there is none."""
    for clause in answers("", [("", ask) for ask in questions]):
        if clause.problem:
            return clause.problem
    return ""


def forbidden_ops(call: Callable[[], object]) -> str:
    """Answer to the question whether CUDA repeats the ops of a call."""
    found = check_ops(call)
    refused = [str(one) for one in found if one.rule.state != SLOW]
    if refused:
        return " ".join(refused[:3])
    return f"{NOTE}slow on GPUs: {found[0]}" if found else ""
