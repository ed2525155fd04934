"""PyTorch models and ExecuTorch programs: hil makes no connections and writes only to its directories."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch
from support.side_effects import side_effects


@pytest.mark.parametrize("runtime", ["iree", "executorch"])
def test_run_stays_offline_and_writes_only_hil_files(runtime, tmp_path):
    if runtime == "executorch":
        pytest.importorskip("executorch")
    inputs = (torch.ones(1, 4),)
    torch.export.save(torch.export.export(torch.nn.Linear(4, 2), inputs), tmp_path / "linear.pt2")
    found = side_effects(("run", "linear.pt2", "--runtime", runtime), cwd=tmp_path)
    assert found.connections == ()
    assert found.files == ()
