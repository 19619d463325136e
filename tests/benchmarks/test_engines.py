"""The table of engines: rows that are equal pass, a wrong one does not, and C++ programs are read as they print."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_artifact

from benchmarks import engines
from segpipe.runtime.artifact import read_artifact
from segpipe.runtime.session import Session


def test_rows_say_how_much_is_equal(tmp_path: Path) -> None:
    artifact = read_artifact(write_artifact(tmp_path / "export"))
    session, image = Session(artifact), artifact.golden.image[0]

    def wrong() -> engines.Masks:
        mask, confidence = session.run(image)
        return 1 - mask, confidence + np.uint8(3)

    rows = engines.compared(
        {"right": lambda: session.run(image), "wrong": wrong}, artifact, repeats=2
    )
    assert (rows["right"]["equal"], rows["right"]["levels"]) == (1.0, 0)
    assert (rows["wrong"]["equal"], rows["wrong"]["levels"]) == (0.0, 3)
    assert all(row["p50_ms"] >= 0 <= row["cpu_ms"] for row in rows.values())
    assert engines.table(rows)[2].startswith("| right | 100.0000 % | 0 | ")


def test_a_program_is_read_as_it_prints(tmp_path: Path) -> None:
    path = tmp_path / "segpipe_ort"
    assert engines._program(str(tmp_path), "segpipe_ort", tmp_path, 3) is None
    path.write_text(
        "#!/bin/sh\necho 'frame 0: 99.9950 % of the pixels equal, confidence within 1 levels, p50 6.500 ms'\n"
    )
    path.chmod(0o755)
    row = engines._program(str(tmp_path), "segpipe_ort", tmp_path, 3)
    assert row is not None
    assert abs(row.pop("cpu_ms")) < 1000
    assert row == {"equal": pytest.approx(0.99995), "levels": 1, "p50_ms": 6.5}
    path.write_text("#!/bin/sh\necho altered >&2; exit 7\n")
    with pytest.raises(RuntimeError, match="ended with 7: altered"):
        engines._program(str(tmp_path), "segpipe_ort", tmp_path, 3)


@pytest.mark.parametrize(("equal", "passed"), [(0.99995, True), (0.998, False)])
def test_the_claim_follows_the_masks(
    equal: float, passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_artifact(tmp_path / "run" / "export")
    row = {"levels": 0, "p50_ms": 1.0, "cpu_ms": 1.0}
    rows = {
        "onnxruntime": {**row, "equal": equal},
        "OpenVINO, default precision": {**row, "equal": 0.5},
    }
    monkeypatch.setattr(engines, "arms", lambda *_: {})
    monkeypatch.setattr(engines, "compared", lambda *_: rows)
    found = engines.measure(
        argparse.Namespace(settings=[f"run={tmp_path / 'run'}"], repeats=1)
    )
    assert found["passed"] is passed
