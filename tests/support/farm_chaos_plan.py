"""Plan of the events of a chaos test. It depends only on a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

# Relative frequency of each event.
WEIGHTS = {
    "kill worker": 8,
    "kill agent": 6,
    "kill host": 4,
    "kill gateway": 4,
    "kill database": 2,
    "freeze gateway": 2,
    "cut link": 3,
    "drop link": 3,
}
# Duration in seconds of a freeze or an interruption.
LASTS = {"freeze gateway": (1.0, 5.0), "cut link": (1.0, 5.0), "freeze host": (14.0, 18.0)}
KINDS = {"pass": 60, "mismatch": 15, "crash": 10, "compile": 5, "generate": 10}
PRIORITIES = ("high", "normal", "normal", "low")


@dataclass(frozen=True)
class Blow:
    """One event.

    Attributes:
        at_s: time since the start.
        what: a key of WEIGHTS, or "freeze host".
        pick: value from 0 to 1 that selects the target.
        lasts_s: duration.
    """

    at_s: float
    what: str
    pick: float
    lasts_s: float = 0.0


@dataclass(frozen=True)
class Batch:
    """One submission: its time, user, priority, kinds of jobs, and board selector."""

    at_s: float
    user: str
    priority: str
    selector: str
    kinds: tuple[str, ...]


def blows(seed: int, seconds: float, every_s: float) -> list[Blow]:
    """Return the events of a test. The first event of each kind is early. In the middle, a host freezes for longer than
    its lease.
    """
    rng = random.Random(f"blows {seed}")
    first = list(WEIGHTS)
    rng.shuffle(first)
    found, at = [], 1.0
    while at < seconds:
        what = first.pop() if first else rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        lasts = rng.uniform(*LASTS[what]) if what in LASTS else 0.0
        found.append(Blow(at, what, rng.random(), lasts))
        at += rng.uniform(0.5, 1.5) * every_s
    frozen = Blow(seconds * 0.4, "freeze host", rng.random(), rng.uniform(*LASTS["freeze host"]))
    return sorted([*found, frozen], key=lambda blow: blow.at_s)


def batches(seed: int, jobs: int, each: int, boards: int, seconds: float) -> list[Batch]:
    """Return submissions with this number of jobs each, distributed over a time."""
    rng = random.Random(f"batches {seed}")
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=jobs)
    kinds[: len(KINDS)] = KINDS  # at least one job of each kind
    half = boards // 2
    groups = [tuple(kinds[start : start + each]) for start in range(0, jobs, each)]
    return [
        Batch(
            seconds * number / len(groups),
            rng.choice(("ann", "ben")),
            rng.choice(PRIORITIES),
            rng.choice(("", "", f"rank < {half}", f"rank >= {half}", "simulated")),
            group,
        )
        for number, group in enumerate(groups)
    ]
