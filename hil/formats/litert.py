"""Run TFLite models with LiteRT's interpreter (``ai-edge-litert``), for importer, runtime and reference.

The package is imported only when a model is opened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from hil.core.placement_reasons import group_reasons
from hil.core.results import Part, Placement
from hil.core.tensors import Array, Dim, TensorSpec, get_dtype_name, parse_dtype, type_text
from hil.errors import LoadFailed, RunFailed, did_you_mean
from hil.formats.executorch_file import get_root_table, map_program

PACKAGE = "ai-edge-litert"
# Kernel choice: hil's name -> LiteRT's. XNNPACK runs the operators that it supports. LiteRT's kernels run the other
# operators.
KERNELS: Mapping[str, str] = MappingProxyType(
    {"xnnpack": "BUILTIN", "builtin": "BUILTIN_WITHOUT_DEFAULT_DELEGATES", "reference": "BUILTIN_REF"}
)
# Operators with hidden state between runs. VARIABLE means a variable that some operator uses.
_KEEPING = frozenset(
    "VARIABLE ASSIGN_VARIABLE LSTM RNN SVDF UNIDIRECTIONAL_SEQUENCE_LSTM UNIDIRECTIONAL_SEQUENCE_RNN "
    "BIDIRECTIONAL_SEQUENCE_LSTM BIDIRECTIONAL_SEQUENCE_RNN".split()
)
# Custom operators included in LiteRT.
_OWN_CUSTOM = frozenset(["AudioSpectrogram", "Mfcc", "NumericVerify", "TFLite_Detection_PostProcess"])
# Operators that draw random numbers.
_DRAWING = frozenset(["MULTINOMIAL", "RANDOM_STANDARD_NORMAL", "RANDOM_UNIFORM"])

_DELEGATED = "xnnpack"
# Node name that a delegate inserts for the nodes that it runs.
_DELEGATE = "DELEGATE"


class LiteRtSignature:
    """Loaded function of a model: a signature, or the main graph if the model has no signatures.

    Args:
        kernels: key of :data:`KERNELS` that the interpreter was created with.

    Attributes:
        name: the signature's key; "" without signatures.
        inputs, outputs: specs with names from the signature or the graph. Unnamed tensors are called by
            position, such as ``input0``. A dynamic dimension is a symbol such as ``x.dim0`` for inputs, and None for
            outputs.
        keeping: operators in the function's graph with state between runs. For graphs after the first, only
            the use of variables is known, not their assignment.
        random: operators in the function's graph that draw random numbers. Unknown (empty) for graphs after the
            first.
        graph: number of the function's graph; the first is 0.
    """

    def __init__(self, interpreter: Any, file: str, function: str, kernels: str) -> None:
        self._owner = interpreter  # the core does not keep the interpreter alive
        self._file = file
        self._kernels = kernels
        self._placed: Placement | None = None
        # The public methods support only the first subgraph, and copy data more than needed.
        self._core = interpreter._interpreter
        signatures = self._core.GetSignatureDefs()
        self.signatures = tuple(signatures)
        self.name = _choose(file, function, self.signatures)
        if self.name:
            self.graph = int(self._core.GetSubgraphIndexFromSignature(self.name))
            given, made = (list(signatures[self.name][which].items()) for which in ("inputs", "outputs"))
        else:
            self.graph = 0
            # Pairs, because a graph may give multiple tensors the same name.
            given = [(self._core.TensorName(index, 0), index) for index in self._core.InputIndices()]
            made = [(self._core.TensorName(index, 0), index) for index in self._core.OutputIndices()]
        given, made = _name_tensors("input", given), _name_tensors("output", made)
        self._given, self._made = [int(index) for _, index in given], [int(index) for _, index in made]
        self.inputs = tuple(self._make_spec(name, index, named=True) for name, index in given)
        self.outputs = tuple(self._make_spec(name, index, named=False) for name, index in made)
        self._sizes: list[tuple[int, ...]] | None = None
        operators = self._list_operators()
        self.keeping = tuple(sorted(operators & _KEEPING))
        self.random = tuple(sorted(operators & _DRAWING))

    def open_other(self, function: str) -> LiteRtSignature:
        """Return another function of the same interpreter. Raises LoadFailed if it is missing."""
        return LiteRtSignature(self._owner, self._file, function, self._kernels)

    def list_tensor_names(self) -> tuple[list[str], list[str]]:
        """Return the names that the graph gives to inputs and outputs."""
        inputs, outputs = (
            [str(self._core.TensorName(index, self.graph)) for index in side] for side in (self._given, self._made)
        )
        return inputs, outputs

    def set_inputs(self, arrays: Sequence[Array]) -> None:
        """Copy the inputs to the interpreter, and reallocate memory if their shapes changed.

        Raises:
            RunFailed: LiteRT rejects the inputs, or lacks a kernel for an operator.
        """
        sizes = [tuple(array.shape) for array in arrays]
        try:
            if sizes != self._sizes:
                self._sizes = None
                for index, spec, size in zip(self._given, self.inputs, sizes, strict=True):
                    if not spec.is_static:
                        self._core.ResizeInputTensor(index, np.array(size, np.int32), False, self.graph)
                self._core.AllocateTensors(self.graph)
                self._sizes, self._placed = sizes, None
            for index, array in zip(self._given, arrays, strict=True):
                self._core.SetTensor(index, _to_litert(array), self.graph)
        except Exception as error:
            raise RunFailed(f"LiteRT rejected the inputs: {format_error(error)}", detail=str(error)) from error

    def invoke(self) -> None:
        """Run the model. Raises RunFailed if an operator failed."""
        try:
            self._core.Invoke(self.graph)
        except Exception as error:
            raise RunFailed(f"LiteRT failed to run the model: {format_error(error)}", detail=str(error)) from error

    def copy_outputs(self) -> list[Array]:
        """Return copies of the last run's outputs."""
        return [self._copy_output(index, spec) for index, spec in zip(self._made, self.outputs, strict=True)]

    def placement(self) -> Placement | None:
        """Return the kernels used for every node. Inputs must be set. LiteRT reports nodes only for the first subgraph.

        LiteRT does not report the nodes that a delegate runs. hil finds them between the inputs and the outputs of the
        delegate's node.
        """
        if self.graph:
            return None if self._kernels == _DELEGATED else (Part(self._kernels),)
        if self._placed is None:
            core = self._core
            names = [str(core.NodeName(node)) for node in range(core.NumNodes())]
            delegates = {node for node, name in enumerate(names) if name == _DELEGATE}
            own = set(range(len(names))) - delegates
            makers = {int(tensor): node for node in own for tensor in core.NodeOutputs(node)}
            taken: set[int] = set()
            for delegate in delegates:
                given = {int(tensor) for tensor in core.NodeInputs(delegate)}
                left = [int(tensor) for tensor in core.NodeOutputs(delegate)]
                while left:
                    node = makers.get(left.pop())
                    if node is not None and node not in taken:
                        taken.add(node)
                        left += {int(tensor) for tensor in core.NodeInputs(node)} - given
            left_nodes = sorted(own - taken)
            self._placed = _make_parts(
                self._kernels,
                [names[node] for node in taken],
                [names[node] for node in left_nodes],
                [(self._describe_inputs(node), names[node]) for node in left_nodes],
            )
        return self._placed

    def _describe_inputs(self, node: int) -> str:
        """Return the facts of a node that XNNPACK did not take. LiteRT does not report why."""
        tensors = [int(index) for index in self._core.NodeInputs(node) if index >= 0]
        try:
            types = [
                type_text(
                    get_dtype_name(self._core.TensorType(index, 0)), tuple(map(int, self._core.TensorSize(index, 0)))
                )
                for index in tensors
            ]
        except Exception:  # a type unknown to numpy, such as that of a variable
            types = []
        facts = f"; its inputs are {', '.join(types)}" if types else ""
        is_dynamic = any(-1 in self._core.TensorSizeSignature(index, 0) for index in tensors)
        return f"reason not reported by LiteRT{facts}{'; a shape is dynamic' * is_dynamic}"

    def _list_operators(self) -> set[str]:
        """Return the operator names.

        For graphs after the first, return only "VARIABLE" or nothing: LiteRT reports only tensors.
        """
        if not self.graph:
            return {str(self._core.NodeName(node)) for node in range(self._core.NumNodes())}
        return {"VARIABLE"} if any(map(self._is_handle, range(self._core.NumTensors(self.graph)))) else set()

    def _is_handle(self, index: int) -> bool:
        try:
            return self._core.TensorType(index, self.graph) is np.object_
        except Exception:  # a type unknown to numpy, so not a handle
            return False

    def _copy_output(self, index: int, spec: TensorSpec) -> Array:
        size = [int(dim) for dim in self._core.TensorSize(index, self.graph)]
        if 0 in size:  # LiteRT has no buffer for an empty tensor
            return np.empty(size, parse_dtype(spec.dtype))
        return _convert_array(np.asarray(self._core.GetTensor(index, self.graph)), spec.dtype)

    def _make_spec(self, name: str, index: int, *, named: bool) -> TensorSpec:
        try:
            kind = self._core.TensorType(index, self.graph)
            dtype = "string" if kind is np.bytes_ else get_dtype_name(kind)
        except Exception as error:  # a type unknown to numpy or to LiteRT
            raise LoadFailed(f"tensor {name!r} has unsupported elements: {format_error(error)}") from error
        size = [int(dim) for dim in self._core.TensorSize(index, self.graph)]
        open_size = [int(dim) for dim in self._core.TensorSizeSignature(index, self.graph)] or size
        shape: list[Dim] = [
            dim if dim >= 0 else f"{name}.dim{axis}" if named else None for axis, dim in enumerate(open_size)
        ]
        return TensorSpec(name, dtype, tuple(shape))


def open_signature(path: Path, function: str, *, kernels: str = "xnnpack", threads: int = 0) -> LiteRtSignature:
    """Load a function from a .tflite file.

    Args:
        function: a signature's key; "" selects the only signature.
        threads: threads for kernels that support them; 0 means a thread per usable CPU.

    Raises:
        LoadFailed: the file is invalid, or the function is missing. Also for unsupported dtypes or operators,
            including custom operators that LiteRT lacks.
    """
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    count = threads or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
    try:
        interpreter = Interpreter(
            model_path=str(path), num_threads=count, experimental_op_resolver_type=OpResolverType[KERNELS[kernels]]
        )
    except Exception as error:
        raise LoadFailed(f"LiteRT cannot load {path.name}: {format_error(error)}", detail=str(error)) from error
    if custom := sorted(_list_custom_operators(path) - _OWN_CUSTOM):
        raise LoadFailed(
            f"{path.name} uses custom operators that LiteRT lacks: {', '.join(custom)}",
            hint="convert the model with built-in TFLite operators only, or use a runtime that has these operators",
        )
    try:
        return LiteRtSignature(interpreter, path.name, function, kernels)
    except UnicodeDecodeError as error:
        raise LoadFailed(f"{path.name} is corrupt: a name is not valid UTF-8") from error


def _list_custom_operators(path: Path) -> set[str]:
    """Return the custom operators in a file. LiteRT must have verified the file.

    TensorFlow Lite schema: ``Model.operator_codes`` is field 1, ``OperatorCode.custom_code`` is field 1.
    """
    return {code.text(1) for code in get_root_table(map_program(path)).iter_tables(1)} - {""}


def _name_tensors(kind: str, tensors: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Name unnamed tensors by their position."""
    return [(name or f"{kind}{place}", index) for place, (name, index) in enumerate(tensors)]


def _make_parts(kernels: str, delegated: list[str], left: list[str], facts: list[tuple[str, str]]) -> Placement:
    if kernels != _DELEGATED:
        return (Part.of(kernels, left),)
    rest = replace(Part.of("builtin", left, elsewhere=True), reasons=group_reasons(facts))
    parts = Part.of(_DELEGATED, delegated), rest
    return tuple(part for part in parts if part.nodes)


def format_error(error: Exception) -> str:
    """Return LiteRT's error text on a single line."""
    return " ".join(str(error).split())[:400] or type(error).__name__


def _choose(file: str, function: str, signatures: tuple[str, ...]) -> str:
    listed = ", ".join(signatures)
    if function and function not in signatures:
        raise LoadFailed(
            f"function {function!r} not found in {file}",
            hint=f"{did_you_mean(function, signatures)}use --function with one of: {listed}"
            if signatures
            else "the file has no signatures: omit --function",
            option="--function",
        )
    if not function and len(signatures) > 1:
        hint = f"select a function with --function: {listed}"
        raise LoadFailed(f"{file} has multiple functions", hint=hint, option="--function")
    return function or (signatures[0] if signatures else "")


def _to_litert(array: Array) -> Array:
    if array.dtype.kind not in "OU":
        return array
    encoded = np.empty(array.shape, object)
    encoded.reshape(-1)[:] = [str(item).encode() for item in array.ravel()]
    return encoded


def _convert_array(array: Array, dtype: str) -> Array:
    if dtype != "string":
        return array
    decoded = np.empty(array.shape, object)
    decoded.reshape(-1)[:] = [bytes(item).decode(errors="replace") for item in array.ravel()]
    return decoded
