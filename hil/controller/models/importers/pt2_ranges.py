"""Ranges of a PyTorch program's integer inputs, where they are indices: random ones must not point outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Operators that hand on the values of their first argument, all or some of them.
_SAME_VALUES = frozenset(
    "_to_copy to clone contiguous detach alias view reshape flatten squeeze unsqueeze transpose permute t expand "
    "repeat slice select narrow split chunk unbind flip roll getitem".split()
)
# Operator -> where its indices are among its arguments, and where the dimension that they count; None is the first.
_INDEXED = {
    "embedding": (1, None),
    "embedding_bag": (1, None),
    "_embedding_bag": (1, None),
    "_embedding_bag_forward_only": (1, None),
    "index_select": (2, 1),
    "index_add": (2, 1),
    "index_copy": (2, 1),
    "index_fill": (2, 1),
    "gather": (2, 1),
    "scatter": (2, 1),
    "scatter_add": (2, 1),
    "scatter_reduce": (2, 1),
}


def known_ranges(inputs: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Input -> (lowest, highest) value of those that are used as indices.

    Args:
        inputs: name -> node of the graph.
    """
    found = {name: list(_sizes(node, set())) for name, node in inputs.items()}
    return {name: (0, min(sizes) - 1) for name, sizes in found.items() if sizes and min(sizes) > 0}


def _sizes(node: Any, seen: set[Any]) -> Iterator[int]:
    """The sizes of what a node's values index."""
    for user in node.users:
        if user.op != "call_function" or user in seen:
            continue
        seen.add(user)
        name = _name(user.target)
        if name in _SAME_VALUES and user.args and user.args[0] is node:
            yield from _sizes(user, seen)
        elif name in _INDEXED:
            place, axis = _INDEXED[name]
            if len(user.args) > place and user.args[place] is node:
                yield from _size(user.args[0], 0 if axis is None else user.args[axis])
        elif name in ("index", "index_put", "_unsafe_index") and len(user.args) > 1:
            for axis, index in enumerate(user.args[1]):
                if index is node:
                    yield from _size(user.args[0], axis)


def _size(indexed: Any, axis: Any) -> Iterator[int]:
    value = indexed.meta.get("val")
    if value is not None and isinstance(axis, int) and len(value.shape) and isinstance(value.shape[axis], int):
        yield value.shape[axis]


def _name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    name = str(schema.name).rpartition("::")[2] if schema is not None else str(getattr(target, "__name__", ""))
    return name.rstrip("_") if not name.startswith("__") else name
