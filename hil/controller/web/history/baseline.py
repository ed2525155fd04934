"""Baseline of the home page: a night, a branch or a label. Changes after the baseline are new."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hil.controller.web.history.nights import NIGHT_SECONDS, format_night, list_nights, parse_night
from hil.controller.web.index.index import SEPARATOR
from hil.controller.web.text.parameters import InvalidParameter

KINDS = ("night", "branch", "label")
_SEPARATOR = ":"
# Maximum branches and labels to offer, and maximum sessions to search for each.
_CHOICES, _SESSIONS = 100, 2000
# Suite, flow and board.
Target = tuple[str, str, str]


@dataclass(frozen=True)
class Baseline:
    """Baseline, and the time of its sessions."""

    kind: str = ""  # one of KINDS, or "" without sessions
    value: str = ""  # date, branch or label
    created: float = 0.0  # changes before this time are old
    # Time of the baseline's session per target, for a branch or label. Other targets have no baseline.
    targets: Mapping[Target, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Value in URLs: ``night:2026-11-29``, ``branch:main`` or ``label:v1``."""
        return f"{self.kind}{_SEPARATOR}{self.value}" if self.kind else ""

    @property
    def is_empty(self) -> bool:
        """True if no session matches a branch or label."""
        return self.kind in ("branch", "label") and not self.targets

    def is_new(self, created: float | None, targets: Iterable[Target]) -> bool:
        """Return True if a change is newer than the baseline of one of its targets."""
        if created is None:
            return False
        if self.kind in ("branch", "label"):
            return any(target in self.targets and created > self.targets[target] for target in targets)
        return created >= self.created


def find_baseline_of(database: sqlite3.Connection, text: str) -> Baseline:
    """Return the baseline for a URL parameter. "" selects the night before the newest night with sessions.

    Raises:
        UsageError: invalid text.
    """
    kind, separator, value = text.partition(_SEPARATOR)
    if text and (kind not in KINDS or not separator or not value):
        raise InvalidParameter(
            f"invalid baseline {text[:80]!r}", hint="expected night:YYYY-MM-DD, branch:NAME or label:NAME"
        )
    if kind in ("branch", "label"):
        targets = _find_targets(database, kind, value)
        return Baseline(kind, value, min(targets.values(), default=0.0), targets)
    if text:
        night = parse_night(value)
    else:
        nights = list_nights(database, 2)
        if not nights:
            return Baseline()
        # With a single night, its changes are new.
        night = nights[1] if len(nights) > 1 else nights[0] - 1
    return Baseline("night", format_night(night), (night + 1) * NIGHT_SECONDS)


def list_baselines(database: sqlite3.Connection, nights: int) -> dict[str, Sequence[str]]:
    """Return the baselines to offer, by kind."""
    branches = database.execute(
        "select branch from sessions where suite != '' and branch != '' group by branch"
        " order by max(created) desc limit ?",
        (_CHOICES,),
    )
    labels: dict[str, None] = {}
    rows = database.execute(
        "select labels from sessions where suite != '' and labels != '' order by created desc limit ?", (_SESSIONS,)
    )
    for (names,) in rows:
        labels |= dict.fromkeys(filter(None, names.split(SEPARATOR)))
    return {
        # The newest night has nothing after it.
        "night": [format_night(one) for one in list_nights(database, nights + 1)[1:]],
        "branch": [row[0] for row in branches],
        "label": list(labels)[:_CHOICES],
    }


def _find_targets(database: sqlite3.Connection, kind: str, value: str) -> dict[Target, float]:
    """Return the time of the newest session of a branch or label per target.

    The newest session of a target is not a baseline, because nothing can be newer.
    """
    condition = "branch = ?" if kind == "branch" else "instr(labels, ?)"
    matched = value if kind == "branch" else f"{SEPARATOR}{value}{SEPARATOR}"
    newest: dict[Target, float] = {}
    query = "select suite, flow, boards, max(created) from sessions where suite != '' group by 1, 2, 3"
    for suite, flow, boards, created in database.execute(query):
        for board in split_boards(boards):
            newest[suite, flow, board] = max(newest.get((suite, flow, board), 0.0), created or 0.0)
    found: dict[Target, float] = {}
    rows = database.execute(
        f"select suite, flow, boards, created from sessions where suite != '' and created is not null and {condition}"
        " order by created desc limit ?",
        (matched, _SESSIONS),
    )
    for suite, flow, boards, created in rows:
        for board in split_boards(boards):
            target = suite, flow, board
            if created < newest[target]:
                found.setdefault(target, created)
    return found


def split_boards(boards: str) -> list[str]:
    """Return the boards of a session from the text in the index."""
    return [one for one in boards.split(SEPARATOR) if one]
