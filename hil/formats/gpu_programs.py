"""Read the GPU target of an IREE program, and compare it with a device.

IREE does not compare the target with the device: a Vulkan program that was compiled for another subgroup size runs
without an error and returns wrong values. The compiler writes its target into the messages of the program's checks.
SPIR-V code lists the capabilities that it needs.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass

_TARGET = re.compile(rb'#hal\.executable\.target<"([\w-]+)", "[\w-]+", \{[^}]{0,4000}?#iree_gpu\.target<(.{0,2000}?)>>')
_ARCH = re.compile(r'arch = "([^"]*)"')
_SPIRV = re.compile(r"spirv:v(\d+)\.(\d+)")
_SUBGROUP = re.compile(r"subgroup = ([\w|]+)")
_SIZES = re.compile(r"subgroup_size_choices = \[([\d, ]*)\]")
VULKAN = "vulkan-spirv"
_BACKENDS = {"vulkan": VULKAN, "cuda": "cuda", "hip": "rocm"}
# SPIR-V: magic number, number of header words, and the opcode that declares a capability.
_MAGIC = re.compile(rb"\x03\x02\x23\x07")
_HEADER_WORDS, _CAPABILITY = 5, 17
_MAX_CAPABILITIES = 200
# Capability -> name and the feature that IREE reports for it.
_CAPABILITIES = {
    9: ("Float16", "shaderFloat16"),
    39: ("Int8", "shaderInt8"),
    4433: ("StorageBuffer16BitAccess", "storageBuffer16BitAccess"),
    4448: ("StorageBuffer8BitAccess", "storageBuffer8BitAccess"),
    5116: ("BFloat16TypeKHR", "shaderBFloat16Type"),
    5117: ("BFloat16DotProductKHR", "shaderBFloat16DotProduct"),
    5118: ("BFloat16CooperativeMatrixKHR", "shaderBFloat16CooperativeMatrix"),
    6019: ("DotProduct", "shaderIntegerDotProduct"),
    6022: ("CooperativeMatrixKHR", "cooperativeMatrix"),
    5347: ("PhysicalStorageBufferAddresses", "bufferDeviceAddress"),
}
# Capability -> name and the bit of VkSubgroupFeatureFlagBits.
_OPERATIONS = {
    61: ("GroupNonUniform", 0x01),
    62: ("GroupNonUniformVote", 0x02),
    63: ("GroupNonUniformArithmetic", 0x04),
    64: ("GroupNonUniformBallot", 0x08),
    65: ("GroupNonUniformShuffle", 0x10),
    66: ("GroupNonUniformShuffleRelative", 0x20),
    67: ("GroupNonUniformClustered", 0x40),
    68: ("GroupNonUniformQuad", 0x80),
}
# Vulkan version -> largest SPIR-V version that it accepts.
_SPIRV_OF_API = {(1, 0): (1, 0), (1, 1): (1, 3), (1, 2): (1, 5), (1, 3): (1, 6)}
_NEWEST_SPIRV = (1, 6)


@dataclass(frozen=True)
class GpuTarget:
    """Target that a program was compiled for."""

    backend: str  # ``vulkan-spirv``, ``cuda``, ``rocm``
    arch: str  # ``valhall4``, ``sm_80``
    spirv: tuple[int, int] = (0, 0)  # (0, 0) for other backends
    subgroup_operations: tuple[str, ...] = ()
    subgroup_sizes: tuple[int, ...] = ()

    @property
    def driver(self) -> str:
        """IREE's driver for the backend; the backend if unknown."""
        return next((driver for driver, backend in _BACKENDS.items() if backend == self.backend), self.backend)

    @property
    def uses_subgroups(self) -> bool:
        """True if the code may exchange values within a subgroup, and so depends on the subgroup's size."""
        return bool(self.subgroup_operations)


def read_targets(program: bytes | memoryview) -> list[GpuTarget]:
    """Return the GPU targets of a .vmfb file; none for CPU programs, and if the compiler omitted the checks."""
    found = ((match[1].decode(), match[2].decode(errors="replace")) for match in _TARGET.finditer(program))
    return [_parse_target(backend, text) for backend, text in dict.fromkeys(found)]


def list_capabilities(program: bytes | memoryview) -> set[int]:
    """Return the capabilities that the program's SPIR-V code declares."""
    found = set[int]()
    for start in _MAGIC.finditer(program):
        place = start.start() + 4 * _HEADER_WORDS
        for _ in range(_MAX_CAPABILITIES):
            if place + 8 > len(program):
                break
            word, value = struct.unpack_from("<II", program, place)
            if word != (2 << 16 | _CAPABILITY):
                break
            found.add(value)
            place += 8
    return found


def find_mismatch(program: bytes | memoryview, driver: str, device: Mapping[str, str]) -> str:
    """Return why a program does not fit a device, or "".

    Args:
        program: content of a .vmfb file.
        driver: IREE's driver.
        device: the device's properties, as from :func:`hil.formats.iree_devices.parse_device`.
    """
    backend = _BACKENDS.get(driver)
    if backend is None:
        return ""
    compiled = read_targets(program)
    targets = [one for one in compiled if one.backend == backend]
    if compiled and not targets:
        return f"the program was compiled for {compiled[0].driver} ({compiled[0].arch})"
    if backend != VULKAN:
        return _compare_arch(targets, backend, device.get("arch", ""))
    reasons = [_compare_sizes(targets, device), _compare_spirv(targets, device)]
    if "features" in device or "subgroup_operations" in device:
        reasons.append(_compare_capabilities(list_capabilities(program), device))
    return "; ".join(filter(None, reasons))


def get_spirv_version(api: str) -> tuple[int, int]:
    """Return the largest SPIR-V version for a Vulkan version such as ``1.3.230``; (0, 0) if unknown."""
    numbers = re.match(r"(\d+)\.(\d+)", api)
    if numbers is None:
        return 0, 0
    version = int(numbers[1]), int(numbers[2])
    return _SPIRV_OF_API.get(version, _NEWEST_SPIRV if version > (1, 3) else (0, 0))


def has_subgroup_operation(device: Mapping[str, str], capability: str) -> bool:
    """Return whether a device supports a SPIR-V subgroup capability."""
    bit = next(bit for name, bit in _OPERATIONS.values() if name == capability)
    return bool(read_number(device.get("subgroup_operations", "")) & bit)


def read_number(text: str) -> int:
    """Return a decimal or hexadecimal number from a driver's report; 0 if invalid."""
    try:
        return int(text, 0)
    except ValueError:
        return 0


def _parse_target(backend: str, text: str) -> GpuTarget:
    arch, spirv, sizes = _ARCH.search(text), _SPIRV.search(text), _SIZES.search(text)
    operations = _SUBGROUP.search(text)
    words = operations[1].split("|") if operations and operations[1] != "none" else []
    return GpuTarget(
        backend,
        arch[1] if arch else "",
        (int(spirv[1]), int(spirv[2])) if spirv else (0, 0),
        tuple(words),
        tuple(int(one) for one in sizes[1].split(",") if one.strip()) if sizes else (),
    )


def _compare_sizes(targets: list[GpuTarget], device: Mapping[str, str]) -> str:
    size = read_number(device.get("subgroup_size", ""))
    for target in targets:
        if size and target.uses_subgroups and target.subgroup_sizes and size not in target.subgroup_sizes:
            sizes = " or ".join(map(str, target.subgroup_sizes))
            return f"the program was compiled for {target.arch} with subgroups of {sizes}, the device has {size}"
    return ""


def _compare_spirv(targets: list[GpuTarget], device: Mapping[str, str]) -> str:
    accepted = get_spirv_version(device.get("api", ""))
    for target in targets:
        if accepted != (0, 0) and target.spirv > accepted:
            needed, most = (f"{major}.{minor}" for major, minor in (target.spirv, accepted))
            return f"the program needs SPIR-V {needed}, the device's Vulkan {device['api']} accepts {most}"
    return ""


def _compare_capabilities(needed: set[int], device: Mapping[str, str]) -> str:
    features = device.get("features", "").split()
    absent = {number: name for number, (name, feature) in _CAPABILITIES.items() if feature not in features}
    lacking = [name for number, name in absent.items() if number in needed]
    if "subgroup_operations" in device:
        mask = read_number(device["subgroup_operations"])
        lacking += [name for number, (name, bit) in _OPERATIONS.items() if number in needed and not mask & bit]
    return f"the program needs {', '.join(lacking)}, which the device lacks" if lacking else ""


def _compare_arch(targets: list[GpuTarget], backend: str, arch: str) -> str:
    """Compare architectures. CUDA's programs contain PTX, so that they also run on newer devices."""
    archs = [one.arch for one in targets if one.arch]
    if not archs or not arch or any(_runs_on(one, arch, backend) for one in archs):
        return ""
    return f"the program was compiled for {' and '.join(archs)}, the device is {arch}"


def _runs_on(compiled: str, arch: str, backend: str) -> bool:
    if backend != "cuda":
        return compiled == arch.partition(":")[0]
    ours, theirs = (re.fullmatch(r"sm_(\d+)a?", one) for one in (compiled, arch))
    return ours is None or theirs is None or int(ours[1]) <= int(theirs[1])
