"""Compiler flags for GPUs, from what boards report."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.vulkan import describe_lavapipe

from hil.controller.backends.gpu_targets import choose_gpu_flags, combine_flags
from hil.controller.backends.targets import choose_iree_target
from hil.controller.devices.board_choice import BoardChoice, fill_target, knows_target, use_device
from hil.controller.models.compiling import find_native_compiler
from hil.core.boards import load_board
from hil.errors import UsageError

PLAIN = "--iree-hal-target-device=vulkan"
MODEL = """func.func @sum(%a: tensor<16x64xf32>) -> tensor<16xf32> {
  %zero = arith.constant dense<0.0> : tensor<16xf32>
  %sum = linalg.reduce { arith.addf } ins(%a : tensor<16x64xf32>) outs(%zero : tensor<16xf32>) dimensions = [1]
  return %sum : tensor<16xf32>
}"""


def flags_for(**properties: str) -> str:
    """Return the flag for lavapipe with other properties."""
    ((flag,), _) = choose_gpu_flags("vulkan", describe_lavapipe(**properties))
    return flag


def test_vulkan_target_describes_reported_device():
    flags, description = choose_gpu_flags("vulkan", describe_lavapipe())
    (flag,) = flags
    assert "subgroup_size_choices = [8]" in flag and "subgroup = shuffle|arithmetic" in flag
    assert "compute = fp32|int32|fp16|int8" in flag and "storage = b32|b16|b8" in flag
    assert "spirv:v1.6" in flag and "dot = dp4xi8toi32" in flag
    assert "subgroup size 8" in description and "llvmpipe" in description


def test_vulkan_target_has_only_reported_features():
    flag = flags_for(features="storageBuffer16BitAccess", api="1.1.100", subgroup_operations="0x7")
    assert "compute = fp32|int32," in flag and "storage = b32|b16," in flag
    assert "spirv:v1.3" in flag and "subgroup = arithmetic," in flag and "dot" not in flag


def test_vulkan_target_avoids_subgroups_of_varying_size():
    flag = flags_for(subgroup_size="32", subgroup_min="8", subgroup_max="32")
    assert "subgroup = none" in flag and "subgroup_size_choices = [32]" in flag


@pytest.mark.parametrize("properties", [{"api": ""}, {"subgroup_size": "many"}, {"subgroup_size": "0"}])
def test_vulkan_target_needs_report(properties):
    with pytest.raises(UsageError, match="does not report the Vulkan version and subgroup size") as caught:
        choose_gpu_flags("vulkan", describe_lavapipe(**properties))
    assert "hil board devices" in caught.value.hint


def test_cuda_and_hip_targets_are_reported_architecture():
    details = {"name": "NVIDIA H200", "properties": {"arch": "sm_90"}}
    assert choose_gpu_flags("cuda", details) == (
        ("--iree-hal-target-device=cuda", "--iree-cuda-target=sm_90"),
        "cuda sm_90 (NVIDIA H200 of the board)",
    )
    flags, _ = choose_gpu_flags("hip", {"properties": {"arch": "gfx942:sramecc+:xnack-"}})
    assert flags == ("--iree-hal-target-device=hip", "--iree-rocm-target=gfx942")
    with pytest.raises(UsageError, match="does not report the architecture of device 'cuda'"):
        choose_gpu_flags("cuda", {})


def test_iree_compiles_described_target(tmp_path: Path):
    (tmp_path / "sum.mlir").write_text(MODEL)
    compiler = find_native_compiler()
    assert compiler is not None
    command = [str(compiler), str(tmp_path / "sum.mlir"), flags_for(), "--compile-to=executable-sources"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 'arch = "vulkan-subgroup8"' in done.stdout


def test_user_device_replaces_described_device():
    chosen = (flags_for(),)
    assert combine_flags(chosen, ("--iree-opt-level=O3",)) == (*chosen, "--iree-opt-level=O3")
    assert combine_flags(chosen, (PLAIN,)) == (PLAIN,)
    assert combine_flags(chosen, ("--iree-vulkan-target=rdna3",)) == (PLAIN, "--iree-vulkan-target=rdna3")


def test_device_option_replaces_flags_for_cpu():
    choice = BoardChoice(load_board("sim").config)
    assert knows_target(choice.config, "iree")
    chosen = use_device(choice, "iree", "vulkan")
    assert chosen.config.devices["iree"] == "vulkan"
    assert not knows_target(chosen.config, "iree")
    assert chosen.config.devices["onnxruntime"] == choice.config.devices["onnxruntime"]
    kept = use_device(choice, "iree", "local-task://0")
    assert kept.config.compile_flags == choice.config.compile_flags
    assert use_device(choice, "iree", "") is choice


def test_other_driver_keeps_simulated_arithmetic():
    config = use_device(BoardChoice(load_board("sim-bf16").config), "iree", "vulkan").config
    assert config.compile_flags["iree"][0] == "--arithmetic=bfloat16"
    assert not knows_target(config, "iree")


def test_fill_target_uses_device_of_config():
    config = use_device(BoardChoice(load_board("sim").config), "iree", "vulkan").config
    runtime = {"name": "iree", "devices": ["local-task", "vulkan"], "device_details": [describe_lavapipe()]}
    filled, description = fill_target(config, "iree", {"machine": {"arch": "x86_64"}, "runtimes": [runtime]})
    assert filled.compile_flags["iree"] == (flags_for(),)
    assert description.startswith("vulkan, SPIR-V 1.6")


def test_missing_device_is_left_to_board():
    config = use_device(BoardChoice(load_board("sim").config), "iree", "vulkan").config
    filled, description = fill_target(config, "iree", {"machine": {}, "runtimes": [{"name": "iree", "devices": ["x"]}]})
    assert filled.compile_flags["iree"] == (PLAIN,)
    assert description == "vulkan, which the board lacks"


def test_cpu_target_ignores_other_devices():
    machine = {"arch": "x86_64", "cpu_features": []}
    assert choose_iree_target({**machine, "device": {"id": "local-task"}}) == choose_iree_target(machine)
