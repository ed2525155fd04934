"""Submissions: queue (idempotent), cancel and change priority."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hil.controller.farm.database.database import Tx
from hil.controller.farm.leasing import transitions
from hil.controller.farm.leasing.allocator import grant_boards, grant_new_jobs
from hil.controller.farm.leasing.lease_queue import LeaseQueue
from hil.controller.farm.leasing.transitions import finish, queue_jobs
from hil.controller.farm.messages import (
    COMMANDS_LABEL,
    LONGEST,
    SEVERAL_BOARDS_LABEL,
    BoardRequest,
    JobResult,
    JobState,
    Kind,
    Principal,
    Priority,
    Right,
    Role,
    Submission,
    format_job_name,
    parse_job,
)
from hil.controller.farm.scheduler.candidates import BoardRow, WaitingJob
from hil.controller.farm.selector import find_nearest, parse, suggest_labels
from hil.controller.farm.settings import FarmSettings, UserLimits
from hil.controller.farm.store.event_log import note_job
from hil.controller.farm.store.records import (
    JOBS,
    JobRow,
    fetch_rows,
    lock_active_leases,
    lock_job_rows,
    make_storable,
    normalize_document,
    read_board_rows,
    serialize_calls,
)
from hil.controller.storage.screen.texts import format_count
from hil.errors import EXIT_INTERRUPTED, AccessRefused, FarmError, NoSuchBoard, UsageError, did_you_mean

_MOST_JOBS, _MOST_ATTEMPTS, _LONGEST_S = 100_000, 100, 30 * 86400.0
_MAX_PROJECT_LENGTH = 100
_MAX_SHOWN = 5
_TIMEOUTS = f"above 0 s and at most {_LONGEST_S / 86400:.0f} days"

# Maximum waiting submissions per user. Each submission may be a separate lane, and every grant reads all lanes.
_MAX_WAITING = 1000
_MANY = "select count(*) as many from (select from hil.jobs where state = 'queued' limit %s) as waiting"
_WAITING = f"""
    select count(distinct job.submission) as waiting from {JOBS}
    where job.state = 'queued' and submission.user_name = %s
"""
_QUEUED = f"select count(*) as queued from {JOBS} where job.state = 'queued' and submission.user_name = %s"
_SENT = "select id, user_name, jobs from hil.submissions where key = %s"
_PRIORITY = """
    with changed as (update hil.submissions set priority = %(priority)s where id = %(submission)s returning *)
    update hil.jobs as job set lane = hil.lane(
        changed.user_name, changed.project, changed.priority, changed.selector, changed.board, job.checks, job.avoid,
        changed.more, changed.groups)
    from changed where job.submission = changed.id and job.state = 'queued'
"""


@dataclass(frozen=True)
class QueuedSubmission:
    """Number and job names of a queued submission."""

    submission: int
    jobs: list[str]


@serialize_calls
async def submit(
    tx: Tx, queue: LeaseQueue, who: Principal, order: Submission, trace: str, settings: FarmSettings
) -> QueuedSubmission:
    """Queue all jobs of a submission, and grant them free boards.

    Raises:
        NoSuchBoard: no board of the farm can ever match.
        UsageError: the submission is invalid.
        AccessRefused: the project belongs to other users.
        FarmError: too many submissions of this user are waiting.
    """
    _check_submission(order)
    order = _restrict_commands(who, order)
    order = replace(
        order, title=make_storable(order.title), specs=tuple(normalize_document(spec) for spec in order.specs)
    )
    project = _choose_project(who, order)
    sent = await tx.execute(_SENT, [order.key])
    boards = await read_board_rows(tx, settings)
    for before in await sent.fetchall():
        if before["user_name"] != who.user:
            raise UsageError(
                "a different user already used this submission key", hint="use a new key for each submission"
            )
        return QueuedSubmission(before["id"], _make_job_names(before["id"], before["jobs"]))
    lane = WaitingJob(
        0,
        who.user,
        project,
        order.priority,
        selector=order.selector,
        board=order.board,
        kind=order.specs[0].kind,
        more=order.more,
        groups=who.board_groups,
    )
    _check_satisfiable(order, boards)
    _check_access(lane, boards)
    _check_board_count(who, order, settings.limits.get_limits(who.user))
    await _check_quota(tx, who, len(order.specs), settings.limits.get_limits(who.user))
    order = _limit_lease(who, order, settings.limits.get_limits(who.user))
    submission, jobs = await queue_jobs(tx, order, who.user, project, trace, groups=lane.groups)
    await grant_new_jobs(tx, queue, settings, order, lane, jobs, boards)
    return QueuedSubmission(submission, _make_job_names(submission, len(jobs)))


@serialize_calls
async def cancel(tx: Tx, queue: LeaseQueue, who: Principal, name: str, settings: FarmSettings) -> list[str]:
    """Cancel a job, or all jobs of a submission. Returns the names of the cancelled jobs."""
    submission, number = await _find_own_job(tx, who, name)
    result = JobResult(EXIT_INTERRUPTED, reason=f"cancelled by {who.user}")
    leases = {
        lease.job.id: lease
        for lease in await lock_active_leases(tx, "submission.id = %(id)s and lease.part = 0", {"id": submission})
    }
    jobs = await _open_jobs(tx, submission, number)
    for job in jobs:
        if job.id in leases:
            await transitions.lease_over(tx, queue, leases[job.id], result, settings, JobState.CANCELLED)
        else:
            await finish(tx, job, result, state=JobState.CANCELLED)
    freed = [leases[job.id].board for job in jobs if job.id in leases]
    if freed or any(job.boards > 1 for job in jobs):
        await grant_boards(tx, queue, settings, freed if all(job.boards == 1 for job in jobs) else None)
    return [job.name for job in jobs]


@serialize_calls
async def set_priority(tx: Tx, who: Principal, name: str, priority: Priority) -> list[str]:
    """Change a submission's priority. Returns the names of unfinished jobs."""
    submission, _ = await _find_own_job(tx, who, name)
    jobs = await _open_jobs(tx, submission, None)
    if jobs:
        await tx.execute(_PRIORITY, {"priority": priority.value, "submission": submission})
    for job in jobs:
        await note_job(tx, "priority", job, job.state, reason=f"{priority.value}, by {who.user}")
    return [job.name for job in jobs]


def _make_job_names(submission: int, jobs: int) -> list[str]:
    return [format_job_name(submission, number, jobs) for number in range(1, jobs + 1)]


def _check_submission(order: Submission) -> None:
    """Validate a submission before storing anything."""
    if not order.key:
        raise UsageError("missing submission key")
    if not 1 <= len(order.specs) <= _MOST_JOBS:
        raise UsageError(f"a submission must have 1 to {_MOST_JOBS} jobs, got {len(order.specs)}")
    if not 0 < order.timeout_s <= _LONGEST_S:
        raise UsageError(f"a job's time limit must be {_TIMEOUTS}, got {order.timeout_s} s")
    if not 1 <= order.max_attempts <= _MOST_ATTEMPTS:
        raise UsageError(f"max_attempts must be 1 to {_MOST_ATTEMPTS}, got {order.max_attempts}")
    if len(order.project) > _MAX_PROJECT_LENGTH:
        raise UsageError(f"project name exceeds {_MAX_PROJECT_LENGTH} characters")
    kinds = {spec.kind for spec in order.specs}
    if Kind.HEALTH in kinds:
        raise UsageError(
            "health jobs cannot be submitted; the farm creates them",
            hint="request a health check with hil farm resume BOARD",
        )
    if Kind.LEASE in kinds and len(order.specs) > 1:
        raise UsageError("a lease must be the only job of the submission")
    if Kind.COMMAND in kinds and len(kinds) > 1:
        raise UsageError("commands cannot be in a submission with other jobs")
    for request in order.requests:
        parse(request.selector)
    if order.more and kinds - {Kind.COMMAND, Kind.LEASE}:
        raise UsageError(
            "only commands and leases can use several boards", hint="hil farm submit --board A --board B -- CMD..."
        )
    if order.more and len(order.specs) > 1:
        raise UsageError("a submission with several boards must have one job")


def _restrict_commands(who: Principal, order: Submission) -> Submission:
    """Return an order of commands restricted to hosts that allow commands, and any other order unchanged.

    Raises AccessRefused if the caller lacks the right.
    """
    if order.specs[0].kind is not Kind.COMMAND:
        return order
    if not who.has_right(Right.COMMANDS):
        raise AccessRefused(
            f"permission denied for {who.user}: the token lacks the right {Right.COMMANDS.value}",
            hint=f"an admin creates such a token: hil farm token add {who.user} --role submitter --right commands",
        )
    # The command runs on the host of the first board.
    needed = f"{COMMANDS_LABEL}, {SEVERAL_BOARDS_LABEL}" if order.more else COMMANDS_LABEL
    return replace(order, selector=f"({order.selector}), {needed}" if order.selector else needed)


def _check_board_count(who: Principal, order: Submission, limits: UserLimits) -> None:
    """Raise UsageError if a job needs more boards than its user may use at once."""
    if order.more and len(order.requests) > limits.boards:
        most = format_count(int(limits.boards), "board")
        raise UsageError(
            f"the limit of {who.user} is {most} at once, the job needs {len(order.requests)}",
            hint="use fewer boards, or ask an admin for a higher limit",
        )


def _check_access(job: WaitingJob, known: Sequence[BoardRow]) -> None:
    """Raise AccessRefused if the boards that match a job are restricted to other users."""
    if job.matches_all(known):
        return
    for part in job.parts:
        match = replace(part, kind=Kind.HEALTH)  # matches boards without access
        fit = [one for one in known if match.matches_first(one)]
        if fit and not any(part.matches_first(one) for one in fit):
            names = ", ".join(one.name for one in fit[:_MAX_SHOWN]) + (", ..." if len(fit) > _MAX_SHOWN else "")
            allowed = sorted({f"group {group}" for one in fit for group in one.access.groups})
            allowed += sorted({f"user {user}" for one in fit for user in one.access.users})
            raise AccessRefused(
                f"permission denied for {job.user}: restricted boards: {names}",
                hint=f"open to {', '.join(allowed[:_MAX_SHOWN])}; ask an admin for a token with a group",
            )
    raise AccessRefused(
        f"permission denied for {job.user}: fewer than {len(job.parts)} matching boards are open to you",
        hint="hil farm access shows which boards you may use",
    )


def _limit_lease(who: Principal, order: Submission, limits: UserLimits) -> Submission:
    """Return a lease without a requested time with the user's limit. Raises UsageError for a longer requested time."""
    longest_s = limits.lease_hours * 3600
    if order.specs[0].kind is not Kind.LEASE or order.timeout_s <= longest_s:
        return order
    if not order.specs[0].options.get(LONGEST):
        raise UsageError(
            f"the lease of {order.timeout_s / 3600:.3g} h exceeds the limit of {who.user}: {limits.lease_hours:g} h",
            hint=f"use --for {limits.lease_hours:g}h, or ask an admin for a higher limit",
        )
    return replace(order, timeout_s=longest_s)


async def _check_quota(tx: Tx, who: Principal, jobs: int, limits: UserLimits) -> None:
    """Raise FarmError if too many jobs or submissions of a user are waiting.

    Count submissions exactly only if the queue is long.
    """
    if math.isfinite(limits.queued):
        [own] = await fetch_rows(tx, _QUEUED, [who.user])
        if own["queued"] + jobs > limits.queued:
            most = format_count(int(limits.queued), "waiting job")
            raise FarmError(
                f"the limit of {who.user} is {most}: {own['queued']} waiting, {jobs} new",
                hint="wait until some have finished, cancel some, or ask an admin for a higher limit",
            )
    [all_] = await fetch_rows(tx, _MANY, [_MAX_WAITING])
    if all_["many"] < _MAX_WAITING:
        return
    [own] = await fetch_rows(tx, _WAITING, [who.user])
    if own["waiting"] >= _MAX_WAITING:
        raise FarmError(
            f"{who.user} already has {_MAX_WAITING} waiting submissions",
            hint="combine jobs in a submission, or wait until some have finished",
        )


def _choose_project(who: Principal, order: Submission) -> str:
    """Return the project that a submission is counted for.

    Raises AccessRefused if the caller may not use the project.
    """
    if order.project and order.project != who.project and who.role is not Role.ADMIN:
        raise AccessRefused(
            f"this token is not valid for project {order.project!r}",
            hint=f"the token's project is {who.project!r}" if who.project else "the token has no project",
        )
    return order.project or who.project


def _check_satisfiable(order: Submission, known: Iterable[BoardRow]) -> None:
    """Raise NoSuchBoard if no known board matches, regardless of the boards' states."""
    rows = list(known)
    for request in order.requests:
        _check_request(order, request, rows)
    pinned = [request.board for request in order.requests if request.board]
    if twice := next((name for name in pinned if pinned.count(name) > 1), ""):
        raise UsageError(f"board {twice!r} is requested twice", hint="each board can be used once in a job")
    job = WaitingJob(0, "", selector=order.selector, board=order.board, more=order.more, kind=Kind.HEALTH)
    if not job.matches_all(rows):
        raise NoSuchBoard(
            f"the job needs {len(order.requests)} different boards, but fewer boards of the farm match",
            hint="hil farm boards lists all boards",
        )


def _check_request(order: Submission, request: BoardRequest, known: Iterable[BoardRow]) -> None:
    """Raise NoSuchBoard if no known board matches a request."""
    boards = {one.name: one.labels for one in known}
    selector = parse(request.selector)
    if request.board:
        if request.board not in boards:
            hint = did_you_mean(request.board, boards) + "hil farm boards lists all boards"
            raise NoSuchBoard(f"board {request.board!r} not found", hint=hint)
        boards = {request.board: boards[request.board]}
    if any(selector.matches(labels) for labels in boards.values()):
        return
    if order.specs[0].kind is Kind.COMMAND and not any(labels.get(COMMANDS_LABEL) for labels in boards.values()):
        raise NoSuchBoard(
            "no host of the farm allows commands", hint="start a board's host with hil farm host --allow-commands"
        )
    old = [name for name, labels in boards.items() if selector.matches({**labels, SEVERAL_BOARDS_LABEL: True})]
    if old and order.more:
        raise NoSuchBoard(
            f"the hosts of {', '.join(old[:_MAX_SHOWN])} cannot run a command with several boards",
            hint="update hil on these hosts, or use a first board on another host",
        )
    if not boards:
        raise NoSuchBoard("the farm has no boards yet", hint="add a machine's boards with hil farm host --site S")
    close = "; ".join(f"{name}: {', '.join(misses)}" for name, misses in find_nearest(selector, boards))
    similar = suggest_labels(selector, boards.values())
    raise NoSuchBoard(f"no board matches {request.selector!r}", hint=f"{similar}nearest: {close}")


async def _find_own_job(tx: Tx, who: Principal, name: str) -> tuple[int, int | None]:
    """Return submission and job number for a name. Raises AccessRefused if the caller may not change the job."""
    submission, number = parse_job(name)
    where = "submission.id = %s and (%s::numeric is null or job.number = %s) limit 1"
    owners = await fetch_rows(
        tx, f"select submission.user_name from {JOBS} where {where}", [submission, number, number]
    )
    if not owners:
        raise UsageError(f"job {name} not found", hint="hil farm status lists all jobs")
    if owners[0]["user_name"] != who.user and who.role is not Role.ADMIN:
        raise AccessRefused(
            f"job {name} belongs to {owners[0]['user_name']}",
            hint="only the owner of the job or an admin can change the job",
        )
    return submission, number


async def _open_jobs(tx: Tx, submission: int, number: int | None) -> list[JobRow]:
    where = "job.submission = %s and (%s::numeric is null or job.number = %s) and job.state in ('queued', 'running')"
    return await lock_job_rows(tx, where, [submission, number, number])
