"""ONNX models whose speed is the peak of a board.

The models run like every other model: the board's compiler, runtime and device execute them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from hil.controller.records.measurements.roofline import PeakKernel, PeakType

# Bytes of an element.
ITEM_BYTES = {"f32": 4, "f16": 2, "int8": 1}
# Elements in a row that the kernel `sum` adds.
_COLUMNS = 4096


@dataclass(frozen=True)
class Probe:
    """Kernel with a size."""

    kernel: PeakKernel
    dtype: PeakType
    size: int  # N of a matmul, or the number of elements of an array

    @property
    def name(self) -> str:
        """Name of the model's file, without the suffix."""
        return f"{self.kernel}_{self.dtype}_{self.size}"

    @property
    def work(self) -> int:
        """Operations of a matmul; bytes that another kernel reads and writes.

        A multiplication of N x N matrices has N^3 multiply-accumulates of two operations each (as in LINPACK). The
        bytes of `add` are those of the kernel Add of STREAM (McCalpin, 1995): two arrays read, one written. Neither
        counts the read of a cache line before a write.
        """
        if self.kernel == "matmul":
            return 2 * self.size**3
        if self.kernel == "add":
            return 3 * ITEM_BYTES[self.dtype] * self.size
        return ITEM_BYTES[self.dtype] * (self.size + self.size // _COLUMNS)

    @property
    def memory_bytes(self) -> int:
        """Memory of the inputs and outputs."""
        if self.kernel != "matmul":
            return self.work
        result = 4 if self.dtype == "int8" else ITEM_BYTES[self.dtype]
        return (2 * ITEM_BYTES[self.dtype] + result) * self.size**2


def round_size(elements: float) -> int:
    """Return a number of elements that all kernels of memory support."""
    return max(math.floor(elements / _COLUMNS), 1) * _COLUMNS


def write_probe(probe: Probe, folder: Path) -> Path:
    """Write a probe's model. Return the path."""
    import onnx
    from onnx import TensorProto, helper

    kinds = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "int8": TensorProto.INT8}
    kind, size = kinds[probe.dtype], probe.size
    if probe.kernel == "matmul":
        is_int8 = probe.dtype == "int8"
        op, shape, result = "MatMulInteger" if is_int8 else "MatMul", [size, size], [size, size]
        result_kind = TensorProto.INT32 if is_int8 else kind
    elif probe.kernel == "add":
        op, shape, result, result_kind = "Add", [size], [size], kind
    else:
        op, shape, result, result_kind = "ReduceSum", [size // _COLUMNS, _COLUMNS], [size // _COLUMNS, 1], kind
    names = ["a"] if probe.kernel == "sum" else ["a", "b"]
    inputs = [helper.make_tensor_value_info(name, kind, shape) for name in names]
    output = helper.make_tensor_value_info("y", result_kind, result)
    axes = [helper.make_tensor("axes", TensorProto.INT64, [1], [1])] if probe.kernel == "sum" else []
    node = helper.make_node(op, [*names, *(one.name for one in axes)], ["y"], probe.kernel)
    graph = helper.make_graph([node], probe.name, inputs, [output], axes)
    path = folder / f"{probe.name}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path
