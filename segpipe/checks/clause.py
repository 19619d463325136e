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
            answer = ask()
        except SegpipeError as error:
            answer = str(error)
        except Exception as error:
            answer = f"{plugins.located(error)}."
        if answer.startswith(NOTE):
            yield Clause(part, name, note=answer.removeprefix(NOTE))
        else:
            yield Clause(part, name, answer)
            if answer and place == 0:
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
