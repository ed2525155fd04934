"""Tensors in and out of an IREE device's memory."""

from __future__ import annotations

import math
from typing import Any

import iree.runtime as rt
import numpy as np

from hil.core.tensors import SUB_BYTE_BITS, Array, dtype_name, dtype_of, pack, unpack
from hil.errors import RunFailed
from hil.formats.iree_values import dtype_of_element, element_of

# Below this size a copy is quicker than setting up shared memory as a device buffer.
_IMPORT_FROM = 1 << 16
_ALIGNMENT = 64
_MEMORY = int(rt.MemoryType.DEVICE_LOCAL | rt.MemoryType.HOST_VISIBLE)
_USAGE = int(rt.BufferUsage.DEFAULT | rt.BufferUsage.MAPPING)
_HOST_VISIBLE = int(rt.MemoryType.HOST_VISIBLE)
_MAPPING_SCOPED = int(rt.BufferUsage.MAPPING_SCOPED)
_STAGING_MEMORY = int(rt.MemoryType.HOST_LOCAL | rt.MemoryType.DEVICE_VISIBLE)
_STAGING_USAGE = int(rt.BufferUsage.TRANSFER | rt.BufferUsage.MAPPING)


def shared_view_of(device: Any, array: Array) -> Any:
    """A buffer view of an array's own memory, which has to outlive it; None where a copy is needed, or quicker.

    Raises:
        LoadFailed: IREE has no element type for the dtype.
    """
    name = dtype_name(array.dtype)
    if array.nbytes < _IMPORT_FROM or name in SUB_BYTE_BITS or not array.flags.c_contiguous:
        return None
    raw = array.reshape(-1).view(np.uint8)
    if raw.ctypes.data % _ALIGNMENT:
        return None
    element = element_of(name)
    try:
        buffer = device.allocator.import_host_allocation(raw, _MEMORY, _USAGE)
        return rt.HalBufferView(buffer, list(array.shape), element)
    except Exception:  # of a device that cannot see the host's memory
        return None


def view_of(device: Any, array: Array) -> Any:
    """A copy of a tensor as a buffer view on a device.

    Raises:
        LoadFailed: IREE has no element type for the dtype.
    """
    name = dtype_name(array.dtype)
    element, shape, allocator = element_of(name), list(array.shape), device.allocator
    if array.size == 0:
        buffer = allocator.allocate_buffer(memory_type=_MEMORY, allowed_usage=_USAGE, allocation_size=0)
        return rt.HalBufferView(buffer, shape, element)
    raw = pack(array) if name in SUB_BYTE_BITS else np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    buffer = allocator.allocate_buffer_copy(memory_type=_MEMORY, allowed_usage=_USAGE, device=device, buffer=raw)
    return rt.HalBufferView(buffer, shape, element)


def array_of(device: Any, view: Any, declared: str = "") -> Array:
    """The tensor in a buffer view; it views the device's memory where the host can see that.

    Args:
        declared: the dtype that its function declares, which says of integers whether they have a sign; "" is unknown.

    Raises:
        RunFailed: hil has no dtype for its elements.
    """
    name = dtype_of_element(view.element_type, declared)
    if not name:
        raise RunFailed(f"IREE's element type {int(view.element_type):#x} is none that hil has a dtype for")
    shape, dtype = tuple(view.shape), dtype_of(name)
    if 0 in shape:
        return np.empty(shape, dtype)
    raw = _host_bytes(device, view)
    if name in SUB_BYTE_BITS:
        return unpack(raw, name, shape)
    return raw[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _host_bytes(device: Any, view: Any) -> Array:
    """The bytes of a view, through a staging buffer where the host cannot map the device's own, as of most GPUs."""
    buffer = view.get_buffer()
    if buffer.memory_type() & _HOST_VISIBLE and buffer.allowed_usage() & _MAPPING_SCOPED:
        return np.frombuffer(view.map(), np.uint8)
    staging = device.allocator.allocate_buffer(
        memory_type=_STAGING_MEMORY, allowed_usage=_STAGING_USAGE, allocation_size=buffer.byte_length()
    )
    done = rt.HalFence.create_at(device.create_semaphore(0), 1)
    device.queue_copy(buffer, staging, [], done)
    done.wait()
    return np.frombuffer(staging.map(), np.uint8)
