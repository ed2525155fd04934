"""Rewrite an ONNX model so that ONNX Runtime computes the model as specified.

ONNX Runtime trades accuracy for speed in three ways that no session option disables:

- ``accuracy_level`` of MatMulNBits and similar operators rounds activations to 8 bits (SQNR of 46 dB instead of 136
  dB).
- On x86 CPUs without VNNI instructions, products of uint8 and int8 saturate, because two products are added in 16 bits.
  Products of uint8 and uint8 do not saturate. So int8 becomes uint8: (b - z) = (b + 128) - (z + 128).
- Most operators have no float16 kernel on CPUs. ONNX Runtime computes chains of them in float32, and removes the
  roundings to float16 between them and next to them, also those of Cast nodes in the model. It keeps a rounding before
  two Identity nodes: it would compute a single one in float32 as well.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from hil.controller.models.importers.onnx_nodes import list_graphs
from hil.controller.models.onnx_files.onnx_contrib import ACCURACY, remove_accuracy_levels
from hil.core.files import open_file
from hil.formats.onnx_file import set_nodes
from hil.formats.onnx_functions import MAX_INLINED_BYTES, inline_functions

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
# TensorProto.DataType values.
_UINT8, _INT8, _INT32, _FLOAT16 = 2, 3, 6, 10
_SHIFT = 128
# float16 in the bytes of an attribute `to`, a tensor type, or a tensor.
_HALF = re.compile(rb"\x0a\x02to\x18\x0a|\x0a.\x08\x0a|\x10\x0a[\x2a\x42\x4a\x6a]", re.DOTALL)
# Operators whose results are no tensors, or have no values to round.
_NOT_ROUNDED = ("Sequence", "Optional", "Identity", "Constant", "If", "Loop", "Scan")


def needs_rewriting(path: Path) -> bool:
    """Return True if a model file may contain such operators. The function only searches the raw bytes."""
    with open_file(path) as file:
        if not path.stat().st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return any(data.find(text) >= 0 for text in _TEXTS) or _HALF.search(data) is not None


def make_exact(model: Any) -> None:
    """Rewrite a ModelProto in place: remove accuracy levels and products that saturate, keep roundings to float16."""
    remove_accuracy_levels(model)
    types = _infer_types(model)
    _shift_products(model.graph, types)
    if _FLOAT16 in types.values():
        if model.functions and model.ByteSize() <= MAX_INLINED_BYTES:
            model.CopyFrom(inline_functions(model))
            types = _infer_types(model)
        names = (f"hil_rounded_{number}" for number in count())
        # Inner graphs first, because the function copies the nodes of a graph.
        for graph in reversed(list_graphs(model.graph)):
            _keep_roundings(graph, types, names)


def _infer_types(model: Any) -> dict[str, int]:
    """Return tensor name -> element type, as far as shape inference can determine it. Includes subgraphs."""
    import onnx

    try:
        inferred = onnx.shape_inference.infer_shapes(model)
    except Exception:  # shape inference does not support the model: use the declared types
        inferred = model
    found: dict[str, int] = {}
    for graph in list_graphs(inferred.graph):
        values = (*graph.input, *graph.value_info, *graph.output)
        found |= {value.name: kind for value in values if (kind := value.type.tensor_type.elem_type)}
        found |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return found


def _shift_products(graph: Any, types: Mapping[str, int]) -> None:
    from onnx import helper, numpy_helper

    nodes: list[Any] = []
    shift, zero = f"{graph.name}/hil_shift", f"{graph.name}/hil_zero"
    shifted = 0
    for node in graph.node:
        factor, point = _PRODUCTS.get(node.op_type, (0, 0))
        if factor and types.get(node.input[factor]) == _INT8 and types.get(node.input[0]) != _INT8:
            node.input.extend([""] * (point + 1 - len(node.input)))
            for place in (factor, point):
                if not node.input[place]:
                    node.input[place] = zero
                    continue
                wide, moved, name = (f"{shift}_{shifted}_{place}_{step}" for step in range(3))
                nodes += [
                    helper.make_node("Cast", [node.input[place]], [wide], to=_INT32),
                    helper.make_node("Add", [wide, shift], [moved]),
                    helper.make_node("Cast", [moved], [name], to=_UINT8),
                ]
                node.input[place] = name
            shifted += 1
        nodes.append(node)
    if shifted:
        import numpy as np

        graph.initializer.append(numpy_helper.from_array(np.array(_SHIFT, np.int32), shift))
        graph.initializer.append(numpy_helper.from_array(np.array(_SHIFT, np.uint8), zero))
        set_nodes(graph, nodes)


def _keep_roundings(graph: Any, types: Mapping[str, int], names: Iterator[str]) -> None:
    """Add two Identity nodes after each node with a float16 result, or with a result of unknown type.

    Args:
        names: unused names of tensors.
    """
    from onnx import helper

    nodes: list[Any] = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type.startswith(_NOT_ROUNDED):
            continue
        for place, name in enumerate(node.output):
            if name and types.get(name, _FLOAT16) == _FLOAT16:
                exact, copy = next(names), next(names)
                node.output[place] = exact
                nodes += [helper.make_node("Identity", [exact], [copy]), helper.make_node("Identity", [copy], [name])]
    set_nodes(graph, nodes)
