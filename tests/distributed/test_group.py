"""`Group.together`: an error of one rank ends all of them, and one of them reports it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from segpipe.distributed.group import Group
from segpipe.errors import CheckpointError, DataError, SegpipeError


class Ranks(Group):
    """One rank of three; the others have the given errors."""

    others: tuple[SegpipeError | None, ...] = ()

    def gather(self, item: Any) -> list[Any]:
        entries: list[Any] = list(self.others)
        entries.insert(self.rank, item)
        return entries


def rank(number: int, *others: SegpipeError | None) -> Ranks:
    group = Ranks(number, number, 3, torch.device("cpu"))
    object.__setattr__(group, "others", others)
    return group


def full() -> None:
    raise CheckpointError("no space left")


def test_what_works_everywhere_raises_nowhere() -> None:
    done = []
    rank(1, None, None).together(lambda: done.append(1))
    assert done == [1]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_error_of_one_rank_is_raised_on_all_and_reported_by_rank_0(number: int) -> None:
    with pytest.raises(DataError, match="torn") as caught:
        rank(number, DataError("torn"), None).together(lambda: None)
    assert caught.value.told == (number != 0)


def test_of_several_errors_all_ranks_raise_that_of_the_lowest_rank() -> None:
    with pytest.raises(CheckpointError, match="no space left"):
        rank(0, DataError("torn"), None).together(full)
    with pytest.raises(DataError, match="torn"):
        rank(2, DataError("torn"), None).together(full)


def test_an_error_that_is_not_ours_is_left_to_the_contract() -> None:
    def bug() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rank(0, None, None).together(bug)
