"""Choose the flags of iree-compile for a GPU from what its driver reports.

IREE's default Vulkan target is right for some devices only, and a program for a different subgroup size returns wrong
values without an error. So hil describes the device to the compiler. Limits that IREE's drivers do not report have the
smallest value that Vulkan permits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hil.errors import UsageError
from hil.formats.gpu_programs import get_spirv_version, has_subgroup_operation, read_number
from hil.formats.iree_devices import get_driver

TARGET_DEVICE = "--iree-hal-target-device="
# Smallest limits of a Vulkan device: maxComputeWorkGroupSize, -Invocations, maxComputeSharedMemorySize, -Count.
_LIMITS = (
    "max_workgroup_sizes = [128, 128, 64], max_thread_count_per_workgroup = 128, "
    "max_workgroup_memory_bytes = 16384, max_workgroup_counts = [65535, 65535, 65535]"
)
_DESCRIBED = f"{TARGET_DEVICE}#hal.device.target<"
_VULKAN_TARGET = "--iree-vulkan-target"  # also the prefix of -features
# Driver -> compiler's name of the device, and the flag for its architecture.
_OF_ARCH = {"cuda": ("cuda", "--iree-cuda-target="), "hip": ("hip", "--iree-rocm-target=")}
# Architectures of --iree-cuda-target. For others, iree-compile fails: "missing GPU target".
CUDA_TARGETS = (60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 120, 121)
# Driver -> flag that names its target. The flag with the suffix -features does not: it changes the default target.
_TARGET_FLAGS = {"vulkan": _VULKAN_TARGET, "cuda": "--iree-cuda-target", "hip": "--iree-rocm-target"}
# Driver -> flag that a hint shows.
_EXAMPLES = {
    "vulkan": f"{_VULKAN_TARGET}=valhall4",
    "cuda": "--iree-cuda-target=sm_80",
    "hip": "--iree-rocm-target=gfx942",
}
# Flags that a device given by the user replaces.
_OF_DEVICE = (TARGET_DEVICE, "--iree-hal-local-target-device-backends=")
TARGETED_DRIVERS = ("vulkan", *_OF_ARCH)


def choose_gpu_flags(device: str, details: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """Return the compiler flags for a GPU, and the target's description.

    Args:
        device: name of the device: ``vulkan``, ``vulkan://GPU-6d65``, ``cuda``.
        details: the board's description of the device; empty if the board does not report the device.

    Raises:
        UsageError: the board does not report what the target depends on.
    """
    driver = get_driver(device)
    properties: Mapping[str, str] = details.get("properties", {})
    named = f"{details.get('name', '')} of the board"
    if driver in _OF_ARCH:
        arch = properties.get("arch", "").partition(":")[0]
        _require(bool(arch), device, "architecture")
        name, flag = _OF_ARCH[driver]
        target = choose_cuda_target(arch) if driver == "cuda" else arch
        code = "" if target == arch else f", code for {target}"
        return (f"{TARGET_DEVICE}{name}", f"{flag}{target}"), f"{driver} {arch}{code} ({named})"
    spirv, size = get_spirv_version(properties.get("api", "")), read_number(properties.get("subgroup_size", ""))
    _require(spirv != (0, 0) and size > 0, device, "Vulkan version and subgroup size")
    operations = _list_operations(properties, size)
    arch = f"vulkan-subgroup{size}"
    groups = "|".join(operations) or "none"
    target = _format_target(arch, spirv, size, operations, set(properties.get("features", "").split()))
    description = f"vulkan, SPIR-V {spirv[0]}.{spirv[1]}, subgroup size {size}, subgroup operations {groups} ({named})"
    return (f"{TARGET_DEVICE}{target}",), description


def choose_cuda_target(arch: str) -> str:
    """Return the newest architecture that iree-compile has and that a CUDA device can run.

    The program contains PTX, which CUDA's driver compiles for the device. Newer devices run the PTX of older ones.

    Args:
        arch: the device's architecture, such as ``sm_90``. An unknown architecture is returned unchanged.
    """
    number = re.fullmatch(r"sm_(\d+)a?", arch)
    older = [one for one in CUDA_TARGETS if number and one <= int(number[1])]
    return f"sm_{max(older)}" if older else arch


def name_target(device: str, flags: Sequence[str]) -> tuple[str, ...]:
    """Return the device's flag if a user's flags name the target of a GPU; otherwise no flags.

    hil can then compile for a device that the board does not have.
    """
    driver = get_driver(device)
    return (f"{TARGET_DEVICE}{driver}",) if driver in _TARGET_FLAGS and _has_target(driver, flags) else ()


def describe_target_flag(device: str) -> str:
    """Return an example of the flag that names the target of a GPU; "" for other devices."""
    return _EXAMPLES.get(get_driver(device), "")


def combine_flags(chosen: Sequence[str], given: Sequence[str]) -> tuple[str, ...]:
    """Return a config's compile flags with the user's flags.

    iree-compile accepts multiple devices, so a user's device replaces the config's. A user's Vulkan target replaces the
    device that hil described.

    Raises:
        UsageError: iree-compile would use its default target of a GPU.
    """
    flags = (*chosen, *given)
    if any(flag.startswith(TARGET_DEVICE) for flag in given):
        flags = (*(flag for flag in chosen if not flag.startswith(_OF_DEVICE)), *given)
    elif any(flag.startswith(_VULKAN_TARGET) for flag in given):
        plain = f"{TARGET_DEVICE}vulkan"
        flags = (*(plain if flag.startswith(_DESCRIBED) else flag for flag in chosen), *given)
    for driver in _TARGET_FLAGS:
        device = f"{TARGET_DEVICE}{driver}"
        if device in flags and not _has_target(driver, flags):
            raise UsageError(
                f"missing compile target for {device}: iree-compile would use a default target",
                hint=f"add a flag such as {_EXAMPLES[driver]}, or remove {device} and use --device {driver}: hil then "
                "compiles for the device that the board reports",
            )
    return flags


def _has_target(driver: str, flags: Sequence[str]) -> bool:
    """Return True if a flag names the target of a driver. A flag and the value may be separate."""
    name = _TARGET_FLAGS[driver]
    return any(flag == name or flag.startswith(f"{name}=") for flag in flags)


def _require(known: bool, device: str, what: str) -> None:
    if not known:
        raise UsageError(
            f"the board does not report the {what} of device {device!r}: hil cannot choose the target",
            hint=f"list the devices: hil board devices; or set the flags in the board's config: [compile_flags] iree = "
            f'["{TARGET_DEVICE}{get_driver(device)}", ...]',
        )


def _list_operations(properties: Mapping[str, str], size: int) -> list[str]:
    """Return the subgroup operations that programs may use; none if the driver may choose another subgroup size."""
    bounds = [read_number(properties.get(name, "")) or size for name in ("subgroup_min", "subgroup_max")]
    if bounds != [size, size]:
        return []
    named = {"shuffle": "GroupNonUniformShuffle", "arithmetic": "GroupNonUniformArithmetic"}
    return [name for name, capability in named.items() if has_subgroup_operation(properties, capability)]


def _format_target(arch: str, spirv: tuple[int, int], size: int, operations: list[str], features: set[str]) -> str:
    """Return the MLIR attribute of a Vulkan device."""
    optional = [("fp16", "shaderFloat16"), ("int8", "shaderInt8")]
    compute = ["fp32", "int32", *(name for name, feature in optional if feature in features)]
    widths = [("b16", "storageBuffer16BitAccess"), ("b8", "storageBuffer8BitAccess")]
    storage = ["b32", *(name for name, feature in widths if feature in features)]
    dot = "dot = dp4xi8toi32, " if {"shaderIntegerDotProduct", "shaderInt8"} <= features else ""
    return (
        '#hal.device.target<"vulkan", [#hal.executable.target<"vulkan-spirv", "vulkan-spirv-fb", '
        f'{{iree_codegen.target_info = #iree_gpu.target<arch = "{arch}", '
        f'features = "spirv:v{spirv[0]}.{spirv[1]},cap:Shader", '
        f"wgp = <compute = {'|'.join(compute)}, storage = {'|'.join(storage)}, "
        f"subgroup = {'|'.join(operations) or 'none'}, {dot}subgroup_size_choices = [{size}], {_LIMITS}>>}}>]> "
        ": !hal.device"
    )
