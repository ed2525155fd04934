"""A model as a graph of nodes with folded constants; writes parts as models. Runs in isolated processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.models.onnx_files.random_nodes import is_random
from hil.core.digest import digest_of
from hil.core.tensors import DTYPES
from hil.formats.ort_values import ONNX_TYPES

# Operators that are not folded, so that a quantised weight stays quantised.
_NOT_FOLDED = frozenset(["QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"])
_OF_SHAPES = frozenset(["Shape", "Size"])
_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
# A node is not folded if its result is larger than this and larger than the node's inputs.
_LARGE_BYTES = 1 << 20

_DTYPES = {number: name for name, number in ONNX_TYPES.items() if name in DTYPES}
# External data up to this size is embedded in a part's file; larger data is written to a separate file.
_EMBEDDED_BYTES = 256 << 20
_ALIGNMENT = 4096


def prepare_model(path: Path, dims: Mapping[str, int]) -> Any:
    """Load a model with fixed sizes, inlined local functions, inferred shapes and names for all nodes.

    Large external weights (see :mod:`hil.controller.backends.compilers.onnx_to_mlir`) stay in their files.
    """
    from onnx import TensorProto

    from hil.controller.backends.compilers.onnx_to_mlir import infer
    from hil.controller.models.importers.onnx import make_light_copy
    from hil.controller.models.importers.onnx_nodes import iter_tensors
    from hil.controller.models.onnx_files.onnx_model import load_model
    from hil.controller.models.onnx_files.onnx_rewrites import name_nodes
    from hil.formats.onnx_functions import inline_functions

    model = load_model(path, dims)
    if model.functions:
        model = inline_functions(model)
    for tensor in iter_tensors(model):
        if tensor.data_location == TensorProto.DEFAULT:
            # Remove an explicit default, which has no effect, so that a layer's file does not depend on the source of
            # its weights.
            tensor.ClearField("data_location")
    infer(model, make_light_copy(model))
    name_nodes(model)
    return model


def find_captured(node: Any) -> list[str]:
    """Return the outer values that a node's subgraphs use, in order of first use."""
    found: dict[str, None] = {}
    for graph in list_subgraphs(node):
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        own |= {item.values.name for item in graph.sparse_initializer}
        for inner in graph.node:
            found.update(dict.fromkeys(name for name in list_reads(inner) if name not in own))
            own.update(inner.output)
        found.update(dict.fromkeys(value.name for value in graph.output if value.name not in own))
    return list(found)


def list_subgraphs(node: Any) -> list[Any]:
    """Return the graphs among a node's attributes."""
    graphs = []
    for attribute in node.attribute:
        graphs += [attribute.g] if attribute.HasField("g") else []
        graphs += attribute.graphs
    return graphs


def list_reads(node: Any) -> list[str]:
    """Return the names of the values that a node and the subgraphs use."""
    return list(dict.fromkeys([*(name for name in node.input if name), *find_captured(node)]))


def fold(model: Any) -> set[str]:
    """Replace nodes that depend only on constants and fixed shapes by initializers, in place.

    Returns:
        The names of the values computed by onnx's evaluator.
    """
    from hil.controller.backends.compilers.onnx_to_mlir import infer
    from hil.controller.models.importers.onnx import make_light_copy

    constants = [name for node in model.graph.node if node.op_type == "Constant" for name in node.output]
    held = {*(tensor.name for tensor in model.graph.initializer), *constants}
    while _fold_once(model):
        # Infer again: folded constants may determine the shapes of Reshape or Expand, which allows further folding.
        infer(model, make_light_copy(model))
    return {tensor.name for tensor in model.graph.initializer} - held


def _fold_once(model: Any) -> bool:
    """Fold the nodes in a single pass; return True if more shapes might be known now."""
    import onnx

    graph = model.graph
    known = {tensor.name: tensor for tensor in graph.initializer if tensor.data_location != 1}
    types = {value.name: value.type for value in (*graph.input, *graph.value_info, *graph.output)}
    for tensor in graph.initializer:
        if tensor.name not in known:
            types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    kept, was_more = [], False
    for node in graph.node:
        if not _is_foldable(node, known, types) or (made := _evaluate_node(model, node, known, types)) is None:
            kept.append(node)
            continue
        known |= {tensor.name: tensor for tensor in made}
        graph.initializer.extend(made)
        was_more |= node.op_type != "Constant"
    if len(kept) < len(graph.node):
        del graph.node[:]
        graph.node.extend(kept)
    return was_more


def _is_foldable(node: Any, known: Mapping[str, Any], types: dict[str, Any]) -> bool:
    if node.domain not in _DOMAINS or node.op_type in _NOT_FOLDED or is_random(node, known):
        return False
    if node.op_type in _OF_SHAPES and get_static_shape(types.get(node.input[0])) is not None:
        return True
    if any(name not in known for name in list_reads(node)):
        return False
    sizes = [_count_bytes(types.get(name)) or 0 for name in node.output]
    return max(sizes, default=0) <= _LARGE_BYTES or sum(sizes) <= sum(
        known[name].ByteSize() for name in list_reads(node)
    )


def _evaluate_node(model: Any, node: Any, known: dict[str, Any], types: dict[str, Any]) -> list[Any] | None:
    """Return a node's results as tensors; None if onnx's evaluator cannot compute them as tensors."""
    from onnx import helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    names = [name for name in node.output if name]
    given: dict[str, Any] = {}
    for name in list_reads(node):
        if name in known:
            given[name] = numpy_helper.to_array(known[name])
        else:
            # For Shape and Size, the evaluator needs only the shape. This array needs the memory of a single element.
            given[name] = np.broadcast_to(np.float32(0), get_static_shape(types[name]) or ())
    inputs = [helper.make_empty_tensor_value_info(name) for name in given]
    outputs = [helper.make_empty_tensor_value_info(name) for name in names]
    graph = helper.make_graph([node], "constant", inputs, outputs)
    try:
        one = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
        with np.errstate(all="ignore"):
            values = ReferenceEvaluator(one).run(None, given)
        if not all(isinstance(value, (np.ndarray, np.generic)) for value in values):
            return None
        tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in zip(names, values, strict=True)]
    except Exception as error:  # do not fold the node
        print(f"note: cannot fold node {node.name!r} ({node.op_type}): {error}", flush=True)
        return None
    for tensor in tensors:
        declared = types[tensor.name].tensor_type.elem_type if tensor.name in types else 0
        if declared not in (0, tensor.data_type):
            return None
    return tensors


def get_static_shape(kind: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor type if all dimensions are numbers, else None."""
    sizes = _read_sizes(kind)
    return None if sizes is None or not all(isinstance(size, int) for size in sizes) else tuple(map(int, sizes))


def _read_sizes(kind: Any) -> list[Any] | None:
    """Return the size, symbol or None for every dimension; None if the type is not a tensor or has no rank."""
    if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    return [
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param or None
        for dim in kind.tensor_type.shape.dim
    ]


def _count_bytes(kind: Any) -> int | None:
    """Return the byte size for tensors of this type; None if unknown."""
    from onnx import helper

    shape = get_static_shape(kind)
    if shape is None or not kind.tensor_type.elem_type:
        return None
    return math.prod(shape) * int(helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type).itemsize)


class FoldedGraph:
    """All nodes in a model's main graph, by default after constant folding.

    Args:
        observed: tensor -> [dtype, shape] as observed in runs; dimensions that differ between runs are None.
        folding: False keeps the nodes that compute constants.
    """

    def __init__(
        self, path: Path, dims: Mapping[str, int], observed: Mapping[str, Sequence[Any]], *, folding: bool = True
    ) -> None:
        self._folder = path.parent
        self._model = model = prepare_model(path, dims)
        _write_observed(model, observed)
        self.folded = fold(model) if folding else set()  # constants computed by folding
        _write_observed(model, observed)
        graph = model.graph
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._sparse = {item.values.name: item for item in graph.sparse_initializer}
        constants = {*self._constants, *self._sparse}
        self.nodes: list[Any] = list(graph.node)
        self.inputs = [value.name for value in graph.input if value.name not in constants]
        self.outputs = [value.name for value in graph.output]
        self._types = {value.name: value.type for value in (*graph.input, *graph.value_info, *graph.output)}
        self._reads = [list_reads(node) for node in self.nodes]
        # Value -> number of the producing node.
        self.producer = {name: number for number, node in enumerate(self.nodes) for name in node.output if name}
        self.runtime = set(self.inputs)  # all values that depend on inputs or random numbers
        for number, node in enumerate(self.nodes):
            if self.is_random(number) or not self.runtime.isdisjoint(self._reads[number]):
                self.runtime.update(name for name in node.output if name)
        # Numbers of the live nodes: outputs need them, and they depend on inputs or random numbers.
        self.live = [number for number in sorted(self.find_dependencies(self.outputs)) if self.is_runtime(number)]
        self.users: dict[str, list[int]] = {}  # value -> numbers of live nodes that use it
        for number in self.live:
            for name in self._reads[number]:
                self.users.setdefault(name, []).append(number)

    def list_reads(self, number: int) -> list[str]:
        """Return the values that a node and the subgraphs use."""
        return self._reads[number]

    def is_random(self, number: int) -> bool:
        """Return True if a node draws random numbers."""
        return is_random(self.nodes[number], self._constants)

    def is_runtime(self, number: int) -> bool:
        """Return True if a node depends on inputs or random numbers."""
        return any(name in self.runtime for name in self.nodes[number].output)

    def find_dependencies(self, values: Iterable[str]) -> set[int]:
        """Return the nodes that values depend on."""
        found: set[int] = set()
        pending = [self.producer[name] for name in values if name in self.producer]
        while pending:
            if (number := pending.pop()) not in found:
                found.add(number)
                pending += [self.producer[name] for name in self._reads[number] if name in self.producer]
        return found

    def find_dependents(self, values: Iterable[str]) -> set[int]:
        """Return the live nodes that depend on values."""
        reached, found = set(values), set()
        for number in self.live:
            if not reached.isdisjoint(self._reads[number]):
                found.add(number)
                reached.update(self.nodes[number].output)
        return found

    def add_constants(self, numbers: Iterable[int]) -> list[int]:
        """Return the nodes and all nodes that compute constants for them, in order."""
        found = set(numbers)
        values = {name for number in found for name in self._reads[number]} - self.runtime
        return sorted(found | self.find_dependencies(values))

    def list_inputs(self, numbers: Sequence[int]) -> list[str]:
        """Return the runtime values that these nodes use but do not compute, in order of first use."""
        made = {name for number in numbers for name in self.nodes[number].output}
        used = dict.fromkeys(name for number in numbers for name in self._reads[number])
        return [name for name in used if name in self.runtime and name not in made]

    def get_constant(self, name: str) -> Any:
        """Return a constant's TensorProto, or None."""
        return self._constants.get(name)

    def digest_of_constant(self, name: str) -> str:
        """Return a digest of a constant's type, shape and values; "" if the value is not a constant."""
        from hil.controller.models.importers.onnx_data import read_raw

        if (sparse := self._sparse.get(name)) is not None:
            return digest_of(sparse.SerializeToString(deterministic=True))
        if (tensor := self._constants.get(name)) is None:
            return ""
        values = tensor.string_data if tensor.data_type == tensor.STRING else digest_of(read_raw(tensor, self._folder))
        return repr((tensor.data_type, list(tensor.dims), values))

    def type_of(self, name: str) -> tuple[str, list[int | str | None]] | None:
        """Return a value's dtype and shape; None if the value is not a tensor or the rank is unknown."""
        kind: Any = self._types.get(name)
        sizes = _read_sizes(kind)
        if sizes is None or (dtype := _DTYPES.get(kind.tensor_type.elem_type)) is None:
            return None
        return dtype, sizes

    @cached_property
    def open(self) -> list[str]:
        """Values between live nodes without a fully known type and shape."""
        made = [name for number in self.live for name in self.nodes[number].output]
        used = {*self.users, *self.outputs}
        return [name for name in made if name in used and get_static_shape(self._types.get(name)) is None]

    def save(self, numbers: Sequence[int], inputs: Sequence[str], outputs: Sequence[str], path: Path) -> None:
        """Write nodes as a separate model, with the constants that they use."""
        import onnx

        part = onnx.ModelProto()
        # Since IR version 4, a constant need not be an input.
        part.ir_version = max(self._model.ir_version, 4)
        part.producer_name = self._model.producer_name
        part.opset_import.extend(self._model.opset_import)
        graph = part.graph
        graph.name = "main_graph"
        graph.node.extend(self.nodes[number] for number in numbers)
        used = dict.fromkeys(name for number in numbers for name in self._reads[number])
        graph.initializer.extend(self._constants[name] for name in used if name in self._constants)
        graph.sparse_initializer.extend(self._sparse[name] for name in used if name in self._sparse)
        self._store_external_data(graph.initializer, path.with_name(f"{path.name}.data"))
        graph.input.extend(self._build_value_info(name) for name in inputs)
        graph.output.extend(self._build_value_info(name) for name in outputs)
        made = {name for number in numbers for name in self.nodes[number].output} - {*outputs, ""}
        graph.value_info.extend(self._build_value_info(name) for name in sorted(made) if name in self._types)
        onnx.save(part, path)

    def _store_external_data(self, tensors: Any, data: Path) -> None:
        """Add a part's external data: embedded, or in a separate file if large."""
        from hil.controller.models.importers.onnx_data import compute_size, embed_data, read_raw

        outside = [tensor for tensor in tensors if tensor.data_location == 1]
        if sum(map(compute_size, outside)) <= _EMBEDDED_BYTES:
            for tensor in outside:
                embed_data(tensor, self._folder)
            return
        with data.open("wb") as file:
            for tensor in outside:
                # Use a memory map, so that the file is copied without loading it completely.
                raw = read_raw(tensor, self._folder)
                file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
                del tensor.external_data[:]
                for key, value in (("location", data.name), ("offset", file.tell()), ("length", raw.nbytes)):
                    tensor.external_data.add(key=key, value=str(value))
                raw.tofile(file)

    def _build_value_info(self, name: str) -> Any:
        import onnx

        value = onnx.ValueInfoProto(name=name)
        if name in self._types:
            value.type.CopyFrom(self._types[name])
        return value


def _write_observed(model: Any, observed: Mapping[str, Sequence[Any]]) -> None:
    """Add observed types and shapes to a model if inference found none."""
    import onnx

    graph = model.graph
    known = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
    for name, (dtype, shape) in observed.items():
        value = known.get(name)
        if value is None:
            value = graph.value_info.add()
            value.name = name
        if value.type.WhichOneof("value") not in (None, "tensor_type"):
            continue
        tensor = value.type.tensor_type
        seen = onnx.helper.make_tensor_type_proto(ONNX_TYPES[dtype], shape).tensor_type
        if not tensor.elem_type:
            tensor.elem_type = seen.elem_type
        if not tensor.HasField("shape") or len(tensor.shape.dim) != len(shape):
            tensor.shape.CopyFrom(seen.shape)
        for mine, size in zip(tensor.shape.dim, shape, strict=True):
            if size is not None and not mine.HasField("dim_value"):
                mine.dim_value = size
