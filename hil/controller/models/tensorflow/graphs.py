"""Inspect TensorFlow functions: nested arguments, variables, StableHLO text, one-line errors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from hil.controller.storage.screen.texts import make_unique_name
from hil.core.tensors import Array
from hil.errors import CompileFailed

Structure = Any


def iter_leaves(structure: Structure, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path, in the order of ``tf.nest.flatten``: dicts by sorted keys; None is a leaf.

    Args:
        structure: nested dicts, lists and tuples, including named tuples.
        path: path of the structure; a leaf of ``{"a": [x]}`` is ``a.0``.
    """
    for name, item in _iter_items(structure):
        yield from iter_leaves(item, f"{path}.{name}" if path else str(name))
    if not _is_nested(structure):
        yield path, structure


def replace_leaves(structure: Structure, make: Callable[[Any], Any]) -> Structure:
    """Return the same structure with new leaves, created in the order of :func:`iter_leaves`."""
    if not _is_nested(structure):
        return make(structure)
    made = {name: replace_leaves(item, make) for name, item in _iter_items(structure)}
    if isinstance(structure, Mapping):
        return {name: made[name] for name in structure}
    if hasattr(structure, "_fields"):
        return type(structure)(**made)
    return type(structure)(made.values())


def number_leaves(structure: Structure, counts: Callable[[Any], bool] = lambda leaf: leaf is not None) -> Structure:
    """Replace each leaf for which ``counts`` returns True by its number. Other leaves stay unchanged."""
    numbers = iter(range(sum(map(counts, (leaf for _, leaf in iter_leaves(structure))))))
    return replace_leaves(structure, lambda leaf: next(numbers) if counts(leaf) else leaf)


def restore(structure: Structure, values: Sequence[Any]) -> Structure:
    """Replace the numbers from :func:`number_leaves` by values. Other leaves stay unchanged."""
    return replace_leaves(structure, lambda leaf: values[leaf] if type(leaf) is int else leaf)


def _is_nested(structure: Structure) -> bool:
    return isinstance(structure, (Mapping, list, tuple))


def _iter_items(structure: Structure) -> Iterator[tuple[Any, Structure]]:
    if isinstance(structure, Mapping):
        yield from ((name, structure[name]) for name in sorted(structure))
    elif hasattr(structure, "_fields"):
        yield from zip(structure._fields, structure, strict=True)
    elif isinstance(structure, (list, tuple)):
        yield from enumerate(structure)


# Operations that only read a variable, or only forward its handle.
_READING = frozenset(
    ("ReadVariableOp", "IsVariableInitializedOp", "ResourceGather", "ResourceGatherNd", "VariableShape")
)
_PASSING_ON = frozenset(("Identity", "IdentityN"))
# Operations that call functions -> number of inputs before the function's arguments.
_CALLS = {"PartitionedCall": 0, "StatefulPartitionedCall": 0, "While": 0, "StatelessWhile": 0}
_CALLS |= dict.fromkeys(("If", "StatelessIf", "Case", "StatelessCase"), 1)


def name_new_value(name: str) -> str:
    """Return the output name for a variable's new value."""
    return f"variable {name}"


def list_captured(concrete: Any) -> list[tuple[str, Any]]:
    """Return the captured variables and tensors in a concrete function in order, with unique names.

    Raises:
        CompileFailed: a captured resource is not a variable.
    """
    items = _list_captures(concrete)
    if any(item.dtype.name == "resource" for _, item in items):
        raise CompileFailed(
            "unsupported resource in the function: XLA supports variables, but not tables or other resources"
        )
    return items


def find_assigned(concrete: Any) -> dict[str, Any]:
    """Return the variables that a concrete function may assign, by name, in capture order.

    The result includes a variable if its handle reaches any operation that may write, directly or in a called function.
    """
    items = _list_captures(concrete)
    graph = concrete.graph.as_graph_def()
    looked_through = HandleGraph(graph.node, {function.signature.name: function for function in graph.library.function})
    places = concrete.inputs[len(concrete.inputs) - len(items) :]
    return {
        name: item
        for (name, item), place in zip(items, places, strict=True)
        if is_variable(item) and looked_through.is_written(place.op.name)
    }


@dataclass(frozen=True, eq=False)
class HandledVariable:
    """Variable that a function captured only by handle, as TensorFlow 1's optimizers and raw operations do."""

    handle: Any
    name: str
    dtype: Any
    shape: Any

    @classmethod
    def from_handle(cls, tensor: Any) -> Any:
        """Return the variable of a handle tensor. Other tensors are returned unchanged."""
        import tensorflow as tf

        data = getattr(tensor, "_handle_data", None) if tensor.dtype.name == "resource" else None
        kinds = list(data.shape_and_type) if data is not None else []
        if len(kinds) != 1:
            return tensor
        return cls(tensor, "variable", tf.as_dtype(kinds[0].dtype), tf.TensorShape(kinds[0].shape))

    def read_value(self) -> Any:
        """Return the value as a tensor."""
        import tensorflow as tf

        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def numpy(self) -> Array:
        """Return the value as an array."""
        array: Array = self.read_value().numpy()
        return array

    def assign(self, value: Any) -> None:
        """Assign a new value."""
        import tensorflow as tf

        tf.raw_ops.AssignVariableOp(resource=self.handle, value=tf.convert_to_tensor(value, self.dtype))

    def is_initialized(self) -> bool:
        """Return True if the variable has a value."""
        import tensorflow as tf

        return bool(tf.raw_ops.VarIsInitializedOp(resource=self.handle))


def is_variable(item: Any) -> bool:
    """Return True if a captured item is a variable, not a tensor."""
    return hasattr(item, "handle")


class HandleGraph:
    """Nodes of a graph or function, indexed by input.

    Args:
        nodes: nodes in the graph or function.
        library: functions that nodes call. Without a library, each variable that is passed to a call counts as
            assigned.
    """

    def __init__(self, nodes: Iterable[Any], library: Mapping[str, Any] | None = None) -> None:
        self._library = library
        self._called: dict[str, HandleGraph] = {}
        self._takers: dict[str, list[tuple[Any, int]]] = defaultdict(list)
        for node in nodes:
            for place, taken in enumerate(node.input):
                if not taken.startswith("^"):
                    self._takers[taken.partition(":")[0]].append((node, place))

    def is_written(self, handle: str) -> bool:
        """Return True if any operation assigns the variable with this handle (a node or argument)."""
        waiting, seen = [handle], {handle}
        while waiting:
            for node, place in self._takers[waiting.pop()]:
                if node.op in _PASSING_ON:
                    waiting += {node.name} - seen
                    seen.add(node.name)
                elif node.op in _CALLS and self._library is not None:
                    if any(self._iter_writes(node, place)):
                        return True
                elif node.op not in _READING:
                    return True
        return False

    def _iter_writes(self, node: Any, place: int) -> Iterator[bool]:
        """For each function that a node calls, yield True if the function assigns the node's input at ``place``."""
        assert self._library is not None
        for value in node.attr.values():
            for name in (function.name for function in (value.func, *value.list.func) if function.name):
                function = self._library[name]
                if name not in self._called:
                    self._called[name] = HandleGraph(function.node_def, self._library)
                yield self._called[name].is_written(function.signature.input_arg[place - _CALLS[node.op]].name)


def _list_captures(concrete: Any) -> list[tuple[str, Any]]:
    """Return name and variable, or the tensor, for every capture of a function."""
    variables = {id(variable.handle): variable for variable in concrete.graph.variables}
    items = [variables.get(id(tensor), HandledVariable.from_handle(tensor)) for tensor in concrete.captured_inputs]
    taken: set[str] = set()
    return [(make_unique_name(_get_capture_name(item), taken), item) for item in items]


def _get_capture_name(item: Any) -> str:
    return str(item.name).split(":")[0] if is_variable(item) else "captured"


_LENGTH = 400
# Start of the actual error in autograph's message, after the quoted code: ` ValueError: ...`.
_RAISED = re.compile(r"^ {4}(?P<name>\w+): ", re.M)
_QUOTED = re.compile(r'^\s*File ".*", line \d+, in .*$', re.M)
_COLOR = re.compile(r"\x1b\[\d+m")
# XLA's message prefix, and markers for text to remove.
_XLA = "Failed getting HLO text: '"
_BEFORE = ("Graph execution error", "Detected at node", "<stack traces")
_AFTER = ("The op is created at", "Stack trace", "tf2xla conversion failed", "Arguments received by", "[[")
# Repeated node name: `... compatible with node {{node Eig}}){{node Eig}}`
_NODE_AGAIN = re.compile(r"(?<=\))\{\{node [^}]*\}\}")
_FUNCTION_NODE = re.compile(r"\{\{function_node [^}]*\}\}\s*")
_NODE = re.compile(r"\{\{node ([^}]*)\}\}")
_OPERATION = re.compile(r"\s*\[Op:\w+\].*$")
# Location to remove: `loc(callsite(fused["Erf:", ...)): 'tf.Erf' op is ...`
_LOCATION = re.compile(r"^loc\(.*?\): ")


def format_error(error: Exception) -> str:
    """Return an error's kind and message in one line."""
    name, text = type(error).__name__, _COLOR.sub("", str(error))
    if text.startswith("in user code:") and (raised := _RAISED.search(text)):
        name, text = raised["name"], text[raised.end() :]
    message = " ".join(_iter_message_lines(_QUOTED.split(text)[-1] if text.startswith(_BEFORE) else text))
    for pattern, instead in ((_NODE_AGAIN, ""), (_FUNCTION_NODE, ""), (_NODE, r"\1"), (_OPERATION, "")):
        message = pattern.sub(instead, message)
    message = message.removeprefix(_XLA)[:_LENGTH]
    return f"{name}: {message}" if message else name


def format_converter_error(error: Exception) -> str:
    """Return the TFLite converter's errors in one line."""
    lines = [line.partition("error: ")[2].strip() for line in str(error).splitlines() if "error: " in line]
    texts = [_LOCATION.sub("", line) for line in lines]
    return "; ".join(dict.fromkeys(texts))[:_LENGTH] or format_error(error)


def _iter_message_lines(text: str) -> Iterator[str]:
    lines = (line.strip() for line in text.splitlines())
    kept = (line for line in lines if line and not line.startswith(_BEFORE))
    return takewhile(lambda line: not line.startswith(_AFTER), kept)


# `%24 = mhlo.copy %23 : tensor<2xf32>` requests a separate buffer for a result. hil replaces the operation by a no-op.
# Removing it would require renaming its uses, but values of different regions share names.
_COPY = re.compile(r"= mhlo\.copy (?P<value>%[\w#]+) : (?P<type>tensor<[^>]*>)")
_IDENTITY = r"= stablehlo.reshape \g<value> : (\g<type>) -> \g<type>"
# IREE supports chlo, StableHLO's companion dialect, but not mhlo.
_ERF = re.compile(r"= mhlo\.erf (?P<value>%[\w#]+) : (?P<type>tensor<[^>]*>)")
_CHLO_ERF = r"= chlo.erf \g<value> : \g<type> -> \g<type>"
# Alias of a result: `{alias = {..., parameter_number = 3 : i64}, output_index = array<i64: 3>}`
_ALIAS = re.compile(r"parameter_number = (?P<argument>\d+) : i64\}, output_index = array<i64(?:: (?P<result>\d+))?>")
_MAIN = re.compile(r"func\.func (?:public )?@main\((?P<arguments>.*?)\) -> ")


@dataclass(frozen=True)
class StableHlo:
    """StableHLO module as text."""

    mlir: str  # without operations of the mhlo dialect
    arguments: int  # number of arguments of ``main``
    aliases: dict[int, int]  # result number -> number of the argument with the old value


def read_stablehlo(text: str) -> StableHlo:
    """Parse the output of ``experimental_get_compiler_ir(...)(stage="stablehlo")``."""
    main = _MAIN.search(text)
    aliases = {int(found["result"] or 0): int(found["argument"]) for found in _ALIAS.finditer(text)}
    clean = _ERF.sub(_CHLO_ERF, _COPY.sub(_IDENTITY, text))
    return StableHlo(clean, main["arguments"].count("%arg") if main else 0, aliases)
