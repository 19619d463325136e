"""Gates and comparisons on numbers alone: every limit, every figure, and what a verdict names."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from segpipe.export.gates import judge, quality
from segpipe.export.gates.comparison import (
    LIMITS,
    Candidate,
    ImageComparison,
    Limits,
    Sigma,
    compare,
    compare_answers,
    gate_integrity,
    gate_logits,
    gate_mask,
    gate_preprocessing,
)
from segpipe.export.gates.quality import Score, gate_quality
from segpipe.export.graph.network import Answer

ONE = Sigma(1.0, 1.0)
FP32 = {
    "logits_sigma": 1e-3, "agreement": 0.9999, "image_agreement": 0.999, "margin_sigma": 2e-3, "confidence_levels": 1,
    "normalised": 1e-5, "miou_points": 0.01, "class_points": 0.05, "critical_points": math.inf, "both_ways": True,
    "relative_latency": math.inf, "confidence_share": 1.0, "made_images": True,
}  # fmt: skip
REDUCED = {
    "image_agreement": 0.0, "class_points": math.inf, "both_ways": False, "made_images": False,
}  # fmt: skip
FP16 = {
    "logits_sigma": 3e-2, "agreement": 0.995, "margin_sigma": 6e-2, "miou_points": 0.1, "confidence_levels": 2,
    "confidence_share": 0.999,
}  # fmt: skip
# Eight times fp16's: three bits of mantissa fewer
BF16 = {"logits_sigma": 0.24, "margin_sigma": 0.48, "confidence_levels": 16}
INT8 = {
    "logits_sigma": math.inf, "agreement": 0.97, "margin_sigma": math.inf, "miou_points": 1.0, "critical_points": 2.0,
    "relative_latency": 0.9, "confidence_levels": 32, "confidence_share": 0.99,
}  # fmt: skip


def test_limits_change_only_on_purpose() -> None:
    """They are promises of docs/export.md."""
    assert asdict(LIMITS["fp32"]) == FP32
    assert asdict(LIMITS["fp16"]) == {**FP32, **REDUCED, **FP16}
    assert asdict(LIMITS["int8"]) == {**FP32, **REDUCED, **INT8}
    assert asdict(LIMITS["bf16"]) == {**FP32, **REDUCED, **FP16, **BF16}
    assert set(LIMITS) == {"fp32", "fp16", "bf16", "int8"}


def cells(*differences: int) -> Any:
    """Cells by the difference of their confidence."""
    return np.bincount(differences, minlength=256)


def compared(
    name: str = "x", *, pixels: int = 10_000, margins: Any = (), **changes: Any
) -> ImageComparison:
    """An image on which nothing differs but pixels of these margins."""
    differing = np.array(margins, np.float32)
    same = ImageComparison(name, True, 0.0, differing, pixels, cells(0))
    return replace(same, **changes)


def test_integrity_names_every_problem() -> None:
    whole = gate_integrity([])
    assert (whole.passed, whole.figures) == (True, {"problems": []})
    assert whole.message
    torn = gate_integrity(["a is torn", "b is missing"])
    assert (torn.passed, torn.figures) == (
        False,
        {"problems": ["a is torn", "b is missing"]},
    )
    assert "a is torn; b is missing" in torn.message


def test_logits_at_the_limit_pass_and_the_worst_image_is_named() -> None:
    entries = [
        compared("a", logits_difference=0.25),
        compared("b", logits_difference=0.5),
        compared("c"),
    ]
    found = gate_logits(entries, ONE, Limits(logits_sigma=0.5))
    assert found.passed
    assert found.figures == {"max_sigma": 0.5, "limit_sigma": 0.5, "worst": "b"}
    assert "5.0e-01 sigma" in found.message
    assert "not judged" not in found.message
    refused = gate_logits(entries, ONE, Limits(logits_sigma=0.49))
    assert not refused.passed
    assert "0.5 > 0.49 sigma" in refused.message
    assert "b" in refused.message
    assert (
        "not judged" in gate_logits(entries, ONE, Limits(logits_sigma=math.inf)).message
    )


def test_what_cannot_be_measured_is_refused_with_its_reason() -> None:
    constant = gate_logits([compared()], Sigma(0.0, 0.0))
    infinite = gate_logits(
        [compared("bad", logits_difference=math.inf), compared()], ONE
    )
    assert not constant.passed
    assert not infinite.passed
    assert constant.figures["max_sigma"] == infinite.figures["max_sigma"] == math.inf
    assert "NaN" in infinite.message
    assert "bad" in infinite.message
    assert "NaN" not in constant.message


def test_mask_figures_are_those_of_all_images() -> None:
    entries = [
        compared("near", margins=[0.001] * 3, confidence=cells(1)),
        compared("far", margins=[0.001, 0.5]),
        compared("same"),
    ]
    found = gate_mask(entries, ONE, Limits(agreement=0.9, image_agreement=0.9))
    assert found.figures == {
        "agreement": pytest.approx(1 - 5 / 30_000),
        "worst_image_agreement": pytest.approx(1 - 3 / 10_000),
        "unexplained_pixels": 1,
        "confidence_levels": 1,
        "confidence_share": 1.0,
        "worst": "far",
        "images": 3,
    }
    assert not found.passed
    assert "0.002 sigma" in found.message
    assert "far, 1 unexplained" in found.message


def test_mask_agreement_at_the_limit_passes() -> None:
    half = compared(pixels=8, margins=[0.0] * 4)
    assert gate_mask([half], ONE, Limits(agreement=0.5, image_agreement=0.5)).passed
    assert (
        "50.00 %"
        in gate_mask([half], ONE, Limits(agreement=0.51, image_agreement=0.5)).message
    )
    assert (
        "50.00 %"
        in gate_mask([half], ONE, Limits(agreement=0.5, image_agreement=0.51)).message
    )
    assert gate_mask(
        [compared(confidence=cells(2))], ONE, Limits(confidence_levels=2)
    ).passed
    refused = gate_mask(
        [compared(confidence=cells(3))], ONE, Limits(confidence_levels=2)
    )
    assert not refused.passed
    assert "3 > 2" in refused.message


def test_single_cells_of_a_reduced_precision_may_be_less_sure() -> None:
    """fp16 of a normal run: 3 levels at one cell in a thousand, masks equal on 99.97 % of the pixels."""
    near = compared(confidence=cells(*[0] * 999, 3))
    far = compared(confidence=cells(*[0] * 997, 3, 3, 3))
    assert gate_mask([near], ONE, LIMITS["fp16"]).passed
    assert not gate_mask([near], ONE, LIMITS["fp32"]).passed
    refused = gate_mask([near, far], ONE, LIMITS["fp16"])
    assert not refused.passed, "each image by itself"
    assert (
        refused.figures["confidence_levels"],
        refused.figures["confidence_share"],
    ) == (3, 0.999)


def test_mask_says_what_differs() -> None:
    loose = Limits(agreement=0.0, image_agreement=0.0)
    assert "all pixels equal" in gate_mask([compared()], ONE, loose).message
    near = gate_mask([compared(pixels=8, margins=[0.0])], ONE, loose)
    assert "1 of 8" in near.message


def test_a_share_is_rounded_down() -> None:
    found = gate_mask([compared(pixels=100_000, margins=[0.0] * 11)], ONE)
    assert "99.98 % < 99.99 %" in found.message


def test_preprocessing_at_the_limit_passes_and_the_worst_image_is_named() -> None:
    entries = [
        compared("a", normalised_difference=0.1),
        compared("b", normalised_difference=0.25),
        compared("c"),
    ]
    found = gate_preprocessing(entries, Limits(normalised=0.25))
    assert found.passed
    assert found.figures == {"max_difference": 0.25, "limit": 0.25, "worst": "b"}
    assert "2.5e-01" in found.message
    refused = gate_preprocessing(entries, Limits(normalised=0.2))
    assert not refused.passed
    assert "0.25 > 0.2" in refused.message
    assert "b" in refused.message
    infinite = gate_preprocessing([compared(normalised_difference=math.inf)])
    assert (infinite.passed, infinite.figures["max_difference"]) == (False, math.inf)


# --- comparisons


@pytest.mark.parametrize("sigma", [0.0, math.inf, math.nan])
def test_without_a_spread_a_difference_means_nothing(sigma: float) -> None:
    assert compared(logits_difference=1.0).relative(Sigma(sigma, sigma)) == math.inf
    assert compared(logits_difference=1.0).relative(Sigma(4.0, 2.0)) == 0.5
    assert (
        compared(logits_difference=1.0, is_real=False).relative(Sigma(4.0, 2.0)) == 0.25
    )


def test_a_pixel_at_the_margin_is_explained() -> None:
    entry = compared(pixels=10, margins=[0.5, 0.51, math.nan])
    assert entry.unexplained(ONE, 0.5) == 2
    assert entry.unexplained(Sigma(2.0, 2.0), 0.5) == 1
    assert entry.agreement == pytest.approx(0.7)


def check(name: str, *, is_real: bool = False, level: int = 0) -> Any:
    return SimpleNamespace(
        name=name,
        is_real=is_real,
        is_scene=is_real,
        image=np.full((2, 3, 3), level, np.uint8),
    )


def answer(image: Any) -> Answer:
    """Three classes; logits as large as the level of the image."""
    level = float(image[0, 0, 0])
    logits = np.stack(
        [np.full((2, 3), value, np.float32) for value in (0.0, level, -level)]
    )
    mask, confidence = np.full((2, 3), 1, np.uint8), np.full((1, 1), 200, np.uint8)
    return Answer(mask, confidence, logits, np.full((3, 2, 3), level, np.float32))


def test_answers_are_compared_output_by_output() -> None:
    right = answer(check("x", level=4).image)
    assert right.logits is not None
    assert right.confidence is not None
    mask = right.mask.copy()
    mask[0, 1] = 2
    probe = right._replace(
        logits=right.logits + 0.5, normalised=right.normalised - 0.25
    )
    shipped = Answer(mask, right.confidence - 7)
    found = compare_answers(check("x", is_real=True), right, probe, shipped)
    assert (found.name, found.is_real) == ("x", True)
    assert (found.logits_difference, found.normalised_difference) == (0.5, 0.25)
    assert found.confidence_levels(1.0) == 7
    assert found.margins.tolist() == [4.0]  # the best class against the second
    assert found.pixels == right.mask.size
    without = compare_answers(check("x"), right, probe, Answer(mask))
    assert without.confidence_levels(1.0) == 0
    two = right._replace(logits=right.logits[:2] + 3)
    assert compare_answers(check("x"), two, two, Answer(mask)).margins.tolist() == [4.0]
    alone = right._replace(logits=right.logits[:1] + 3)
    assert compare_answers(check("x"), alone, alone, Answer(mask)).margins.tolist() == [
        3.0
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_numbers_that_are_not_finite_differ_without_limit(
    value: float, side: int
) -> None:
    right = answer(check("x", level=4).image)
    assert right.logits is not None
    bad = right._replace(logits=np.full_like(right.logits, value))
    assert (
        compare_answers(
            check("x"), *((bad, right) if side else (right, bad)), right
        ).logits_difference
        == math.inf
    )
    missing = compare_answers(check("x"), right, right._replace(normalised=None), right)
    assert (missing.normalised_difference, missing.logits_difference) == (math.inf, 0.0)


@pytest.mark.parametrize("role", ["probe", "shipped"])
def test_another_shape_is_named(role: str) -> None:
    right = answer(check("x").image)
    given = {
        "probe": right,
        "shipped": right,
        role: right._replace(mask=right.mask[:1]),
    }
    with pytest.raises(ValueError, match=r"mask .*\(1, 3\).*\(2, 3\)"):
        compare_answers(check("x"), right, given["probe"], given["shipped"])


def test_all_images_are_compared_and_sigma_is_that_of_the_reference() -> None:
    checks = [
        check(str(level), is_real=level < 3, level=level) for level in range(1, 6)
    ]
    candidate = Candidate(answer, answer)
    sigma = compare(answer, [candidate], checks)
    assert [entry.name for entry in candidate.comparisons] == ["1", "2", "3", "4", "5"]
    assert all(
        entry.logits_difference == 0 and not entry.margins.size
        for entry in candidate.comparisons
    )
    logits = [answer(each.image).logits for each in checks]
    assert sigma.everything == pytest.approx(np.std(logits), rel=1e-6)
    assert sigma.real == pytest.approx(np.std(logits[:2]), rel=1e-6)
    made_up = compare(answer, [], checks[3:])
    assert (
        made_up.real
        == made_up.everything
        == pytest.approx(np.std(logits[3:]), rel=1e-6)
    )


def test_a_candidate_that_raised_is_not_asked_again() -> None:
    calls: list[int] = []

    def torn(image: Any) -> Answer:
        calls.append(1)
        raise RuntimeError("torn")

    bad, good = Candidate(torn, torn), Candidate(answer, answer)
    compare(answer, [bad, good], [check("first"), check("second")])
    assert calls == [1]
    assert bad.comparisons == []
    assert all(part in bad.broken for part in ("RuntimeError", "torn", "first"))
    assert (good.broken, len(good.comparisons)) == ("", 2)


# --- quality and latency


def counted(
    correct: list[int], *mistakes: tuple[int, int, int], images: int = 3
) -> Score:
    """A confusion with these correct pixels by class, and mistakes as (target, prediction, pixels)."""
    counts = torch.diag(torch.tensor(correct))
    for target, prediction, pixels in mistakes:
        counts[target, prediction] += pixels
    return Score(counts, images=images)


def test_quality_figures_and_limits_are_in_points_of_100(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a limit a file passes; one unit in the last place below it, it does not."""
    monkeypatch.setattr(quality, "TIED", 0)  # nearly all of a class of 100 pixels
    names, before = ("road", "car", "sky", "none"), counted([100, 100, 200, 0])
    now = counted(
        [90, 100, 200, 0], (0, 1, 10)
    )  # IoU of road 90 / 100, of car 100 / 110
    loose = Limits(miou_points=100.0, class_points=math.inf, both_ways=False)
    found = gate_quality(before, now, names, loose)
    assert found.passed
    points = 100 * ((0.9 + 100 / 110 + 1) / 3 - 1)
    assert found.figures == {
        "miou_reference": pytest.approx(100),
        "miou": pytest.approx(100 + points),
        "points": pytest.approx(points),
        "worst_class": "road",
        "class_points": pytest.approx(-10),
        "images": 3,
    }
    assert f"mIoU 100.00 % changes by {points:+.4f} points on 3 images" in found.message
    fall, class_fall = -found.figures["points"], -found.figures["class_points"]
    for setting, value, critical in (
        ("miou_points", fall, []), ("class_points", class_fall, []), ("critical_points", class_fall, ["car", "road"]),
    ):  # fmt: skip
        for both_ways in (True, False):
            at = replace(loose, both_ways=both_ways, **{setting: value})
            assert gate_quality(before, now, names, at, critical).passed
            below = replace(at, **{setting: math.nextafter(value, 0)})
            refused = gate_quality(before, now, names, below, critical)
            assert not refused.passed
            assert refused.message.startswith("G5 quality: ")
            risen = gate_quality(now, before, names, below, critical)
            assert risen.passed is not both_ways, (
                "a gain is refused where both ways are limited"
            )


def test_pixels_are_counted_by_target_and_prediction() -> None:
    score = Score(torch.zeros(3, 3, dtype=torch.int64))
    for _ in range(2):
        answer = Answer(np.array([[0, 1, 2, 2, 3, -1]]))
        score.add(answer, np.array([[0, 0, 1, 255, 2, 2]], np.uint8))
    assert score.counts.tolist() == [[2, 2, 0], [0, 0, 2], [4, 0, 0]]
    assert (score.images, score.invalid_pixels) == (2, 4)


def test_reduced_precision_is_judged_where_answers_mean_something() -> None:
    """On real images and their degraded copies; on noise and constants a network may say anything."""
    real, made = (
        compared("frame"),
        compared("noise", is_real=False, margins=[0.0] * 9_000),
    )
    copy = compared("frame (dark)", margins=[0.0] * 9_000)
    reduced = LIMITS["int8"]
    assert gate_mask([real, made], ONE, reduced).passed
    assert not gate_mask([real, copy], ONE, reduced).passed
    assert not gate_mask([made], ONE, reduced).passed, "there is nothing else"
    assert not gate_mask([real, made], ONE, replace(reduced, made_images=True)).passed


def test_confidence_of_int8_is_judged_by_a_quantile() -> None:
    """One cell in a hundred may be as far off as it likes: what the others say decides."""
    limits = LIMITS["int8"]
    near = compared(confidence=cells(*[32] * 99, 200))
    assert gate_mask([near], ONE, limits).passed
    refused = gate_mask(
        [near, compared(confidence=cells(*[33] * 2, *[0] * 98))], ONE, limits
    )
    assert not refused.passed, "each image by itself"
    assert "33 > 32 levels at more than 1.0%" in refused.message


class Clock:
    """Seconds that pass only in runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.calls = 1000.0, ""
        monkeypatch.setattr(
            judge,
            "time",
            SimpleNamespace(perf_counter=lambda: self.now, process_time=self.spent),
        )

    def spent(self) -> float:
        """Processor time: half of the clock's."""
        return self.now / 2

    def run(self, name: str, seconds: float, first: float) -> Any:
        """A run that takes `seconds`, and `first` in each of its first two calls."""

        def answer(image: Any) -> Answer:
            self.now += first if self.calls.count(name) < 2 else seconds
            self.calls += name
            return Answer(image)

        return answer


@pytest.mark.parametrize(
    ("seconds", "num"), [(1 / 1024, 50), (1 / 16, 14), (1 / 2, 10)]
)
def test_latency_is_that_of_warm_runs_that_take_turns(
    monkeypatch: pytest.MonkeyPatch, seconds: float, num: int
) -> None:
    """At least 10, at most 50, and as many as fit into a second for each file."""
    clock = Clock(monkeypatch)
    runs = {name: clock.run(name, seconds, first=seconds) for name in "ab"}
    found = judge.measure(runs, check("x").image)
    assert clock.calls == "ab" * (num + 2)
    assert {name: entry["n"] for name, entry in found.items()} == {"a": num, "b": num}
    clock = Clock(monkeypatch)
    runs = {
        "a": clock.run("a", 1 / 8, first=64.0),
        "b": clock.run("b", 1 / 4, first=64.0),
    }
    found = judge.measure(runs, check("x").image)
    assert [found[name][share] for name in "ab" for share in ("p50_ms", "p99_ms")] == [
        125,
        125,
        250,
        250,
    ]
    assert [found[name]["cpu_ms"] for name in "ab"] == [62.5, 125]


def test_quantiles_of_latency_are_those_of_all_warm_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)

    def slower_each_time(image: Any) -> Answer:
        clock.now += len(clock.calls) / 2**16
        clock.calls += "a"
        return Answer(image)

    found = judge.measure({"a": slower_each_time}, check("x").image)["a"]
    wall = 1e3 * np.arange(2, 52) / 2**16
    assert [found[f"p{share}_ms"] for share in (50, 90, 99)] == [
        pytest.approx(np.percentile(wall, share), abs=6e-4) for share in (50, 90, 99)
    ]


def test_latency_at_its_limits() -> None:
    """The figures are the limits only, so that equal exports have equal reports."""
    int8 = Limits(relative_latency=0.5)
    measured = {"p50_ms": 8.0, "cpu_ms": 4.0}
    assert judge.gate_latency(measured, budget_ms=8.0).message == "within 8 ms"
    assert judge.gate_latency(measured, budget_ms=0).message == "no budget"
    assert (
        "8.0 ms > 0.5 ms of export.latency_budget_ms"
        in judge.gate_latency(measured, budget_ms=0.5).message
    )
    fp32 = {"p50_ms": 1.0, "cpu_ms": 8.0}  # a p50 that load has moved does not count
    half = judge.gate_latency(measured, budget_ms=9.0, fp32=fp32, limits=int8)
    assert (half.passed, half.message) == (True, "within 9 ms, at most 0.5 of fp32")
    assert half.figures == {"budget_ms": 9.0, "share_of_fp32": 0.5}
    slower = judge.gate_latency(
        {"p50_ms": 0.1, "cpu_ms": 4.01}, budget_ms=9.0, fp32=fp32, limits=int8
    )
    assert not slower.passed
    assert "CPU time 0.501 > 0.5" in slower.message
