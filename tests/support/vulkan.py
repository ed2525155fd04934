"""Vulkan on this machine, and what IREE reports about Mesa's software device."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hil.formats.iree_devices import parse_device

# IREE's report about lavapipe (Mesa 22.3.6), without the list of extensions.
LAVAPIPE_REPORT = """name: llvmpipe (LLVM 15.0.6, 256 bits)
path: GPU-6d65736132322e332e36000000000000
api: 1.3.230
type: cpu
vendor_id: 0x10005
driver: llvmpipe
driver_info: Mesa 22.3.6 (LLVM 15.0.6)
feature_tier[vulkan-1.3]: supported
features: bufferDeviceAddress=yes storageBuffer8BitAccess=yes storageBuffer16BitAccess=yes shaderInt8=yes \
shaderFloat16=yes shaderBFloat16Type=no shaderIntegerDotProduct=yes subgroupSizeControl=yes cooperativeMatrix=no
sparse: binding=no residencyBuffer=no residencyAliased=no
subgroup: size=8 operations=0x000000bf quadOperationsInAllStages=no minSubgroupSize=8 maxSubgroupSize=8 \
requiredSubgroupSizeStages=0x00000030
queue_families: 1
  [0] count=1 flags=graphics|compute|transfer timestampValidBits=64
"""
PATH = "GPU-6d65736132322e332e36000000000000"


def describe_lavapipe(**properties: str) -> dict[str, Any]:
    """Return the description of lavapipe, with other properties if given."""
    found = parse_device("vulkan", {"device_id": 1, "path": PATH, "name": "llvmpipe"}, LAVAPIPE_REPORT)
    return {**found, "properties": {**found["properties"], **properties}}


@functools.cache
def has_vulkan() -> bool:
    """Return whether IREE finds a Vulkan device on this machine."""
    import iree.runtime as rt

    try:
        return bool(rt.get_driver("vulkan").query_available_devices())
    except Exception:
        return False


NO_VULKAN = "no Vulkan device: install Debian's mesa-vulkan-drivers, which computes on the CPU"
# Skips a test on machines without a Vulkan device.
needs_vulkan = pytest.mark.skipif(not has_vulkan(), reason=NO_VULKAN)
