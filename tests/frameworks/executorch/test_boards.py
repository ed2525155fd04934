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

from support.executorch_programs import Linear, export, save_bpte, save_pt2

from tools.virtual_board import VirtualBoard

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the exporter's own, there are many
    pytest.mark.board,
    pytest.mark.timeout(1200),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_pt2(tmp_path / "linear.pt2", export(Linear(), [torch.zeros(2, 4)]))


def hil(*arguments: object, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "hil.controller.cli.main", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def reach(board: VirtualBoard) -> list[object]:
    return ["--board", board.address, "--identity", board.identity, "--known-hosts", board.known_hosts]


def run(model: Path, board: VirtualBoard, environment: dict[str, str]) -> dict[str, Any]:
    arguments = ["run", model, "--runtime", "executorch", *reach(board)]
    (case,) = hil(*arguments, folder=model.parent, environment=environment)["cases"]
    return case


def test_a_program_passes_on_a_board_of_this_machines_kind(model: Path, board_x86: VirtualBoard, environment):
    case = run(model, board_x86, environment)
    assert case["outcome"] == "PASS", case["error"] or case["reason"]
    assert case["provenance"]["board"] == board_x86.address
    assert case["provenance"]["runtime_version"]


def test_a_bundled_program_of_stock_executorch_is_verified_over_ssh(
    tmp_path: Path, board_x86: VirtualBoard, environment
):
    module, x = Linear(), torch.arange(8.0).reshape(2, 4)
    right, wrong = [([x * scale], list(module(x * scale))) for scale in (1, -1)], ([x], [y + 1 for y in module(x)])
    stock = save_bpte(tmp_path / "stock.bpte", export(module, [x]), [*right, wrong])
    place = {"folder": tmp_path, "environment": environment}
    assert hil("bundle", "import", stock, "--from", "bpte", "-o", "b.hilb", **place)["exit_code"] == 0
    told = hil("bundle", "run", "b.hilb", *reach(board_x86), **place)
    assert [case["outcome"] for case in told["cases"]] == ["PASS", "PASS", "FAIL"], told
    assert told["exit_code"] == 1


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
