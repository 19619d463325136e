"""The gates: each at its limits, and the negative controls that show they see something."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from exports import IMAGES, NAMES, NUM_CLASSES, tiny_network
from segpipe.data.augment import Augmenter
from segpipe.errors import (
    ConfigError,
    ExportMismatch,
    IntegrityError,
    LatencyError,
    QualityError,
)
from segpipe.export.dataset import Labelled, check_set
from segpipe.export.gates import controls
from segpipe.export.gates.comparison import (
    LIMITS,
    Candidate,
    Check,
    GateResult,
    ImageComparison,
    Limits,
    Sigma,
    as_trained,
    compare,
    compare_answers,
    gate_logits,
    gate_mask,
    gate_preprocessing,
)
from segpipe.export.gates.controls import CONTROLS, gate_power
from segpipe.export.gates.judge import gate_latency
from segpipe.export.gates.quality import Score, calibration_entry, gate_quality, scores
from segpipe.export.graph.network import (
    PROFILES,
    ROBOT,
    Answer,
    DeployModel,
    Image,
    run_eager,
)
from segpipe.export.verify_report import ExportReport, refusal
from segpipe.models.preprocess import Preprocess
from segpipe.settings.config import Config, check
from segpipe.settings.groups import AugmentConfig

ONE = Sigma(1.0, 1.0)


def answers(
    num_different: int, margin: float, *, pixels: int = 100_000
) -> ImageComparison:
    """Two classes, sigma 1: `num_different` pixels differ where the reference is `margin` from a tie."""
    logits = np.zeros((2, 1, pixels), dtype=np.float32)
    logits[0] = margin
    mask, changed = (
        np.zeros((1, pixels), dtype=np.uint8),
        np.zeros((1, pixels), dtype=np.uint8),
    )
    changed[0, :num_different] = 1
    confidence = np.zeros((1, 1), dtype=np.uint8)
    right = Answer(mask, confidence, logits)
    return compare_answers(
        Check("x", IMAGES[0]), right, right, Answer(changed, confidence)
    )


@pytest.mark.parametrize(
    ("num_different", "margin", "passed"),
    [
        (0, 1.0, True),
        (9, 1.9e-3, True),
        (11, 1.9e-3, False),
        (1, 2.1e-3, False),
        (1, float("nan"), False),
    ],
)
def test_mask_gate_at_its_limits(
    num_different: int, margin: float, passed: bool
) -> None:
    assert gate_mask([answers(num_different, margin)], ONE).passed is passed


def test_mask_gate_looks_at_every_image() -> None:
    small = answers(2, 0.0, pixels=1000)
    assert gate_mask([answers(0, 1.0), answers(1, 0.0, pixels=1000)], ONE).passed
    result = gate_mask([answers(0, 1.0), small], ONE)
    assert not result.passed
    assert "99.80 % < 99.9 %" in result.message


def test_mask_gate_sees_confidence() -> None:
    entry = answers(0, 1.0)
    one, two = (np.bincount([level], minlength=256) for level in (1, 2))
    assert gate_mask([dataclasses.replace(entry, confidence=one)], ONE).passed
    assert not gate_mask([dataclasses.replace(entry, confidence=two)], ONE).passed


def assert_is_json(result: GateResult) -> None:
    """As a report has it, which writes null for infinity."""
    report = ExportReport(Path(), {}, gates={"model.onnx": [result]})
    json.dumps(report.to_mapping(), allow_nan=False)


@pytest.mark.parametrize(
    ("difference", "sigma", "passed"),
    [
        (0.9e-3, 1.0, True),
        (1.1e-3, 1.0, False),
        (1.1e-3, 2.0, True),
        (float("inf"), 1.0, False),
        (0.0, 0.0, False),
    ],
)
def test_logits_gate_at_its_limits(
    difference: float, sigma: float, passed: bool
) -> None:
    entry = dataclasses.replace(answers(0, 1.0), logits_difference=difference)
    result = gate_logits([entry], Sigma(sigma, sigma))
    assert result.passed is passed
    assert_is_json(result)


def test_real_images_are_held_to_their_own_sigma() -> None:
    entry = dataclasses.replace(answers(1, 1.5e-3), logits_difference=0.9e-3)
    made = dataclasses.replace(entry, is_real=False)
    inflated = Sigma(everything=1.0, real=0.5)
    for gate in (gate_logits, gate_mask):
        assert gate([made], inflated).passed
        assert not gate([entry], inflated).passed
        assert gate([entry], Sigma(everything=1.0, real=9.0)).passed
    worse = dataclasses.replace(answers(1, 3e-3), logits_difference=2e-3)
    for gate in (gate_logits, gate_mask):
        assert not gate([worse], Sigma(everything=1.0, real=9.0)).passed, (
            "the smaller of both is the unit"
        )


def test_int8_has_no_limit_of_logits_and_still_no_nan() -> None:
    entry = dataclasses.replace(answers(0, 1.0), logits_difference=5.0)
    assert gate_logits([entry], ONE, LIMITS["int8"]).passed
    assert not gate_logits([entry], ONE, LIMITS["fp16"]).passed
    assert gate_logits(
        [dataclasses.replace(entry, logits_difference=2.9e-2)], ONE, LIMITS["fp16"]
    ).passed
    assert not gate_logits(
        [dataclasses.replace(entry, logits_difference=float("inf"))],
        ONE,
        LIMITS["int8"],
    ).passed


@pytest.mark.parametrize(("precision", "agreement"), [("fp16", 0.995), ("int8", 0.97)])
def test_mask_gate_of_reduced_precision(precision: str, agreement: float) -> None:
    limit = round((1 - agreement) * 100_000)
    assert gate_mask([answers(limit - 1, 1e-2)], ONE, LIMITS[precision]).passed
    result = gate_mask([answers(limit + 1, 1e-2)], ONE, LIMITS[precision])
    assert not result.passed
    assert "G3 mask agreement" in result.message


# G4


@pytest.mark.parametrize(
    ("difference", "passed"), [(0.9e-5, True), (1.1e-5, False), (float("inf"), False)]
)
def test_preprocessing_gate_at_its_limits(difference: float, passed: bool) -> None:
    result = gate_preprocessing(
        [dataclasses.replace(answers(0, 1.0), normalised_difference=difference)]
    )
    assert result.passed is passed
    assert passed or result.message.startswith("G4 preprocessing differs by")
    assert_is_json(result)


def test_the_graph_normalises_what_training_feeds_the_network() -> None:
    """The whole way of a training sample with nothing random in it, against the tensor inside the deploy model."""
    image = IMAGES[0]
    height, width, _ = image.shape
    still = AugmentConfig(
        crop_size=[height, width],
        scale=[1.0, 1.0],
        flip=0.0,
        brightness=0.0,
        contrast=0.0,
        saturation=0.0,
        hue=0.0,
    )
    sample, _ = Augmenter(still)(image, np.zeros((height, width), np.uint8), 7)
    fed = Preprocess()(torch.from_numpy(sample)[None])[0].numpy()
    for profile in PROFILES.values():
        inside = run_eager(DeployModel(tiny_network(), profile=profile))(
            image
        ).normalised
        assert inside is not None
        assert np.abs(inside - fed).max() <= 1e-6
        assert np.abs(inside[::-1] - fed).max() > 0.1, (
            "the control: another order of the channels"
        )


# G5


def score(pairs: dict[tuple[int, int], int], num_classes: int = 2) -> Score:
    """A confusion with so many pixels per (target, prediction)."""
    counts = torch.zeros(num_classes, num_classes, dtype=torch.int64)
    for place, pixels in pairs.items():
        counts[place] = pixels
    return Score(counts, images=1)


RIGHT = {(0, 0): 500_000, (1, 1): 500_000}


@pytest.mark.parametrize(
    ("wrong", "precision", "passed"),
    [
        (0, "fp32", True),
        (40, "fp32", True),  # mIoU falls by 0.008 points
        (60, "fp32", False),
        (400, "fp16", True),
        (600, "fp16", False),
        (4_900, "int8", True),
        (5_200, "int8", False),
    ],
)
def test_quality_gate_at_its_limits(wrong: int, precision: str, passed: bool) -> None:
    found = score({(0, 0): 500_000 - wrong, (0, 1): wrong, (1, 1): 500_000})
    result = gate_quality(score(RIGHT), found, ("a", "b"), LIMITS[precision])
    assert result.passed is passed
    assert passed or result.message.startswith("G5 quality: mIoU 100.000 -> 9")
    # The other way round it is a gain, which only fp32 may not have.
    gained = gate_quality(found, score(RIGHT), ("a", "b"), LIMITS[precision])
    assert gained.passed is (passed or precision != "fp32")


def test_a_mean_within_its_limit_is_not_refused() -> None:
    """What rises within its ties counts where the mean would move too far, not against it."""
    before, now = (
        Score(torch.tensor(matrix), 4)
        for matrix in (
            [[50, 13, 0, 27], [15, 500, 10, 15], [7, 18, 500, 2], [7, 15, 14, 5000]],
            [[50, 13, 0, 27], [0, 500, 10, 30], [0, 51, 476, 0], [7, 15, 14, 5000]],
        )
    )
    found = gate_quality(before, now, ("a", "b", "c", "d"), LIMITS["fp16"])
    assert abs(found.figures["points"]) < LIMITS["fp16"].miou_points
    assert "limit 0.1" not in found.message


def test_quality_gate_sees_one_class_among_many() -> None:
    names = tuple(f"class_{index}" for index in range(20))
    right = {(index, index): 100_000 for index in range(20)}
    before, now = score(right, 20), score({**right, (3, 3): 99_920, (3, 4): 80}, 20)
    result = gate_quality(before, now, names)
    assert (
        result.message
        == "G5 quality: IoU of class_3 changes by -0.080 points, limit 0.05"
    )
    assert gate_quality(before, now, names, Limits(class_points=0.1)).passed, (
        "the control: mIoU alone is within limits"
    )


@pytest.mark.parametrize(("moved", "passed"), [(1, True), (3, True), (40, False)])
def test_quality_gate_lets_a_pixel_between_two_classes_fall_to_either(
    moved: int, passed: bool
) -> None:
    """Where a class has 400 labelled pixels, one of them moves its IoU by more than the limits in points."""
    before = score({(0, 0): 239_500, (0, 1): 100, (1, 0): 200, (1, 1): 200})
    now = score(
        {(0, 0): 239_500 - moved, (0, 1): 100 + moved, (1, 0): 200, (1, 1): 200}
    )
    assert gate_quality(before, now, ("a", "b")).passed is passed


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_class_of_one_pixel_lends_its_room_to_no_other(precision: str) -> None:
    names = tuple(f"class_{index}" for index in range(11))
    right = {(index, index): 100_000 for index in range(10)} | {(10, 10): 1}
    worse = right | {(k, k): 85_000 for k in range(10)} | {(k, 10): 0 for k in range(1)}
    worse |= {(k, (k + 1) % 10): 15_000 for k in range(10)}
    before, now = score(right, 11), score(worse, 11)
    assert not gate_quality(before, now, names, LIMITS[precision]).passed
    assert gate_quality(before, before, names, LIMITS[precision]).passed


def test_quality_gate_of_a_critical_class() -> None:
    names = ("road", *(f"class_{index}" for index in range(19)))
    right = {(index, index): 100_000 for index in range(20)}
    before, now = score(right, 20), score({**right, (0, 0): 97_500, (0, 1): 2_500}, 20)
    assert gate_quality(before, now, names, LIMITS["int8"]).passed
    result = gate_quality(before, now, names, LIMITS["int8"], ["class_3", "road"])
    assert (
        result.message
        == "G5 quality: IoU of critical class road drops by more than 2.0 points"
    )


def test_a_critical_class_without_a_label_is_not_passed_over() -> None:
    right = score({(0, 0): 1000, (1, 1): 1000}, 3)
    assert gate_quality(
        right, right, ("road", "sky", "person"), LIMITS["int8"], ["road"]
    ).passed
    assert gate_quality(
        right, right, ("road", "sky", "person"), LIMITS["fp32"], ["person"]
    ).passed, "int8 alone has it"
    result = gate_quality(
        right, right, ("road", "sky", "person"), LIMITS["int8"], ["road", "person"]
    )
    assert not result.passed
    assert (
        "critical class person has no pixel in the 1 labelled images" in result.message
    )


def test_quality_needs_labels_and_known_ids() -> None:
    nothing = gate_quality(score({}), score({}), ("a", "b"))
    assert not nothing.passed
    assert "no labelled pixel" in nothing.message
    target = np.zeros((1, 4), np.uint8)
    counted = Score(torch.zeros(2, 2, dtype=torch.int64))
    counted.add(Answer(np.array([[0, 1, 200, -1]], np.int32)), target)
    assert counted.invalid_pixels == 2
    assert counted.counts.sum() == 4
    result = gate_quality(counted, counted, ("a", "b"))
    assert "2 pixels have an id that is not a class" in result.message


class Split:
    """Images whose targets are their index."""

    def __init__(self, images: list[Image]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return str(index)

    def read(self, index: int) -> tuple[Image, np.ndarray]:
        image = self.images[index]
        return image, np.full(image.shape[:2], index % NUM_CLASSES, np.uint8)


def test_scores_are_counted_on_the_labelled_images() -> None:
    labelled = Labelled(Split(IMAGES), [0, 2, 3])
    runs = {
        "right": lambda image: Answer(np.zeros(image.shape[:2], np.uint8)),
        "eager": run_eager(DeployModel(tiny_network())),
    }
    found = scores(runs, labelled, NUM_CLASSES)
    assert found["right"].images == found["eager"].images == 3
    assert found["right"].counts[:, 0].tolist() == [6144, 0, 6144, 6144, 0]


# G6


def power(model: DeployModel | None = None) -> GateResult:
    model = model or DeployModel(tiny_network())
    checks = check_set(IMAGES[:1], ["x"])
    reference = as_trained(run_eager(model), model.preprocess)
    return gate_power(model, reference, checks, compare(reference, [], checks))


def test_every_negative_control_is_refused() -> None:
    result = power()
    assert result.passed, result.message
    assert set(result.figures["refused_by"]) == set(CONTROLS)
    assert (result.figures["unseen"], result.figures["without_effect"]) == ([], [])
    assert result.message == "all 7 negative controls are refused"
    assert "G4" in result.figures["refused_by"]["bgr"]
    assert "G4" not in result.figures["refused_by"]["one_weight_scaled"]


def test_controls_leave_the_model_as_it_was() -> None:
    model = DeployModel(tiny_network())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    reference = as_trained(run_eager(model), Preprocess())
    checks = check_set(IMAGES[:1], ["x"])
    gate_power(model, reference, checks, compare(reference, [], checks))
    assert not any(module.training for module in model.modules())
    assert all(
        torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()
    )


def tensors_of(model: DeployModel) -> dict[str, torch.Tensor]:
    return dict(model.network.named_parameters())


@pytest.mark.parametrize("align_corners", [True, False])
def test_each_control_is_the_fault_that_its_name_says_and_no_other(
    align_corners: bool,
) -> None:
    model, image = DeployModel(tiny_network()), IMAGES[0]
    model.align_corners = align_corners
    right, pixels = run_eager(model)(image), image.transpose(2, 0, 1) / 255
    assert right.logits is not None
    faulty = {name: controls._faulty(model, name) for name in CONTROLS}
    found = {name: run_eager(each)(image) for name, each in faulty.items()}
    normalised = {
        "bgr": run_eager(model)(image[..., ::-1].copy()).normalised,
        "no_normalisation": pixels,
        "half_mean_and_std": (pixels - 0.5) / 0.5,
    }
    for name, answer in found.items():
        assert answer.normalised is not None
        np.testing.assert_allclose(
            answer.normalised,
            normalised.get(name, right.normalised),
            atol=1e-5,
            err_msg=name,
        )
        changed = [
            key
            for key, value in tensors_of(faulty[name]).items()
            if not value.equal(tensors_of(model).get(key, value))
        ]
        assert len(changed) == (name == "one_weight_scaled"), name
    (scaled,) = (
        key
        for key, value in tensors_of(faulty["one_weight_scaled"]).items()
        if not value.equal(tensors_of(model)[key])
    )
    torch.testing.assert_close(
        tensors_of(faulty["one_weight_scaled"])[scaled],
        1.01 * tensors_of(model)[scaled],
    )
    assert np.array_equal(
        found["classes_permuted"].mask, (right.mask.astype(int) + 1) % NUM_CLASSES
    )
    assert faulty["align_corners_flipped"].align_corners is not align_corners
    assert not np.array_equal(found["align_corners_flipped"].logits, right.logits)  # type: ignore[arg-type]
    modes = {
        name: [type(module).__name__ for module in each.modules() if module.training]
        for name, each in faulty.items()
    }
    assert modes.pop("batchnorm_in_training_mode") == ["BatchNorm2d"]
    assert not any("BatchNorm2d" in training for training in modes.values())


def test_controls_are_tried_on_three_images_that_reveal_most() -> None:
    checks = check_set(IMAGES, NAMES)

    def names(chosen: list[Check]) -> list[str]:
        return [entry.name for entry in controls._chosen(chosen)]

    assert names(checks) == NAMES[:3]
    assert names(checks[3:]) == [NAMES[3], "noise", "checkerboard"]
    assert names(checks[4:][::-1]) == ["noise", "checkerboard", "constant_255"]


@pytest.mark.parametrize(
    ("effects", "unseen"), [([1e-2], False), ([1.001e-2], True), ([0.5, 0.0], True)]
)
def test_an_effect_of_a_hundredth_must_be_noticed(
    monkeypatch: pytest.MonkeyPatch, effects: list[float], unseen: bool
) -> None:
    """On the image where it is largest."""
    found = iter(effects)
    monkeypatch.setattr(controls, "CONTROLS", {"bgr": controls.CONTROLS["bgr"]})
    monkeypatch.setattr(controls, "_refusing", lambda *_: [])
    monkeypatch.setattr(controls, "_effect", lambda *_: next(found))
    model = DeployModel(tiny_network())
    result = gate_power(
        model, run_eager(model), [Check("x", IMAGES[0])] * len(effects), ONE
    )
    assert (result.gate, result.passed) == ("G6", not unseen)
    assert (result.figures["unseen"], result.figures["without_effect"]) == (
        (["bgr"], []) if unseen else ([], ["bgr"])
    )
    assert (
        "bgr, so the gates are inconclusive"
        if unseen
        else "no effect on this network: bgr"
    ) in result.message


def test_a_control_without_effect_says_nothing_of_the_gates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hardly(model: DeployModel) -> None:
        network: Any = model.network
        network.classifier.bias.add_(1e-6)

    monkeypatch.setitem(controls.CONTROLS, "nothing", hardly)
    result = power()
    assert result.passed
    assert (result.figures["without_effect"], result.figures["unseen"]) == (
        ["nothing"],
        [],
    )
    assert (
        result.message
        == "no effect on this network: nothing; the other controls are refused"
    )
    report = ExportReport(Path("export"), {}, gates={"eager": [result]}, real_images=16)
    assert (report.status, report.passed) == ("UNVERIFIED_FLAT_NETWORK", True)
    assert (
        ExportReport(Path("export"), {}, gates={"eager": [result]}).status
        == "UNVERIFIED_REAL_DATA"
    )


@pytest.mark.parametrize(
    "name",
    [
        "batchnorm_in_training_mode",
        "half_mean_and_std",
        "no_normalisation",
        "align_corners_flipped",
    ],
)
def test_a_network_is_not_flat_because_it_cannot_have_a_fault(name: str) -> None:
    """A network with GroupNorm, with a normalisation of 0.5, without upsampling: trained as well as any other."""
    model = DeployModel(tiny_network())
    network: Any = model.network
    if name.startswith("batchnorm"):
        network.body[1] = nn.Identity()
    elif name == "align_corners_flipped":
        network.body[0].stride, network.output_stride = (1, 1), 1
    else:
        model.preprocess = Preprocess(
            *(((0.5,) * 3,) * 2 if "half" in name else ((0.0,) * 3, (1.0,) * 3))
        )
    result = power(model)
    assert result.passed
    assert (result.figures["impossible"], result.figures["without_effect"]) == (
        [name],
        [],
    )
    assert set(result.figures["refused_by"]) == set(CONTROLS) - {name}
    assert (
        result.message
        == f"all 6 negative controls are refused; {name} does not apply to this network"
    )
    report = ExportReport(Path("export"), {}, gates={"eager": [result]}, real_images=16)
    assert report.status == "verified"


def test_the_effect_of_a_control_is_measured_in_spreads_of_the_logits() -> None:
    logits, normalised = (
        np.zeros((2, 4, 4), np.float32),
        np.zeros((3, 4, 4), np.float32),
    )
    logits[0] = 2.0  # standard deviation 1
    expected = Answer(np.zeros((4, 4), np.uint8), None, logits, normalised)
    assert controls._effect(expected, expected) == 0
    assert controls._effect(
        expected, expected._replace(logits=logits + np.float32(0.5))
    ) == pytest.approx(0.5)
    assert controls._effect(expected, expected._replace(normalised=normalised - 3)) == 3
    flat = expected._replace(logits=np.zeros_like(logits))
    assert controls._effect(flat, flat) == 0


def test_the_scaled_weight_is_the_one_that_moves_the_logits_most() -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 64, 1), nn.Conv2d(64, 2, 1)
    )
    with torch.no_grad():
        network[1].bias.fill_(
            5.0
        )  # which the last weights multiply, and those before it do not
        before = [weight.clone() for weight in network.parameters()]
        assert controls._most_influential(network) is network[2].weight
        norm = nn.BatchNorm2d(8)
        norm.weight.fill_(100.0)
        norm.bias.fill_(1e4)
        first = nn.Conv2d(3, 8, 3, padding=1)
        assert (
            controls._most_influential(nn.Sequential(first, norm).eval())
            is first.weight
        ), "of a convolution only"
        alone = nn.BatchNorm2d(3).eval()
        alone.bias.fill_(1e4)
        assert controls._most_influential(alone) is alone.bias, (
            "there is no convolution"
        )
        patches = nn.Sequential(nn.PixelUnshuffle(14), nn.Conv2d(588, 4, 1))
        assert controls._most_influential(patches) is patches[1].weight
    assert all(map(torch.equal, before, network.parameters()))


def test_a_gate_that_was_widened_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Limits(
        logits_sigma=100.0,
        agreement=0.0,
        image_agreement=0.0,
        margin_sigma=100.0,
        confidence_levels=255,
    )

    def widened(gate: Any) -> Any:
        return lambda comparisons, sigma: gate(comparisons, sigma, wide)

    monkeypatch.setattr(controls, "gate_logits", widened(gate_logits))
    monkeypatch.setattr(controls, "gate_mask", widened(gate_mask))
    result = power()
    assert "one_weight_scaled" in result.message
    assert "bgr" not in result.message, "G4 still sees it"


# Latency and the verdict


@pytest.mark.parametrize(
    ("budget", "fp32", "precision", "passed"),
    [(0.0, None, "fp32", True), (10.0, None, "fp32", True), (9.9, None, "fp32", False), (0.0, 12.0, "int8", True),
     (0.0, 11.0, "int8", False), (0.0, 11.0, "fp16", True)],
)  # fmt: skip
def test_latency_gate_at_its_limits(
    budget: float, fp32: float | None, precision: str, passed: bool
) -> None:
    measured = {"p50_ms": 10.0, "cpu_ms": 10.0}
    others = None if fp32 is None else {"cpu_ms": fp32}
    result = gate_latency(
        measured, budget_ms=budget, fp32=others, limits=LIMITS[precision]
    )
    assert result.passed is passed
    assert not any(
        value == 10.0 for value in result.figures.values() if value != budget
    ), "equal exports, equal gates"


@pytest.mark.parametrize(
    ("failing", "kind", "exit_code"),
    [
        (["G5", "G1", "G3"], IntegrityError, 7),
        (["G5", "G3"], ExportMismatch, 4),
        (["G4"], ExportMismatch, 4),
        (["G6", "latency"], ExportMismatch, 4),
        (["G5", "G6"], ExportMismatch, 4),
        (["latency", "G5"], QualityError, 11),
        (["latency"], LatencyError, 12),
    ],
)
def test_the_worst_failure_decides(
    failing: list[str], kind: type[ExportMismatch], exit_code: int
) -> None:
    gates = [
        ("model.onnx", GateResult(name, f"{name} is bad", {"limit": 1}, ""))
        for name in failing
    ]
    error = refusal("EXPORT REJECTED", gates, "there")
    assert type(error) is kind
    assert error.exit_code == exit_code
    assert all(f"{name} is bad in model.onnx" in str(error) for name in failing)
    assert [(name, gate.gate, gate.figures) for name, gate in error.failed] == [
        ("model.onnx", name, {"limit": 1}) for name in failing
    ]
    report = ExportReport(
        Path("export"),
        {},
        gates={"model.onnx": [gate for _, gate in gates]},
        real_images=1,
    )
    assert report.status == "rejected"
    assert report.failed == gates


def test_status_without_real_images(tmp_path: Any) -> None:
    assert ExportReport(tmp_path, {}, real_images=16).status == "verified"
    assert ExportReport(tmp_path, {}, real_images=15).status == "VERIFIED_FEW_IMAGES"
    assert ExportReport(tmp_path, {}, real_images=1).status == "VERIFIED_FEW_IMAGES"
    assert ExportReport(tmp_path, {}).status == "UNVERIFIED_REAL_DATA"


def test_a_file_that_does_not_run_is_broken_not_a_traceback() -> None:
    def torn(image: Image) -> Answer:
        raise RuntimeError("torn")

    model = DeployModel(tiny_network())
    good, bad = Candidate(run_eager(model), run_eager(model)), Candidate(torn, torn)
    compare(
        as_trained(run_eager(model), Preprocess()),
        [bad, good],
        check_set(IMAGES[:1], ["x"]),
    )
    assert bad.broken == "RuntimeError: torn (on x)"
    assert len(good.comparisons) == 10


# Confidence and profiles


def test_temperature_reaches_the_confidence_and_not_the_mask() -> None:
    network = tiny_network()
    plain, soft = (
        run_eager(DeployModel(network, temperature=value))(IMAGES[0])
        for value in (1.0, 4.0)
    )
    assert np.array_equal(plain.mask, soft.mask)
    assert plain.confidence is not None
    assert soft.confidence is not None
    assert soft.confidence.mean() < plain.confidence.mean() - 5
    with torch.no_grad():
        logits = network.model(network.preprocess(torch.from_numpy(IMAGES[0])[None]))
    expected = (
        (logits / 4).softmax(1).amax(1).mul(255).round().to(torch.uint8)[0].numpy()
    )
    assert np.array_equal(soft.confidence, expected)


def test_calibration_entry() -> None:
    assert calibration_entry(tiny_network(), None) == {
        "method": "none",
        "temperature": 1.0,
    }
    entry = calibration_entry(tiny_network(), Labelled(Split(IMAGES), range(4)))
    assert entry["method"] == "temperature"
    assert entry["images"] == len(IMAGES)
    assert entry["temperature"] != 1.0
    assert 0 <= entry["ece_after"] <= 1


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_answer_alike(name: str) -> None:
    network = tiny_network()
    robot, other = (
        DeployModel(network, profile=profile) for profile in (ROBOT, PROFILES[name])
    )
    expected, found = run_eager(robot)(IMAGES[0]), run_eager(other)(IMAGES[0])
    assert np.array_equal(expected.mask, found.mask)
    assert expected.logits is not None
    assert found.logits is not None
    np.testing.assert_allclose(expected.logits, found.logits, atol=1e-5)
    outputs = other(torch.from_numpy(PROFILES[name].encode(IMAGES[0])))
    shapes = {
        "robot": [(1, 64, 96), (1, 16, 24)],
        "isaac": [(1, 64, 96)],
    }
    assert [tuple(output.shape) for output in outputs] == shapes[name]
    kinds = {"robot": torch.uint8, "isaac": torch.int32}
    assert outputs[0].dtype == kinds[name]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"precision": ["fp16"]}, "lacks fp32"),
        (
            {"precision": ["fp32", "int8"], "formats": ["torchscript"]},
            "only ONNX files come in fp16 or int8",
        ),
        ({"precision": ["fp32", "int8"], "profile": "isaac"}, "export.profile = isaac"),
        ({"precision": ["fp32", "fp8"]}, "export.precision = 'fp8'"),
        ({"profile": "robots"}, "Did you mean robot?"),
        ({"formats": ["onnx", "onnx"]}, "contains a name twice"),
        ({"height": 64}, "export.width = 0"),
        ({"latency_budget_ms": -1.0}, "export.latency_budget_ms"),
        ({"quality_images": 0}, "export.quality_images"),
    ],
)
def test_settings_that_cannot_work(changes: dict[str, Any], told: str) -> None:
    config = Config(export=dataclasses.replace(Config().export, **changes))
    with pytest.raises(ConfigError) as caught:
        check(config, world_size=1)
    assert told in str(caught.value)
