"""Selectors: what a board must be, in a line: ``chip=a53, mem>=1GiB, runtimes in (iree, onnxruntime), !gpu``.

====================================  ======================================================================
``chip=a53``, ``chip!=a53``           the label is, or is not, this; a list is what any of its elements is
``mem>=1GiB``, ``>``, ``<=``, ``<``   numbers with or without a unit, and versions: ``kernel>=6.1``
``arch in (aarch64, x86_64)``         one of these; also ``not in``
``gpu``, ``!gpu``                     it has the label, and that is not false, 0 or empty; or not
``a, b``, ``a and b``, ``a && b``     both
``a or b``, ``a || b``                either
``(a or b), c``, ``!(a or b)``        parentheses; ``not`` is ``!``
``chip="a 53"``, ``'my label'=1``     quoted; a backslash before a quote takes it as it is
====================================  ======================================================================

A comma and ``or`` beside each other need parentheses, for people read them in two ways. What a board has no label for
is not equal to, in, above or below anything, so ``chip!=a53`` is also true of a board without ``chip``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

from hil.errors import UsageError

Labels: TypeAlias = Mapping[str, Any]
Selector: TypeAlias = "Term | Group"
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Term:
    """One condition on one label."""

    label: str
    op: str = "exists"  # ``exists``, ``=``, ``in``, ``>=``, ``<=``, ``>`` or ``<``
    values: tuple[str, ...] = ()  # what it is compared with: none, one, or for ``in`` several
    negated: bool = False  # whether it must not hold

    def matches(self, labels: Labels) -> bool:
        """Whether a board with these labels is so."""
        return self._holds(labels.get(self.label)) is not self.negated

    def _holds(self, value: Any) -> bool:
        if self.op == "exists":
            return is_there(value)
        elements = value if isinstance(value, (list, tuple, set, frozenset)) else () if value is None else (value,)
        if self.op in _ORDER:
            return any(above(one, self.values[0], _ORDER[self.op]) for one in elements)
        return any(map(self._wanted.has, elements))

    @cached_property
    def _wanted(self) -> Wanted:
        return Wanted(self.values)

    def misses(self, labels: Labels) -> list[str]:
        """In words, what keeps a board from matching: ``chip is a72, not a53``; nothing where it matches."""
        if self.matches(labels):
            return []
        value = labels.get(self.label)
        if self.op == "exists":
            return [f"has {self.label}" if self.negated else f"has no {self.label}"]
        if value is None or value == "":
            return [f"{self.label} is empty" if self.negated else f"has no {self.label}"]
        wanted = f", not {self.op + ' ' if self.op in _ORDER else ''}{' or '.join(self.values)}"
        return [f"{self.label} is {value_text(value, self.values)}{'' if self.negated else wanted}"]

    def __invert__(self) -> Term:
        return replace(self, negated=not self.negated)

    def __str__(self) -> str:
        label, values = quoted(self.label), [quoted(one) for one in self.values]
        if self.op == "in":
            return f"{label} {'not ' if self.negated else ''}in ({', '.join(values)})"
        if self.op == "=":
            return f"{label}{'!' if self.negated else ''}={values[0]}"
        compared = "" if self.op == "exists" else self.op + values[0]
        return f"{'!' if self.negated else ''}{label}{compared}"


@dataclass(frozen=True)
class Group:
    """Several conditions: all of them, or any. All of none hold always."""

    parts: tuple[Selector, ...] = ()
    any: bool = False  # whether one of them is enough

    def matches(self, labels: Labels) -> bool:
        """Whether a board with these labels is so."""
        return (any if self.any else all)(part.matches(labels) for part in self.parts)

    def misses(self, labels: Labels) -> list[str]:
        """In words, what keeps a board from matching; of several ways to match, all in one text."""
        misses = [part.misses(labels) for part in self.parts]
        if not self.any:
            return [miss for some in misses for miss in some]
        return [", or ".join(" and ".join(some) for some in misses)] if all(misses) else []

    def __invert__(self) -> Group:
        return Group(tuple(~part for part in self.parts), not self.any)

    def __str__(self) -> str:
        texts = [f"({part})" if isinstance(part, Group) else str(part) for part in self.parts]
        return (" or " if self.any else ", ").join(texts)


@lru_cache(512)
def parse(text: str) -> Selector:
    """Read a selector; "" matches every board. As text (``str``) it is the same whatever spelling it was typed in.

    Raises:
        UsageError: it cannot be read; the message says where.
    """
    return _Parser(text).selector()


def nearest(selector: Selector, boards: Mapping[str, Labels], most: int = 3) -> list[tuple[str, list[str]]]:
    """The boards that come nearest to a selector, by name, with what each misses: those that miss least first."""
    found = [(name, selector.misses(labels)) for name, labels in boards.items()]
    return sorted(found, key=lambda one: (len(one[1]), one[0]))[:most]


_LONGEST, _DEEPEST = 2000, 40
_WORD = r"[^\s\"'()&|,=<>!]+"
_TOKEN = re.compile(
    r"""(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<mark>&&|\|\||==|!=|>=|<=|[=<>!(),])"""
    rf"|(?P<word>{_WORD})|(?P<bad>\S)",
    re.DOTALL,
)
_KEYWORDS = ("and", "or", "not", "in")
_HINT = 'for example "chip=a53, mem>=1GiB, runtimes in (iree, onnxruntime), !gpu"'


class _Token(NamedTuple):
    kind: str  # ``quoted``, ``mark`` (punctuation and keywords) or ``word``
    text: str  # what it says, without quotes
    at: int


class _Parser:
    """A selector's tokens, and a method for each rule of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[_Token] = []
        self._index = 0
        if len(text) > _LONGEST:
            raise UsageError(f"a selector has {len(text):,} characters, of at most {_LONGEST:,}", hint=_HINT)
        for at, character in enumerate(text):
            if not (character.isprintable() or character.isspace()):
                raise self._error(f"{character!r} cannot stand here", at)
        for found in _TOKEN.finditer(text):
            self._tokens.append(self._token(found))

    def _token(self, found: re.Match[str]) -> _Token:
        kind, text = str(found.lastgroup), found[0]
        if kind == "bad":
            what = "a quote is not closed" if text in "\"'" else "`and` is && or a comma, `or` is ||"
            raise self._error(what, found.start())
        if kind == "quoted":
            text = re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL)
        elif text.lower() in _KEYWORDS:
            kind, text = "mark", text.lower()
        return _Token(kind, text, found.start())

    def selector(self) -> Selector:
        """The whole text."""
        tree = self._either(0) if self._tokens else Group()
        if self._next is not None:
            raise self._error("here a condition is over, and something else follows")
        return tree

    def _either(self, depth: int) -> Selector:
        ways, joints = [], set()
        while True:
            parts = [self._one(depth)]
            while found := self._takes(",", "and", "&&"):
                joints.add(found.text)
                parts.append(self._one(depth))
            ways.append(_joined(parts, any=False))
            if not self._takes("or", "||"):
                break
        if "," in joints and len(ways) > 1:
            raise self._error("before this, a comma and `or` need parentheses: (a or b), c")
        return _joined(ways, any=True)

    def _one(self, depth: int) -> Selector:
        if depth > _DEEPEST:
            raise self._error(f"this is nested deeper than {_DEEPEST}")
        if self._takes("!", "not"):
            return ~self._one(depth + 1)
        if self._takes("("):
            tree = self._either(depth + 1)
            self._expects(")", "a parenthesis is not closed")
            return tree
        return self._term()

    def _term(self) -> Term:
        label = self._value("a label's name").text
        if self._takes("=", "=="):
            return Term(label, "=", (self._value("a value").text,))
        if self._takes("!="):
            return Term(label, "=", (self._value("a value").text,), negated=True)
        if found := self._takes(*_ORDER):
            return Term(label, found.text, (self._magnitude(found.text),))
        if self._takes("in"):
            return Term(label, "in", self._values())
        if self._takes("not"):
            self._expects("in", "after a label, `not` needs `in`")
            return Term(label, "in", self._values(), negated=True)
        return Term(label)

    def _values(self) -> tuple[str, ...]:
        self._expects("(", "`in` needs its values in parentheses")
        values = [self._value("a value").text]
        while self._takes(","):
            values.append(self._value("a value").text)
        self._expects(")", "a parenthesis is not closed")
        return tuple(values)

    def _magnitude(self, op: str) -> str:
        _, text, at = self._value("a number or a version")
        if quantity(text)[0] is None:
            if version(text) is None:
                raise self._error(f"{op} compares numbers and versions, which {text!r} is not", at)
            if unit := re.fullmatch("[0-9]+([A-Za-z]+)", text):
                raise self._error(f"{unit[1]} is no unit; B, KB, KiB, MB, MiB, ... are", at)
        return text

    @property
    def _next(self) -> _Token | None:
        return self._tokens[self._index] if self._index < len(self._tokens) else None

    def _takes(self, *marks: str) -> _Token | None:
        """Go over the next token if it is one of these marks or keywords."""
        token = self._next
        if token is None or token.kind != "mark" or token.text not in marks:
            return None
        self._index += 1
        return token

    def _expects(self, mark: str, else_: str) -> None:
        if not self._takes(mark):
            raise self._error(else_)

    def _value(self, what: str) -> _Token:
        """Go over a word or a quoted text, which must come."""
        token = self._next
        if token is None or token.kind == "mark":
            raise self._error(f"{what} is missing")
        self._index += 1
        return token

    def _error(self, what: str, at: int | None = None) -> UsageError:
        """What is wrong at a place, else at the token that comes."""
        if at is None:
            at = self._next.at if self._next else len(self._text.rstrip())
        return UsageError(f"selector {self._text!r}, character {at + 1}: {what}", hint=_HINT)


def _joined(parts: Sequence[Selector], *, any: bool) -> Selector:
    """Several conditions as one, without groups of one and groups in groups of the same kind."""
    flat: list[Selector] = []
    for part in parts:
        flat += part.parts if isinstance(part, Group) and part.any is any else (part,)
    return flat[0] if len(flat) == 1 else Group(tuple(flat), any)


def quoted(text: str) -> str:
    """A label or a value as a selector writes it: in quotes where it would be read otherwise without them."""
    if re.fullmatch(_WORD, text) and text.lower() not in _KEYWORDS:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


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
    """The values that a selector asks for, of which one will do; looked up, for a label may have many elements too."""

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


def value_text(value: Any, beside: Sequence[str] = ()) -> str:
    """A label's value for people; a number in the units of what it stands beside. Of a long list, its beginning."""
    if isinstance(value, (list, tuple, set, frozenset)):
        texts = [value_text(one, beside) for one in value]
        more = [f"{len(texts) - _SAID} more"] if len(texts) > _SAID + 1 else []
        return " and ".join(texts[:_SAID] + more if more else texts) or "empty"
    number = not isinstance(value, bool) and isinstance(value, (int, float)) and 1024 <= value < 1e30
    if number and any(quantity(text)[1] for text in beside):
        power = next(power for power in (40, 30, 20, 10) if value >= 1 << power)
        return f"{value / (1 << power):.4g}{' KMGT'[power // 10]}iB"
    return as_text(value)
