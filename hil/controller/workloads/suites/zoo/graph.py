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
    """A graph in the making. Tensors are called by name; weights are random, the same for the same model's name.

    Args:
        name: the model's.
        opset: of the operators.
        dtype: of weights and inputs where nothing else is said.
        outer: the graph that this is the body of: its tensors may be used here, and its names are not used again.
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
        """Declare an input; a dimension that is a text is symbolic."""
        self._inputs.append(self._info(name, dtype, shape))
        return name

    def output(self, name: str, *shape: int | str, dtype: str = "") -> None:
        """Declare a tensor as an output."""
        self._outputs.append(self._info(name, dtype, shape))

    def weight(self, *shape: int, scale: float | None = None) -> str:
        """Random weights of a uniform distribution; without a scale, such that the layer keeps its input's variance."""
        fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else shape[0]
        limit = (3.0 / max(fan_in, 1)) ** 0.5 if scale is None else scale
        return self.const(self._random.uniform(-limit, limit, shape).astype(dtype_of(self._dtype)), "w")

    def const(self, value: Any, name: str = "c") -> str:
        """A constant: an array, or a number or list in the graph's dtype (ints in int64)."""
        from onnx import helper

        array = np.asarray(value)
        if not isinstance(value, (np.ndarray, np.generic)):
            array = array.astype(np.int64 if array.dtype.kind == "i" else dtype_of(self._dtype))
        name = self._name(name)
        raw = np.ascontiguousarray(array).tobytes()
        self._weights.append(helper.make_tensor(name, ONNX_TYPES[dtype_name(array.dtype)], array.shape, raw, raw=True))
        return name

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        """Add a node of one output and return that; ``out`` is its name where that matters."""
        return self.ops(kind, *inputs, out=(out,), **attributes)[0]

    def ops(self, kind: str, *inputs: str, out: Sequence[str], **attributes: Any) -> tuple[str, ...]:
        """Add a node of several outputs and return their names: those given, made up where one is ""."""
        from onnx import helper

        node = self._name(kind)
        outputs = tuple(name or f"{node}:{number}" for number, name in enumerate(out))
        self._nodes.append(helper.make_node(kind, list(inputs), list(outputs), name=node, **attributes))
        return outputs

    def body(self, name: str) -> Graph:
        """A graph for a control-flow node's attribute; :meth:`proto` is its value."""
        return Graph(name, opset=self._opset, dtype=self._dtype, outer=self)

    def proto(self) -> Any:
        """The graph as ONNX has it."""
        from onnx import helper

        return helper.make_graph(self._nodes, self.name, self._inputs, self._outputs, self._weights)

    def model(self) -> Any:
        """The model, checked, with its shapes inferred."""
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
