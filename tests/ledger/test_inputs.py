"""inputs.json binds what a run reads; what follows from it is made again at every start."""

import json
from pathlib import Path

from runs import DIGESTS, run

RUN = (
    "loss.class_weights=log",
    "data.balance=1",
    "optim.schedule_steps=9",
    "compute.shards=1",
    "data.num_train=4",
    "data.num_val=1",
)


def test_a_resume_counts_the_pixels_of_the_classes_again(tmp_path: Path) -> None:
    """The bits of one run, also in a folder of a release that kept the counts; control: others without weights."""

    def outcome(of: Path) -> list[object]:
        result = json.loads((of / "result.json").read_text())
        return [result[name] for name in DIGESTS]

    whole, folder, plain = (tmp_path / name for name in ("whole", "cut", "plain"))
    assert run(whole, *RUN, "train.steps=2") == 0
    assert run(plain, *RUN, "train.steps=2", "loss.class_weights=none") == 0
    assert outcome(plain) != outcome(whole)
    assert run(folder, *RUN, "train.steps=1") == 0
    assert not (folder / "pixels.npz").exists()

    (folder / "pixels.npz").write_bytes(b"no archive")
    path = folder / "inputs.json"
    recorded = json.loads(path.read_text())
    assert "pixels" not in recorded
    path.write_text(json.dumps(recorded | {"pixels": "0" * 64}))
    assert run(folder, *RUN, "train.steps=2", "run.exists=resume") == 0
    assert outcome(folder) == outcome(whole)
