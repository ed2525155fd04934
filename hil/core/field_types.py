"""Check the types of values from plugin code."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hil.core.guarded import format_value


def is_a(*kinds: type) -> Callable[[Any], None]:
    """Return a function that checks the type of a value and of its dataclass fields.

    The function raises TypeError unless the value has one of the types and each field has its declared type.
    """

    def check(value: Any) -> None:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise TypeError(
                f"it returned {format_value(value)}: expected {' or '.join(kind.__name__ for kind in kinds)}"
            )
        if dataclasses.is_dataclass(value):
            check_fields(value)

    return check


def check_fields(thing: Any) -> None:
    """Check each field against its declared type. Raises TypeError on a mismatch."""
    kind: type = type(thing)
    for name, hint in _read_hints(kind).items():
        value = getattr(thing, name)
        if not _is_fitting(value, hint):
            raise TypeError(f"{name} is {format_value(value)}: expected {_format_hint(hint)}")


@functools.cache
def _read_hints(kind: type) -> dict[str, Any]:
    unknown: dict[str, Any] = {}
    while True:
        try:
            hints = get_type_hints(kind, localns=unknown)
            break
        except NameError as error:  # imported only for type checkers
            unknown[str(error.name)] = Any
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _is_fitting(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or hint is None:
        return hint is Any or value is None
    if origin in (Union, types.UnionType):
        return any(_is_fitting(value, one) for one in args)
    if origin is Literal:
        return value in args
    if origin is Callable or getattr(hint, "_is_protocol", False):
        return callable(value)
    if origin is tuple:
        if args[-1] is not Ellipsis:
            return isinstance(value, tuple) and len(value) == len(args) and all(map(_is_fitting, value, args))
        return isinstance(value, tuple | list) and all(_is_fitting(one, args[0]) for one in value)
    if origin in (Mapping, dict):
        return isinstance(value, Mapping) and all(
            _is_fitting(k, args[0]) and _is_fitting(v, args[1]) for k, v in value.items()
        )
    if origin is Sequence:
        return (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and all(_is_fitting(one, args[0]) for one in value)
        )
    kind = origin or hint
    if not isinstance(kind, type):
        return True
    if kind is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return False
    return not dataclasses.is_dataclass(kind) or all(
        _is_fitting(getattr(value, k), h) for k, h in _read_hints(kind).items()
    )


def _format_hint(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
