"""Build the graphs of the suite ``models``."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from hil.core.tensors import get_dtype_name, parse_dtype
from hil.formats.ort_values import ONNX_TYPES

# Use RandomState, whose numbers are the same in all numpy releases. The numbers of default_rng may change.
_Random = np.random.RandomState


class GraphBuilder:
    """Graph under construction. Strings name tensors. Random weights depend only on the model's name.

    Args:
        outer: the enclosing graph, if this is a body. A body may use tensors of the enclosing graph, and names are
            unique across both graphs.
    """

    def __init__(self, name: str, outer: GraphBuilder | None = None) -> None:
        self.name = name
        self.opset = 17
        self.dtype: str = outer.dtype if outer else "float32"  # default for weights and inputs
        self._random: np.random.RandomState = outer._random if outer else _Random(zlib.crc32(name.encode()))
        self._count: Counter[str] = outer._count if outer else Counter()
        self._nodes: list[Any] = []
        self._weights: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def add_input(self, name: str, *shape: int | str, dtype: str = "") -> str:
        """Declare an input. A string is a symbolic dimension."""
        self._inputs.append(self._make_value_info(name, dtype, shape))
        return name

    def add_output(self, name: str, *shape: int | str, dtype: str = "") -> None:
        """Declare a tensor as an output."""
        self._outputs.append(self._make_value_info(name, dtype, shape))

    def add_weight(self, *shape: int, scale: float | None = None) -> str:
        """Add uniform random weights. The default scale preserves the variance of the layer's input."""
        fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else shape[0]
        limit = (3.0 / max(fan_in, 1)) ** 0.5 if scale is None else scale
        return self.add_constant(self._random.uniform(-limit, limit, shape).astype(parse_dtype(self.dtype)), "w")

    def add_constant(self, value: Any, name: str = "c") -> str:
        """Add a constant: an array, or a number or list, which gets the graph's dtype (int64 for ints)."""
        from onnx import helper

        array = np.asarray(value)
        if not isinstance(value, (np.ndarray, np.generic)):
            array = array.astype(np.int64 if array.dtype.kind == "i" else parse_dtype(self.dtype))
        name = self._make_name(name)
        raw = np.ascontiguousarray(array).tobytes()
        self._weights.append(
            helper.make_tensor(name, ONNX_TYPES[get_dtype_name(array.dtype)], array.shape, raw, raw=True)
        )
        return name

    def add_op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        """Add a node with an output and return the name: ``out``, or a generated name."""
        return self.add_ops(kind, *inputs, out=(out,), **attributes)[0]

    def add_ops(self, kind: str, *inputs: str, out: Sequence[str], **attributes: Any) -> tuple[str, ...]:
        """Add a node with multiple outputs and return their names. "" gets a generated name."""
        from onnx import helper

        node = self._make_name(kind)
        outputs = tuple(name or f"{node}:{number}" for number, name in enumerate(out))
        self._nodes.append(helper.make_node(kind, list(inputs), list(outputs), name=node, **attributes))
        return outputs

    def make_body(self, name: str) -> GraphBuilder:
        """Create a graph for an attribute of a control-flow node. :meth:`build_proto` returns the attribute's value."""
        return GraphBuilder(name, outer=self)

    def build_proto(self) -> Any:
        """Return the GraphProto."""
        from onnx import helper

        return helper.make_graph(self._nodes, self.name, self._inputs, self._outputs, self._weights)

    def model(self) -> Any:
        """Return the ModelProto, checked, with shapes inferred."""
        import onnx
        from onnx import helper

        opsets = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(self.build_proto(), opset_imports=opsets, ir_version=10, producer_name="hil")
        model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        onnx.checker.check_model(model, full_check=True)
        return model

    def _make_name(self, base: str) -> str:
        self._count[base] += 1
        return f"{base}_{self._count[base]}"

    def _make_value_info(self, name: str, dtype: str, shape: Sequence[int | str]) -> Any:
        from onnx import helper

        return helper.make_tensor_value_info(name, ONNX_TYPES[dtype or self.dtype], list(shape))
