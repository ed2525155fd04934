"""ExecuTorch on boards over SSH, where its package can be had."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from executorch_programs import Linear, export, save_pt2  # noqa: E402

from hil.testing.virtual_board import VirtualBoard  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the exporter's own, there are many
    pytest.mark.board,
    pytest.mark.timeout(1200),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_pt2(tmp_path / "linear.pt2", export(Linear(), [torch.zeros(2, 4)]))


def run(model: Path, board: VirtualBoard, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "hil.controller.cli.main", "run", str(model), "--runtime", "executorch", "--json"]
    command += ["--board", board.address, "--identity", str(board.identity), "--known-hosts", str(board.known_hosts)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=model.parent)
    (case,) = json.loads(done.stdout)["cases"]
    return case


def test_a_program_passes_on_a_board_of_this_machines_kind(model: Path, board_x86: VirtualBoard, environment):
    case = run(model, board_x86, environment)
    assert case["outcome"] == "PASS", case["error"] or case["reason"]
    assert case["provenance"]["board"] == board_x86.address
    assert case["provenance"]["runtime_version"]


def test_an_arm_board_runs_it_or_says_that_there_is_no_pytorch_for_it(
    model: Path, board_aarch64: VirtualBoard, environment
):
    case = run(model, board_aarch64, environment)
    if case["outcome"] != "PASS":
        # PyPI has no build of PyTorch for Arm that does without CUDA; the index that has one is named.
        assert case["outcome"] == "BOARD_LOST"
        assert "torch==" in case["reason"]
        assert "+cpu is not published for Python" in case["reason"]
        assert "PIP_EXTRA_INDEX_URL" in case["error"]["hint"]
