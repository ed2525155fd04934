"""Boards and jobs as matching sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hil.controller.farm import policy
from hil.controller.farm.desk.database import Tx
from hil.controller.farm.desk.rows import Row, fetched
from hil.controller.farm.selector import parse
from hil.controller.farm.terms import Terms
from hil.controller.farm.words import BoardState, Kind, Order, Priority

_LABELS_MOST = 4096
# Labels by their digest: what a board says of itself is read once in each form that it takes.
_labels: dict[str, Mapping[str, Any]] = {}

_BOARDS = """
    select name, labels_digest, state, hold, warm, worker <> '' and owned_until > clock_timestamp() as attended,
        exists (select from hil.leases where board = name and ended_at is null) as busy,
        coalesce(checked_at < clock_timestamp() - make_interval(secs => %(health_every_s)s), true) as unchecked
    from hil.boards where not forgotten
"""


@dataclass(frozen=True)
class BoardRow:
    """A board, as far as matching goes.

    Attributes:
        name: its name.
        labels: with its name, site, host and kind of hardware among them.
        state: how it is.
        held: whether nothing new may begin on it.
        attended: whether its worker is heard of.
        busy: whether a lease on it is not over.
        unchecked: whether nothing is known of its health for long.
        warm: what it is warm for.
    """

    name: str
    labels: Mapping[str, Any]
    state: BoardState
    held: bool
    attended: bool
    busy: bool
    unchecked: bool
    warm: frozenset[str]

    @property
    def may_serve(self) -> bool:
        """Whether jobs may have it, now or as soon as it is free and checked."""
        return self.attended and not self.held and self.state in (BoardState.ONLINE, BoardState.SUSPECT)

    @property
    def free(self) -> policy.Free | None:
        """The board as one that is free, be it for health jobs alone; None where it is not."""
        if self.busy or self.held or not self.attended or self.state is BoardState.OFFLINE:
            return None
        healthy = self.state is BoardState.ONLINE and not self.unchecked
        return policy.Free(self.name, self.labels, self.warm, health_only=not healthy)

    @property
    def doubtful(self) -> bool:
        """Whether it is free and thought to be healthy, but nobody has looked for long."""
        return self.free is not None and self.state is BoardState.ONLINE and self.unchecked


@dataclass(frozen=True)
class Lane:
    """What all jobs of a lane have in common."""

    lane: str
    kind: Kind
    user: str
    project: str
    priority: Priority
    selector: str
    board: str
    avoid: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, row: Row) -> Lane:
        """Of a row of the query that reads the lanes."""
        return cls(
            lane=row["lane"],
            kind=Kind(row["kind"]),
            user=row["user_name"],
            project=row["project"],
            priority=Priority(row["priority"]),
            selector=row["selector"],
            board=row["board"],
            avoid=frozenset(row["avoid"]),
        )

    def matches(self, name: str, labels: Mapping[str, Any]) -> bool:
        """Whether its jobs may ever have this board."""
        return self.board in ("", name) and parse(self.selector).matches(labels)

    def takes(self, free: policy.Free) -> bool:
        """Whether its jobs may have this board now."""
        if (free.health_only and self.kind is not Kind.HEALTH) or free.name in self.avoid:
            return False
        return self.matches(free.name, free.labels)

    def allowed(self, boards: Iterable[BoardRow]) -> Lane:
        """The lane as it is today: its jobs avoid the boards where they failed only while another may serve them."""
        others = (one for one in boards if one.may_serve and one.name not in self.avoid)
        if not self.avoid or any(self.matches(one.name, one.labels) for one in others):
            return self
        return replace(self, avoid=frozenset())

    def waiting(self, id: int, affinity: str, waits_s: float = 0.0) -> policy.Waiting:
        """One of its jobs, as the policy sees it."""
        return policy.Waiting(
            id=id,
            user=self.user,
            project=self.project,
            priority=self.priority,
            waits_s=waits_s,
            selector=self.selector,
            board=self.board,
            avoid=self.avoid,
            affinity=affinity,
            kind=self.kind,
        )


def lane_of(order: Order, user: str, project: str, lane: str = "") -> Lane:
    """The lane of an order's jobs."""
    return Lane(lane, order.specs[0].kind, user, project, order.priority, order.selector, order.board)


async def board_rows(tx: Tx, terms: Terms, names: Sequence[str] | None = None) -> list[BoardRow]:
    """The boards that the farm has, attended or not: all or some."""
    where = "" if names is None else " and name = any(%(names)s)"
    values = {"names": list(names or ()), "health_every_s": terms.health_every_s}
    rows = await fetched(tx, f"{_BOARDS}{where} order by name", values)
    await _learn(tx, {row["labels_digest"] for row in rows})
    return [
        BoardRow(
            name=row["name"],
            labels=_labels[row["labels_digest"]],
            state=BoardState(row["state"]),
            held=row["hold"] != "",
            attended=row["attended"],
            busy=row["busy"],
            unchecked=row["unchecked"],
            warm=frozenset(row["warm"]),
        )
        for row in rows
    ]


async def _learn(tx: Tx, digests: set[str]) -> None:
    """Read the labels that are not known yet."""
    if len(_labels) > _LABELS_MOST:
        _labels.clear()
    lacking = list(digests - _labels.keys())
    if lacking:
        query = "select labels_digest, labels from hil.boards where labels_digest = any(%s)"
        for row in await fetched(tx, query, [lacking]):
            _labels[row["labels_digest"]] = row["labels"]
