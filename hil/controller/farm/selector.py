"""Selectors: board requirements in one line: ``chip=a53, mem>=1GiB, runtimes in (iree, onnxruntime), !gpu``.

====================================  ======================================================================
``chip=a53``, ``chip!=a53``           the label is, or is not, this value; a list matches by any element
``mem>=1GiB``, ``>``, ``<=``, ``<``   numbers with or without a unit, and versions: ``kernel>=6.1``
``arch in (aarch64, x86_64)``         any of these values; also ``not in``
``gpu``, ``!gpu``                     the label exists and is not false, 0 or empty; or the opposite
``a, b``, ``a and b``, ``a && b``     both
``a or b``, ``a || b``                either
``(a or b), c``, ``!(a or b)``        parentheses; ``not`` is ``!``
``chip="a 53"``, ``'my label'=1``     quoted; a backslash escapes a quote
====================================  ======================================================================

A selector with both a comma and ``or`` needs parentheses, because readers may not know the precedence. If a label is
missing, ``=``, ``<`` and similar comparisons are false. ``!=`` is the opposite of ``=``, so ``chip!=a53`` also matches
a board without ``chip``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

from hil.errors import UsageError, did_you_mean

Labels: TypeAlias = Mapping[str, Any]
Selector: TypeAlias = "Term | TermGroup"
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Term:
    """Condition on one label."""

    label: str
    op: str = "exists"  # ``exists``, ``=``, ``in``, ``>=``, ``<=``, ``>`` or ``<``
    values: tuple[str, ...] = ()  # operands: none, a single value, or several for ``in``
    negated: bool = False  # inverts the result

    def matches(self, labels: Labels) -> bool:
        """Return whether a board with these labels matches."""
        return self._is_satisfied(labels.get(self.label)) is not self.negated

    def _is_satisfied(self, value: Any) -> bool:
        if self.op == "exists":
            return is_there(value)
        elements = value if isinstance(value, (list, tuple, set, frozenset)) else () if value is None else (value,)
        if self.op in _ORDER:
            return any(compare_or_false(one, self.values[0], _ORDER[self.op]) for one in elements)
        return any(map(self._value_set.has, elements))

    @cached_property
    def _value_set(self) -> ValueSet:
        return ValueSet(self.values)

    def misses(self, labels: Labels) -> list[str]:
        """Return the reasons for a mismatch, such as ``chip is a72, not a53``; empty if the board matches."""
        if self.matches(labels):
            return []
        value = labels.get(self.label)
        if self.op == "exists":
            return [f"has {self.label}" if self.negated else f"has no {self.label}"]
        if value is None or value == "":
            return [f"{self.label} is empty" if self.negated else f"has no {self.label}"]
        wanted = f", not {self.op + ' ' if self.op in _ORDER else ''}{' or '.join(self.values)}"
        return [f"{self.label} is {format_value(value, self.values)}{'' if self.negated else wanted}"]

    @property
    def names(self) -> set[str]:
        """Names of the labels in the condition."""
        return {self.label}

    def __invert__(self) -> Term:
        return replace(self, negated=not self.negated)

    def __str__(self) -> str:
        label, values = quote_label(self.label), [quote_label(one) for one in self.values]
        if self.op == "in":
            return f"{label} {'not ' if self.negated else ''}in ({', '.join(values)})"
        if self.op == "=":
            return f"{label}{'!' if self.negated else ''}={values[0]}"
        compared = "" if self.op == "exists" else self.op + values[0]
        return f"{'!' if self.negated else ''}{label}{compared}"


@dataclass(frozen=True)
class TermGroup:
    """Conjunction or disjunction of conditions. An empty conjunction always matches."""

    parts: tuple[Selector, ...] = ()
    any: bool = False  # True for a disjunction

    def matches(self, labels: Labels) -> bool:
        """Return whether a board with these labels matches."""
        return (any if self.any else all)(part.matches(labels) for part in self.parts)

    def misses(self, labels: Labels) -> list[str]:
        """Return the reasons for a mismatch. A disjunction returns one text for all alternatives."""
        misses = [part.misses(labels) for part in self.parts]
        if not self.any:
            return [miss for some in misses for miss in some]
        return [", or ".join(" and ".join(some) for some in misses)] if all(misses) else []

    @property
    def names(self) -> set[str]:
        """Names of the labels in the conditions."""
        return {name for part in self.parts for name in part.names}

    def __invert__(self) -> TermGroup:
        return TermGroup(tuple(~part for part in self.parts), not self.any)

    def __str__(self) -> str:
        texts = [f"({part})" if isinstance(part, TermGroup) else str(part) for part in self.parts]
        return (" or " if self.any else ", ").join(texts)


@lru_cache(512)
def parse(text: str) -> Selector:
    """Parse a selector; "" matches every board. ``str`` of the result is a canonical spelling.

    Raises:
        UsageError: the selector is invalid; the message contains the position.
    """
    return _SelectorParser(text).parse_selector()


def find_nearest(selector: Selector, boards: Mapping[str, Labels], most: int = 3) -> list[tuple[str, list[str]]]:
    """Return the ``most`` boards with the fewest mismatches: name and reasons, best first."""
    found = [(name, selector.misses(labels)) for name, labels in boards.items()]
    return sorted(found, key=lambda one: (len(one[1]), one[0]))[:most]


def suggest_labels(selector: Selector, boards: Iterable[Labels]) -> str:
    """Return the start of a hint for labels that no board has: ``did you mean 'chip'? ``. "" without similar labels."""
    known = {name for labels in boards for name in labels}
    return "".join(did_you_mean(name, known) for name in sorted(selector.names - known))


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
    text: str  # without quotes
    at: int


class _SelectorParser:
    """Recursive descent parser of a selector, with a method for every grammar rule."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[_Token] = []
        self._index = 0
        if len(text) > _LONGEST:
            raise UsageError(f"selector has {len(text):,} characters, maximum {_LONGEST:,}", hint=_HINT)
        for at, character in enumerate(text):
            if not (character.isprintable() or character.isspace()):
                raise self._make_error(f"invalid character {character!r}", at)
        for found in _TOKEN.finditer(text):
            self._tokens.append(self._make_token(found))

    def _make_token(self, found: re.Match[str]) -> _Token:
        kind, text = str(found.lastgroup), found[0]
        if kind == "bad":
            what = "unclosed quote" if text in "\"'" else "use && or a comma for `and`, || for `or`"
            raise self._make_error(what, found.start())
        if kind == "quoted":
            text = re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL)
        elif text.lower() in _KEYWORDS:
            kind, text = "mark", text.lower()
        return _Token(kind, text, found.start())

    def parse_selector(self) -> Selector:
        """Parse the whole text."""
        tree = self._parse_disjunction(0) if self._tokens else TermGroup()
        if self._next_token is not None:
            raise self._make_error("unexpected text after the condition")
        return tree

    def _parse_disjunction(self, depth: int) -> Selector:
        ways, joints = [], set()
        while True:
            parts = [self._parse_condition(depth)]
            while found := self._accept_mark(",", "and", "&&"):
                joints.add(found.text)
                parts.append(self._parse_condition(depth))
            ways.append(_join_parts(parts, any=False))
            if not self._accept_mark("or", "||"):
                break
        if "," in joints and len(ways) > 1:
            raise self._make_error("mixing a comma and `or` requires parentheses: (a or b), c")
        return _join_parts(ways, any=True)

    def _parse_condition(self, depth: int) -> Selector:
        if depth > _DEEPEST:
            raise self._make_error(f"nesting exceeds {_DEEPEST} levels")
        if self._accept_mark("!", "not"):
            return ~self._parse_condition(depth + 1)
        if self._accept_mark("("):
            tree = self._parse_disjunction(depth + 1)
            self._expect_mark(")", "unclosed parenthesis")
            return tree
        return self._parse_term()

    def _parse_term(self) -> Term:
        label = self._parse_value("label name").text
        if self._accept_mark("=", "=="):
            return Term(label, "=", (self._parse_value("value").text,))
        if self._accept_mark("!="):
            return Term(label, "=", (self._parse_value("value").text,), negated=True)
        if found := self._accept_mark(*_ORDER):
            return Term(label, found.text, (self._parse_magnitude(found.text),))
        if self._accept_mark("in"):
            return Term(label, "in", self._parse_values())
        if self._accept_mark("not"):
            self._expect_mark("in", "expected `in` after `not`")
            return Term(label, "in", self._parse_values(), negated=True)
        return Term(label)

    def _parse_values(self) -> tuple[str, ...]:
        self._expect_mark("(", "`in` requires values in parentheses")
        values = [self._parse_value("value").text]
        while self._accept_mark(","):
            values.append(self._parse_value("value").text)
        self._expect_mark(")", "unclosed parenthesis")
        return tuple(values)

    def _parse_magnitude(self, op: str) -> str:
        _, text, at = self._parse_value("number or version")
        if parse_quantity(text)[0] is None:
            if parse_version(text) is None:
                raise self._make_error(f"{op} requires a number or version, got {text!r}", at)
            if unit := re.fullmatch("[0-9]+([A-Za-z]+)", text):
                raise self._make_error(f"unknown unit {unit[1]}: expected B, KB, KiB, MB, MiB, ...", at)
        return text

    @property
    def _next_token(self) -> _Token | None:
        return self._tokens[self._index] if self._index < len(self._tokens) else None

    def _accept_mark(self, *marks: str) -> _Token | None:
        """Consume the next token if it is one of these marks or keywords."""
        token = self._next_token
        if token is None or token.kind != "mark" or token.text not in marks:
            return None
        self._index += 1
        return token

    def _expect_mark(self, mark: str, else_: str) -> None:
        if not self._accept_mark(mark):
            raise self._make_error(else_)

    def _parse_value(self, what: str) -> _Token:
        """Consume a word or a quoted string. Raises UsageError if the next token is neither."""
        token = self._next_token
        if token is None or token.kind == "mark":
            raise self._make_error(f"missing {what}")
        self._index += 1
        return token

    def _make_error(self, what: str, at: int | None = None) -> UsageError:
        """Return a syntax error at a position; the default is the next token."""
        if at is None:
            at = self._next_token.at if self._next_token else len(self._text.rstrip())
        return UsageError(f"selector {self._text!r}, character {at + 1}: {what}", hint=_HINT)


def _join_parts(parts: Sequence[Selector], *, any: bool) -> Selector:
    """Combine conditions into a group.

    Flatten nested groups of the same kind, and return a single condition unchanged.
    """
    flat: list[Selector] = []
    for part in parts:
        flat += part.parts if isinstance(part, TermGroup) and part.any is any else (part,)
    return flat[0] if len(flat) == 1 else TermGroup(tuple(flat), any)


def quote_label(text: str) -> str:
    """Return a label or value in selector syntax, quoted if necessary."""
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
# Maximum list elements in a message; a CPU label has up to a hundred features.
_MAX_LISTED = 4


class ValueSet:
    """Accepted values of a label, stored as sets for fast lookup, because labels may have many elements."""

    def __init__(self, values: Sequence[str]) -> None:
        self._texts = frozenset(values)
        self._lower = frozenset(value.lower() for value in values)
        found = [parse_quantity(value) for value in values]
        self._numbers = frozenset(number for number, _ in found if number is not None)
        self._with_unit = frozenset(number for number, unit in found if number is not None and unit)

    def has(self, value: Any) -> bool:
        """Return True if an element of a label is in the set. Strings match exactly, numbers by value."""
        if isinstance(value, bool):
            return not self._lower.isdisjoint(_TRUE if value else _FALSE)
        if isinstance(value, (int, float)):
            return value in self._numbers
        text = as_text(value)
        mine, unit = parse_quantity(text)
        return text in self._texts or (mine is not None and mine in (self._numbers if unit else self._with_unit))


def compare_or_false(value: Any, wanted: str, compare: Callable[[Any, Any], bool]) -> bool:
    """Return ``compare(value, wanted)``, or False if the values cannot be compared.

    Numbers compare with numbers. A string compares as a number if either side has a unit
    (``512MiB``). Otherwise strings are versions: ``6.10`` is above ``6.9``, and ``6.1`` equals ``6.1.0``.
    """
    if isinstance(value, bool):
        return False
    number, unit = parse_quantity(wanted)
    mine, my_unit = (value, "") if isinstance(value, (int, float)) else parse_quantity(as_text(value))
    if unit or my_unit or (number is not None and mine is value):
        return mine is not None and number is not None and compare(mine, number)
    versions = parse_version(as_text(value)), parse_version(wanted)
    return None not in versions and compare(*versions)


@lru_cache(4096)
def parse_quantity(text: str) -> tuple[float | None, str]:
    """Parse a quantity: ``1.5 GiB`` -> number of bytes and ``gib``. Returns (None, "") for an invalid text."""
    found = _QUANTITY.fullmatch(text.strip())
    if not found:
        return None, ""
    unit = found[2].lower()
    return float(found[1]) * _UNITS[unit], unit


@lru_cache(4096)
def parse_version(text: str) -> tuple[float, ...] | None:
    """Parse leading version numbers, without trailing zeros: ``6.1.0-23-amd64`` -> (6, 1). Other texts give None."""
    found = _VERSION.match(text.strip())
    if not found:
        return None
    parts = [float(part) for part in found[1].split(".")]
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


def is_there(value: Any) -> bool:
    """Return True if a label is set, and not false, 0 or empty."""
    return bool(value) and not (isinstance(value, str) and value.strip().lower() in _FALSE)


def as_text(value: Any) -> str:
    """Return a label's value as text."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_value(value: Any, beside: Sequence[str] = ()) -> str:
    """Format a label's value for display. Long lists are cut.

    Args:
        beside: values of the comparison. If one of these values has a unit, large numbers are shown in binary units.
    """
    if isinstance(value, (list, tuple, set, frozenset)):
        texts = [format_value(one, beside) for one in value]
        more = [f"{len(texts) - _MAX_LISTED} more"] if len(texts) > _MAX_LISTED + 1 else []
        return " and ".join(texts[:_MAX_LISTED] + more if more else texts) or "empty"
    number = not isinstance(value, bool) and isinstance(value, (int, float)) and 1024 <= value < 1e30
    if number and any(parse_quantity(text)[1] for text in beside):
        power = next(power for power in (40, 30, 20, 10) if value >= 1 << power)
        return f"{value / (1 << power):.4g}{' KMGT'[power // 10]}iB"
    return as_text(value)
