"""One check of a board, and what it found."""

from __future__ import annotations

from dataclasses import dataclass

# What a check ends in. Only FAIL says that models cannot be run there.
PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        name: what was checked.
        state: ``pass``; ``warn``: models run, but times or room are doubtful; ``fail``: none can run; ``skip``: it does
            not apply here.
        found: what there is.
        mend: what to do; "" where nothing is wrong.
    """

    name: str
    state: str
    found: str
    mend: str = ""
