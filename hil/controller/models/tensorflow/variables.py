"""The variables that a TensorFlow function uses, and those of them that it assigns: told from its graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hil.errors import CompileFailed

# Operations on a variable that leave it as it is, and those that hand its handle on.
READING = frozenset(
    ("ReadVariableOp", "IsVariableInitializedOp", "ResourceGather", "ResourceGatherNd", "VariableShape")
)
PASSING_ON = frozenset(("Identity", "IdentityN"))
# Operations that call functions -> how many of their inputs come before the functions' own.
_CALLS = {
    "PartitionedCall": 0,
    "StatefulPartitionedCall": 0,
    "While": 0,
    "StatelessWhile": 0,
    "If": 1,
    "StatelessIf": 1,
    "Case": 1,
    "StatelessCase": 1,
}


def new_value(name: str) -> str:
    """What the new value of a variable is called among the outputs."""
    return f"variable {name}"


def captured(concrete: Any) -> list[tuple[str, Any]]:
    """The variables and tensors that a concrete function captured, in order, each with a name of its own.

    Raises:
        CompileFailed: it captured a resource that is no variable.
    """
    items = _items(concrete)
    if any(item.dtype.name == "resource" for _, item in items):
        raise CompileFailed("the function uses a resource that is no variable, such as a table: XLA has none")
    return items


def assigned(concrete: Any) -> dict[str, Any]:
    """The variables that a concrete function may assign, by name, in the order in which it captured them.

    Those are all whose handle goes to anything but a reading operation, in the function or in one that it calls.
    """
    items = _items(concrete)
    graph = concrete.graph.as_graph_def()
    looked_through = _Graph(graph.node, {function.signature.name: function for function in graph.library.function})
    places = concrete.inputs[len(concrete.inputs) - len(items) :]
    return {
        name: item
        for (name, item), place in zip(items, places, strict=True)
        if is_variable(item) and looked_through.writes(place.op.name)
    }


def is_variable(item: Any) -> bool:
    """Whether what a function captured is a variable rather than a tensor."""
    return hasattr(item, "handle")


class _Graph:
    """The nodes of a graph or function, by what they take."""

    def __init__(self, nodes: Iterable[Any], library: Mapping[str, Any]) -> None:
        self._library = library
        self._called: dict[str, _Graph] = {}
        self._takers: dict[str, list[tuple[Any, int]]] = defaultdict(list)
        for node in nodes:
            for place, taken in enumerate(node.input):
                if not taken.startswith("^"):
                    self._takers[taken.partition(":")[0]].append((node, place))

    def writes(self, handle: str) -> bool:
        """Whether anything assigns the variable whose handle this node or argument gives."""
        waiting, seen = [handle], {handle}
        while waiting:
            for node, place in self._takers[waiting.pop()]:
                if node.op in PASSING_ON and node.name not in seen:
                    seen.add(node.name)
                    waiting.append(node.name)
                elif node.op in _CALLS:
                    if any(self._function(name).writes(argument) for name, argument in self._arguments(node, place)):
                        return True
                elif node.op not in READING and node.op not in PASSING_ON:
                    return True
        return False

    def _function(self, name: str) -> _Graph:
        if name not in self._called:
            self._called[name] = _Graph(self._library[name].node_def, self._library)
        return self._called[name]

    def _arguments(self, node: Any, place: int) -> Iterator[tuple[str, str]]:
        """The functions that a node calls, and what each of them calls the node's input."""
        for value in node.attr.values():
            for function in (value.func, *value.list.func):
                if function.name:
                    yield function.name, self._library[function.name].signature.input_arg[place - _CALLS[node.op]].name


def _items(concrete: Any) -> list[tuple[str, Any]]:
    """Name and variable, or else the tensor itself, of all that a function captured."""
    variables = {id(variable.handle): variable for variable in concrete.graph.variables}
    items = [variables.get(id(tensor), tensor) for tensor in concrete.captured_inputs]
    return list(zip(_unique([_name(item) for item in items]), items, strict=True))


def _name(item: Any) -> str:
    return str(item.name).split(":")[0] if is_variable(item) else "captured"


def _unique(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        count = seen[name] = seen.get(name, -1) + 1
        unique.append(f"{name}_{count}" if count else name)
    return unique
