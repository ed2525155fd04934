"""ExecuTorch on boards over SSH, if its package is available."""

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
    pytest.mark.filterwarnings("ignore"),  # the exporter emits many warnings
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


def test_program_passes_on_x86_board(model: Path, board_x86: VirtualBoard, environment):
    case = run(model, board_x86, environment)
    assert case["outcome"] == "PASS", case["error"] or case["reason"]
    assert case["provenance"]["board"] == board_x86.address
    assert case["provenance"]["runtime_version"]


def test_board_verifies_stock_bundled_program_over_ssh(tmp_path: Path, board_x86: VirtualBoard, environment):
    module, x = Linear(), torch.arange(8.0).reshape(2, 4)
    right, wrong = [([x * scale], list(module(x * scale))) for scale in (1, -1)], ([x], [y + 1 for y in module(x)])
    stock = save_bpte(tmp_path / "stock.bpte", export(module, [x]), [*right, wrong])
    place = {"folder": tmp_path, "environment": environment}
    assert hil("bundle", "import", stock, "--from", "bpte", "-o", "b.hilb", **place)["exit_code"] == 0
    told = hil("bundle", "run", "b.hilb", *reach(board_x86), **place)
    assert [case["outcome"] for case in told["cases"]] == ["PASS", "PASS", "FAIL"], told
    assert told["exit_code"] == 1


def test_arm_board_passes_or_reports_missing_pytorch_wheel(model: Path, board_aarch64: VirtualBoard, environment):
    case = run(model, board_aarch64, environment)
    if case["outcome"] != "PASS":
        # PyPI has no PyTorch for Arm without CUDA; the hint names an index with such builds.
        assert case["outcome"] == "BOARD_LOST"
        assert "torch==" in case["reason"]
        assert "+cpu is not published for Python" in case["reason"]
        assert "PIP_EXTRA_INDEX_URL" in case["error"]["hint"]
