"""Group changed cases by cause. Pure functions.

A cause is one of these, in this order:

1. a layer: a stored bisection names it as the first wrong layer of the failing model
2. tools: the compiler or runtime has another version since the change
3. a board: at least half of its measured cases became slower in the same night, and no other board did
4. a commit: the same, on multiple boards
5. an operator, or a model if the cases have no operator
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hil.controller.web.history.nights import format_night
from hil.core.digest import digest_of

BROKE, SLOWER = "broke", "slower"
# Smallest share of a board's measured cases, and smallest number of cases, for a cause "board".
_BOARD_SHARE, _BOARD_CASES = 0.5, 3
# The position of a step in a noisy series may differ by one night.
_WINDOW_NIGHTS = 1


@dataclass(frozen=True)
class ChangedCase:
    """Case that fails or is slower since a session."""

    case: str
    what: str  # BROKE or SLOWER
    board: str
    night: int  # days since the epoch (UTC)
    suite: str = ""
    flow: str = ""
    runtime: str = ""
    model: str = ""
    op: str = ""  # "" for a whole model
    layer: str = ""  # first wrong layer of the model by bisection; "" if unknown
    outcome: str = ""  # of a failing case
    tools: tuple[str, ...] = ()  # changed versions, such as "iree-base-compiler 3.12 -> 3.13"
    ratio: float | None = None  # time after / time before, of a slower case
    timed: int = 0  # cases with a time in the session, on this board
    number: int = 0  # for the caller: the place in its list


@dataclass(frozen=True)
class Cause:
    """Changed cases with the same probable cause."""

    kind: str  # layer, tools, board, commit, operator, model
    subject: str  # name of the layer, board, operator or model, or the changed versions
    what: str  # BROKE or SLOWER
    members: tuple[ChangedCase, ...]

    @property
    def boards(self) -> tuple[str, ...]:
        """Boards of the cases."""
        return _list_sorted(one.board for one in self.members)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the cases."""
        return _list_sorted(one.case for one in self.members)

    @property
    def night(self) -> int:
        """First night of the change."""
        return min(one.night for one in self.members)

    @property
    def date(self) -> str:
        """Date of the first night with a change."""
        return format_night(self.night)

    @property
    def ratio(self) -> float | None:
        """Median ratio of the slower cases."""
        found = [one.ratio for one in self.members if one.ratio is not None]
        return statistics.median(found) if found else None

    @property
    def measured(self) -> int:
        """Number of cases that the boards measured: the total for the share of slower cases."""
        timed: dict[tuple[str, str, str], int] = {}
        for one in self.members:
            key = one.board, one.suite, one.flow
            timed[key] = max(timed.get(key, 0), one.timed)
        return sum(timed.values())

    @property
    def key(self) -> str:
        """Identifier for URLs. It does not depend on other causes."""
        first = self.members[0]
        # Causes of a night can have the same subject: layers of several models, or other outcomes of an operator.
        other = {"layer": first.model, "operator": first.outcome, "model": first.outcome}.get(self.kind, "")
        text = "\n".join((self.kind, self.subject, other, self.what, str(self.night), *self.boards))
        return digest_of(text.encode()).rpartition(":")[2][:12]

    @property
    def title(self) -> str:
        """Sentence that names cases, effect, boards and cause."""
        count = len(self.members)
        cases = f"{count} case{'s' * (count != 1)}"
        on = f" on {', '.join(filter(None, self.boards))}" if any(self.boards) else ""
        if self.what == SLOWER:
            share = f"{count} of {self.measured} cases" if self.kind in ("board", "commit") and self.measured else cases
            effect = f"{share} {self.ratio:.2f}x slower" if self.ratio is not None else f"{share} slower"
        else:
            effect = f"{cases} fail" + "s" * (count == 1)
        causes = {
            "layer": f"{self.subject} is the first wrong layer by bisection",
            "tools": self.subject,
            "board": "the board",
            "commit": "all boards: the commit",
            "operator": f"operator {self.subject}",
            "model": f"model {self.subject}" if self.subject else "no common part",
        }
        return f"{effect}{on}: {causes[self.kind]}"

    @property
    def explanation(self) -> str:
        """Why hil groups these cases."""
        reasons = {
            "layer": f"A bisection of model {self.members[0].model} names {self.subject} as the first wrong layer.",
            "tools": "These versions changed between the last good session and the first session with the change.",
            "board": "Most measured cases of this board became slower in the same night. No other board did then.",
            "commit": "Most measured cases of several boards became slower in the same night.",
            "operator": "The cases have the same operator, outcome and night, and no versions changed.",
            "model": "The cases have the same model, outcome and night, and no versions changed.",
        }
        return reasons[self.kind]


def group_changes(changes: Iterable[ChangedCase]) -> list[Cause]:
    """Group changes by cause: failures first, then the causes with the most cases, then the newest.

    Every change is in exactly one cause. The order of the changes does not matter.
    """
    left = sorted(changes, key=lambda one: (one.night, one.what, one.board, one.suite, one.flow, one.case, one.number))
    causes: list[Cause] = []
    for find in (_group_by_layer, _group_by_tools, _group_by_board, _group_by_operator):
        found = find(left)
        causes += found
        taken = {id(one) for cause in found for one in cause.members}
        left = [one for one in left if id(one) not in taken]
    return sorted(causes, key=lambda one: (one.what != BROKE, -len(one.members), -one.night, one.kind, one.subject))


def _group_by_layer(changes: Sequence[ChangedCase]) -> list[Cause]:
    return _group_by(
        [one for one in changes if one.layer and one.what == BROKE],
        "layer",
        lambda one: (one.model, one.layer),
        lambda one: one.layer,
    )


def _group_by_tools(changes: Sequence[ChangedCase]) -> list[Cause]:
    return _group_by(
        [one for one in changes if one.tools],
        "tools",
        lambda one: one.tools,
        lambda one: ", ".join(one.tools),
    )


def _group_by_board(changes: Sequence[ChangedCase]) -> list[Cause]:
    """Find nights in which most cases of a board became slower. If multiple boards did, the commit is the cause."""
    slow: defaultdict[tuple[str, str, str], list[ChangedCase]] = defaultdict(list)
    for one in changes:
        if one.what == SLOWER and one.board:
            slow[one.board, one.suite, one.flow].append(one)
    clusters: list[tuple[ChangedCase, ...]] = []
    for members in slow.values():
        left = list(members)
        while cluster := _find_largest_cluster(left):
            clusters.append(cluster)
            left = [one for one in left if one not in cluster]
    causes = []
    for near in _join_near(clusters):
        boards = {one.board for one in near}
        names = ", ".join(sorted(boards))
        causes.append(Cause("board" if len(boards) == 1 else "commit", names, SLOWER, tuple(near)))
    return causes


def _find_largest_cluster(changes: Sequence[ChangedCase]) -> tuple[ChangedCase, ...]:
    """Return the most changes of a board within the window of nights, or () if they are too few for the board."""
    best: tuple[ChangedCase, ...] = ()
    for night in sorted({one.night for one in changes}):
        near = tuple(one for one in changes if night <= one.night <= night + _WINDOW_NIGHTS)
        best = max(best, near, key=len)
    total = max((one.timed for one in best), default=0)
    return best if len(best) >= max(_BOARD_CASES, _BOARD_SHARE * total) else ()


def _join_near(clusters: Sequence[tuple[ChangedCase, ...]]) -> list[list[ChangedCase]]:
    """Join clusters that begin in the same window of nights."""
    joined: list[list[ChangedCase]] = []
    begins = 0
    for cluster in sorted(clusters, key=lambda one: one[0].night):
        if joined and cluster[0].night - begins <= _WINDOW_NIGHTS:
            joined[-1] += cluster
        else:
            joined.append(list(cluster))
            begins = cluster[0].night
    return joined


def _group_by_operator(changes: Sequence[ChangedCase]) -> list[Cause]:
    """Group by operator. Whole models join the operator that changed in the same model, if there is exactly one."""
    with_op = [one for one in changes if one.op]
    grouped = _group_by(with_op, "operator", lambda one: (one.op, one.outcome), lambda one: one.op)
    own: list[ChangedCase] = []
    further: defaultdict[int, list[ChangedCase]] = defaultdict(list)
    for one in changes:
        if not one.op:
            hosts = [number for number, cause in enumerate(grouped) if _explains(cause, one)]
            if len(hosts) == 1:
                further[hosts[0]].append(one)
            else:
                own.append(one)
    found = [
        Cause(cause.kind, cause.subject, cause.what, (*cause.members, *further[number]))
        for number, cause in enumerate(grouped)
    ]
    return found + _group_by(own, "model", lambda one: (one.model, one.outcome), lambda one: one.model)


def _explains(cause: Cause, change: ChangedCase) -> bool:
    """Return True if a layer of the changed model, on the same board, is in the cause."""
    return cause.what == change.what and any(
        (one.model, one.board) == (change.model, change.board) and abs(one.night - change.night) <= _WINDOW_NIGHTS
        for one in cause.members
    )


def _group_by(
    changes: Sequence[ChangedCase],
    kind: str,
    key: Callable[[ChangedCase], tuple[str, ...]],
    subject: Callable[[ChangedCase], str],
) -> list[Cause]:
    """Group changes with the same key and effect whose nights follow each other within the window."""
    causes = []
    ordered = sorted(changes, key=lambda one: (one.what, key(one), one.night))
    for (what, _), alike in itertools.groupby(ordered, key=lambda one: (one.what, key(one))):
        near: list[ChangedCase] = []
        for one in alike:
            if near and one.night - near[-1].night > _WINDOW_NIGHTS:
                causes.append(Cause(kind, subject(near[0]), what, tuple(near)))
                near = []
            near.append(one)
        causes.append(Cause(kind, subject(near[0]), what, tuple(near)))
    return causes


def _list_sorted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))
