"""Compile targets before and after a board is probed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hil.controller.devices.board_choice import fill_target, knows_target
from hil.core.boards import load_board


@pytest.mark.parametrize(
    ("board", "runtime", "known"),
    [
        ("sim", "xla-aot", True),
        ("sim", "iree", True),
        ("sim", "", True),
        ("generic", "xla-aot", False),
        ("generic", "iree", False),
        ("generic", "onnxruntime", True),
    ],
)
def test_knows_target_for_configured_or_local_board(board, runtime, known):
    assert knows_target(load_board(board).config, runtime) is known


def test_with_target_sets_tfcompile_flags_from_board():
    config, told = fill_target(load_board("generic").config, "xla-aot", {"machine": {"arch": "aarch64"}})
    assert config.compile_flags["tfcompile"] == ("--target-triple=aarch64-unknown-linux-gnu",)
    assert told == "aarch64-unknown-linux-gnu"
    assert fill_target(config, "xla-aot", {"machine": {"arch": "x86_64"}}) == (config, "")
    simulator = load_board("sim").config
    assert fill_target(simulator, "xla-aot", {"machine": {"arch": "x86_64"}}) == (simulator, "")


def test_fill_target_keeps_arithmetic_flags(tmp_path):
    (tmp_path / "npu.toml").write_text('[compile_flags]\niree = ["--arithmetic=bfloat16"]\n[simulator]\n')
    config = load_board(str(tmp_path / "npu.toml")).config
    assert not knows_target(config, "iree")
    filled, _ = fill_target(config, "iree", {"machine": {"arch": "x86_64"}})
    assert filled.compile_flags["iree"][-1] == "--arithmetic=bfloat16"
    assert any(flag.startswith("--iree-llvmcpu-target-cpu=") for flag in filled.compile_flags["iree"])
    assert knows_target(filled, "iree")


def test_choosing_simulator_does_not_import_ssh_packages():
    program = (
        "import sys\n"
        "from hil.controller.devices.choosing import board_resolver\n"
        "board_resolver.choose('', hw_type='sim')\n"
        "heavy = {'paramiko', 'fabric', 'cryptography'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
