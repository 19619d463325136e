"""The probes of the loader: what differs between workers or repeats itself on ranks is found."""

import pytest

import impure
from impure import Noise, config
from segpipe.data import layouts
from segpipe.data.augment import Augmenter
from segpipe.data.layouts import LAYOUTS, check_diversity, check_layouts
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
    assert check_layouts(augmenter, Noise(), FEW, report=lambda *result: seen.append(result)) == []
    assert seen == [("no workers", None), ("fork x 2", None), ("fork x 3", None)]


def test_the_unkeyed_control_is_found_in_every_layout():
    findings = check_layouts(Augmenter(config(keyed=False)), Noise(), FEW)
    assert [finding.probe for finding in findings] == ["worker layouts"] * 3
    assert "step 0, shard 0, sample 0: image (y, x, channel)" in findings[1].detail
    assert "augment.keyed=true" in findings[0].advice


def test_a_transform_that_knows_its_process_is_found(monkeypatch):
    monkeypatch.setitem(TRANSFORMS, "process_id", impure.ProcessId)
    findings = check_layouts(Augmenter(config(extra=["process_id"])), Noise(), FEW[:2])
    assert [finding.detail.partition(":")[0] for finding in findings] == ["fork x 2"]


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
    colours = dict.fromkeys(("brightness", "contrast", "saturation", "hue"), 0.0)
    augmenter = Augmenter(config(scale=[1.0, 1.0], crop_size=[60, 80], **colours))
    assert bool(check_diversity(augmenter, Noise(), ranks=2)) == (share > 1)
