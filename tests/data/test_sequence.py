"""Which images are of one sequence: the names that data sets use."""

from __future__ import annotations

import pytest

from segpipe.data.samples import frame, sequence
from segpipe.errors import DataError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0016E5_08640", ("0016E5", 8640)),  # CamVid at 360x480
        ("Seq05VD_f00030", ("Seq05VD", 30)),  # CamVid at full size
        ("lindau/lindau_000003_000019_leftImg8bit", ("lindau", 19)),  # Cityscapes
        ("lindau_000003_000019_leftImg8bit", ("lindau_000003", 19)),
        ("drive1/camera2/x", ("drive1/camera2", None)),
        ("train/images/0016E5_08640", ("0016E5", 8640)),  # of a CSV
        ("images/drive1/000012", ("drive1", 12)),
        ("kitchen-left-000123", ("kitchen-left", 123)),
        ("rec_2024-05-01_12-33-01_000010", ("rec_2024-05-01_12-33-01", 10)),
        ("frame0012", ("frame", 12)),
        ("img (3)", ("img", 3)),
        ("000012", ("unnamed", 12)),
        ("kitchen", ("kitchen", None)),
    ],
)
def test_rule(name: str, expected: tuple[str, int | None]) -> None:
    assert frame(name) == expected
    assert sequence(name) == expected[0]


def test_a_pattern_replaces_the_rule() -> None:
    assert sequence("lindau_000003_000019", r"^[a-z]+") == "lindau"
    assert sequence("robot7/2024_cam1_0001", r"_(cam\d)_") == "cam1"
    for pattern in ("berlin", "(berlin)?"):
        with pytest.raises(DataError, match="does not match lindau_000003"):
            sequence("lindau_000003", pattern)
