"""Options of a command job, checked by the client and by the host."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePosixPath
from typing import Any

from hil.errors import UsageError

_MAX_PATTERNS, _MAX_WORDS, _MAX_WORD_LENGTH = 100, 1000, 100_000


def check_command(words: Any) -> list[str]:
    """Return a valid command. Raises UsageError otherwise."""
    valid = isinstance(words, (list, tuple)) and 0 < len(words) <= _MAX_WORDS
    if not valid or not all(isinstance(one, str) and len(one) <= _MAX_WORD_LENGTH and "\0" not in one for one in words):
        raise UsageError(f"a command must have 1 to {_MAX_WORDS} words, each of at most {_MAX_WORD_LENGTH} characters")
    if not words[0]:
        raise UsageError("the command's program is empty")
    return list(words)


def check_patterns(patterns: Any) -> list[str]:
    """Return valid patterns of files below the command's directory. Raises UsageError otherwise."""
    valid = isinstance(patterns, (list, tuple)) and len(patterns) <= _MAX_PATTERNS
    if not valid or not all(isinstance(one, str) for one in patterns):
        raise UsageError(f"a command can keep at most {_MAX_PATTERNS} patterns of files")
    for one in patterns:
        inside = PurePosixPath(one)
        whole = not any("**" in part and part != "**" for part in inside.parts)
        if not (inside.parts and one.isprintable() and whole) or inside.is_absolute() or ".." in inside.parts:
            raise UsageError(
                f"invalid pattern {one[:100]!r}: expected files below the command's directory",
                hint="for example --keep 'out/*.log'",
            )
    return list(patterns)


def check_executables(names: Any, files: Collection[str]) -> list[str]:
    """Return valid names of the job's files that are programs. Raises UsageError otherwise."""
    if not isinstance(names, (list, tuple)) or not all(isinstance(one, str) and one in files for one in names):
        raise UsageError("the programs of a command must be files of the job")
    return list(names)
