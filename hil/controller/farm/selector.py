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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

from hil.controller.farm.selector_text import Reader, Token, quoted
from hil.controller.farm.selector_values import Wanted, above, is_there, quantity, said, version

Labels: TypeAlias = Mapping[str, Any]
Tree: TypeAlias = "Term | All | Either"
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_DEEPEST = 40


@dataclass(frozen=True)
class Term:
    """One condition on one label.

    Attributes:
        label: its name.
        op: ``exists``, ``=``, ``in``, ``>=``, ``<=``, ``>`` or ``<``.
        values: what it is compared with: none, one, or for ``in`` several.
        negated: whether it must not hold.
    """

    label: str
    op: str = "exists"
    values: tuple[str, ...] = ()
    negated: bool = False

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
        """In words, what a board lacks; nothing where it matches."""
        if self.matches(labels):
            return []
        value = labels.get(self.label)
        if self.op == "exists":
            return [f"has {self.label}" if self.negated else f"has no {self.label}"]
        if value is None or value == "":
            return [f"{self.label} is empty" if self.negated else f"has no {self.label}"]
        wanted = f", not {self.op + ' ' if self.op in _ORDER else ''}{' or '.join(self.values)}"
        return [f"{self.label} is {said(value, self.values)}{'' if self.negated else wanted}"]

    def __invert__(self) -> Term:
        return Term(self.label, self.op, self.values, not self.negated)

    def __str__(self) -> str:
        label, values = quoted(self.label), [quoted(one) for one in self.values]
        if self.op == "in":
            return f"{label} {'not ' if self.negated else ''}in ({', '.join(values)})"
        if self.op == "=":
            return f"{label}{'!' if self.negated else ''}={values[0]}"
        compared = "" if self.op == "exists" else self.op + values[0]
        return f"{'!' if self.negated else ''}{label}{compared}"


@dataclass(frozen=True)
class All:
    """All of several conditions; of none, always."""

    parts: tuple[Tree, ...] = ()

    def matches(self, labels: Labels) -> bool:
        """Whether a board with these labels is all of them."""
        return all(part.matches(labels) for part in self.parts)

    def misses(self, labels: Labels) -> list[str]:
        """In words, what a board lacks."""
        return [miss for part in self.parts for miss in part.misses(labels)]

    def __invert__(self) -> Either:
        return Either(tuple(~part for part in self.parts))

    def __str__(self) -> str:
        return ", ".join(f"({part})" if isinstance(part, Either) else str(part) for part in self.parts)


@dataclass(frozen=True)
class Either:
    """At least one of several conditions."""

    parts: tuple[Tree, ...]

    def matches(self, labels: Labels) -> bool:
        """Whether a board with these labels is any of them."""
        return any(part.matches(labels) for part in self.parts)

    def misses(self, labels: Labels) -> list[str]:
        """In words, what a board lacks: one text with each of the ways to match."""
        ways = [" and ".join(part.misses(labels)) for part in self.parts]
        return [", or ".join(ways)] if all(ways) else []

    def __invert__(self) -> All:
        return All(tuple(~part for part in self.parts))

    def __str__(self) -> str:
        return " or ".join(f"({part})" if isinstance(part, All) else str(part) for part in self.parts)


@dataclass(frozen=True)
class Selector:
    """What a board must be. As text it reads the same whatever spelling it was typed in.

    Attributes:
        tree: its conditions.
        text: what was typed.
    """

    tree: Tree
    text: str = field(default="", compare=False)

    def matches(self, labels: Labels) -> bool:
        """Whether a board with these labels will do."""
        return self.tree.matches(labels)

    def misses(self, labels: Labels) -> list[str]:
        """In words, what keeps a board from matching: ``chip is a72, not a53``; nothing where it matches."""
        return self.tree.misses(labels)

    def __invert__(self) -> Selector:
        """The boards that this one does not match."""
        return Selector(~self.tree)

    def __str__(self) -> str:
        return str(self.tree)


@lru_cache(512)
def parse(text: str) -> Selector:
    """Read a selector; "" matches every board.

    Raises:
        UsageError: it cannot be read; the message says where.
    """
    reader = Reader(text)
    tree = All() if reader.next is None else _either(reader, 0)
    if reader.next is not None:
        raise reader.error("here a condition is over, and something else follows")
    return Selector(tree, text)


def nearest(selector: Selector, boards: Mapping[str, Labels], most: int = 3) -> list[tuple[str, list[str]]]:
    """The boards that come nearest to a selector, by name, with what each misses: those that miss least first."""
    found = [(name, selector.misses(labels)) for name, labels in boards.items()]
    return sorted(found, key=lambda one: (len(one[1]), one[0]))[:most]


def _either(reader: Reader, depth: int) -> Tree:
    parts, comma = [], False
    while True:
        part, with_comma = _all(reader, depth)
        parts.append(part)
        comma = comma or with_comma
        if not reader.takes("or", "||"):
            break
    if comma and len(parts) > 1:
        raise reader.error("before this, a comma and `or` need parentheses: (a or b), c")
    flat = [one for part in parts for one in (part.parts if isinstance(part, Either) else (part,))]
    return flat[0] if len(flat) == 1 else Either(tuple(flat))


def _all(reader: Reader, depth: int) -> tuple[Tree, bool]:
    parts, comma = [_one(reader, depth)], False
    while found := reader.takes(",", "and", "&&"):
        comma = comma or found.text == ","
        parts.append(_one(reader, depth))
    flat = [one for part in parts for one in (part.parts if isinstance(part, All) else (part,))]
    return (flat[0] if len(flat) == 1 else All(tuple(flat))), comma


def _one(reader: Reader, depth: int) -> Tree:
    if depth > _DEEPEST:
        raise reader.error(f"this is nested deeper than {_DEEPEST}")
    if reader.takes("!", "not"):
        return ~_one(reader, depth + 1)
    if reader.takes("("):
        tree = _either(reader, depth + 1)
        reader.expects(")", "a parenthesis is not closed")
        return tree
    return _term(reader)


def _term(reader: Reader) -> Term:
    label = reader.value("a label's name").text
    if reader.takes("=", "=="):
        return Term(label, "=", (reader.value("a value").text,))
    if reader.takes("!="):
        return Term(label, "=", (reader.value("a value").text,), negated=True)
    if found := reader.takes(*_ORDER):
        return Term(label, found.text, (_magnitude(reader, found.text),))
    if reader.takes("in"):
        return Term(label, "in", _values(reader))
    if reader.takes("not"):
        reader.expects("in", "after a label, `not` needs `in`")
        return Term(label, "in", _values(reader), negated=True)
    return Term(label)


def _values(reader: Reader) -> tuple[str, ...]:
    reader.expects("(", "`in` needs its values in parentheses")
    values = [reader.value("a value").text]
    while reader.takes(","):
        values.append(reader.value("a value").text)
    reader.expects(")", "a parenthesis is not closed")
    return tuple(values)


def _magnitude(reader: Reader, op: str) -> str:
    found: Token = reader.value("a number or a version")
    if quantity(found.text)[0] is None and version(found.text) is None:
        raise reader.error(f"{op} compares numbers and versions, which {found.text!r} is not", at=found)
    if quantity(found.text)[0] is None and (unit := re.fullmatch("[0-9]+([A-Za-z]+)", found.text)):
        raise reader.error(f"{unit[1]} is no unit; B, KB, KiB, MB, MiB, ... are", at=found)
    return found.text
