"""Number the served directories for URLs. The numbers do not depend on the order of the directories."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hil.core.digest import digest_of

# Hexadecimal digits of a number: at most nine decimal digits.
_DIGITS = 7
# Maximum decimal digits of a number in URLs.
MAX_DIGITS = 9


def number_roots(roots: Iterable[Path]) -> dict[int, Path]:
    """Return number -> directory. The only directory has the number 0.

    The number of a directory depends on its path, so a URL remains valid if other directories are added.
    """
    paths = sorted(set(roots))
    if len(paths) == 1:
        return {0: paths[0]}
    numbered: dict[int, Path] = {}
    for path in paths:
        number = int(digest_of(os.fsencode(path)).rpartition(":")[2][:_DIGITS], 16) or 1
        while number in numbered:
            number += 1
        numbered[number] = path
    return numbered
