"""Read what IREE's drivers report about their devices.

A driver reports text: lines of ``key: value``, and for Vulkan lines with multiple ``key=value`` words. IREE defines no
format for this text, so that only the values that hil uses are read, and missing values are omitted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# IREE's drivers that compute on the CPU. They report nothing about their device.
CPU_DRIVERS = ("local-sync", "local-task")
# Names of IREE's drivers and ONNX Runtime's providers for GPUs.
GPU_DRIVERS = ("cuda", "hip", "metal", "vulkan", "WebGpuExecutionProvider")
# Type of a CPU. The device of a GPU driver with this type is a GPU in software, such as Mesa's lavapipe.
CPU_TYPE = "cpu"
_MAX_VALUE = 1000
_MAX_DIGITS = 2  # of a position; longer numbers are parts of names, such as RTX 4090
_TYPES = {"cpu": CPU_TYPE, "integrated": "integrated-gpu", "discrete": "discrete-gpu", "virtual": "virtual-gpu"}
_LINE = re.compile(r"^[-\s]*([\w-]+): (.*)$", re.MULTILINE)
_WORD = re.compile(r"(\w+)=(\w+)")
# Words of the lines "features" and "subgroup" -> hil's property.
_SUBGROUP_WORDS = {
    "size": "subgroup_size",
    "minSubgroupSize": "subgroup_min",
    "maxSubgroupSize": "subgroup_max",
    "operations": "subgroup_operations",
    "requiredSubgroupSizeStages": "subgroup_stages",
}


def parse_device(driver: str, device: Mapping[str, Any], report: str) -> dict[str, Any]:
    """Return the description of a device, with the keys of the protocol's message RuntimeDevice.

    Args:
        driver: IREE's driver.
        device: an entry of ``query_available_devices``.
        report: text of ``dump_device_info`` for this device.
    """
    lines = {key: value.strip()[:_MAX_VALUE] for key, value in _LINE.findall(report)}
    path = str(device.get("path", ""))
    vendor = " ".join(filter(None, (lines.get("driver"), lines.get("driver_info"))))
    name = "" if driver in CPU_DRIVERS else str(device.get("name", ""))[:_MAX_VALUE]
    return {
        "id": f"{driver}://{path}" if path else driver,
        "name": lines.get("name") or name,
        "type": _get_type(driver, lines.get("type", "")),
        "driver": vendor,
        "properties": _read_properties(lines),
    }


def get_driver(device: str) -> str:
    """Return the driver in a device name such as ``vulkan://GPU-6d65``."""
    return device.partition("://")[0]


def rejects_empty_tensors(device: str) -> bool:
    """Return whether the device's driver fails if a program reads a tensor that is empty only at run time."""
    return get_driver(device) == "vulkan"


def number_equal_ids(devices: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a driver's devices with unique IDs.

    Drivers such as lavapipe report the same path for multiple devices. These devices get the position as ID:
    ``vulkan://0``, ``vulkan://1``.
    """
    counts = Counter(one["id"] for one in devices)
    return [
        {**one, "id": f"{get_driver(one['id'])}://{place}"} if counts[one["id"]] > 1 else dict(one)
        for place, one in enumerate(devices)
    ]


def match_devices(devices: Iterable[Mapping[str, Any]], wanted: str) -> list[Mapping[str, Any]]:
    """Return the devices that a name selects: multiple if the name is ambiguous, none if the device is missing.

    Args:
        devices: descriptions of :func:`parse_device`.
        wanted: an ID, a driver, which selects the first device, ``DRIVER://N`` for the device at position N, or
            ``DRIVER://TEXT`` for a device whose name contains the text.
    """
    driver, _, which = wanted.partition("://")
    own = [one for one in devices if get_driver(str(one.get("id", ""))) == driver]
    if exact := [one for one in own if one["id"] == wanted]:
        return exact[:1]
    if not which:
        return own[:1]
    if which.isascii() and which.isdecimal() and len(which) <= _MAX_DIGITS:
        return own[int(which) :][:1]
    return [one for one in own if which.lower() in str(one.get("name", "")).lower()]


def find_device(runtimes: Iterable[Mapping[str, Any]], runtime: str, device: str) -> Mapping[str, Any] | None:
    """Return a board's description of the device that a name selects; None if missing or ambiguous."""
    found = match_devices(list_devices(runtimes, runtime), device)
    return found[0] if len(found) == 1 else None


def list_devices(runtimes: Iterable[Mapping[str, Any]], runtime: str) -> Sequence[Mapping[str, Any]]:
    """Return a board's descriptions of the devices of a runtime."""
    return next((one.get("device_details", ()) for one in runtimes if one.get("name") == runtime), ())


def is_software_gpu(device: Mapping[str, Any]) -> bool:
    """Return True if the CPU computes in place of a GPU. Its times say nothing about a GPU."""
    return device.get("type") == CPU_TYPE and get_driver(str(device.get("id", ""))) in GPU_DRIVERS


def _get_type(driver: str, reported: str) -> str:
    if driver in CPU_DRIVERS:
        return CPU_TYPE
    if driver in ("cuda", "hip"):
        return "gpu"
    word = reported.lower().replace("_", "-").removesuffix("-gpu").removesuffix(" gpu")
    return _TYPES.get(word, reported)


def _read_properties(lines: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    if "gpu-arch-name" in lines:
        found["arch"] = lines["gpu-arch-name"]
    if "gpu-compute-capability" in lines:
        found["compute_capability"] = lines["gpu-compute-capability"]
    if "api" in lines:
        found["api"] = lines["api"]
    subgroup = dict(_WORD.findall(lines.get("subgroup", "")))
    found |= {ours: subgroup[word] for word, ours in _SUBGROUP_WORDS.items() if word in subgroup}
    if "features" in lines:
        found["features"] = " ".join(word for word, value in _WORD.findall(lines["features"]) if value == "yes")
    return found
