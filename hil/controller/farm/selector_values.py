"""What a label's value is beside what a selector asks for: equal, above, below; numbers, units, versions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{binary}b": (1024 if binary else 1000) ** power
    for power, letter in enumerate("kmgt", 1)
    for binary in ("", "i")
}
_QUANTITY = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([kmgt]i?b|b|)", re.IGNORECASE)
_VERSION = re.compile(r"v?([0-9]+(?:\.[0-9]+)*)")
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0", "")
# Of a CPU's hundred features a message says this many.
_SAID = 4


class Wanted:
    """The values that a selector asks for, of which one will do; looked up, for a label may have many elements too.

    Args:
        values: as they were typed.
    """

    def __init__(self, values: Sequence[str]) -> None:
        self._texts = frozenset(values)
        self._lower = frozenset(value.lower() for value in values)
        found = [quantity(value) for value in values]
        self._numbers = frozenset(number for number, _ in found if number is not None)
        self._with_unit = frozenset(number for number, unit in found if number is not None and unit)

    def has(self, value: Any) -> bool:
        """Whether one element of a label is one of them: texts as they are, numbers by what they amount to."""
        if isinstance(value, bool):
            return not self._lower.isdisjoint(_TRUE if value else _FALSE)
        if isinstance(value, (int, float)):
            return value in self._numbers
        text = as_text(value)
        mine, unit = quantity(text)
        return text in self._texts or (mine is not None and mine in (self._numbers if unit else self._with_unit))


def above(value: Any, wanted: str, compare: Callable[[Any, Any], bool]) -> bool:
    """Whether one element of a label compares so with what is asked for; False where they cannot be compared.

    Numbers compare with numbers, and with a text where either has a unit (``512MiB``); else texts are versions:
    ``6.10`` is above ``6.9``, and ``6.1`` is ``6.1.0``.
    """
    if isinstance(value, bool):
        return False
    number, unit = quantity(wanted)
    mine, my_unit = (value, "") if isinstance(value, (int, float)) else quantity(as_text(value))
    if unit or my_unit or (number is not None and mine is value):
        return mine is not None and number is not None and compare(mine, number)
    versions = version(as_text(value)), version(wanted)
    return None not in versions and compare(*versions)


@lru_cache(4096)
def quantity(text: str) -> tuple[float | None, str]:
    """``1.5 GiB`` -> its number of bytes and ``gib``; no number where it is none."""
    found = _QUANTITY.fullmatch(text.strip())
    if not found:
        return None, ""
    unit = found[2].lower()
    return float(found[1]) * _UNITS[unit], unit


@lru_cache(4096)
def version(text: str) -> tuple[float, ...] | None:
    """``6.1.0-23-amd64`` -> (6, 1): its leading numbers, without noughts at the end; None where it has none."""
    found = _VERSION.match(text.strip())
    if not found:
        return None
    parts = [float(part) for part in found[1].split(".")]
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


def is_there(value: Any) -> bool:
    """Whether a label says yes: it is there, and neither false, 0 nor empty."""
    return bool(value) and not (isinstance(value, str) and value.strip().lower() in _FALSE)


def as_text(value: Any) -> str:
    """A label's value as people write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def said(value: Any, beside: Sequence[str] = ()) -> str:
    """A label's value for people; a number in the units of what it stands beside. Of a long list, its beginning."""
    if isinstance(value, (list, tuple, set, frozenset)):
        texts = [said(one, beside) for one in value]
        more = [f"{len(texts) - _SAID} more"] if len(texts) > _SAID + 1 else []
        return " and ".join(texts[:_SAID] + more if more else texts) or "empty"
    number = not isinstance(value, bool) and isinstance(value, (int, float)) and 1024 <= value < 1e30
    if number and any(quantity(text)[1] for text in beside):
        power = next(power for power in (40, 30, 20, 10) if value >= 1 << power)
        return f"{value / (1 << power):.4g}{' KMGT'[power // 10]}iB"
    return as_text(value)
