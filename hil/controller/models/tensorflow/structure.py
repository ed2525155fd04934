"""Nested arguments and results (dict, list, tuple) as flat tensors, and back: what ``tf.nest`` does, without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Structure = Any


def leaves(structure: Structure, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, in the order of ``tf.nest.flatten``: dicts by sorted keys; None is a leaf.

    Args:
        structure: dicts, lists and tuples (named ones too) of anything else.
        path: of the structure itself; a leaf of ``{"a": [x]}`` is ``a.0``.
    """
    for name, item in _items(structure):
        yield from leaves(item, f"{path}.{name}" if path else str(name))
    if not _is_nested(structure):
        yield path, structure


def replace_leaves(structure: Structure, make: Callable[[Any], Any]) -> Structure:
    """The same structure with other leaves, made in the order of :func:`leaves`."""
    if not _is_nested(structure):
        return make(structure)
    made = {name: replace_leaves(item, make) for name, item in _items(structure)}
    if isinstance(structure, Mapping):
        return {name: made[name] for name in structure}
    if hasattr(structure, "_fields"):
        return type(structure)(**made)
    return type(structure)(made.values())


def numbered(structure: Structure, counts: Callable[[Any], bool] = lambda leaf: leaf is not None) -> Structure:
    """The same structure with the number of each leaf that counts in its place; the others stay as they are."""
    numbers = iter(range(sum(map(counts, (leaf for _, leaf in leaves(structure))))))
    return replace_leaves(structure, lambda leaf: next(numbers) if counts(leaf) else leaf)


def restore(structure: Structure, values: Sequence[Any]) -> Structure:
    """Values in the places that :func:`numbered` gave them (leaves that are no number stay)."""
    return replace_leaves(structure, lambda leaf: values[leaf] if type(leaf) is int else leaf)


def _is_nested(structure: Structure) -> bool:
    return isinstance(structure, (Mapping, list, tuple))


def _items(structure: Structure) -> Iterator[tuple[Any, Structure]]:
    if isinstance(structure, Mapping):
        yield from ((name, structure[name]) for name in sorted(structure))
    elif hasattr(structure, "_fields"):
        yield from zip(structure._fields, structure, strict=True)
    elif isinstance(structure, (list, tuple)):
        yield from enumerate(structure)
