"""Typed rows of the farm's tables, their queries, and conversion of values for the database."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from hil.controller.farm.database.database import Tx
from hil.controller.farm.messages import BoardAccess, BoardRequest, BoardState, JobState, Kind
from hil.controller.farm.scheduler.candidates import EVERYONE, BoardRow
from hil.controller.farm.settings import FarmSettings
from hil.controller.records.base import Record, make_record
from hil.errors import UsageError

Row: TypeAlias = dict[str, Any]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=Record)

# Advisory lock for transactions that change jobs, leases or board ownership: they run one at a time in the whole farm.
# Heartbeats only extend deadlines and do not need the lock.
SERIALIZED = 0x4_68_69_6C  # "hil"

# Name of a job in SQL: see :func:`hil.controller.farm.messages.format_job_name`.
NAME = "case submission.jobs when 1 then submission.id::text else submission.id || '.' || job.number end"
JOBS = "hil.jobs as job join hil.submissions as submission on submission.id = job.submission"
LEASES = (
    "hil.leases as lease join hil.jobs as job on job.id = lease.job"
    " join hil.submissions as submission on submission.id = job.submission"
)
_JOB = f"""
    job.id as job_id, {NAME} as name, job.submission, job.kind, job.state, job.attempts, job.affinity, job.avoid,
    job.boards,
    submission.user_name as user, submission.project, submission.board as pinned, submission.max_attempts
"""
_LEASE = f"""
    select lease.id, lease.part, lease.board, lease.worker, lease.queue_id, lease.key, lease.granted_at,
        lease.started_at, lease.ended_at, lease.reason, lease.result, board.hold <> '' as held_back, {_JOB}
    from {LEASES} join hil.boards as board on board.name = lease.board
"""


_MAX_LABELS = 4096
# Cache of board labels by digest, so that each version of the labels is read only once.
_labels: dict[str, Mapping[str, Any]] = {}

_BOARDS = """
    select name, labels_digest, state, hold <> '' as held, hold_reason, warm,
        coalesce(card -> 'access', '{}') as access,
        coalesce((
            select user_name from hil.reservations
            where board = name and ends_at > clock_timestamp()
                and begins_at < clock_timestamp() + make_interval(secs => %(reserve_lead_s)s)
            order by begins_at limit 1
        ), '') as reserved_by,
        worker <> '' and owned_until > clock_timestamp() as attended,
        exists (select from hil.leases where board = name and ended_at is null) as busy,
        coalesce(checked_at < clock_timestamp() - make_interval(secs => %(health_every_s)s), true) as unchecked
    from hil.boards where not forgotten
"""


@dataclass(frozen=True)
class JobRow:
    """Job with fields of the submission."""

    id: int
    name: str
    submission: int
    kind: Kind
    state: JobState
    attempts: int  # number of counted leases so far
    max_attempts: int  # limit for leases
    user: str
    project: str
    pinned: str  # required board; "" for any
    affinity: str  # cache affinity key
    avoid: tuple[str, ...]  # boards on which this job had an infrastructure failure
    boards: int  # number of boards that the job uses at the same time

    @classmethod
    def of(cls, row: Row) -> JobRow:
        """Build a job from a row with the job columns."""
        same = {name: row[name] for name in cls.__dataclass_fields__ if name != "id"}
        kind, state = Kind(row["kind"]), JobState(row["state"])
        return cls(**{**same, "id": row["job_id"], "kind": kind, "state": state, "avoid": tuple(row["avoid"])})


@dataclass(frozen=True)
class LeaseRow:
    """Active or ended lease with the job."""

    id: int
    job: JobRow
    part: int  # place of the board among the boards of the job; the job runs with the lease of part 0
    board: str
    worker: str
    queue_id: int | None
    key: str
    granted_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    reason: str
    result: Mapping[str, Any] | None
    held_back: bool  # True if the board is drained

    @classmethod
    def of(cls, row: Row) -> LeaseRow:
        """Build a lease from a row of the lease query."""
        own = {name: row[name] for name in cls.__dataclass_fields__ if name != "job"}
        return cls(job=JobRow.of(row), **own)


def serialize_calls(
    function: Callable[Concatenate[Tx, P], Awaitable[T]],
) -> Callable[Concatenate[Tx, P], Coroutine[Any, Any, T]]:
    """Decorate a function so that it waits for a farm-wide lock, and keeps the lock up to the end of the transaction.

    Statements are pipelined. The function waits only for statements with fetched rows.
    """

    @functools.wraps(function)
    async def run(tx: Tx, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async with tx.pipeline():
            await tx.execute("select pg_advisory_xact_lock(%s)", [SERIALIZED])
            return await function(tx, *args, **kwargs)

    return run


async def fetch_rows(tx: Tx, query: str, values: Mapping[str, Any] | Sequence[Any] = ()) -> list[Row]:
    """Return all rows of a query."""
    return await (await tx.execute(query, values)).fetchall()


async def lock_job_rows(tx: Tx, where: str, values: Mapping[str, Any] | Sequence[Any]) -> list[JobRow]:
    """Lock and return the jobs that match a SQL condition, ordered by id."""
    query = f"select {_JOB} from {JOBS} where {where} order by job.id for update of job"
    return [JobRow.of(row) for row in await fetch_rows(tx, query, values)]


async def lease_row(tx: Tx, lease: int) -> LeaseRow | None:
    """Lock and return a lease, or None if the lease does not exist."""
    rows = await fetch_rows(tx, f"{_LEASE} where lease.id = %s for update of lease", [lease])
    return LeaseRow.of(rows[0]) if rows else None


async def lock_active_leases(tx: Tx, where: str = "true", values: Mapping[str, Any] | None = None) -> list[LeaseRow]:
    """Lock and return the active leases that match a SQL condition."""
    query = f"{_LEASE} where lease.ended_at is null and ({where}) order by lease.id for update of lease"
    return [LeaseRow.of(row) for row in await fetch_rows(tx, query, values or {})]


async def read_board_rows(tx: Tx, settings: FarmSettings, names: Sequence[str] | None = None) -> list[BoardRow]:
    """Return all boards of the farm or the named ones, with or without a worker."""
    where = "" if names is None else " and name = any(%(names)s)"
    values = {
        "names": list(names or ()),
        "health_every_s": settings.health_every_s,
        "reserve_lead_s": settings.reserve_lead_s,
    }
    rows = await fetch_rows(tx, f"{_BOARDS}{where} order by name", values)
    await _cache_labels(tx, {row["labels_digest"] for row in rows})
    found = []
    for row in rows:
        labels, state, warm = _labels[row.pop("labels_digest")], BoardState(row["state"]), frozenset(row["warm"])
        access = read_access(row["access"])
        found.append(BoardRow(**{**row, "labels": labels, "state": state, "warm": warm, "access": access}))
    return found


def read_access(access: Mapping[str, Any] | None) -> BoardAccess:
    """Convert the stored access list of a board. Boards of older hosts have none."""
    return BoardAccess(tuple(access.get("users", ())), tuple(access.get("groups", ()))) if access else EVERYONE


def make_requests(more: Sequence[Mapping[str, Any]]) -> tuple[BoardRequest, ...]:
    """Convert the stored requests for the boards after a job's first board."""
    return tuple(BoardRequest(one["selector"], one["board"]) for one in more)


async def _cache_labels(tx: Tx, digests: set[str]) -> None:
    """Read the labels that are not cached yet."""
    if len(_labels) > _MAX_LABELS:
        _labels.clear()
    lacking = list(digests - _labels.keys())
    if lacking:
        query = "select labels_digest, labels from hil.boards where labels_digest = any(%s)"
        for row in await fetch_rows(tx, query, [lacking]):
            _labels[row["labels_digest"]] = row["labels"]


_NUL = "\\u0000"


def as_json(value: Any) -> str:
    """Return a JSON document as text for a jsonb column."""
    # Fast path: nearly all documents are storable as they are.
    with contextlib.suppress(ValueError):
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if not text.isascii():
            text.encode()  # raises for lone surrogates
        if _NUL not in text:
            return text
    return json.dumps(make_storable(value), ensure_ascii=False)


def normalize_document(document: R) -> R:
    """Return a document in the form in which a jsonb column returns it.

    Raises UsageError if the document is nested too deeply.
    """
    try:
        return make_record(make_storable(document.to_json()), type(document))
    except RecursionError as error:
        raise UsageError(f"{type(document).__name__} exceeds the nesting limit") from error


def make_storable(value: Any) -> Any:
    """Return a JSON value without NUL, lone surrogates and non-finite numbers, which jsonb and text columns reject."""
    if isinstance(value, str):
        return value.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {make_storable(str(key)): make_storable(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [make_storable(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
