"""Regular expressions for lines of an untrusted board, with a limited time for every line.

Python's expressions need up to ``forms * length ** n / n!`` steps for a line, where n is the number of repetitions plus
one: the places where the parts between repetitions begin are in order. A pattern therefore matches only the start of a
line, with a length that limits the number of steps.
"""

from __future__ import annotations

import math
import re

from hil.errors import UsageError

# Maximum part of a line that patterns match.
MATCHED_CHARACTERS = 512
_MAX_PATTERN = 200
# Maximum steps for a line: about 20 ms.
_MAX_STEPS = 4_000_000
# A pattern that can only match a shorter part of a line is refused.
_MIN_CHARACTERS = 64
# A repetition at the start of a pattern has no effect on the result of a search.
_LEADING = re.compile(r"((?:\(\?[a-z]+\))?)(?:\.\*\??)+")
_REPEATS = re.compile(r"[*+]|\{\d*,\d*\}")
# The flag x allows comments, which could hide a part of the pattern from the checks.
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")


class LinePattern:
    """Regular expression for the start of a line.

    Args:
        is_fast: True for a pattern of hil, which needs no limit.

    Attributes:
        max_characters: length of the part of a line that the pattern matches.
    """

    def __init__(self, pattern: str, *, is_fast: bool = False) -> None:
        shorter = _strip_leading_repetition(pattern)
        self._expression = re.compile(shorter)
        self.max_characters = MATCHED_CHARACTERS if is_fast else _find_length(shorter)

    def matches(self, line: str) -> bool:
        """Return True if the start of a line contains a match."""
        return self._expression.search(line[: self.max_characters]) is not None


def check_pattern(pattern: str, place: str) -> None:
    """Raise UsageError for an invalid regular expression, or one that may need exponential time.

    A group with a repetition, an optional part or an alternative inside may not be repeated, such as ``(a+)+``. The
    number of these parts is limited. The flag ``x`` is not supported.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{place}: invalid regular expression {pattern!r}: {error}") from error
    problem = f"more than {_MAX_PATTERN} characters" if len(pattern) > _MAX_PATTERN else _find_slow_part(pattern)
    if problem:
        raise UsageError(
            f"{place}: slow regular expression {pattern!r}: {problem}", hint="match a fixed part of the line instead"
        )


def _find_slow_part(pattern: str) -> str:
    """Return why a pattern may be slow; "" if it is fast. Scans the text of a valid regular expression."""
    if _VERBOSE.search(pattern):
        return "the flag x is not supported"
    plain = _simplify(pattern)
    open_groups: list[str] = [""]
    for index, character in enumerate(plain):
        if character == "(":
            open_groups.append("")
        elif character in "*+{?|":
            open_groups[-1] += character
        elif character == ")" and len(open_groups) > 1:
            found = open_groups.pop()
            if found and plain[index + 1 : index + 2] in ("*", "+", "{"):
                return "a repeated group contains a repetition, an optional part or an alternative"
            open_groups[-1] += found.replace("|", "*")
    shorter = _strip_leading_repetition(pattern)
    if (length := _find_length(shorter)) < _MIN_CHARACTERS:
        repeats, forms = _count_slow_parts(shorter)
        return (
            f"{repeats} repetitions, and {forms:,} combinations of optional parts and alternatives, allow only "
            f"{length} characters of a line; the minimum is {_MIN_CHARACTERS}"
        )
    return ""


def _simplify(pattern: str) -> str:
    """Return a pattern without the parts that have no effect on the time of a match."""
    # Characters of classes, escaped characters and the start of special groups.
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", pattern, flags=re.DOTALL)
    plain = re.sub(r"\(\?", "(", plain)
    # A question mark after a repetition only changes the order of attempts.
    return re.sub(r"([*+?}])\?", r"\1", plain)


def _count_slow_parts(pattern: str) -> tuple[int, int]:
    """Return the number of repetitions, and the maximum number of combinations of optional parts and alternatives.

    A group with alternatives counts as one more, because the choice itself takes time.
    """
    plain = _simplify(pattern)
    forms, alternatives = 2 ** plain.count("?"), [1]
    for character in plain:
        if character == "(":
            alternatives.append(1)
        elif character == "|":
            alternatives[-1] += 1 if alternatives[-1] > 1 else 2
        elif character == ")" and len(alternatives) > 1:
            forms *= alternatives.pop()
    return len(_REPEATS.findall(plain)), forms * math.prod(alternatives)


def _strip_leading_repetition(pattern: str) -> str:
    """Return an equivalent pattern for a search, without ``.*`` at the start."""
    shorter = _LEADING.sub(r"\1", pattern, count=1) if _LEADING.match(pattern) else pattern
    try:
        re.compile(shorter)
    except (re.error, OverflowError, RecursionError):
        return pattern
    return shorter


def _find_length(pattern: str) -> int:
    """Return the length of the part of a line that a pattern can match within :data:`_MAX_STEPS` steps."""
    repeats, forms = _count_slow_parts(pattern)
    places = repeats + 1
    return min(MATCHED_CHARACTERS, int((_MAX_STEPS * math.factorial(places) / forms) ** (1 / places)))
