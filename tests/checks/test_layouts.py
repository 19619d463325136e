"""The probes of the loader: what differs between workers or repeats itself on ranks is found, and told."""

from typing import Any

import pytest
import torch

import impure
import runs
from benchmarks import augment
from impure import Noise, config
from segpipe.checks import layouts
from segpipe.checks import purity as checker
from segpipe.checks.layouts import LAYOUTS, check_diversity, check_layouts
from segpipe.cli import check_augment
from segpipe.cli.main import main as segpipe
from segpipe.data.augment import Augmenter
from segpipe.data.transforms import TRANSFORMS

FEW = ((0, "fork"), (2, "fork"), (3, "fork"))


def test_all_start_methods_and_the_numbers_that_the_contract_names_are_tried():
    assert {method for _, method in LAYOUTS} == {"fork", "forkserver", "spawn"}
    assert {workers for workers, _ in LAYOUTS} == {0, 1, 2, 3, 8}
    assert len(LAYOUTS) == 13
    assert 2 * len(layouts.STEPS) > max(workers for workers, _ in LAYOUTS), (
        "a worker with one batch could not repeat it"
    )


def test_keyed_workers_give_the_same_bytes():
    seen = []
    augmenter = Augmenter(config(extra=["noise", "cutout"]))
    assert (
        check_layouts(
            augmenter, Noise(), FEW, report=lambda *result: seen.append(result)
        )
        == []
    )
    assert seen == [("no workers", None), ("fork x 2", None), ("fork x 3", None)]
    assert check_layouts(Augmenter(config(color_on="device")), Noise(), FEW[:2]) == []


def test_the_unkeyed_control_is_found_in_every_layout():
    findings = check_layouts(Augmenter(config(keyed=False)), Noise(), FEW)
    assert [finding.probe for finding in findings] == ["worker layouts"] * 3
    assert "step 0, shard 0, sample 0: image (y, x, channel)" in findings[1].detail
    assert "augment.keyed=true" in findings[0].advice


def test_a_transform_that_knows_its_process_is_found(monkeypatch):
    monkeypatch.setitem(TRANSFORMS, "process_id", impure.ProcessId)
    findings = check_layouts(Augmenter(config(extra=["process_id"])), Noise(), FEW[:2])
    assert [finding.detail.partition(":")[0] for finding in findings] == ["fork x 2"]


class TorchSum(impure.Planted):
    """Torch divides sums of this size among its threads, which decides their last bits."""

    def number(self) -> int:
        bits = torch.arange(200_000.0).sin().sum().view(torch.int32)
        return 16 * (int(bits) & 0xFFFFFF) + torch.get_num_threads()


def test_torch_has_one_thread_wherever_samples_are_augmented(monkeypatch):
    """In this process, too, whose own threads a forked one would wait for without an end."""
    monkeypatch.setitem(TRANSFORMS, "torch_sum", TorchSum)
    augmenter = Augmenter(config(extra=["torch_sum"]))
    with runs.torch_restored():
        torch.set_num_threads(1)
        alone = TorchSum().number()
        torch.set_num_threads(3)
        assert TorchSum().number() != alone, "the control, which starts torch's threads"
        assert check_layouts(augmenter, Noise(), FEW[:2]) == []
        assert checker.quick(augmenter, Noise(), budget_s=600) == ""
        monkeypatch.setattr(checker, "METHODS", {"fork": checker.FORKED})
        assert checker.check(augmenter, Noise()) == []
        assert torch.get_num_threads() == 3


def test_ranks_see_different_outputs():
    assert check_diversity(Augmenter(config()), Noise(), ranks=4) == []


def test_the_unkeyed_control_repeats_itself():
    [finding] = check_diversity(Augmenter(config(keyed=False)), Noise(), ranks=4)
    assert finding.probe == "diversity"
    assert "4 ranks with 2 workers each give 4 distinct outputs of 32" in finding.detail


@pytest.mark.parametrize("share", [0.99, 2.0])
def test_few_possible_outputs_are_no_alarm(monkeypatch, share):
    """A flip knows two; the control asks for more than there are."""
    monkeypatch.setattr(layouts, "DISTINCT", share)
    colors = dict.fromkeys(("brightness", "contrast", "saturation", "hue"), 0.0)
    augmenter = Augmenter(config(scale=[1.0, 1.0], crop_size=[60, 80], **colors))
    assert bool(check_diversity(augmenter, Noise(), ranks=2)) == (share > 1)


@pytest.fixture
def two_layouts(monkeypatch):
    """The script with two layouts and two ranks in place of 13 and 16."""
    monkeypatch.setattr(check_augment, "LAYOUTS", FEW[:2])
    monkeypatch.setattr(check_augment, "RANKS", 2)
    with runs.torch_restored():
        yield


SMALL = ("data.size=[64,96]", "data.num_train=4", "augment.crop_size=[48,64]")


@pytest.mark.usefixtures("two_layouts")
def test_the_script_says_that_the_pipeline_is_pure(capsys):
    assert segpipe(["check-augment", *SMALL]) == 0
    said = capsys.readouterr().out
    assert "2 layouts of workers, 2 ranks x 2 workers: pure" in said
    assert "impure" not in said


@pytest.mark.usefixtures("two_layouts")
def test_the_script_names_the_layouts_in_which_the_unkeyed_control_differs(
    monkeypatch, capsys
):
    monkeypatch.setattr(
        check_augment.purity, "check", lambda *args, **kwargs: []
    )  # it would find the control, too
    assert segpipe(["check-augment", *SMALL, "augment.keyed=false"]) == 8
    said = capsys.readouterr().out
    assert "probe 'worker layouts': no workers: step " in said
    assert "probe 'worker layouts': fork x 2: step " in said
    assert "2 ranks x 2 workers: impure" in said


def test_the_script_refuses_a_setting_that_does_not_exist(capsys):
    assert segpipe(["check-augment", "augment.kyed=false"]) == 2
    assert "augment.kyed" in capsys.readouterr().err


def examined(**changes: Any) -> dict[str, Any]:
    sound = {
        "keyed": True,
        "probes": 9,
        "failed": [],
        "layouts": {"a": "same bytes"},
        "diversity": "distinct",
    }
    return {**sound, **changes}


CONTROL = examined(
    keyed=False, layouts={"a": "differs", "b": "differs"}, diversity="2 of 8"
)


def test_the_benchmark_passes_what_is_pure_beside_a_control_that_is_not():
    assert augment.passed([examined(), CONTROL])


@pytest.mark.parametrize(
    "rows",
    [
        [examined(failed=["flip: call again"]), CONTROL],
        [examined(layouts={"a": "same bytes", "b": "differs"}), CONTROL],
        [examined(layouts={}), CONTROL],
        [examined(diversity="2 of 8"), CONTROL],
        [examined(probes=0), CONTROL],
        [examined()],
        [CONTROL],
        [examined(), {**CONTROL, "layouts": {"a": "differs", "b": "same bytes"}}],
        [examined(), {**CONTROL, "diversity": "distinct"}],
    ],
)
def test_the_benchmark_fails_what_is_impure_and_a_control_that_is_not(rows):
    assert not augment.passed(rows)


def test_the_benchmark_asks_all_probes_and_layouts(monkeypatch):
    monkeypatch.delitem(
        augment.purity.METHODS, "spawn"
    )  # seconds; the script's test has it
    with runs.torch_restored():
        found = augment.examined(SMALL, keyed=True, layouts=FEW[:2], ranks=2)
    assert found["layouts"] == {"no workers": "same bytes", "fork x 2": "same bytes"}
    assert found["probes"] == (len(augment.purity.NAMES) - 1) * (
        len(found["transforms"]) + 1
    )
    assert (found["failed"], found["diversity"]) == ([], "distinct")
