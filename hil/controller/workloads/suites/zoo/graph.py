"""A small builder of ONNX graphs."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from hil.core.tensors import dtype_name, dtype_of
from hil.formats.ort_values import ONNX_TYPES

# RandomState's numbers are the same in every release of numpy; default_rng's are not.
_Random = np.random.RandomState


class Graph:
    """A graph being built. Tensors are named by strings; random weights depend only on the model's name.

    Args:
        name: of the model.
        opset: of the operators.
        dtype: default of weights and inputs.
        outer: the graph that this is the body of; its tensors may be used here, and names are unique in both.
    """

    def __init__(self, name: str, *, opset: int = 17, dtype: str = "float32", outer: Graph | None = None) -> None:
        self.name = name
        self._opset = opset
        self._dtype = dtype
        self._random: np.random.RandomState = outer._random if outer else _Random(zlib.crc32(name.encode()))
        self._count: Counter[str] = outer._count if outer else Counter()
        self._nodes: list[Any] = []
        self._weights: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def input(self, name: str, *shape: int | str, dtype: str = "") -> str:
        """Declare an input; a string is a symbolic dimension."""
        self._inputs.append(self._info(name, dtype, shape))
        return name

    def output(self, name: str, *shape: int | str, dtype: str = "") -> None:
        """Declare a tensor as an output."""
        self._outputs.append(self._info(name, dtype, shape))

    def weight(self, *shape: int, scale: float | None = None) -> str:
        """Add uniform random weights; the default scale keeps the variance of the layer's input."""
        fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else shape[0]
        limit = (3.0 / max(fan_in, 1)) ** 0.5 if scale is None else scale
        return self.const(self._random.uniform(-limit, limit, shape).astype(dtype_of(self._dtype)), "w")

    def const(self, value: Any, name: str = "c") -> str:
        """Add a constant: an array, or a number or list, which gets the graph's dtype (int64 for ints)."""
        from onnx import helper

        array = np.asarray(value)
        if not isinstance(value, (np.ndarray, np.generic)):
            array = array.astype(np.int64 if array.dtype.kind == "i" else dtype_of(self._dtype))
        name = self._name(name)
        raw = np.ascontiguousarray(array).tobytes()
        self._weights.append(helper.make_tensor(name, ONNX_TYPES[dtype_name(array.dtype)], array.shape, raw, raw=True))
        return name

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        """Add a node with one output and return its name: ``out``, or a generated one."""
        return self.ops(kind, *inputs, out=(out,), **attributes)[0]

    def ops(self, kind: str, *inputs: str, out: Sequence[str], **attributes: Any) -> tuple[str, ...]:
        """Add a node with several outputs and return their names; "" is replaced by a generated one."""
        from onnx import helper

        node = self._name(kind)
        outputs = tuple(name or f"{node}:{number}" for number, name in enumerate(out))
        self._nodes.append(helper.make_node(kind, list(inputs), list(outputs), name=node, **attributes))
        return outputs

    def body(self, name: str) -> Graph:
        """Make a graph for an attribute of a control-flow node; :meth:`proto` is its value."""
        return Graph(name, opset=self._opset, dtype=self._dtype, outer=self)

    def proto(self) -> Any:
        """Return the GraphProto."""
        from onnx import helper

        return helper.make_graph(self._nodes, self.name, self._inputs, self._outputs, self._weights)

    def model(self) -> Any:
        """Return the ModelProto, checked, with shapes inferred."""
        import onnx
        from onnx import helper

        opsets = [helper.make_opsetid("", self._opset)]
        model = helper.make_model(self.proto(), opset_imports=opsets, ir_version=10, producer_name="hil")
        model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        onnx.checker.check_model(model, full_check=True)
        return model

    def _name(self, base: str) -> str:
        self._count[base] += 1
        return f"{base}_{self._count[base]}"

    def _info(self, name: str, dtype: str, shape: Sequence[int | str]) -> Any:
        from onnx import helper

        return helper.make_tensor_value_info(name, ONNX_TYPES[dtype or self._dtype], list(shape))
