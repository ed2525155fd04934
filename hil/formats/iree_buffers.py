"""Copy tensors to and from an IREE device's memory."""

from __future__ import annotations

import math
from typing import Any

import iree.runtime as rt
import numpy as np

from hil.core.tensors import SUB_BYTE_BITS, Array, get_dtype_name, pack, parse_dtype, unpack
from hil.errors import RunFailed
from hil.formats.iree_values import get_element_dtype, get_element_type

# Below this size, copying is faster than importing shared memory as a device buffer.
_IMPORT_FROM = 1 << 16
_ALIGNMENT = 64
_MEMORY = int(rt.MemoryType.DEVICE_LOCAL | rt.MemoryType.HOST_VISIBLE)
_USAGE = int(rt.BufferUsage.DEFAULT | rt.BufferUsage.MAPPING)
_HOST_VISIBLE = int(rt.MemoryType.HOST_VISIBLE)
_MAPPING_SCOPED = int(rt.BufferUsage.MAPPING_SCOPED)
_STAGING_MEMORY = int(rt.MemoryType.HOST_LOCAL | rt.MemoryType.DEVICE_VISIBLE)
# Size of the buffers that test whether a device counts its memory. The peak contains these buffers, so they are small.
_TEST_BYTES = 16
_STAGING_USAGE = int(rt.BufferUsage.TRANSFER | rt.BufferUsage.MAPPING)


def make_shared_view(device: Any, array: Array) -> Any:
    """Return a buffer view that shares an array's memory, or None if a copy is required or faster.

    The array must outlive the view.

    Raises:
        LoadFailed: IREE has no element type for the dtype.
    """
    name = get_dtype_name(array.dtype)
    if array.nbytes < _IMPORT_FROM or name in SUB_BYTE_BITS or not array.flags.c_contiguous:
        return None
    raw = array.reshape(-1).view(np.uint8)
    if raw.ctypes.data % _ALIGNMENT:
        return None
    element = get_element_type(name)
    try:
        buffer = device.allocator.import_host_allocation(raw, _MEMORY, _USAGE)
        return rt.HalBufferView(buffer, list(array.shape), element)
    except Exception:  # a device without access to host memory
        return None


def view_of(device: Any, array: Array) -> Any:
    """Copy a tensor to a buffer view on a device.

    Raises:
        LoadFailed: IREE has no element type for the dtype.
    """
    name = get_dtype_name(array.dtype)
    element, shape, allocator = get_element_type(name), list(array.shape), device.allocator
    if array.size == 0:
        buffer = allocator.allocate_buffer(memory_type=_MEMORY, allowed_usage=_USAGE, allocation_size=0)
        return rt.HalBufferView(buffer, shape, element)
    raw = pack(array) if name in SUB_BYTE_BITS else np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    buffer = allocator.allocate_buffer_copy(memory_type=_MEMORY, allowed_usage=_USAGE, device=device, buffer=raw)
    return rt.HalBufferView(buffer, shape, element)


def read_array(device: Any, view: Any, declared: str = "") -> Array:
    """Return the tensor in a buffer view, without copying if the host can access the device's memory.

    Args:
        declared: dtype from the function's declaration, which defines the sign of integers; "" if unknown.

    Raises:
        RunFailed: hil has no dtype for the elements.
    """
    name = get_element_dtype(view.element_type, declared)
    if not name:
        raise RunFailed(f"unsupported IREE element type {int(view.element_type):#x}")
    shape, dtype = tuple(view.shape), parse_dtype(name)
    if 0 in shape:
        return np.empty(shape, dtype)
    raw = _read_host_bytes(device, view)
    if name in SUB_BYTE_BITS:
        return unpack(raw, name, shape)
    return raw[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _read_host_bytes(device: Any, view: Any) -> Array:
    """Return a view's bytes. Use a staging buffer if the host cannot map device memory, as on most GPUs."""
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


def counts_memory(device: Any) -> bool:
    """Return True if the statistics of a device's allocator contain freed buffers, and buffers of its queues.

    A peak without them is wrong. In IREE 3.13, the statistics of vulkan and local-task lack some of them.
    """
    allocator = device.allocator
    if not allocator.has_statistics:
        return False
    before = allocator.statistics
    buffer = allocator.allocate_buffer(memory_type=_MEMORY, allowed_usage=_USAGE, allocation_size=_TEST_BYTES)
    del buffer
    middle = allocator.statistics
    buffer = device.queue_alloca(_TEST_BYTES, rt.HalFence(0), rt.HalFence(0))
    after = allocator.statistics
    del buffer
    freed = middle["device_bytes_freed"] - before["device_bytes_freed"]
    queued = after["device_bytes_allocated"] - middle["device_bytes_allocated"]
    return bool(freed >= _TEST_BYTES and queued >= _TEST_BYTES)
