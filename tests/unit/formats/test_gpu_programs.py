"""Programs for other GPUs are refused, from the target and the code in the program."""

from __future__ import annotations

import struct

import pytest
from support.vulkan import describe_lavapipe

from hil.formats.gpu_programs import GpuTarget, find_mismatch, list_capabilities, read_targets

LAVAPIPE = describe_lavapipe()["properties"]


def target(arch: str, sizes: str, *, subgroup: str = "shuffle|arithmetic") -> bytes:
    """Return a program's message about its target, as IREE's compiler writes it."""
    return (
        'HAL device `#hal.device.target<"vulkan", [#hal.executable.target<"vulkan-spirv", "vulkan-spirv-fb", '
        f'{{iree_codegen.target_info = #iree_gpu.target<arch = "{arch}", features = "spirv:v1.6,cap:Shader", '
        f"wgp = <compute = fp32|int32, storage = b32, subgroup = {subgroup}, subgroup_size_choices = [{sizes}], "
        "max_workgroup_sizes = [128, 128, 64]>>}>]> : !hal.device` not found or unavailable"
    ).encode()


def spirv(*capabilities: int) -> bytes:
    """Return SPIR-V code that declares capabilities."""
    words = [0x07230203, 0x10000, 0, 10, 0]
    for capability in capabilities:
        words += [2 << 16 | 17, capability]
    return struct.pack(f"<{len(words) + 2}I", *words, 3 << 16 | 14, 0)


def cuda(arch: str) -> bytes:
    return target(arch, "32").replace(b"vulkan-spirv-fb", b"cuda-nvptx-fb").replace(b"vulkan-spirv", b"cuda")


def test_read_targets_of_program():
    content = memoryview(b"\0" * 100 + target("rdna3", "32, 64") + b"\0" + target("rdna3", "32, 64"))
    assert read_targets(content) == [GpuTarget("vulkan-spirv", "rdna3", (1, 6), ("shuffle", "arithmetic"), (32, 64))]
    assert read_targets(b"a CPU program") == []


@pytest.mark.parametrize(
    ("arch", "sizes"), [("valhall4", "16"), ("adreno", "64"), ("sm_80", "32"), ("rdna3", "32, 64")]
)
def test_program_for_other_subgroup_size_is_refused(arch, sizes):
    listed = sizes.replace(", ", " or ")
    reason = find_mismatch(target(arch, sizes), "vulkan", LAVAPIPE)
    assert reason == f"the program was compiled for {arch} with subgroups of {listed}, the device has 8"


@pytest.mark.parametrize(
    "content",
    [
        target("vulkan-subgroup8", "8"),
        target("vp_android_baseline_2022", "64", subgroup="none"),
        target("any", "8, 16"),
        b"no target",
        target("vulkan-subgroup8", "8") + cuda("sm_80"),
    ],
)
def test_program_that_fits_is_accepted(content):
    assert find_mismatch(content, "vulkan", LAVAPIPE) == ""


@pytest.mark.parametrize(("driver", "content", "built"), [("vulkan", cuda("sm_80"), "cuda (sm_80)")])
def test_program_for_other_driver_is_refused(driver, content, built):
    assert find_mismatch(content, driver, LAVAPIPE) == f"the program was compiled for {built}"


def test_program_with_newer_spirv_is_refused():
    reason = find_mismatch(target("any", "8"), "vulkan", describe_lavapipe(api="1.1.0")["properties"])
    assert reason == "the program needs SPIR-V 1.6, the device's Vulkan 1.1.0 accepts 1.3"


def test_program_with_missing_capability_is_refused():
    assert list_capabilities(b"x" + spirv(1, 9, 63) + spirv(39)) == {1, 9, 39, 63}
    weak = describe_lavapipe(features="shaderInt8", subgroup_operations="0x3")["properties"]
    reason = find_mismatch(spirv(1, 9, 63, 39), "vulkan", weak)
    assert reason == "the program needs Float16, GroupNonUniformArithmetic, which the device lacks"
    assert find_mismatch(spirv(1, 9, 63, 39), "vulkan", LAVAPIPE) == ""


@pytest.mark.parametrize("cut", range(20, 40))
def test_truncated_code_has_no_further_capabilities(cut):
    assert list_capabilities(spirv(1, 9, 39)[:cut]) <= {1, 9, 39}


def test_cuda_program_runs_on_newer_devices_only():
    assert find_mismatch(cuda("sm_80"), "cuda", {"arch": "sm_90"}) == ""
    reason = find_mismatch(cuda("sm_90"), "cuda", {"arch": "sm_80"})
    assert reason == "the program was compiled for sm_90, the device is sm_80"
    assert find_mismatch(cuda("sm_90"), "cuda", {}) == ""


def test_hip_program_needs_same_architecture():
    content = target("gfx942", "64").replace(b"vulkan-spirv-fb", b"rocm-hsaco-fb").replace(b"vulkan-spirv", b"rocm")
    assert find_mismatch(content, "hip", {"arch": "gfx942:sramecc+:xnack-"}) == ""
    assert "gfx942, the device is gfx90a" in find_mismatch(content, "hip", {"arch": "gfx90a"})


def test_cpu_driver_has_no_gpu_target():
    assert find_mismatch(target("rdna3", "32"), "local-task", {}) == ""
