"""The choice of what is trained again: any span may be chosen, and the seed alone chooses."""

from pathlib import Path

from segpipe.audit.examine import Span, choose_spans

STARTS = {
    0: None,
    4: Path("step_000004.pt"),
    10: Path("step_000010.pt"),
    20: Path("last.pt"),
}


def test_all_spans_when_there_are_few() -> None:
    spans = choose_spans(STARTS, 20, count=9, longest=0, seed=0)
    assert spans == [Span(None, 0, 4), Span(STARTS[4], 4, 10), Span(STARTS[10], 10, 20)]
    assert [str(span) for span in spans[:2]] == [
        "updates 0 to 3 from the seed",
        "updates 4 to 9 from step_000004.pt",
    ]


def test_a_span_is_no_longer_than_asked_for() -> None:
    spans = choose_spans(STARTS, 22, count=9, longest=3, seed=0)
    assert [(span.first, span.last) for span in spans] == [
        (0, 3),
        (4, 7),
        (10, 13),
        (20, 22),
    ]


def test_the_seed_chooses_and_every_span_has_its_turn() -> None:
    def chosen(seed: int) -> list[Span]:
        return choose_spans(STARTS, 20, count=1, longest=0, seed=seed)

    assert all(chosen(seed) == chosen(seed) for seed in range(5))
    firsts = [chosen(seed)[0].first for seed in range(60)]
    assert all(firsts.count(first) > 8 for first in (0, 4, 10))


def test_spans_that_end_at_the_last_and_the_best_checkpoint_are_taken_besides() -> None:
    for seed in range(9):
        by_chance, found = (
            choose_spans(STARTS, 24, count=1, longest=0, seed=seed, always=always)
            for always in ((), (20, 24))
        )
        assert {*by_chance, Span(STARTS[10], 10, 20), Span(STARTS[20], 20, 24)} == {
            *found
        }
    cut = choose_spans(STARTS, 24, count=1, longest=3, seed=0, always=(24,))
    assert len(cut) == 1, "a span that is cut ends at no checkpoint"


def test_nothing_to_train_is_no_span() -> None:
    assert choose_spans({0: None}, 0, count=3, longest=0, seed=0) == []
