"""The purity checker: every planted impurity is found by name, and what is pure is left in peace."""

import multiprocessing
import os
import random
import sys
import time
from functools import partial

import albumentations as A
import cv2
import numpy as np
import pytest
import torch

import impure
from impure import Noise, config
from runs import settings, torch_restored
from segpipe import plugins
from segpipe.checks import elsewhere, purity
from segpipe.checks.probes import PROBES, Case, Finding, Pixel, first_difference, run
from segpipe.data import augment
from segpipe.data.augment import Augmenter
from segpipe.data.transforms import TRANSFORMS
from segpipe.errors import ImpureAugmentError
from segpipe.keys import sample_key
from segpipe.run import launch
from segpipe.settings.compose import compose

# What albumentations 2.0.8 has for an image and its mask; Superpixels is pure as well, but costs as much as all these.
PURE = {
    kind.__name__: kind
    for kind in (
        A.AdvancedBlur, A.Affine, A.AutoContrast, A.Blur, A.CLAHE, A.ChannelDropout, A.ChannelShuffle,
        A.ChromaticAberration, A.CoarseDropout, A.ColorJitter, A.D4, A.Defocus, A.Downscale, A.ElasticTransform,
        A.Emboss, A.Equalize, A.Erasing, A.FancyPCA, A.GaussianBlur, A.GlassBlur, A.GridDistortion, A.GridDropout,
        A.HEStain, A.HorizontalFlip, A.HueSaturationValue, A.ISONoise, A.Illumination, A.ImageCompression, A.InvertImg,
        A.MedianBlur, A.Morphological, A.MotionBlur, A.MultiplicativeNoise, A.NoOp, A.OpticalDistortion, A.Pad,
        A.Perspective, A.PixelDropout, A.PlanckianJitter, A.PlasmaBrightnessContrast, A.PlasmaShadow, A.Posterize,
        A.RandomBrightnessContrast, A.RandomFog, A.RandomGamma, A.RandomGravel, A.RandomGridShuffle, A.RandomRain,
        A.RandomRotate90, A.RandomScale, A.RandomShadow, A.RandomSnow, A.RandomSunFlare, A.RandomToneCurve,
        A.RingingOvershoot, A.Rotate, A.SafeRotate, A.SaltAndPepper, A.Sharpen, A.ShotNoise, A.Solarize, A.Spatter,
        A.SquareSymmetry, A.ThinPlateSpline, A.ToGray, A.ToSepia, A.Transpose, A.UnsharpMask,
        A.VerticalFlip, A.XYMasking, A.ZoomBlur,
    )
} | {
    "GridElasticDeform": partial(A.GridElasticDeform, num_grid_xy=(4, 4), magnitude=5),
    "PadIfNeeded": partial(A.PadIfNeeded, 64, 64),
    "RandomCrop": partial(A.RandomCrop, 48, 48),
    "CropAndPad": partial(A.CropAndPad, px=2),
    "RandomResizedCrop": partial(A.RandomResizedCrop, (48, 48)),
    "RandomSizedCrop": partial(A.RandomSizedCrop, (24, 48), (48, 48)),
    "LongestMaxSize": partial(A.LongestMaxSize, 64),
    "Resize": partial(A.Resize, 48, 48),
    "CenterCrop": partial(A.CenterCrop, 32, 32),
}  # fmt: skip
IMPURE = (A.GaussNoise, A.AdditiveNoise, A.RGBShift)


@pytest.fixture
def plant(monkeypatch):
    """An augmenter with further transforms, by the names of their builders."""

    def planted(*builders, **changes) -> Augmenter:
        names = [
            getattr(builder, "__name__", "partial").lower() for builder in builders
        ]
        for name, builder in zip(names, builders, strict=True):
            monkeypatch.setitem(TRANSFORMS, name, builder)
        return Augmenter(config(extra=names, **changes))

    return planted


@pytest.fixture
def named(monkeypatch):
    """Transforms of the corpus may be taken by import path."""
    monkeypatch.setattr(plugins, "_trusted", {"impure"})


@pytest.fixture
def without_spawn(monkeypatch):
    """A spawned process costs seconds; one test has it."""
    monkeypatch.setattr(purity, "METHODS", {"fork": purity.FORKED})


@pytest.fixture(autouse=True)
def forgotten():
    """Caches of plants that an earlier test in this process has filled, and what they switch in it."""
    impure.forget()
    with torch_restored():
        yield
    cv2.setUseOptimized(True)


def by_transform(findings: list[Finding]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for finding in findings:
        found.setdefault(finding.transform, set()).add(finding.probe)
    return found


@pytest.mark.usefixtures("without_spawn")
@pytest.mark.parametrize("kind", impure.CORPUS, ids=lambda kind: kind.__name__)
def test_planted_impurities_are_named(plant, kind):
    """Transform, probe, and what to do; among clean neighbours, and neither the neighbours nor the whole are blamed."""
    findings = purity.check(plant(A.ToSepia, kind, A.Solarize), Noise())
    named = f"{kind.__name__.lower()} ({kind.__name__})"
    found = by_transform(findings)
    assert found[named] >= impure.CORPUS[kind]
    assert set(found) <= {named, "whole pipeline"}
    assert all(finding.advice and finding.detail for finding in findings)


@pytest.mark.parametrize("kind", impure.CORPUS, ids=lambda kind: kind.__name__)
def test_training_does_not_start_with_them(plant, kind):
    augmenter = plant(kind)
    with pytest.raises(ImpureAugmentError) as caught:
        purity.quick(augmenter, Noise(), budget_s=60)
    message = str(caught.value)
    assert f"{kind.__name__.lower()} ({kind.__name__}), probe '" in message
    assert impure.NAMED.get(kind, "") in message
    assert "augment.check=false" in message
    assert "\n" not in message
    assert caught.value.exit_code == 8


@pytest.mark.usefixtures("without_spawn")
def test_honest_caches_raise_no_alarm(plant):
    """The control: memos, tables and caches of pure functions, on instances, classes, modules, functions and closures.

    All in one pipeline, so that none blames another; HashOfText shows that the check would have spoken."""
    assert len(impure.HONEST) >= 10
    augmenter = plant(*impure.HONEST)
    assert purity.check(augmenter, Noise()) == []
    assert purity.quick(augmenter, Noise()) == ""
    with pytest.raises(ImpureAugmentError, match=r"\(HashOfText\), probe 'tripwires'"):
        purity.quick(plant(*impure.HONEST, impure.HashOfText), Noise())


@pytest.mark.usefixtures("without_spawn")
def test_a_sample_may_not_be_given_back(monkeypatch):
    """Between transforms views are fine, since the first one makes new memory; if it does not, it is named."""
    monkeypatch.setattr(augment, "ScaleCrop", impure.LazyCrop)
    augmenter = Augmenter(config(crop_size=[48, 80]))
    assert ("LazyCrop", "input untouched") in {
        (one.transform, one.probe) for one in purity.check(augmenter, Noise())
    }
    with pytest.raises(ImpureAugmentError, match="LazyCrop, probe 'input untouched'"):
        purity.quick(Augmenter(config(crop_size=[60, 80])), Noise(), budget_s=60)


def test_whoever_insists_may_train(plant):
    purity.quick(plant(impure.Clock, check=False), Noise())


@pytest.mark.usefixtures("without_spawn")
def test_the_first_pixel_is_named(plant):
    finding = next(
        one
        for one in purity.check(plant(impure.SelfCounter), Noise())
        if one.probe == "same key twice"
    )
    assert finding.pixel is not None
    assert finding.pixel[:4] == ("image", 0, 0, 0)
    assert finding.pixel.found == finding.pixel.expected + 1
    assert str(finding.pixel) in str(finding)


@pytest.mark.usefixtures("without_spawn")
def test_the_unkeyed_control_is_found():
    """albumentations' own random state: no transform alone is to blame, and the advice names the setting."""
    control = Augmenter(config(keyed=False))
    findings = purity.check(control, Noise())
    assert by_transform(findings)["whole pipeline"] >= {"same key twice", "call order"}
    assert {finding.transform for finding in findings} == {"whole pipeline"}
    with pytest.raises(
        ImpureAugmentError,
        match=r"whole pipeline, probe 'same key twice'.*augment.keyed=true",
    ):
        purity.quick(control, Noise(), budget_s=60)
    purity.quick(Augmenter(config(keyed=False, check=False)), Noise())


@pytest.fixture(scope="module")
def everything() -> dict[str, set[str]]:
    """What the whole check finds in all shipped and all of albumentations' transforms, and in five impure ones."""
    patch = pytest.MonkeyPatch()
    patch.delenv("PYTHONHASHSEED", raising=False)
    patch.setitem(impure.LATE, "number", 7)
    found = {
        kind.__name__: kind for kind in (*IMPURE, impure.HashOfText, impure.LateGlobal)
    }
    for name, builder in (PURE | found).items():
        patch.setitem(TRANSFORMS, name, builder)
    try:
        return by_transform(
            purity.check(Augmenter(config(extra=list(TRANSFORMS))), Noise())
        )
    finally:
        patch.undo()


def test_pure_transforms_raise_no_alarm(everything):
    guilty = {name.partition(" ")[0] for name in everything}
    assert len(PURE) >= 25
    assert guilty - {"whole"} == {
        kind.__name__ for kind in (*IMPURE, impure.HashOfText, impure.LateGlobal)
    }


@pytest.mark.parametrize("kind", IMPURE, ids=lambda kind: kind.__name__)
def test_the_impure_ones_of_albumentations_are_found(everything, kind):
    name = kind.__name__
    assert everything[f"{name} ({name})"] == {"globals untouched", "tripwires"}


@pytest.mark.parametrize(
    ("name", "others"), [("HashOfText", {"tripwires"}), ("LateGlobal", set())]
)
def test_what_a_spawned_process_sees(everything, name, others):
    assert everything[f"{name} ({name})"] == {"spawned process"} | others


@pytest.mark.usefixtures("named")
def test_what_differs_between_two_starts_is_found_before_a_training():
    """In transforms by import path, with one spawned process for all; honest caches are not blamed."""
    found = (*impure.OF_A_START, *impure.OF_MANY_IMAGES)
    names = {kind: f"impure:{kind.__name__}" for kind in (*found, *impure.HONEST)}
    augmenter = Augmenter(config(extra=list(names.values())))
    frames = purity._two_frames(Noise())
    with elsewhere.started(
        "spawn", purity._outputs, augmenter, frames, False
    ) as afresh:
        findings = by_transform(purity._in_two_orders(augmenter, frames, afresh))
    titles = {kind: f"{name} ({kind.__name__})" for kind, name in names.items()}
    for kind in impure.OF_A_START:
        assert findings.pop(titles[kind]) == {"spawned process"}, kind
    for kind in impure.OF_MANY_IMAGES:
        assert purity.ORDER in findings.pop(titles[kind]), kind
    findings.pop(augmenter.name)
    assert not findings
    # The control: two processes in one order, and without a spawned one, agree about all of them.
    assert (
        not {titles[kind] for kind in impure.OF_A_START}
        & by_transform(purity._in_two_orders(augmenter, frames)).keys()
    )


def test_a_spawned_process_looks_like_another_start(monkeypatch):
    """As rank 1 of 2 in a main process, with another seed, hash, arguments and numbers; else it is as here."""
    monkeypatch.setenv("SEGPIPE_TEST_STRENGTH", "4")
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    monkeypatch.setenv("SEGPIPE_TEST_TEXT", "text")
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    torch.set_num_threads(torch.get_num_threads() + 5)
    before, arguments = dict(os.environ), list(sys.argv)
    there, here = (
        elsewhere.elsewhere("spawn", impure.surroundings),
        impure.surroundings(),
    )
    assert dict(os.environ) == before
    assert sys.argv == arguments
    assert {name for name in here if here[name] == there[name]} == {
        "kept",
        "threads",
        "parent",
        "daemon",
    }
    assert there["rank"] == ("1", 1)
    assert there["number"] == "7"
    assert there["seeds"][0] == elsewhere.START_SEED
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("named")
def test_quick_names_what_differs_between_two_starts(monkeypatch):
    with pytest.raises(
        ImpureAugmentError,
        match=r"impure:ImportedUuid .*, probe 'spawned process'.*not even at import",
    ):
        purity.quick(Augmenter(config(extra=["impure:ImportedUuid"])), Noise())
    monkeypatch.setattr(
        elsewhere, "_send_afresh", impure.forget
    )  # which takes no arguments, so there is no answer
    told = purity.quick(Augmenter(config(extra=["impure:OwnTable"])), Noise())
    assert told.startswith(
        "purity of the augmentation: whole pipeline, probe 'spawned process': the process ended"
    )


def test_no_process_is_spawned_for_transforms_of_segpipe(monkeypatch):
    """It costs seconds; those in TRANSFORMS are checked by segpipe check-augment."""
    monkeypatch.setattr(purity, "started", lambda *_: pytest.fail("spawned"))
    assert purity.quick(Augmenter(config(extra=["fog"])), Noise()) == ""


SHIPPED = {
    "defaults": {},
    "robust": {"extra": list(TRANSFORMS)},
    "nothing random": {"scale": [1.0, 1.0], "crop_size": [60, 80], "flip": 0.0, "brightness": 0.0, "contrast": 0.0,
                       "saturation": 0.0, "hue": 0.0},
    "only padding": {"scale": [0.5, 0.5], "crop_size": [96, 96], "flip": 0.0},
    "a flip alone": {"scale": [1.0, 1.0], "crop_size": [60, 80], "brightness": 0.0, "contrast": 0.0, "saturation": 0.0,
                     "hue": 0.0},
}  # fmt: skip


@pytest.mark.usefixtures("without_spawn")
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_pipelines_raise_no_alarm(name):
    augmenter = Augmenter(config(**SHIPPED[name]))
    passed = []
    assert (
        purity.check(augmenter, Noise(), report=lambda *result: passed.append(result))
        == []
    )
    assert len(passed) == (len(augmenter.parts()) + 1) * (len(PROBES) + 2)
    assert all(finding is None for _, _, finding in passed)
    assert purity.quick(augmenter, Noise(), budget_s=600) == ""
    assert purity.quick(augmenter, Noise(num=1), budget_s=600) == ""


def test_quick_is_quick():
    """At a real crop size, with every shipped transform, all probes take less than 2 s of a processor.

    Other work on the machine makes processor time longer, never shorter: one measurement of three is enough.
    """
    samples, augmenter = (
        Noise((360, 480)),
        Augmenter(config(crop_size=[320, 416], extra=list(TRANSFORMS))),
    )

    def seconds() -> float:
        before = os.times()
        assert purity.quick(augmenter, samples, budget_s=600) == ""
        return sum(os.times()[:4]) - sum(before[:4])

    assert any(seconds() < 2 for _ in range(3))


@pytest.mark.parametrize("fits", [0, 1, 5, 7, 1000])
@pytest.mark.parametrize("always", [0, 4])
def test_no_probe_starts_after_the_budget_but_those_that_always_do(fits, always):
    cases = purity._cases(Augmenter(config()), Noise(), 2)
    asked, questions = [], [(case, probe) for case in cases for probe in PROBES[:2]]
    answer = purity._ask(
        questions,
        fits,
        always,
        report=lambda *r: asked.append(r),
        clock=lambda: len(asked),
    )
    assert len(asked) == answer.asked == min(max(fits, always), 2 * len(cases))


def test_the_budget_is_processor_time_which_a_busy_machine_does_not_spend(
    plant, monkeypatch
):
    """Every call waits; with the wall's clock, the control, probes are left out."""
    augmenter = plant(
        Waits, brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0, flip=0.0
    )
    cases = purity._cases(augmenter, Noise(), 2)
    questions = [(case, probe) for probe in purity.QUICK[:4] for case in cases]
    monkeypatch.setattr(Waits, "waits", 0.1)
    assert purity._ask(questions, 0.4).asked == len(questions)
    assert purity._ask(questions, 0.4, clock=time.monotonic).asked < len(questions)


@pytest.mark.parametrize(
    "kind",
    [impure.StaleParameters, impure.SelfCounter, impure.Clock],
    ids=lambda kind: kind.__name__,
)
def test_without_time_they_are_refused_all_the_same(plant, monkeypatch, kind):
    with pytest.raises(
        ImpureAugmentError, match=rf"\({kind.__name__}\), probe 'same key twice'"
    ):
        purity.quick(plant(A.ToSepia, kind), Noise(), budget_s=0)
    monkeypatch.setattr(
        purity, "ALWAYS", 0
    )  # the control: it passes when nothing is asked
    monkeypatch.setattr(purity, "_in_two_orders", lambda *_: [])
    assert ": 0 of " in purity.quick(plant(A.ToSepia, kind), Noise(), budget_s=0)


def test_what_was_left_out_is_told_before_training(tmp_path, monkeypatch, capsys):
    def told(budget_s: float) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(purity, "quick", partial(purity.quick, budget_s=budget_s))
            launch.prepare(
                compose(
                    settings(
                        tmp_path / "run", "augment.check=true", "run.exists=replace"
                    )
                ),
                1,
            )
        return capsys.readouterr().err

    cases = len(Augmenter(compose(settings(tmp_path / "run")).augment).parts()) + 1
    assert told(0.0) == (
        f"purity of the augmentation: {2 * cases} of {len(purity.QUICK) * cases} probes ran in 0 s of processor "
        "time; segpipe check-augment runs all.\n"
    )
    assert told(600.0) == ""


def test_quick_leaves_this_process_as_it_was(plant):
    """A transform that moves every global generator moves them in the child alone, and in the calls that warm up."""
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    threads = cv2.getNumThreads()
    before = (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )
    for kind in (
        impure.PythonGlobal,
        impure.NumpyGlobal,
        impure.TorchGlobal,
        impure.LeavesSeed,
    ):
        with pytest.raises(ImpureAugmentError):
            purity.quick(plant(kind), Noise(), budget_s=60)
    assert (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    ) == before
    assert cv2.getNumThreads() == threads
    assert not multiprocessing.active_children()


class Waits(impure.Planted):
    waits = 0.0

    def number(self) -> int:
        time.sleep(self.waits)
        return 0


PARENT = os.getpid()


class HangsInChild(impure.Planted):
    def number(self) -> int:
        if os.getpid() != PARENT:
            time.sleep(600)
        return 0


class DiesInChild(impure.Planted):
    def number(self) -> int:
        if os.getpid() != PARENT:
            os._exit(3)
        return 0


class RaisesLater(impure.Planted):
    def number(self) -> int:
        self.calls += 1
        if self.calls > 3:
            raise ValueError("three times is enough")
        return 0


def test_a_child_that_hangs_or_dies_is_told(plant, monkeypatch):
    monkeypatch.setattr(elsewhere, "PATIENCE_S", 0.3)
    start = time.monotonic()
    with pytest.raises(ImpureAugmentError, match=r"no answer in 0 s.*threads"):
        purity.quick(plant(HangsInChild), Noise(), budget_s=60)
    assert time.monotonic() - start < 300, "it sleeps for 600"
    monkeypatch.undo()
    with pytest.raises(ImpureAugmentError, match="ended without an answer"):
        purity.quick(plant(DiesInChild), Noise(), budget_s=60)
    assert not multiprocessing.active_children()


def test_an_error_in_a_probe_is_a_finding(plant):
    with pytest.raises(
        ImpureAugmentError, match="raises ValueError: three times is enough"
    ):
        purity.quick(plant(RaisesLater), Noise(), budget_s=60)


def test_what_cannot_be_sent_to_a_process_is_told(plant, monkeypatch):
    augmenter = plant(lambda: A.Solarize())
    monkeypatch.setattr(purity, "METHODS", {"spawn": purity.SPAWNED})
    findings = purity.check(augmenter, Noise())
    assert any(
        one.probe == "spawned process" and "top of a module" in one.advice
        for one in findings
    )
    assert any(one.probe == "pickled pipeline" for one in findings)
    purity.quick(augmenter, Noise(), budget_s=60)  # forked workers take it


@pytest.mark.usefixtures("without_spawn")
def test_the_whole_is_not_blamed_for_its_parts_but_for_what_it_adds(plant):
    found = purity.check(plant(impure.Clock), Noise())
    assert {finding.transform for finding in found} == {"clock (Clock)"}
    guilty = Finding("part", "tripwires", "", "")
    whole = [
        Finding("whole", "tripwires", "", "a"),
        Finding("whole", "own state", "", "b"),
    ]
    assert purity._drop_explained([guilty, *whole], "whole") == [guilty, whole[1]]
    assert [finding.advice for finding in purity._drop_explained(whole, "whole")] == [
        purity.COMBINED
    ] * 2


def test_a_transform_that_hides_all_others_is_found(plant):
    """The pipeline draws from its key, and every output is the same."""
    augmenter = plant(partial(A.MultiplicativeNoise, multiplier=(0.0, 0.0), p=1.0))
    with pytest.raises(
        ImpureAugmentError, match="the same output for different images"
    ):
        purity.quick(augmenter, Noise(), budget_s=60)


def test_first_difference():
    frame = Noise().read(0)
    other = tuple(part.copy() for part in frame)
    assert first_difference(frame, other) is None
    other[1][3, 4] += 1
    assert first_difference(frame, other) == Pixel(
        "target", 3, 4, 0, frame[1][3, 4], other[1][3, 4]
    )
    other[0][7, 5, 2] ^= 1
    other[0][7, 6, 0] ^= 1
    assert first_difference(frame, other)[:4] == ("image", 7, 5, 2)
    assert "(60, 80, 3), then uint8 (60, 79, 3)" in first_difference(
        frame, (frame[0][:, 1:], frame[1])
    )
    assert "uint8" in first_difference(frame, (frame[0].astype(int), frame[1]))


def test_what_another_sample_leaves_behind_is_found():
    """By the second half of the probe: the output before it stays as it was."""
    frames = Noise().read(0), Noise().read(1)

    class Remembers:
        name, others = "remembers", 0

        def __call__(self, image, target, key):
            self.others += int(not np.array_equal(image, frames[0][0]))
            return image + np.uint8(self.others), target

    function = Remembers()
    case = Case(function, frames, [run(function, frames[0], purity.KEYS[0])])
    [probe] = [probe for probe in PROBES if probe.name == "after unrelated calls"]
    assert probe.run(case)[:4] == ("image", 0, 0, 0)


class Plain:
    """A function for single probes."""

    name, table = "plain", None

    def __init__(self, writes: bool = False) -> None:
        self.writes = writes

    def __call__(self, image, target, key):
        self.table = self.table or [1]  # built once
        if self.writes:
            image[0, 0] ^= 1
            image[0, 0] ^= 1
        return image.copy(), target.copy()


@pytest.mark.parametrize(
    ("probe", "function", "varies", "words"),
    [
        (
            "input untouched",
            Plain(writes=True),
            False,
            "on read-only input it raises",
        ),  # though it puts it back
        ("input untouched", Plain(), False, ""),
        ("key matters", Plain(), True, "the same output for different keys"),
        ("key matters", Plain(), False, ""),
        (
            "own state",
            Plain(),
            False,
            "",
        ),  # what the first call builds is no state that a call changes
    ],
)
def test_single_probes(probe, function, varies, words):
    frame = Noise().read(0)
    case = Case(
        function,
        (frame, frame),
        [tuple(part.copy() for part in frame)] * 2,
        varies=varies,
    )
    found = next(each for each in PROBES if each.name == probe).run(case)
    assert (words in found) if words else found is None


def test_a_split_of_one_sample_is_probed_with_its_mirror_image():
    first, second = purity._two_frames(Noise(num=1))
    assert np.array_equal(first[0][:, ::-1], second[0])
    assert not np.array_equal(first[0], second[0])


def test_keys_are_not_those_of_training():
    assert not {sample_key(0, 0, index, "augment") for index in range(100)} & set(
        purity.KEYS
    )


def test_quick_asks_what_the_whole_check_asks():
    """All but to pickle, which forked workers never do; a forked process is part of the two orders."""
    assert set(purity.NAMES) - {probe.name for probe in purity.QUICK} == {
        "pickled pipeline", "spawned process", "forked process", purity.ORDER,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "probes"),
    [
        (impure.IgnoresKey, {"key matters"}),
        (impure.OneBuffer, {"after unrelated calls", "own state"}),
    ],
)
def test_without_its_probe_a_plant_goes_through(plant, monkeypatch, kind, probes):
    """The control: it is the probe which claims an impurity that finds it."""
    monkeypatch.setattr(
        purity,
        "QUICK",
        tuple(probe for probe in purity.QUICK if probe.name not in probes),
    )
    purity.quick(plant(kind), Noise(), budget_s=60)
