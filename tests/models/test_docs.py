"""docs/models.md says what the code is."""

from pathlib import Path

import torch

from segpipe.cli.speed import operations
from segpipe.models import MODELS, build_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def rows() -> dict[str, list[str]]:
    cells = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    return {row[0]: row[1:] for row in cells if row[0] in MODELS and len(row) == 7}


@torch.no_grad()
def test_the_table_of_networks_is_that_of_the_code() -> None:
    documented = rows()
    assert set(documented) == set(MODELS) - {"smp"}
    for name, row in documented.items():
        with torch.device("meta"):
            net, image = build_model(name, 19).eval(), torch.empty(1, 3, 1024, 2048)
        macs = operations(net, image)
        train = sum(value.numel() for value in net.parameters())
        auxiliary = sum(value.numel() for value in net.train_only.parameters())
        assert row[:5] == [
            f"{train:,}",
            f"{train - auxiliary:,}",
            f"{macs / 1e9:.2f}",
            str(net.output_stride),
            str(net.size_multiple),
        ], name
