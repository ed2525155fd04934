"""Tensors in device memory, both mappable and not mappable by the host."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

rt = pytest.importorskip("iree.runtime")

from hil.errors import RunFailed  # noqa: E402
from hil.formats import iree_buffers  # noqa: E402 (it imports iree.runtime)

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array([True, False, True]),
    np.array([[1, 2, 3]], ml_dtypes.bfloat16),
    np.array([-3, 7, 1], ml_dtypes.int4),
    np.zeros((0, 4), np.int64),
    np.array(2.5, np.float64),
    np.arange(1 << 16, dtype=np.int32),
]


class GpuBuffer:
    """A device buffer that the host cannot map, as on most GPUs: a CPU buffer that refuses mapping."""

    def __init__(self, buffer) -> None:
        self.buffer = buffer

    def byte_length(self) -> int:
        return self.buffer.byte_length()

    def memory_type(self) -> int:
        return int(rt.MemoryType.DEVICE_LOCAL)

    def allowed_usage(self) -> int:
        return int(rt.BufferUsage.DEFAULT)


class GpuView:
    def __init__(self, view) -> None:
        self.element_type, self.shape = view.element_type, view.shape
        self.buffer = view.get_buffer()

    def get_buffer(self) -> GpuBuffer:
        return GpuBuffer(self.buffer)

    def map(self):
        raise RuntimeError("Could not map memory: PERMISSION_DENIED; requested usage was not specified: MAPPING_SCOPED")


class GpuDevice:
    """The CPU device, which copies such buffers and counts the copies."""

    def __init__(self, device) -> None:
        self.device, self.copies = device, 0
        self.allocator, self.create_semaphore = device.allocator, device.create_semaphore

    def queue_copy(self, source, target, wait, signal) -> None:
        self.copies += 1
        self.device.queue_copy(source.buffer, target, wait, signal)


@pytest.fixture(scope="module")
def cpu():
    return rt.get_device("local-task", cache=False)


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}")
def test_array_of_reads_mappable_memory(cpu, array):
    back = iree_buffers.read_array(cpu, iree_buffers.view_of(cpu, array))
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}")
def test_array_of_uses_staging_buffer_for_unmappable_memory(cpu, array):
    gpu = GpuDevice(cpu)
    back = iree_buffers.read_array(gpu, GpuView(iree_buffers.view_of(cpu, array)))
    assert gpu.copies == (1 if array.size else 0)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_array_of_uses_declared_signedness(cpu):
    view = iree_buffers.view_of(cpu, np.array([-1, 2], np.int8))
    assert iree_buffers.read_array(cpu, view, "uint8").tolist() == [255, 2]
    assert iree_buffers.read_array(cpu, view).tolist() == [-1, 2]


def test_array_of_rejects_unknown_element_type(cpu):
    view = rt.HalBufferView(iree_buffers.view_of(cpu, np.zeros(4, np.int8)).get_buffer(), [4], 0x7F000008)
    with pytest.raises(RunFailed, match="element type 0x7f000008"):
        iree_buffers.read_array(cpu, view)


def test_shared_view_shares_large_aligned_tensor(cpu):
    memory = np.zeros((1 << 16) + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    array = memory[begin : begin + (1 << 16)].view(np.float32)
    view = iree_buffers.make_shared_view(cpu, array)
    array[:] = 7
    np.testing.assert_array_equal(iree_buffers.read_array(cpu, view), array)


@pytest.mark.parametrize(
    "array", [np.zeros(4, np.float32), np.zeros((512, 512), np.float32).T, np.zeros(1 << 17, ml_dtypes.int4)]
)
def test_shared_view_declines_unsuitable_tensor(cpu, array):
    assert iree_buffers.make_shared_view(cpu, array) is None


def test_counts_memory_rejects_incomplete_statistics():
    found = {
        name: iree_buffers.counts_memory(rt.get_device(name, cache=False)) for name in ("local-sync", "local-task")
    }
    # The allocator of local-task does not count the buffers of its queue.
    assert found == {"local-sync": True, "local-task": False}
