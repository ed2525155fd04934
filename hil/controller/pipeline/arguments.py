"""The library's arguments, looked at before anything is done with them: what is none of the right kind is bad usage."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from hil.controller.pipeline.case import Options
from hil.errors import UsageError, did_you_mean

# More than anybody waits, and less than what clocks and gRPC can count.
_MOST_SECONDS = 1e7
# What an argument must be: in words, and the value as hil has it, or a ValueError where it is something else.
Kind = tuple[str, Callable[[Any], Any]]


def checked(name: str, value: Any, kind: Kind, hint: str = "") -> Any:
    """A value as hil has it.

    Args:
        name: the argument's, for the message.
        value: what was given.
        kind: what it must be.
        hint: what to do instead.

    Raises:
        UsageError: it is something else.
    """
    wanted, make = kind
    try:
        return make(value)
    except (ValueError, TypeError, OverflowError):
        shown = repr(value) if isinstance(value, (str, bytes, Real, type(None))) else _described(value)
        raise UsageError(f"{name} must be {wanted}, got {shown[:80]}", hint=hint) from None


def options_of(given: Mapping[str, Any]) -> Options:
    """The options that :func:`hil.run` was called with.

    Raises:
        UsageError: there is no such option, or one is of the wrong kind.
    """
    for name in given:
        if name not in _OPTIONS:
            raise UsageError(
                f"hil.run has no option {name!r}",
                hint=f"{did_you_mean(name, _OPTIONS)}it takes {', '.join(_OPTIONS)}",
            )
    return Options(
        **{name: checked(name, value, _OPTIONS[name], _HINTS.get(name, "")) for name, value in given.items()}
    )


def _described(value: Any) -> str:
    if isinstance(value, (list, tuple, set, frozenset)) and value:
        kinds = dict.fromkeys(type(item).__name__ for item in value)
        return f"a {type(value).__name__} of {' and '.join(kinds)}"
    return f"a {type(value).__name__}"


def _an(*kinds: type) -> Callable[[Any], Any]:
    def make(value: Any) -> Any:
        # A bool counts as a number in Python, and as a mistake here.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError
        return value

    return make


def _int(value: Any) -> int:
    return int(_an(Integral)(value))


def _float(value: Any) -> float:
    return float(_an(Real)(value))


def _seconds(value: Any) -> float:
    seconds = _float(value)
    if not 0 <= seconds <= _MOST_SECONDS:
        raise ValueError
    return seconds


def _or_none(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else make(value)


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise ValueError
    return tuple(value)


def _path(value: Any) -> Path:
    return Path(_an(str, os.PathLike)(value))


def _tensors(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return _texts(value)
    if not all(isinstance(name, str) for name in value):
        raise ValueError
    return dict(value)


def _sizes(value: Any) -> dict[str, int]:
    return {_an(str)(name): _int(size) for name, size in _an(Mapping)(value).items()}


def _range(value: Any) -> tuple[float, float]:
    low, high = map(_float, _an(Sequence)(value))
    if not float("-inf") < low <= high < float("inf"):
        raise ValueError
    return low, high


TEXT: Kind = ("a text", _an(str))
SECONDS: Kind = (f"a number of seconds from 0 to {_MOST_SECONDS:g}", _seconds)
PATH: Kind = ("a path", _path)
TEXTS: Kind = ("a sequence of texts", _texts)
_COUNT: Kind = ("a whole number", _int)
_NUMBER_OR_NONE: Kind = ("a number or None", _or_none(_float))
_TENSORS: Kind = ("arrays by name, or a sequence of texts as the command line takes them", _tensors)

_OPTIONS: dict[str, Kind] = {
    "runtime": TEXT,
    "compiler": TEXT,
    "function": TEXT,
    "dims": ("sizes by name, such as {'N': 4}", _sizes),
    "inputs": _TENSORS,
    "seed": _COUNT,
    "input_range": ("two numbers, the lower one first", _or_none(_range)),
    "references": TEXTS,
    "expected": _TENSORS,
    "plain_model": ("a path or None", _or_none(_path)),
    "plain_expected": ("arrays by name", lambda value: dict(_an(Mapping)(value))),
    "min_sqnr_db": _NUMBER_OR_NONE,
    "rtol": _NUMBER_OR_NONE,
    "atol": _NUMBER_OR_NONE,
    "allow_blind": TEXTS,
    "iterations": _COUNT,
    "warmup": _COUNT,
    "timeout": SECONDS,
    "compile_flags": TEXTS,
    "debug_ir": ("a path or None", _or_none(_path)),
    "recompute": ("True or False", _an(bool)),
    "no_fallback": ("True or False", _an(bool)),
}
_HINTS = {
    "inputs": "for example {'x': array}, or ['x=x.npy']",
    "expected": "for example {'y': array}, or ['y=y.npy']",
    "references": "for example ['onnxruntime']",
    "compile_flags": "for example ['--iree-opt-level=O2']",
}
