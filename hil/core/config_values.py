"""Check the values of tables in a board config, and convert them to dataclasses."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from hil.errors import UsageError, did_you_mean

TEXTS = "tuple[str, ...]"
# Dataclass field type -> check for a TOML value, and the expected type for messages.
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda value: type(value) is int, "a number"),
    "str": (lambda value: isinstance(value, str), "text"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    TEXTS: (
        lambda value: isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value),
        "a list of strings",
    ),
    "Mapping[str, str]": (
        lambda value: isinstance(value, dict) and all(isinstance(one, str) for one in value.values()),
        "a table of strings",
    ),
}
# Maximum for timeouts in a board config.
MAX_SECONDS = 86400.0


def make_values(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    """Build a dataclass from a table, and check the type of each value."""
    allowed = {one.name: str(one.type) for one in fields(kind)}
    for key in values:
        if key not in allowed:
            reject_key(where, key, allowed)
    return kind(**{key: check_type(value, allowed[key], f"{where} {key}") for key, value in values.items()})


def reject_key(where: str, key: str, known: Collection[str]) -> NoReturn:
    """Raise UsageError for an unknown key."""
    hint = f"{did_you_mean(key, known)}known keys: {', '.join(known)}"
    raise UsageError(f"{where}: unknown key {key!r}", hint=hint)


def check_type(value: Any, kind: str, where: str) -> Any:
    """Check a TOML value against a type. Unknown types are not checked."""
    fits, called = _TYPES.get(kind, (lambda value: True, ""))
    if not fits(value):
        raise UsageError(f"{where} must be {called}")
    texts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(text, str) and "\0" in text for text in texts):
        raise UsageError(f"{where} contains a NUL character")
    return tuple(value) if kind == TEXTS else value


def parse_timeout(value: Any, where: str) -> float:
    """Check a number of seconds above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_SECONDS:
        raise UsageError(f"{where} must be a number of seconds above 0, at most {MAX_SECONDS:g}")
    return float(value)


def parse_words(value: Any, where: str) -> tuple[str, ...]:
    """Parse a command from a list of strings or a single line."""
    try:
        argv = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UsageError(f"{where}: cannot parse the command: {error}") from error
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        raise UsageError(f"{where} must be a command (a list of strings or a single line) or a table with a url")
    found: tuple[str, ...] = check_type(argv, TEXTS, where)
    return found


def parse_program(value: Any, where: str, config: Path) -> tuple[str, ...]:
    """Parse a command. A relative path of the program starts at the directory of the config file."""
    program, *arguments = parse_words(value, where)
    return (str(config.absolute().parent / program) if "/" in program else program, *arguments)
