"""Names of models and cases: what an id may hold, and each one once."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from hil.core.digest import digest_of

# A case's folder is called by its id, and a file name has at most 255 bytes.
_LONGEST = 160
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._+-]")


def worded(path: str) -> str:
    """A path or name as an id may hold it."""
    return _NOT_IN_IDS.sub("_", path.replace(os.sep, "."))


def short(name: str) -> str:
    """A name that a folder can have; of one that is too long a digest tells it from others."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 9]}-{digest_of(name.encode())[-8:]}"


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
