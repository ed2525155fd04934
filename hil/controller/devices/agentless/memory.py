"""Read the memory of a board without an agent after the OOM killer ended a program."""

from __future__ import annotations

import re
from pathlib import Path

from hil.core.files import read_text

_MARK = "hil-memory"
_LINE = re.compile(r"([A-Za-z]+):? +([0-9]{1,18})(?: kB| ([0-9]{1,18}))?")

# Shell functions oom_kills and memory.
MEMORY_FUNCTIONS = read_text(Path(__file__).with_name("memory.sh"))


def split_memory(lines: list[str]) -> tuple[tuple[int, int] | None, list[str]]:
    """Split off the output of the shell function ``memory``, if present.

    Returns:
        The total and available memory for a program in bytes (None if unknown), and the remaining lines.
    """
    if not lines or lines[0] != _MARK or _MARK not in lines[1:]:
        return None, lines
    end = lines.index(_MARK, 1)
    machine: dict[str, int] = {}
    found = []
    for line in lines[1:end]:
        match = _LINE.fullmatch(line.strip())
        if match and match[1] == "group" and match[3]:
            limit, used = int(match[2]), int(match[3])
            found.append((limit, max(limit - used, 0)))
        elif match:
            machine[match[1]] = int(match[2]) * 1024
    if {"MemTotal", "MemAvailable"} <= machine.keys():
        found.append((machine["MemTotal"], machine["MemAvailable"]))
    return min(found, default=None), lines[end + 1 :]
