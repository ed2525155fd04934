"""Answers of a farm's gateway, by query and action.

Gateways of earlier versions omit the fields that have a default. States, kinds, priorities and roles are plain strings,
because a newer gateway may have more of them.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType, field

from hil.controller.records.base import Record, make_record, note
from hil.controller.records.lab.board_image import ProvisionedImage
from hil.controller.records.lab.fields import (
    Finite,
    Integer,
    JobName,
    KindName,
    Time,
    Whole,
    check_times,
    list_values,
)
from hil.controller.records.lab.webhooks import TestedWebhook, WebhookStatus
from hil.controller.records.suite import CaseRecord, SuiteModelFile, make_case_record

PriorityName = Annotated[str, list_values("high", "normal", "low")]
JobStateName = Annotated[str, list_values("queued", "running", "done", "cancelled")]
BoardStateName = Annotated[str, list_values("online", "draining", "maintenance", "suspect", "quarantined", "offline")]
RoleName = Annotated[str, list_values("viewer", "submitter", "host", "admin")]
RightName = Annotated[str, list_values("power", "commands", "provision")]
Label = str | bool | Integer | Finite | list[str | bool | Integer | Finite]


class RequestedBoard(Record, kw_only=True):
    """A board that a job needs."""

    selector: str = ""
    board: Annotated[str, note("required board; empty for any")] = ""


class FarmJob(Record, kw_only=True):
    """A job."""

    name: JobName
    submission: Whole
    title: Annotated[str, note("name of the model; for a part of a suite: suite, flow and models")]
    kind: KindName
    project: str
    priority: PriorityName
    selector: str
    state: JobStateName
    attempts: Annotated[Whole, note("number of leases so far, without those that a stop of a host interrupted")]
    user: str
    board: Annotated[str, note("current or last board, or empty")]
    pinned: Annotated[str, note("required board; empty for any")] = ""
    boards: Annotated[list[str], note("current or last boards of a job with several boards, in order")] = []
    more: Annotated[list[RequestedBoard], note("boards after the first that the job needs at the same time")] = []
    queued_at: Time
    started_at: Time | None
    finished_at: Time | None
    exit_code: Annotated[Whole | None, note("exit code of the job's command; null without a result")]
    outcome: Annotated[str, note("outcome of the worst case, or empty")]
    reason: Annotated[str, note("reason of the result, or why the last attempt failed")]
    position: Annotated[
        Whole | UnsetType,
        note("of a queued job: position among jobs that wait for the same boards, from 1; 0 if no board matches"),
    ] = UNSET
    why: Annotated[str | UnsetType, note("with position: why the job waits")] = UNSET

    def __post_init__(self) -> None:
        check_times(self, "queued_at", "started_at", "finished_at")


class QueuedJob(FarmJob, kw_only=True):
    """A job in the queue."""

    position: Whole
    why: str


class FarmAttempt(Record, kw_only=True):
    """Lease of a board to a job."""

    lease: Whole
    board: str
    fence: Annotated[Integer, note("fence of the sessions on the board; -1 if invalid")]
    part: Annotated[Whole, note("place of the board among the boards of the job, from 0")] = 0
    granted_at: Time
    started_at: Time | None
    ended_at: Time | None
    reason: Annotated[str, note("why the lease ended")]

    def __post_init__(self) -> None:
        check_times(self, "granted_at", "started_at", "ended_at")


class JobDetails(FarmJob, kw_only=True):
    """A job with its attempts."""

    attempts_made: list[FarmAttempt]


class JobResultRow(Record, kw_only=True):
    """A job with its result. Without a result, only the name and the state are present."""

    name: JobName
    state: JobStateName
    exit_code: Whole | UnsetType = UNSET
    outcome: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    infrastructure: Annotated[bool | UnsetType, note("true if the board or the farm failed, not the job")] = UNSET
    record: Annotated[
        dict[str, Any] | UnsetType, note("record of the run (run.schema.json) or of the suite, with `cases`")
    ] = UNSET
    files: Annotated[
        dict[str, str] | UnsetType, note("path below the run's directory -> digest in the farm's store")
    ] = UNSET
    timings: Annotated[dict[str, Finite] | UnsetType, note("seconds of each step on the host")] = UNSET
    board_ns: Annotated[
        Annotated[list[Integer], Meta(min_length=2, max_length=2)] | UnsetType,
        note("the host's CLOCK_MONOTONIC when the board's session opened, and when the board was returned"),
    ] = UNSET
    spec: Annotated[dict[str, Any] | UnsetType, note("specification of the job, if requested")] = UNSET


class SuitePart(Record, kw_only=True):
    """Record of a suite job, with only the fields that are necessary to merge the parts of a suite."""

    folder: Annotated[str, note("directory of the run on the host")] = ""
    started: float | None = None
    finished: float | None = None
    boards: list[str] = []
    board_info: dict[str, Any] = {}
    models: dict[str, SuiteModelFile] = {}
    versions: dict[str, str] = {}
    suite_ids: Annotated[list[str], note("all cases of the suite, in order")] = []
    cases: Annotated[list[CaseRecord] | None, note("null if no case ran")] = None


def make_suite_part(values: dict[str, Any]) -> SuitePart:
    """Convert the record of a suite job. Raises UsageError."""
    part = make_record({name: value for name, value in values.items() if name != "cases"}, SuitePart)
    cases = values.get("cases")
    return part if cases is None else part.replace(cases=[make_case_record(one) for one in cases])


class BoardUsers(Record, kw_only=True):
    """Users and groups that may use a board; everyone if both are empty."""

    users: list[str] = []
    groups: list[str] = []


class FarmBoard(Record, kw_only=True):
    """A board."""

    name: str
    site: str
    host: str
    hw_type: str
    reason: Annotated[str, note("reason for the state")]
    labels: dict[str, Label]
    failures: Annotated[Whole, note("number of consecutive failed checks")]
    warm: Annotated[list[str], note("affinity keys of recent jobs, newest first")] = []
    state: BoardStateName
    job: Annotated[str, note("job that has the board, or empty")]
    user: str
    since: Annotated[Time | None, note("start of the job's lease")]
    checked_at: Annotated[Time | None, note("last successful check")]
    power: Annotated[list[str], note("power actions that the host can do: on, off, cycle")] = []
    access: BoardUsers = field(default_factory=BoardUsers)
    provisions: Annotated[bool, note("whether the host can write images to the board")] = False
    image: Annotated[ProvisionedImage | None, note("image that hil wrote to the board; null if unknown")] = None

    def __post_init__(self) -> None:
        check_times(self, "since", "checked_at")


class BoardPermission(Record, kw_only=True):
    """Who may use a board."""

    board: str
    access: BoardUsers
    allowed: Annotated[bool, note("whether the requested user may use the board")]
    users: Annotated[list[str], note("users with a valid token who may use the board; only for admins")] = []


class FarmEvent(Record, kw_only=True):
    """An event of a board, job, lease, host or gateway."""

    id: Whole
    at: Time
    what: Annotated[str, note("such as board.suspect, job.done, lease.ended, host.lost, gateway.restarted")]
    board: str
    job: str
    lease: Whole | None
    host: Annotated[str, note("host, or machine and address of the gateway; or empty")] = ""
    reason: str

    def __post_init__(self) -> None:
        check_times(self, "at")


class AuditEntry(Record, kw_only=True):
    """An action, or a refused request."""

    id: Whole
    at: Time
    user: str
    role: str
    peer: str
    action: str
    object: str
    allowed: bool
    detail: dict[str, Any]

    def __post_init__(self) -> None:
        check_times(self, "at")


class FarmToken(Record, kw_only=True):
    """A token, without its secret."""

    id: Whole
    user: str
    project: str
    role: RoleName
    rights: list[RightName] = []
    groups: Annotated[list[str], note("groups of the user, which give access to restricted boards")] = []
    note: str
    made_at: Time
    expires_at: Time | None
    revoked_at: Time | None
    good: Annotated[bool, note("false if expired or revoked")]

    def __post_init__(self) -> None:
        check_times(self, "made_at", "expires_at", "revoked_at")


class LogPiece(Record, kw_only=True):
    """Output of a job."""

    number: Annotated[Whole, note("increases with each piece")]
    job: str
    text: str


class FarmUser(Record, kw_only=True):
    """User and role of the caller's token."""

    user: str
    role: RoleName
    project: str = ""
    rights: Annotated[list[RightName], note("permissions in addition to those of the role")] = []
    groups: Annotated[list[str], note("groups, which give access to restricted boards")] = []


class FarmCase(Record, kw_only=True):
    """Result of a job's case."""

    job: str
    name: str
    outcome: str
    reason: str


class FarmCases(Record, kw_only=True):
    """Case results so far of a submission or a job."""

    total: Whole
    cases: Annotated[list[FarmCase], note("failures first; fewer than `total` if limited")]


class QueuePercentiles(Record, kw_only=True):
    """Queue times in seconds of jobs that started in the last hour; null without jobs."""

    p50: Finite | None
    p95: Finite | None


class UserStats(Record, kw_only=True):
    """Board use of a user."""

    user: str
    project: str
    running: Whole
    queued: Whole
    board_s: Annotated[Finite, note("board time in seconds; older use counts less")]


class FarmStats(Record, kw_only=True):
    """Statistics of a farm."""

    jobs: Annotated[dict[str, Whole], note("number of jobs by state")]
    matching: Annotated[Whole, note("number of jobs with the requested states and user")] = 0
    boards: Annotated[dict[str, Whole], note("number of boards by state")]
    queue: Annotated[dict[str, Whole], note("number of queued jobs by priority")]
    waiting_s: QueuePercentiles
    users: list[UserStats]


class EmptyReply(Record, kw_only=True):
    """Reply to the actions `priority`, `drain` and `resume`."""


class FarmReservation(Record, kw_only=True):
    """Reservation of a board, and reply to the action `reserve`."""

    id: Whole
    user: str
    project: str
    board: str
    begins_at: Time
    ends_at: Time

    def __post_init__(self) -> None:
        check_times(self, "begins_at", "ends_at")


class CancelledReservation(Record, kw_only=True):
    """Reply to the action `unreserve`."""

    board: str


class SwitchedPower(Record, kw_only=True):
    """Reply to the action `power`."""

    state: Annotated[BoardStateName, note("state of the board after the action")]


class ProvisionedBoard(Record, kw_only=True):
    """Reply to the action `provision`."""

    state: Annotated[BoardStateName, note("state of the board after the action")]


class CancelledJobs(Record, kw_only=True):
    """Reply to the action `cancel`."""

    cancelled: Annotated[list[str], note("names of jobs")]


class ForgottenBoard(Record, kw_only=True):
    """Reply to the action `forget`."""

    ended: Annotated[list[str], note("names of queued jobs that required the board")]


class NewToken(Record, kw_only=True):
    """Reply to the action `token`."""

    token: Annotated[str, note("the secret, which the farm does not store")]


class RevokedToken(Record, kw_only=True):
    """Reply to the action `revoke`."""

    user: str


class CleanedFarm(Record, kw_only=True):
    """Reply to the action `gc`."""

    counts: Annotated[dict[str, Whole], note("number of deleted objects by kind")]
    bytes: Annotated[Whole, note("size of the deleted files")]


# Query (field of AskRequest) or action (field of DoRequest) -> type of the answer.
ANSWERS: dict[str, Any] = {
    "jobs": list[FarmJob],
    "job": JobDetails,
    "result": list[JobResultRow],
    "boards": list[FarmBoard],
    "events": list[FarmEvent],
    "audit": list[AuditEntry],
    "stats": FarmStats,
    "tokens": list[FarmToken],
    "logs": list[LogPiece],
    "me": FarmUser,
    "queue": list[QueuedJob],
    "cases": FarmCases,
    "cancel": CancelledJobs,
    "priority": EmptyReply,
    "drain": EmptyReply,
    "resume": EmptyReply,
    "forget": ForgottenBoard,
    "token": NewToken,
    "revoke": RevokedToken,
    "gc": CleanedFarm,
    "power": SwitchedPower,
    "provision": ProvisionedBoard,
    "reservations": list[FarmReservation],
    "access": list[BoardPermission],
    "webhooks": list[WebhookStatus],
    "webhook": TestedWebhook,
    "reserve": FarmReservation,
    "unreserve": CancelledReservation,
}
