"""Names of models and cases: what an id may hold, and each one once."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._+-]")


def worded(path: str) -> str:
    """A path or name as an id may hold it."""
    return _NOT_IN_IDS.sub("_", path.replace(os.sep, "."))


def numbered(names: Sequence[str]) -> list[str]:
    """Names that differ: the second of one name is called ``NAME-2``."""
    taken: set[str] = set()
    found = []
    for name in names:
        again, one = 1, name
        while one in taken:
            again += 1
            one = f"{name}-{again}"
        taken.add(one)
        found.append(one)
    return found
