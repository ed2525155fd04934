"""Bundled programs that ExecuTorch's own tools would not write."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from flatbuffers import Builder


def bundled(shapes: Sequence[Sequence[int]], program: bytes = b"") -> memoryview:
    """Return a ``.bpte`` file with a case of the method ``forward``. Inputs and outputs are zeros of these shapes."""
    builder = Builder()
    held = builder.CreateByteVector(program)
    values = _vector(builder, [_value(builder, shape) for shape in shapes])
    case = _table(builder, values, values)
    suite = _table(builder, builder.CreateString("forward"), _vector(builder, [case]))
    builder.Finish(_table(builder, 0, _vector(builder, [suite]), held), file_identifier=b"BP08")
    return memoryview(bytes(builder.Output()))


def _value(builder: Builder, shape: Sequence[int]) -> int:
    sizes = builder.CreateNumpyVector(np.array(shape, np.int32))
    content = builder.CreateByteVector(bytes(4 * math.prod(shape)))
    order = builder.CreateByteVector(bytes(range(len(shape))))
    builder.StartObject(4)
    builder.PrependInt8Slot(0, 6, 0)  # float32
    for number, vector in enumerate((sizes, content, order), 1):
        builder.PrependUOffsetTRelativeSlot(number, vector, 0)
    tensor = builder.EndObject()
    builder.StartObject(2)
    builder.PrependUint8Slot(0, 1, 0)  # a tensor
    builder.PrependUOffsetTRelativeSlot(1, tensor, 0)
    return int(builder.EndObject())


def _table(builder: Builder, *fields: int) -> int:
    builder.StartObject(len(fields))
    for number, field in enumerate(fields):
        builder.PrependUOffsetTRelativeSlot(number, field, 0)
    return int(builder.EndObject())


def _vector(builder: Builder, tables: Sequence[int]) -> int:
    builder.StartVector(4, len(tables), 4)
    for table in reversed(tables):
        builder.PrependUOffsetTRelative(table)
    return int(builder.EndVector())
