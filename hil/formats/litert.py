"""TFLite models through LiteRT's interpreter (``ai-edge-litert``): for the importer, the runtime and the reference.

The package is imported when a model is opened: naming this module costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from hil.core.results import Part, Placement
from hil.core.tensors import Array, Dim, TensorSpec, dtype_name, dtype_of
from hil.errors import LoadFailed, RunFailed
from hil.formats.executorch_file import mapped, root_table

PACKAGE = "ai-edge-litert"
# How operators are computed: ours -> LiteRT's. XNNPACK takes those that it has kernels for, LiteRT's own do the rest.
KERNELS: Mapping[str, str] = MappingProxyType(
    {"xnnpack": "BUILTIN", "builtin": "BUILTIN_WITHOUT_DEFAULT_DELEGATES", "reference": "BUILTIN_REF"}
)
# Operators that keep something from run to run, which no output shows; VARIABLE is a variable that some operator uses.
_KEEPING = frozenset(
    "VARIABLE ASSIGN_VARIABLE LSTM RNN SVDF UNIDIRECTIONAL_SEQUENCE_LSTM UNIDIRECTIONAL_SEQUENCE_RNN "
    "BIDIRECTIONAL_SEQUENCE_LSTM BIDIRECTIONAL_SEQUENCE_RNN".split()
)
# Custom operators that come with LiteRT.
_OWN_CUSTOM = frozenset(["AudioSpectrogram", "Mfcc", "NumericVerify", "TFLite_Detection_PostProcess"])
# Operators that draw random numbers.
_DRAWING = frozenset(["MULTINOMIAL", "RANDOM_STANDARD_NORMAL", "RANDOM_UNIFORM"])

_DELEGATED = "xnnpack"
# What the nodes are called that delegates put in place of those which they take.
_DELEGATE = "DELEGATE"


class Signature:
    """One function of a model, loaded: a signature, or the main graph of a model that has none.

    Args:
        kernels: one of :data:`KERNELS`, which the interpreter was made with.

    Attributes:
        name: the signature's key; "" where there is none.
        inputs, outputs: named as the signature names them, else as the graph does; a tensor without a name by its
            place, such as ``input0``. An open dimension of an input is a symbol such as ``x.dim0``, of an output None.
        keeping: the operators of its graph that keep state from run to run; of one that is not the first, variables
            alone are known, and not whether it assigns them.
        random: the operators of its graph that draw random numbers; unknown, and none, of one that is not the first.
        graph: the number of its graph; the first is 0.
    """

    def __init__(self, interpreter: Any, file: str, function: str, kernels: str) -> None:
        self._owner = interpreter  # which the core does not keep alive
        self._kernels = kernels
        self._placed: Placement | None = None
        # The public methods reach the first subgraph only, and copy more than once.
        self._core = interpreter._interpreter
        signatures = self._core.GetSignatureDefs()
        self.signatures = tuple(signatures)
        self.name = _choose(file, function, self.signatures)
        if self.name:
            self.graph = int(self._core.GetSubgraphIndexFromSignature(self.name))
            given, made = (list(signatures[self.name][which].items()) for which in ("inputs", "outputs"))
        else:
            self.graph = 0
            # Pairs: nothing keeps a graph from giving several tensors one name.
            given = [(self._core.TensorName(index, 0), index) for index in self._core.InputIndices()]
            made = [(self._core.TensorName(index, 0), index) for index in self._core.OutputIndices()]
        given, made = _named("input", given), _named("output", made)
        self._given, self._made = [int(index) for _, index in given], [int(index) for _, index in made]
        self.inputs = tuple(self._spec(name, index, named=True) for name, index in given)
        self.outputs = tuple(self._spec(name, index, named=False) for name, index in made)
        self._sizes: list[tuple[int, ...]] | None = None
        operators = self._operators()
        self.keeping = tuple(sorted(operators & _KEEPING))
        self.random = tuple(sorted(operators & _DRAWING))

    def tensor_names(self) -> tuple[list[str], list[str]]:
        """What the graph itself calls the inputs and the outputs."""
        inputs, outputs = (
            [str(self._core.TensorName(index, self.graph)) for index in side] for side in (self._given, self._made)
        )
        return inputs, outputs

    def set_inputs(self, arrays: Sequence[Array]) -> None:
        """Copy the inputs in, after memory was planned for their shapes where these have changed.

        Raises:
            RunFailed: LiteRT refuses them, or has no kernel for an operator of the model.
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
            raise RunFailed(f"LiteRT cannot take the inputs: {error_text(error)}", detail=str(error)) from error

    def invoke(self) -> None:
        """Run once. Raises RunFailed: an operator failed."""
        try:
            self._core.Invoke(self.graph)
        except Exception as error:
            raise RunFailed(f"LiteRT failed to run the model: {error_text(error)}", detail=str(error)) from error

    def outputs_now(self) -> list[Array]:
        """The outputs of the last run, copied."""
        return [self._output(index, spec) for index, spec in zip(self._made, self.outputs, strict=True)]

    def placement(self) -> Placement | None:
        """Which kernels run which nodes, now that inputs have been set. Of nodes it tells in the first subgraph alone.

        Of a node that the delegate took, LiteRT says nothing itself: it is one that lies between the tensors which a
        node of the delegate's takes and those which that gives.
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
            self._placed = _parts(self._kernels, [names[node] for node in taken], [names[node] for node in own - taken])
        return self._placed

    def _operators(self) -> set[str]:
        """The names of its operators: LiteRT tells those of the first subgraph alone, and of others the tensors."""
        if not self.graph:
            return {str(self._core.NodeName(node)) for node in range(self._core.NumNodes())}
        return {"VARIABLE"} if any(map(self._is_handle, range(self._core.NumTensors(self.graph)))) else set()

    def _is_handle(self, index: int) -> bool:
        try:
            return self._core.TensorType(index, self.graph) is np.object_
        except Exception:  # numpy has no such type, so it is no handle either
            return False

    def _output(self, index: int, spec: TensorSpec) -> Array:
        size = [int(dim) for dim in self._core.TensorSize(index, self.graph)]
        if 0 in size:  # which LiteRT has no buffer for
            return np.empty(size, dtype_of(spec.dtype))
        return _from_litert(np.asarray(self._core.GetTensor(index, self.graph)), spec.dtype)

    def _spec(self, name: str, index: int, *, named: bool) -> TensorSpec:
        try:
            kind = self._core.TensorType(index, self.graph)
            dtype = "string" if kind is np.bytes_ else dtype_name(kind)
        except Exception as error:  # of LiteRT's too: numpy has no such type
            raise LoadFailed(f"tensor {name!r} has elements that hil cannot pass: {error_text(error)}") from error
        size = [int(dim) for dim in self._core.TensorSize(index, self.graph)]
        open_size = [int(dim) for dim in self._core.TensorSizeSignature(index, self.graph)] or size
        shape: list[Dim] = [
            dim if dim >= 0 else f"{name}.dim{axis}" if named else None for axis, dim in enumerate(open_size)
        ]
        return TensorSpec(name, dtype, tuple(shape))


def open_signature(path: Path, function: str, *, kernels: str = "xnnpack", threads: int = 0) -> Signature:
    """Load one function of a .tflite file.

    Args:
        function: a signature's key; "" is the only one.
        threads: of the kernels that use several; 0 is one for each CPU that this process may use.

    Raises:
        LoadFailed: it is no such file, has no such function, or one whose operators or dtypes cannot be run here, or
            holds custom operators that LiteRT does not have.
    """
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    count = threads or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
    try:
        interpreter = Interpreter(
            model_path=str(path), num_threads=count, experimental_op_resolver_type=OpResolverType[KERNELS[kernels]]
        )
    except Exception as error:
        raise LoadFailed(f"LiteRT refused {path.name}: {error_text(error)}", detail=str(error)) from error
    if custom := sorted(_custom_operators(path) - _OWN_CUSTOM):
        raise LoadFailed(
            f"{path.name} uses custom operators that LiteRT does not have: {', '.join(custom)}",
            hint="convert the model with TFLite's own operators only, or run it on a runtime that has these operators",
        )
    try:
        return Signature(interpreter, path.name, function, kernels)
    except UnicodeDecodeError as error:
        raise LoadFailed(f"{path.name} is damaged: a name in it is no UTF-8 text") from error


def _custom_operators(path: Path) -> set[str]:
    """The names of the custom operators of a file that LiteRT has verified.

    The schema of TensorFlow Lite: ``Model.operator_codes`` is field 1, ``OperatorCode.custom_code`` is field 1.
    """
    return {code.text(1) for code in root_table(mapped(path)).tables(1)} - {""}


def _named(kind: str, tensors: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """The tensors of a side, those without a name under one that tells their place."""
    return [(name or f"{kind}{place}", index) for place, (name, index) in enumerate(tensors)]


def _parts(kernels: str, delegated: list[str], left: list[str]) -> Placement:
    if kernels != _DELEGATED:
        return (Part.of(kernels, left),)
    parts = Part.of(_DELEGATED, delegated), Part.of("builtin", left, elsewhere=True)
    return tuple(part for part in parts if part.nodes)


def error_text(error: Exception) -> str:
    """What LiteRT says, on one line."""
    return " ".join(str(error).split())[:400] or type(error).__name__


def _choose(file: str, function: str, signatures: tuple[str, ...]) -> str:
    listed = ", ".join(signatures)
    if function and function not in signatures:
        raise LoadFailed(
            f"{file} has no function {function!r}",
            hint=f"--function with one of: {listed}" if signatures else "it has no signatures: leave --function out",
        )
    if not function and len(signatures) > 1:
        raise LoadFailed(f"{file} has several functions", hint=f"choose one with --function: {listed}")
    return function or (signatures[0] if signatures else "")


def _to_litert(array: Array) -> Array:
    if array.dtype.kind not in "OU":
        return array
    encoded = np.empty(array.shape, object)
    encoded.reshape(-1)[:] = [str(item).encode() for item in array.ravel()]
    return encoded


def _from_litert(array: Array, dtype: str) -> Array:
    if dtype != "string":
        return array
    decoded = np.empty(array.shape, object)
    decoded.reshape(-1)[:] = [bytes(item).decode(errors="replace") for item in array.ravel()]
    return decoded
