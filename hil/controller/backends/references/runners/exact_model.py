"""Rewrite an ONNX model so that ONNX Runtime computes the model as specified.

ONNX Runtime trades accuracy for speed in two ways that no session option disables:

- ``accuracy_level`` of MatMulNBits and similar operators rounds activations to 8 bits (SQNR of 46 dB instead of 136
  dB).
- On x86 CPUs without VNNI instructions, products of uint8 and int8 saturate, because two products are added in 16 bits.
  Products of uint8 and uint8 do not saturate. So int8 becomes uint8: (b - z) = (b + 128) - (z + 128).
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.models.onnx_files.onnx_contrib import ACCURACY, remove_accuracy_levels
from hil.core.files import open_file

# Operator -> input positions of the second factor and its zero point.
_PRODUCTS: Mapping[str, tuple[int, int]] = {
    "MatMulInteger": (1, 3),
    "QLinearMatMul": (3, 5),
    "QLinearConv": (3, 5),
    "QGemm": (3, 5),
    "MatMulIntegerToFloat": (1, 5),
    "DynamicQuantizeMatMul": (1, 3),
}
_TEXTS = tuple(text.encode() for text in (ACCURACY, *_PRODUCTS))
_SHIFT, _INT8, _UINT8, _INT32 = 128, 3, 2, 6  # the last three are TensorProto.DataType values


def needs_rewriting(path: Path) -> bool:
    """Return True if a model file may contain such operators. The function only searches the raw bytes."""
    with open_file(path) as file:
        if not path.stat().st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return any(data.find(text) >= 0 for text in _TEXTS)


def make_exact(model: Any) -> None:
    """Rewrite a ModelProto in place: remove accuracy levels and products that saturate."""
    remove_accuracy_levels(model)
    _shift_products(model.graph, _infer_types(model))


def _infer_types(model: Any) -> dict[str, int]:
    """Return tensor name -> element type, as far as shape inference can determine it."""
    import onnx

    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except Exception:  # shape inference does not support the model: use the declared types
        graph = model.graph
    values = (*graph.input, *graph.value_info, *graph.output)
    found = {value.name: kind for value in values if (kind := value.type.tensor_type.elem_type)}
    return found | {tensor.name: tensor.data_type for tensor in graph.initializer}


def _shift_products(graph: Any, types: Mapping[str, int]) -> None:
    from onnx import helper, numpy_helper

    nodes: list[Any] = []
    shift, zero = f"{graph.name}/hil_shift", f"{graph.name}/hil_zero"
    count = 0
    for node in graph.node:
        factor, point = _PRODUCTS.get(node.op_type, (0, 0))
        if factor and types.get(node.input[factor]) == _INT8 and types.get(node.input[0]) != _INT8:
            node.input.extend([""] * (point + 1 - len(node.input)))
            for place in (factor, point):
                if not node.input[place]:
                    node.input[place] = zero
                    continue
                wide, moved, name = (f"{shift}_{count}_{place}_{step}" for step in range(3))
                nodes += [
                    helper.make_node("Cast", [node.input[place]], [wide], to=_INT32),
                    helper.make_node("Add", [wide, shift], [moved]),
                    helper.make_node("Cast", [moved], [name], to=_UINT8),
                ]
                node.input[place] = name
            count += 1
        nodes.append(node)
    if count:
        import numpy as np

        graph.initializer.append(numpy_helper.from_array(np.array(_SHIFT, np.int32), shift))
        graph.initializer.append(numpy_helper.from_array(np.array(_SHIFT, np.uint8), zero))
        copies = [type(one).FromString(one.SerializeToString()) for one in nodes]
        del graph.node[:]
        graph.node.extend(copies)
