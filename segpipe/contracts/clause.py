"""One clause of a contract, and whether it is kept."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

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


@dataclass(frozen=True)
class Question:
    """Checks a clause: `ask` returns a problem, or an empty text; "note: ..." is one that does not fail."""

    name: str
    ask: Callable[[], str]


NOTE = "note: "


def answers(part: str, questions: Iterable[Question]) -> Iterator[Clause]:
    """A clause for each question; an error of the user's code is a problem, with its file and line."""
    for question in questions:
        try:
            found = question.ask()
        except SegpipeError as error:
            found = str(error)
        except Exception as error:
            found = f"{plugins.located(error)}."
        if found.startswith(NOTE):
            yield Clause(part, question.name, note=found.removeprefix(NOTE))
        else:
            yield Clause(part, question.name, found)


def scramble(seed: int) -> None:
    """Move the global generators of Python and numpy, on which nothing may depend."""
    random.seed(seed)
    np.random.seed(seed)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Put all global generators of the CPU back at the end, so that a check changes nothing of what follows."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
