"""Parse and check criteria such as ``--accept "logits: top1>=0.99, kl<=1e-4"``.

The grammar is ``[OUTPUT:] CRITERION, ...``. A criterion is ``NAME``, ``NAME OP VALUE``, ``NAME(KEY=VALUE, ...) OP
VALUE`` or ``python:FILE:FUNCTION [OP VALUE]``. OUTPUT is a file name pattern; without OUTPUT, the text applies to every
output. Names are the keys of :data:`hil.compare.measures.MEASURES`. An output must meet all criteria that apply to it.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from hil.compare.measures import ALIASES, Measure, find_measure, measure_names
from hil.core.tensors import Array
from hil.errors import UsageError, VacuousTolerance, did_you_mean

# A user's function takes the board's and the reference's array. It returns a bool, a number or (value, reason).
Function = Callable[[Array, Array], Any]
LoadFunction = Callable[[str, str], Function]

MAX_TEXT = 10_000
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
# An output's name may contain colons, so the name ends at the first colon that precedes a criterion.
_HEAD = re.compile(r"(?:(?P<output>.+?):\s*)??(?P<body>(?:python:\S|[A-Za-z_]\w*\s*(?:[(<>=!,]|$)).*)", re.DOTALL)
_NAME = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*(?:\((?P<arguments>[^()]*)\))?\s*")
_FUNCTION = re.compile(r"\s*python:(?P<file>[^,]+):(?P<name>[A-Za-z_]\w*)\s*(?=[<>=,]|$)")
_BOUND = re.compile(r"(?P<operator>>=|<=|>|<)\s*(?P<value>[^\s,]+)\s*")


@dataclass(frozen=True)
class Criterion:
    """Condition on an output."""

    text: str  # text for messages: ``top1>=0.99``
    measure: Measure | None  # None for a user's function
    arguments: Mapping[str, Any] = field(default_factory=dict)
    operator: str = ""  # "" if a function returns the verdict itself
    bound: float | None = None
    function: Function | None = None

    @property
    def is_positional(self) -> bool:
        """True if the criterion compares elements with the same index."""
        return self.measure is not None and self.measure.is_positional

    def accepts(self, value: float) -> bool:
        """Return True if a value is within the bound; False for NaN."""
        return self.bound is not None and _OPERATORS[self.operator](value, self.bound)


@dataclass(frozen=True)
class Rule:
    """Criteria of one ``--accept`` text, and the outputs that they apply to."""

    output: str  # file name pattern; "" matches every output
    criteria: tuple[Criterion, ...]

    def applies_to(self, name: str) -> bool:
        """Return True if an output's name matches the pattern."""
        return not self.output or name == self.output or fnmatchcase(name, self.output)


def select_criteria(name: str, rules: Iterable[Rule]) -> tuple[Criterion, ...]:
    """Return the criteria that apply to an output."""
    return tuple(criterion for rule in rules if rule.applies_to(name) for criterion in rule.criteria)


def check_outputs(rules: Iterable[Rule], names: Sequence[str]) -> None:
    """Check that each rule matches an output. Raises UsageError otherwise."""
    for rule in rules:
        if not any(map(rule.applies_to, names)):
            raise UsageError(
                f"criterion for unknown output {rule.output!r}",
                hint=f"{did_you_mean(rule.output, names)}outputs: {', '.join(names)}",
            )


def parse_accept(
    texts: Sequence[str], load_function: LoadFunction | None = None, option: str = "--accept"
) -> tuple[Rule, ...]:
    """Parse the texts of ``--accept``.

    Args:
        load_function: loads a function by file path and function name; None if functions are not allowed.
        option: name of the option in messages.

    Raises:
        UsageError: a text does not match the grammar; the message contains the position of the error.
        VacuousTolerance: a criterion cannot fail, such as ``top1>=0``.
    """
    return tuple(_CriterionParser(text, load_function, option).parse() for text in texts)


def resolve_files(text: str, folder: Path) -> str:
    """Return the text with its Python file as an absolute path. Relative paths start at ``folder``."""
    return _FUNCTION.sub(lambda found: found[0].replace(found["file"], str(folder.absolute() / found["file"]), 1), text)


def name_outputs(texts: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Expand each text into a copy for every matching output, prefixed with the output's name."""
    found = []
    for text in texts:
        head = _HEAD.fullmatch(text.strip())
        if head is not None:
            rule = Rule((head["output"] or "").strip(), ())
            found += [f"{name}: {head['body']}" for name in names if rule.applies_to(name)]
    return tuple(found)


def select_output_texts(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the texts that name an output."""
    heads = ((text, _HEAD.fullmatch(text.strip())) for text in texts)
    return tuple(text for text, head in heads if head is not None and head["output"])


def list_function_files(texts: Sequence[str]) -> list[str]:
    """Return the Python files that the texts name. Raises the errors of :func:`parse_accept`."""
    files: list[str] = []

    def note(file: str, _: str) -> Function:
        files.append(file)
        return lambda actual, reference: False

    parse_accept(texts, note)
    return files


class _CriterionParser:
    """Parser of one text."""

    def __init__(self, text: str, load_function: LoadFunction | None, option: str) -> None:
        self._text = text
        self._load_function = load_function
        self._option = option

    def parse(self) -> Rule:
        if len(self._text) > MAX_TEXT:
            self._refuse(f"text has {len(self._text)} characters, maximum {MAX_TEXT}")
        head = _HEAD.fullmatch(self._text.strip())
        if head is None:
            self._refuse("expected [OUTPUT:] CRITERION", hint='for example --accept "logits: top1>=0.99, kl<=1e-4"')
        place = self._text.index(head["body"], len(head["output"] or ""))
        criteria = []
        while True:
            criterion, place = self._parse_criterion(place)
            criteria.append(criterion)
            if place >= len(self._text.rstrip()):
                return Rule((head["output"] or "").strip(), tuple(criteria))
            if self._text[place] != ",":
                self._refuse("expected a comma or end of text", place)
            place += 1

    def _parse_criterion(self, place: int) -> tuple[Criterion, int]:
        if found := _FUNCTION.match(self._text, place):
            return self._parse_function(found)
        found = _NAME.match(self._text, place)
        if found is None:
            self._refuse("expected a criterion name", place)
        name, at = found["name"], found.start("name")
        measure, arguments = find_measure(name)
        if measure is None:
            names = measure_names()
            known = f"one of {', '.join(names)}, python:FILE:FUNCTION"
            self._refuse(
                f"unknown criterion {name!r}", at, hint=f"{did_you_mean(name, [*names, *ALIASES, 'top5'])}{known}"
            )
        arguments = {**arguments, **self._parse_arguments(measure, found)}
        sign, bound, end = self._parse_bound(found.end())
        if bound is None:
            if measure.default is None:
                compared = ">=" if measure.is_higher_better else "<="
                self._refuse(f"{name} requires a bound", at, hint=f"for example {name}{compared}VALUE")
            sign, bound = ">=" if measure.is_higher_better else "<=", measure.default
        text = self._text[at : found.end()].strip()
        criterion = Criterion(f"{text}{sign}{bound:g}", measure, arguments, sign, bound)
        self._check_bound(criterion, measure, at)
        return criterion, end

    def _parse_function(self, found: re.Match[str]) -> tuple[Criterion, int]:
        at = found.start("file") - len("python:")
        if self._load_function is None:
            self._refuse("a Python function cannot be used here", at, hint="use a named criterion")
        function = self._load_function(found["file"], found["name"])
        sign, bound, end = self._parse_bound(found.end())
        text = f"python:{Path(found['file']).name}:{found['name']}" + ("" if bound is None else f"{sign}{bound:g}")
        return Criterion(text, None, {}, sign, bound, function), end

    def _parse_arguments(self, measure: Measure, found: re.Match[str]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if not (found["arguments"] or "").strip():
            return values
        for part in found["arguments"].split(","):
            at = self._text.index(part, found.start("arguments"))
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or key not in measure.arguments or key in values:
                known = ", ".join(f"{one}=VALUE" for one in measure.arguments) or "none"
                self._refuse(
                    f"invalid argument {part.strip()!r} of {found['name']}", at, hint=f"valid arguments: {known}"
                )
            try:
                values[key] = measure.arguments[key](value)
            except ValueError as error:
                self._refuse(f"{key} is {value!r}: {error}", at)
        return values

    def _parse_bound(self, place: int) -> tuple[str, float | None, int]:
        found = _BOUND.match(self._text, place)
        if found is None:
            if place < len(self._text.rstrip()) and self._text[place] != ",":
                self._refuse("expected >=, <=, > or < and a number, a comma, or end of text", place)
            return "", None, place
        try:
            bound = float(found["value"])
        except ValueError:
            bound = math.nan
        if not math.isfinite(bound):
            self._refuse(f"{found['value']!r} is not a finite number", found.start("value"))
        return found["operator"], bound, found.end()

    def _check_bound(self, criterion: Criterion, measure: Measure, place: int) -> None:
        if criterion.operator.startswith(">") is not measure.is_higher_better:
            better = "higher" if measure.is_higher_better else "lower"
            self._refuse(
                f"{criterion.text} accepts wrong outputs: {better} values are better",
                place,
                hint=f"use {'>=' if measure.is_higher_better else '<='}",
            )
        if not criterion.accepts(measure.best):
            self._refuse(f"{criterion.text} is impossible: the best value is {measure.best:g}", place)
        if criterion.accepts(measure.worst):
            raise VacuousTolerance(
                f"{self._option} {self._text!r}: {criterion.text} cannot fail: every output passes",
                hint=f"{measure.worst:g} is the worst possible value: use a stricter bound",
            )

    def _refuse(self, why: str, place: int | None = None, hint: str = "") -> NoReturn:
        where = "" if place is None else f" at character {place + 1}"
        raise UsageError(f"invalid {self._option} {self._text[:200]!r}{where}: {why}", hint=hint)
