"""Boards and jobs as matching sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hil.controller.farm.messages import BoardState, Kind, Priority, Submission
from hil.controller.farm.scheduler import policy
from hil.controller.farm.scheduler.health import GIVEN_UP
from hil.controller.farm.selector import parse


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
    def of(cls, row: Mapping[str, Any]) -> Lane:
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


def lane_of(order: Submission, user: str, project: str, lane: str = "") -> Lane:
    """The lane of an order's jobs."""
    return Lane(lane, order.specs[0].kind, user, project, order.priority, order.selector, order.board)


def unrunnable(jobs: Iterable[Mapping[str, Any]], boards: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Find the queued jobs that no board can run: all that match failed their checks again and again.

    A board that is offline or held back may come back at any moment, so it counts as no reason.

    Args:
        jobs: with ``name``, ``selector`` and ``pinned`` (the only board that will do, "" for any).
        boards: with ``name``, ``labels``, ``state``, ``failures`` and ``reason``; neither offline nor held back.

    Returns:
        Name of the job -> why.
    """
    reasons: dict[tuple[str, str], str] = {}
    found = {}
    for job in jobs:
        key = job["selector"], job["pinned"]
        if key not in reasons:
            selector = parse(job["selector"])
            fit = [one for one in boards if job["pinned"] in ("", one["name"]) and selector.matches(one["labels"])]
            failed = [
                one for one in fit if one["state"] == BoardState.QUARANTINED.value and one["failures"] >= GIVEN_UP
            ]
            text = "; ".join(f"{one['name']}: {one['reason']}" for one in failed[:3])
            reasons[key] = text if failed and len(failed) == len(fit) else ""
        if reasons[key]:
            found[job["name"]] = reasons[key]
    return found
