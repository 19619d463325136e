"""The purity check: every planted impurity is found by name, and what is pure is left in peace."""

import multiprocessing
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import albumentations as A
import cv2
import numpy as np
import pytest
import torch

import impure
from benchmarks import augment as benchmark
from impure import Noise, config
from runs import torch_restored
from segpipe import plugins
from segpipe.checks import elsewhere, purity
from segpipe.checks.purity import Finding
from segpipe.cli.main import main as segpipe
from segpipe.data.augment import TRANSFORMS, Augmenter
from segpipe.data.loader import train_batches
from segpipe.data.order import Order
from segpipe.errors import ConfigError, ImpureAugmentError
from segpipe.keys import sample_key
from segpipe.train.canary import first_difference

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
        A.RandomRotate90, A.RandomShadow, A.RandomSnow, A.RandomSunFlare, A.RandomToneCurve,
        A.RingingOvershoot, A.Rotate, A.SafeRotate, A.SaltAndPepper, A.Sharpen, A.ShotNoise, A.Solarize, A.Spatter,
        A.SquareSymmetry, A.ThinPlateSpline, A.ToGray, A.ToSepia, A.Transpose, A.UnsharpMask,
        A.VerticalFlip, A.XYMasking, A.ZoomBlur, A.GaussNoise, A.AdditiveNoise, A.RGBShift,
    )
} | {
    "GridElasticDeform": partial(A.GridElasticDeform, num_grid_xy=(4, 4), magnitude=5),
    "PadIfNeeded": partial(A.PadIfNeeded, 48, 48),
    "RandomCrop": partial(A.RandomCrop, 48, 48),
    "CropAndPad": partial(A.CropAndPad, px=2),
    "RandomResizedCrop": partial(A.RandomResizedCrop, (48, 48)),
    "RandomSizedCrop": partial(A.RandomSizedCrop, (24, 48), (48, 48)),
    "LongestMaxSize": partial(A.LongestMaxSize, 48),
    "Resize": partial(A.Resize, 48, 48),
    "CenterCrop": partial(A.CenterCrop, 48, 48),
}  # fmt: skip
DOCS = Path(__file__).parents[2] / "docs"


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


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Caches of plants that an earlier test in this process has filled, and what they switch in it."""
    impure.forget()
    with torch_restored():
        yield
    cv2.setUseOptimized(True)


def title(kind: type) -> str:
    return f"{kind.__name__.lower()} ({kind.__name__})"


def probes(findings: list[Finding]) -> dict[str, str]:
    return {finding.transform: finding.probe for finding in findings}


def forked(augmenter: Augmenter, samples: Any = None) -> list[Finding]:
    """What the check finds without another start of the program, which takes seconds."""
    return purity.check(augmenter, samples or Noise(), spawns=False)


def test_planted_impurities_are_named_and_honest_caches_are_not(plant):
    """All in one pipeline: one finding for each, by its cause, and none for its neighbours or the whole.

    Honest are memos, tables and caches of pure functions, on instances, classes, modules, functions and closures.
    """
    kinds = [*impure.HONEST, A.ToSepia, *impure.CORPUS, A.Solarize]
    findings = forked(plant(*kinds))
    expected = {title(kind): probe for kind, probe in impure.CORPUS.items()}
    assert probes(findings) == expected
    told = {finding.transform: str(finding) for finding in findings}
    for kind, words in impure.NAMED.items():
        assert words in told[title(kind)]
    for finding in findings:
        assert finding.detail
        assert finding.advice


UNIQUE = {
    purity.CALLS: impure.ClockByName,
    purity.STATE: impure.SilentCounter,
    purity.REPEAT: impure.SameTwice,
    purity.ANOTHER_WORKER: impure.ShapeCache,
    purity.ANOTHER_START: impure.MethodHash,
}


@pytest.mark.usefixtures("named")
def test_each_probe_finds_what_all_others_miss(monkeypatch):
    """The control: without it, the plant goes through."""
    assert [*UNIQUE] == [*purity.ADVICE]
    for probe in (purity.CALLS, purity.STATE, purity.REPEAT):
        assert "rng of a call" in purity.ADVICE[probe]  # classes without get_params
    names = [f"impure:{kind.__name__}" for kind in UNIQUE.values()]
    augmenter = Augmenter(config(extra=names))
    titles = [f"impure:{kind.__name__} ({kind.__name__})" for kind in UNIQUE.values()]
    expected = dict(zip(titles, UNIQUE, strict=True))
    assert probes(purity.check(augmenter, Noise())) == expected
    for probe, kind in UNIQUE.items():
        advice = {one: text for one, text in purity.ADVICE.items() if one != probe}
        with monkeypatch.context() as patch:
            patch.setattr(purity, "ADVICE", advice)
            one = Augmenter(config(extra=[f"impure:{kind.__name__}"]))
            assert forked(one) == []


@pytest.mark.parametrize(
    "kind", [impure.StaleParameters, impure.Clock, impure.DataclassCurriculum]
)
def test_training_does_not_start_with_them(plant, kind):
    augmenter = plant(kind)
    with pytest.raises(ImpureAugmentError) as caught:
        purity.quick(augmenter, Noise())
    message = str(caught.value)
    assert f"{title(kind)}, probe '{impure.CORPUS[kind]}'" in message
    assert "augment.check=false" in message
    assert "\n" not in message
    assert caught.value.exit_code == 8
    assert purity.quick(plant(kind, check=False), Noise()) == ""


def test_training_starts_with_honest_caches(plant):
    assert purity.quick(plant(*impure.HONEST), Noise()) == ""


def test_the_unkeyed_control_is_found():
    """albumentations' own random state: no transform alone is to blame, and the advice names the setting."""
    [finding] = forked(Augmenter(config(keyed=False)))
    assert finding.transform == "whole pipeline"
    assert finding.probe == purity.STATE
    assert "augment.keyed=true" in finding.advice


@pytest.fixture(scope="module")
def everything() -> dict[str, str]:
    """What the check finds in all shipped and all of albumentations' transforms, and in two impure ones."""
    patch = pytest.MonkeyPatch()
    patch.delenv("PYTHONHASHSEED", raising=False)
    patch.setitem(impure.LATE, "number", 7)
    found = {kind.__name__: kind for kind in (impure.HashOfText, impure.LateGlobal)}
    for name, builder in (PURE | found).items():
        patch.setitem(TRANSFORMS, name, builder)
    try:
        return probes(purity.check(Augmenter(config(extra=list(TRANSFORMS))), Noise()))
    finally:
        patch.undo()


def test_pure_transforms_raise_no_alarm(everything):
    """And what only another start of the program shows is found."""
    assert everything == {
        "HashOfText (HashOfText)": purity.ANOTHER_START,
        "LateGlobal (LateGlobal)": purity.ANOTHER_START,
    }


def test_the_docs_list_the_transforms_that_pass():
    text = (DOCS / "plugins.md").read_text()
    listed = text.partition("These transforms of albumentations")[2].partition("\n\n")[
        0
    ]
    assert set(re.findall(r"`(\w+)`", listed)) == {*PURE, "Superpixels"}


def test_the_docs_count_the_corpus():
    impures = {*impure.CORPUS, *impure.OF_A_START, *impure.OF_MANY_IMAGES}
    text = (DOCS / "race.md").read_text()
    counts = re.search(r"holds (\d+) impure transforms .* and (\d+) valid", text)
    assert counts is not None
    assert counts.groups() == (str(len(impures)), str(len(impure.HONEST)))


@pytest.mark.usefixtures("named")
def test_what_differs_between_two_starts_is_found_before_a_training():
    """In transforms by import path, with one spawned process for all; honest caches are not blamed.

    Further images under further keys show what only comes to light after some, or under one key in ten.
    """
    kinds = [*impure.OF_A_START, *impure.OF_MANY_IMAGES, *impure.HONEST]
    augmenter = Augmenter(config(extra=[f"impure:{kind.__name__}" for kind in kinds]))

    def found(**given: Any) -> dict[str, str]:
        findings = purity.check(augmenter, Noise(), largest=48, **given)
        return {
            re.sub(r".*\((\w+)\)", r"\1", name): probe
            for name, probe in probes(findings).items()
        }

    many = {kind.__name__: probe for kind, probe in impure.OF_MANY_IMAGES.items()}
    starts = {kind.__name__: purity.ANOTHER_START for kind in impure.OF_A_START}
    assert found() == many | starts
    assert found(spawns=False) == many, "the control: two forked processes agree"


@pytest.mark.usefixtures("named")
def test_without_further_keys_a_rare_fault_goes_through(monkeypatch):
    """The control: four keys for all images, as there once were, miss what happens under one key in ten."""
    augmenter = Augmenter(config(extra=["impure:RareBank"]))
    assert len(set(purity.KEYS)) == purity.MANY == 32
    assert len(forked(augmenter)) == 1
    monkeypatch.setattr(purity, "KEYS", [*range(4, 8)] * 8)
    assert forked(augmenter) == []


def test_a_spawned_process_looks_like_another_start(monkeypatch):
    """As rank 1 of 2 in a main process, with another seed, hash, arguments and numbers; else it is as here."""
    monkeypatch.setenv("SEGPIPE_TEST_STRENGTH", "4")
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    monkeypatch.setenv("SEGPIPE_TEST_TEXT", "text")
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    torch.set_num_threads(torch.get_num_threads() + 5)
    before, arguments = dict(os.environ), list(sys.argv)
    there = elsewhere.elsewhere("spawn", impure.surroundings)
    here = impure.surroundings()
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
def test_another_start_that_gives_no_answer_is_noted(monkeypatch):
    monkeypatch.setattr(
        elsewhere, "_send_from_another_start", os.getpid
    )  # which takes no arguments
    note = purity.quick(Augmenter(config(extra=["impure:OwnTable"])), Noise())
    assert "whole pipeline, probe 'spawned process': the process ended" in note


def test_no_process_is_spawned_for_transforms_of_segpipe(monkeypatch):
    """It costs seconds; those in TRANSFORMS are compared by segpipe check-augment."""
    methods = []

    def recorded(method: str, *given: Any) -> Any:
        methods.append(method)
        return elsewhere.elsewhere(method, *given)

    monkeypatch.setattr(purity, "elsewhere", recorded)
    assert purity.quick(Augmenter(config(extra=["noise"])), Noise()) == ""
    assert set(methods) == {"fork"}


SHIPPED = {
    "defaults": {},
    "robust": {"extra": list(TRANSFORMS)},
    "nothing random": {"scale": [1.0, 1.0], "crop_size": [60, 80], "flip": 0.0, "brightness": 0.0, "contrast": 0.0,
                       "saturation": 0.0, "hue": 0.0},
    "only padding": {"scale": [0.5, 0.5], "crop_size": [96, 96], "flip": 0.0},
    "a flip alone": {"scale": [1.0, 1.0], "crop_size": [60, 80], "brightness": 0.0, "contrast": 0.0, "saturation": 0.0,
                     "hue": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_pipelines_raise_no_alarm(name):
    augmenter = Augmenter(config(**SHIPPED[name]))
    assert purity.check(augmenter, Noise(), spawns=False) == []
    assert purity.quick(augmenter, Noise(num=1)) == ""


def test_quick_is_quick():
    """At a real crop size, with every shipped transform, all probes take less than 2 s of a processor.

    Other work on the machine makes processor time longer, never shorter: one measurement of three is enough.
    """
    samples = Noise((360, 480))
    augmenter = Augmenter(config(crop_size=[320, 416], extra=list(TRANSFORMS)))

    def seconds() -> float:
        before = os.times()
        assert purity.quick(augmenter, samples) == ""
        return sum(os.times()[:4]) - sum(before[:4])

    assert any(seconds() < 2 for _ in range(3))


def test_quick_leaves_this_process_as_it_was(plant):
    """Transforms that move every global generator move them in another process."""
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    threads = cv2.getNumThreads()

    def generators() -> list[Any]:
        numpy = np.random.get_state()[1].tolist()
        return [random.getstate(), numpy, torch.get_rng_state().tolist()]

    before = generators()
    kinds = (impure.PythonGlobal, impure.NumpyGlobal, impure.TorchGlobal)
    with pytest.raises(ImpureAugmentError, match=r"\(2 more\)"):
        purity.quick(plant(*kinds), Noise())
    assert generators() == before
    assert cv2.getNumThreads() == threads
    assert not multiprocessing.active_children()


class TorchSum(impure.Planted):
    """Torch divides sums of this size among its threads, which decides their last bits."""

    def number(self) -> int:
        bits = torch.arange(200_000.0).sin().sum().view(torch.int32)
        return 16 * (int(bits) & 0xFFFFFF) + torch.get_num_threads()


def test_torch_has_one_thread_wherever_samples_are_augmented(plant):
    """In this process, too, whose own threads a forked one would wait for without an end."""
    augmenter = plant(TorchSum)

    def batches(workers: int) -> list[bytes]:
        stream = train_batches(
            Noise(), augmenter, Order(0, 4, 1, 2), shards=range(1), steps=range(2), workers=workers,
            start_method="fork", prefetch=1, pin_memory=False,
        )  # fmt: skip
        with closing(stream):
            return [batch.image.numpy().tobytes() for batch in stream]

    torch.set_num_threads(1)
    alone = TorchSum().number()
    torch.set_num_threads(3)
    assert TorchSum().number() != alone, "the control, which starts torch's threads"
    assert batches(0) == batches(2)
    assert forked(augmenter) == []
    assert torch.get_num_threads() == 3


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


class Raises(impure.Planted):
    after = 0

    def number(self) -> int:
        self.calls += 1
        if self.calls > self.after:
            raise ValueError("often enough")
        return 0


class RaisesLater(Raises):
    after = 3


def test_a_child_that_hangs_or_dies_is_told(plant, monkeypatch):
    monkeypatch.setattr(elsewhere, "PATIENCE_S", 0.3)
    start = time.monotonic()
    with pytest.raises(ImpureAugmentError, match=r"no answer in 0 s.*threads"):
        purity.quick(plant(HangsInChild), Noise())
    assert time.monotonic() - start < 300, "it sleeps for 600"
    monkeypatch.undo()
    with pytest.raises(ImpureAugmentError, match="ended without an answer"):
        purity.quick(plant(DiesInChild), Noise())
    assert not multiprocessing.active_children()


def test_an_error_of_a_transform_is_told(plant):
    with pytest.raises(ImpureAugmentError, match="raises ValueError: often enough"):
        purity.quick(plant(RaisesLater), Noise())
    with pytest.raises(
        ConfigError,
        match=r"raises \(Raises\) fails: .*test_purity.py, line \d+ .*often enough",
    ):
        purity.quick(plant(Raises), Noise())


class AddsAnId(A.DualTransform):
    """Rarely, so that training could go on for hours."""

    def __init__(self) -> None:
        super().__init__(p=0.001)

    def apply(self, img: Any, **params: Any) -> Any:
        return img

    def apply_to_mask(self, mask: Any, **params: Any) -> Any:
        return mask + np.uint8(1)


def test_an_id_of_no_class_is_told(plant):
    with pytest.raises(ConfigError, match=r"\(AddsAnId\) makes the id 11, but there"):
        purity.quick(plant(AddsAnId), Noise())


def test_what_cannot_be_sent_to_a_process_is_told(plant):
    augmenter = plant(lambda: A.Solarize())
    [finding] = purity.check(augmenter, Noise())
    assert finding.unanswered
    assert finding.probe == purity.ANOTHER_START
    assert "module level" in finding.advice
    assert purity.quick(augmenter, Noise()) == "", "forked workers take it"


def test_first_difference():
    frame = Noise().read(0)
    other = tuple(part.copy() for part in frame)
    assert first_difference(frame, other) == ""
    other[1][3, 4] = (frame[1][3, 4] + 1) % 11
    values = f"is {frame[1][3, 4]}, then {other[1][3, 4]}"
    assert first_difference(frame, other) == (
        f"target (y, x, channel) = (3, 4, 0) {values}"
    )
    other[0][7, 5, 2] ^= 1
    other[0][7, 6, 0] ^= 1
    assert "image (y, x, channel) = (7, 5, 2) is " in first_difference(frame, other)
    cut = (frame[0][:, 1:], frame[1])
    assert "(60, 80, 3), then uint8 (60, 79, 3)" in first_difference(frame, cut)
    assert "uint8" in first_difference(frame, (frame[0].astype(int), frame[1]))


def test_keys_are_not_those_of_training():
    keys = {sample_key(0, 0, index, "augment") for index in range(100)}
    assert not keys & set(purity.KEYS)


SMALL = ("data.size=[64,96]", "data.num_train=4", "augment.crop_size=[48,64]")


def test_the_command_says_what_is_pure(monkeypatch, capsys):
    monkeypatch.setattr(purity, "check", partial(purity.check, spawns=False))
    assert segpipe(["check-augment", *SMALL]) == 0
    told = capsys.readouterr().out
    assert "ColorMatrix is pure" in told
    assert "4 checks of augment: all passed" in told
    assert segpipe(["check-augment", *SMALL, "augment.keyed=false"]) == 8
    told = capsys.readouterr().out
    assert "whole pipeline, probe 'own state': " in told
    assert "4 checks of augment: 1 failed" in told


def test_the_command_refuses_a_setting_that_does_not_exist(capsys):
    assert segpipe(["check-augment", "augment.kyed=false"]) == 2
    assert "augment.kyed" in capsys.readouterr().err


def test_the_benchmark_needs_a_pure_pipeline_and_a_control_that_is_not(monkeypatch):
    monkeypatch.setattr(purity, "check", partial(purity.check, spawns=False))
    pure, control = (benchmark.examined(SMALL, keyed=keyed) for keyed in (True, False))
    assert pure["checked"][0] == "ScaleCrop"
    assert benchmark.passed([pure, control])
    assert not benchmark.passed([pure])
    assert not benchmark.passed([control])
    assert not benchmark.passed([{**pure, "checked": []}, control])
    assert not benchmark.passed([{**pure, "failed": ["flip: own state"]}, control])
    assert not benchmark.passed([pure, {**control, "failed": []}])
