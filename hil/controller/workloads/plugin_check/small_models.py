"""Small ONNX models for the checks, with inputs and expected outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hil.core.tensors import Array

# An operator that no compiler knows.
UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class SmallModel:
    """Model with two sets of inputs. ``compute`` returns the outputs in order."""

    name: str
    inputs: Mapping[str, Array]
    nodes: tuple[tuple[str, str, str], ...]  # operator, inputs separated by spaces, output
    outputs: tuple[str, ...]
    compute: Callable[..., list[Array]]

    @property
    def others(self) -> dict[str, Array]:
        """Inputs with other values."""
        return {name: np.flip(array).copy() for name, array in self.inputs.items()}

    @property
    def operators(self) -> set[str]:
        """Operators of the nodes."""
        return {operator for operator, _, _ in self.nodes}

    @property
    def what(self) -> str:
        """Text for a message: the dtype and what is special."""
        return f"model {self.name}"

    def write(self, folder: Path) -> Path:
        """Write the ONNX file and return its path."""
        import onnx
        from onnx import helper

        made = self.compute(*self.inputs.values())
        sides = [self.inputs, dict(zip(self.outputs, made, strict=True))]
        inputs, outputs = (
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
                for name, array in side.items()
            ]
            for side in sides
        )
        nodes = [helper.make_node(op, given.split(), [output], f"node_{output}") for op, given, output in self.nodes]
        graph = helper.make_graph(nodes, self.name, inputs, outputs)
        path = folder / f"{self.name}.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
        return path


def _float(*shape: int) -> Array:
    return (np.arange(np.prod(shape), dtype=np.float32).reshape(shape) - 3) / 4


def _make_add(name: str, x: Array, y: Array) -> SmallModel:
    return SmallModel(name, {"x": x, "y": y}, (("Add", "x y", "sum"),), ("sum",), lambda a, b: [a + b])


SMALL_MODELS: tuple[SmallModel, ...] = (
    SmallModel(
        "float32",
        {"x": _float(2, 4), "y": _float(2, 4)[::-1].copy()},
        (("Add", "x y", "sum"), ("Relu", "sum", "out")),
        ("out",),
        lambda x, y: [np.maximum(x + y, 0)],
    ),
    SmallModel(
        "two-outputs",
        {"x": _float(4), "y": _float(2, 4)},
        (("Add", "x y", "first"), ("Relu", "x", "second")),
        ("first", "second"),
        lambda x, y: [x + y, np.maximum(x, 0)],
    ),
    _make_add("int8", np.arange(6, dtype=np.int8) - 3, np.arange(6, dtype=np.int8)),
    SmallModel("bool", {"x": np.array([True, False, False])}, (("Not", "x", "out"),), ("out",), lambda x: [~x]),
    _make_add("zero-sized", _float(0, 4), _float(0, 4)),
    _make_add("scalar", _float(1).reshape(()), np.array(2.5, np.float32)),
)


TOLERANCE = 1e-3


def find_wrong_values(array: Array, right: Array, tolerance: float = TOLERANCE) -> str:
    """Return the worst element, its expected value and the difference if an output is wrong, else ""."""
    actual, expected = array.astype(np.float64), right.astype(np.float64)
    is_wrong = np.asarray(~np.isclose(actual, expected, rtol=tolerance, atol=tolerance))
    if not is_wrong.any():
        return ""
    with np.errstate(invalid="ignore"):  # the difference of infinities
        difference = np.abs(actual - expected)
    # NaN is the largest difference.
    rank = np.where(is_wrong, np.nan_to_num(difference, nan=np.inf), -1.0)
    index = np.unravel_index(int(np.argmax(rank)), array.shape)
    place = f" at {[int(one) for one in index]}" if index else ""
    return (
        f"wrong{place}: {array[index]}, expected {right[index]}, difference {difference[index]:.3g} "
        f"({np.count_nonzero(is_wrong)} of {array.size} elements are wrong)"
    )


def write_unsupported(folder: Path) -> Path:
    """Write a model with an operator of another domain. The file is valid, so importers accept it."""
    import onnx
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy")
    node = helper.make_node("HilCheckNone", ["x"], ["y"], "node_unsupported", domain="hil.check")
    graph = helper.make_graph([node], UNSUPPORTED, [x], [y])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("hil.check", 1)]
    path = folder / f"{UNSUPPORTED}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path
