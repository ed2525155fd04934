"""Compiler flags for GPUs, from what boards report."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.vulkan import describe_lavapipe

from hil.controller.backends.gpu_targets import (
    CUDA_TARGETS,
    choose_cuda_target,
    choose_gpu_flags,
    combine_flags,
    name_target,
)
from hil.controller.backends.targets import choose_iree_target
from hil.controller.devices.board_choice import (
    BoardChoice,
    fill_target,
    knows_target,
    refuse_missing_device,
    use_device,
    use_named_target,
)
from hil.controller.models.compiling import find_native_compiler
from hil.core.boards import load_board
from hil.errors import BoardUnfit, UsageError
from hil.formats.iree_devices import number_equal_ids

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
        ("--iree-hal-target-device=cuda", "--iree-cuda-target=sm_89"),
        "cuda sm_90, code for sm_89 (NVIDIA H200 of the board)",
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
    named = (PLAIN, "--iree-vulkan-target=rdna3", "--iree-vulkan-target-features=spirv:v1.3")
    assert combine_flags(chosen, named) == named
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


@pytest.mark.parametrize("driver", ["vulkan", "cuda", "hip"])
def test_default_target_of_compiler_is_refused(driver):
    device = f"--iree-hal-target-device={driver}"
    for chosen, given in (((device,), ()), ((flags_for(),), (device,))):
        with pytest.raises(UsageError, match=f"missing compile target for {device}") as caught:
            combine_flags(chosen, given)
        assert f"--device {driver}" in caught.value.hint


@pytest.mark.parametrize(("driver", "flag"), [("vulkan", "vulkan"), ("cuda", "cuda"), ("hip", "rocm")])
def test_features_without_target_are_refused(driver, flag):
    features = f"--iree-{flag}-target-features=+x"
    assert name_target(driver, [features]) == ()
    assert name_target(driver, [features, f"--iree-{flag}-target=y"]) == (f"--iree-hal-target-device={driver}",)
    with pytest.raises(UsageError, match="missing compile target"):
        combine_flags((f"--iree-hal-target-device={driver}",), (features,))


@pytest.mark.parametrize(
    ("arch", "target"),
    [
        ("sm_50", "sm_50"),
        ("sm_80", "sm_80"),
        ("sm_90a", "sm_89"),
        ("sm_103", "sm_89"),
        ("?", "?"),
        ("sm_130", "sm_121"),
    ],
)
def test_cuda_target_is_newest_that_device_runs(arch, target):
    assert choose_cuda_target(arch) == target


@pytest.mark.parametrize("number", [89, 90, 120])
def test_compiler_has_listed_cuda_targets(number, tmp_path: Path):
    (tmp_path / "sum.mlir").write_text(MODEL)
    compiler = find_native_compiler()
    assert compiler is not None
    flags = ("--iree-hal-target-device=cuda", f"--iree-cuda-target=sm_{number}", "--compile-to=executable-sources")
    command = [str(compiler), str(tmp_path / "sum.mlir"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (f'arch = "sm_{number}"' in done.stdout) == (number in CUDA_TARGETS)


RUNTIME = {"name": "iree", "devices": ["local-task", "vulkan"], "device_details": [describe_lavapipe()]}


@pytest.mark.parametrize("device", ["cuda", "hip", "vulkan://1", "vulkan://GPU-0", "vulkan://radeon", "llvmpipe"])
def test_missing_device_is_refused(device):
    config = use_device(BoardChoice(load_board("sim").config), "iree", device).config
    info = {"machine": {}, "runtimes": [RUNTIME]}
    assert fill_target(config, "iree", info) == (config, "")
    with pytest.raises(BoardUnfit, match=f"board 'lab' has no device '{device}'") as caught:
        refuse_missing_device(config, "iree", info, "lab")
    assert "devices found: vulkan://GPU-6d65" in caught.value.hint


@pytest.mark.parametrize("device", ["", "vulkan", "vulkan://0", "vulkan://llvmpipe", "local-task://0"])
def test_existing_device_is_accepted(device):
    config = use_device(BoardChoice(load_board("sim").config), "iree", device).config
    refuse_missing_device(config, "iree", {"runtimes": [RUNTIME]}, "lab")
    refuse_missing_device(config, "onnxruntime", {"runtimes": [RUNTIME]}, "lab")


def test_ambiguous_device_is_usage_error():
    both = number_equal_ids([describe_lavapipe(), describe_lavapipe()])
    config = use_device(BoardChoice(load_board("sim").config), "iree", "vulkan://llvmpipe").config
    with pytest.raises(UsageError, match="selects vulkan://0 and vulkan://1"):
        refuse_missing_device(config, "iree", {"runtimes": [{**RUNTIME, "device_details": both}]}, "lab")


def test_other_gpu_of_same_driver_has_own_target():
    before = load_board("sim").config
    flags = {**before.compile_flags, "iree": (PLAIN, "--iree-vulkan-target=rdna3")}
    config = replace(before, devices={**before.devices, "iree": "vulkan"}, compile_flags=flags)
    assert use_device(BoardChoice(config), "iree", "vulkan").config == config
    assert use_device(BoardChoice(config), "iree", "vulkan://1").config.compile_flags["iree"] == ()


def test_named_target_needs_no_board():
    config = use_device(BoardChoice(load_board("sim").config), "iree", "cuda").config
    assert not knows_target(use_named_target(config, "iree", ["--iree-opt-level=O3"]), "iree")
    named = use_named_target(config, "iree", ["--iree-cuda-target=sm_80"])
    assert knows_target(named, "iree")
    assert named.compile_flags["iree"] == ("--iree-hal-target-device=cuda",)


def test_cpu_target_ignores_other_devices():
    machine = {"arch": "x86_64", "cpu_features": []}
    assert choose_iree_target({**machine, "device": {"id": "local-task"}}) == choose_iree_target(machine)
