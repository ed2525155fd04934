"""Jobs and boards as the scheduler sees them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hil.controller.farm.messages import BoardAccess, BoardRequest, BoardState, Kind, Priority
from hil.controller.farm.scheduler.board_matching import can_match_all
from hil.controller.farm.selector import parse

EVERYONE = BoardAccess()


@dataclass(frozen=True)
class WaitingJob:
    """Queued job, or the common properties of a lane's jobs."""

    id: int  # 0 for a lane
    # Owner for fair sharing.
    user: str
    project: str = ""
    priority: Priority = Priority.NORMAL
    waits_s: float = 0.0  # seconds in the queue
    selector: str = ""  # board selector (:mod:`.selector`); "" matches any board
    board: str = ""
    avoid: frozenset[str] = frozenset()  # boards that the job must not receive
    affinity: str = ""  # cache affinity key; "" for none
    kind: Kind = Kind.RUN  # health jobs are scheduled separately
    lane: str = ""
    more: tuple[BoardRequest, ...] = ()  # boards after the first
    groups: frozenset[str] = frozenset()  # groups of the user

    @functools.cached_property
    def parts(self) -> tuple[WaitingJob, ...]:
        """One job for every board of this job."""
        first = replace(self, more=())
        return first, *(replace(first, selector=one.selector, board=one.board) for one in self.more)

    def matches(self, board: SchedulableBoard) -> bool:
        """Return True if the job can ever use this board, possibly with other boards."""
        return any(part.matches_first(board) for part in self.parts)

    def matches_first(self, board: SchedulableBoard) -> bool:
        """Return True if the job can ever use this board as its first board."""
        return (
            self.board in ("", board.name)
            and (board.access.allows(self.user, self.groups) or self.kind is Kind.HEALTH)
            and parse(self.selector).matches(board.labels)
        )

    def matches_all(self, boards: Iterable[SchedulableBoard]) -> bool:
        """Return True if these boards are sufficient for the job."""
        known = list(boards)
        masks = [sum(1 << n for n, one in enumerate(known) if part.matches_first(one)) for part in self.parts]
        return can_match_all(masks)

    def takes(self, free: FreeBoard) -> bool:
        """Return True if the job can use this board now."""
        if (free.health_only and self.kind is not Kind.HEALTH) or free.name in self.avoid:
            return False
        if free.reserved_by not in ("", self.user) and self.kind is not Kind.HEALTH:
            return False
        return self.matches(free)

    def without_avoid(self, boards: Iterable[BoardRow]) -> WaitingJob:
        """Return the job, with an empty ``avoid`` set if no other board can serve the job."""
        if not self.avoid or self.matches_all(one for one in boards if one.may_serve and one.name not in self.avoid):
            return self
        return replace(self, avoid=frozenset())


class SchedulableBoard(Protocol):
    """Properties of a board that decide which jobs can use it."""

    @property
    def name(self) -> str:
        """Name in the farm."""

    @property
    def labels(self) -> Mapping[str, Any]:
        """Labels for selectors."""

    @property
    def access(self) -> BoardAccess:
        """Users and groups that may use the board."""


@dataclass(frozen=True)
class FreeBoard:
    """Board without a job."""

    name: str
    labels: Mapping[str, Any] = field(default_factory=dict)  # labels for selectors
    warm: frozenset[str] = frozenset()  # affinity keys of data cached on the board
    health_only: bool = False  # True if the board must be checked first
    reserved_by: str = ""  # the only user who may use the board now; "" for all
    access: BoardAccess = EVERYONE


@dataclass(frozen=True)
class BoardUse:
    """Board use of a user's project."""

    running: int = 0  # number of boards in use now
    board_s: float = 0.0  # past board time in seconds, with older use weighted less


@dataclass(frozen=True)
class BoardRow:
    """Board with the properties needed for scheduling."""

    name: str
    labels: Mapping[str, Any]  # including name, site, host and hardware type
    state: BoardState
    held: bool  # True if the board is drained
    attended: bool  # True if the worker sends heartbeats
    busy: bool  # True if it has an active lease
    unchecked: bool  # True if a health check is overdue
    warm: frozenset[str]
    hold_reason: str = ""  # user who drained it, and the reason
    reserved_by: str = ""  # user with a reservation now or soon
    access: BoardAccess = EVERYONE

    @property
    def may_serve(self) -> bool:
        """Whether jobs may use the board, now or after the current job or check."""
        return self.attended and not self.held and self.state in (BoardState.ONLINE, BoardState.SUSPECT)

    @property
    def free(self) -> FreeBoard | None:
        """The board as input for the assignment, or None if the board is not free. May be restricted to health jobs."""
        if self.busy or self.held or not self.attended or self.state is BoardState.OFFLINE:
            return None
        healthy = self.state is BoardState.ONLINE and not self.unchecked
        return self._make_free_board(health_only=not healthy)

    @property
    def occupied(self) -> FreeBoard | None:
        """The board as it will be after its current job or check; None if it is free or not in service."""
        return self._make_free_board() if self.may_serve and (self.busy or self.unchecked) else None

    def _make_free_board(self, *, health_only: bool = False) -> FreeBoard:
        return FreeBoard(self.name, self.labels, self.warm, health_only, self.reserved_by, self.access)

    @property
    def doubtful(self) -> bool:
        """Whether the board is free and online, but a health check is overdue."""
        return self.free is not None and self.state is BoardState.ONLINE and self.unchecked
