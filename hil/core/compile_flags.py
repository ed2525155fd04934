"""Recognize compiler flags that cannot write files or start programs."""

from __future__ import annotations

import re

_TARGET_FLAG = re.compile(r"--[\w-]*target[\w-]*=[^/\s]*")
# Flags with a plain value (number, type, level or switch) are usually safe. Flags whose name matches the second pattern
# may write files or start programs even with a plain value.
_PLAIN_VALUE = re.compile(r"--[\w-]+=(?:true|false|all|\d+|O[0-3sz]|[suib]?[if]\d+|(?:b?float|u?int)\d+)")
_ACTING_FLAG = re.compile(r"dump|path|file|dir|output|link|tool|load|plugin|save|write|trace")


def is_safe_flag(flag: str) -> bool:
    """Return whether a compiler flag of another user is safe: it sets only a target, level, type, number or switch."""
    if _ACTING_FLAG.search(flag):
        return False
    return bool(_TARGET_FLAG.fullmatch(flag) or _PLAIN_VALUE.fullmatch(flag))
