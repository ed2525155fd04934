"""Documents of `hil farm`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType

from hil.controller.records.base import Count, Record, note
from hil.controller.records.lab.farm import (
    AuditEntry,
    BoardPermission,
    FarmBoard,
    FarmEvent,
    FarmJob,
    FarmReservation,
    FarmStats,
    FarmToken,
    JobDetails,
    LogPiece,
    RightName,
    RoleName,
)
from hil.controller.records.lab.webhooks import WebhookStatus
from hil.controller.records.suite import SuiteDocument


class FarmStatus(Record, kw_only=True):
    """Output of `hil farm status`."""

    stats: FarmStats
    jobs: Annotated[list[FarmJob], note("the newest jobs and all running jobs")]


class SubmissionStatus(Record, kw_only=True):
    """Output of `hil farm status JOB` for a submission of multiple jobs."""

    submission: int
    jobs: list[FarmJob]


class JobReport(Record, kw_only=True):
    """Output of `hil farm status JOB`."""

    job: JobDetails


class FarmBoardList(Record, kw_only=True):
    """Output of `hil farm boards`."""

    boards: list[FarmBoard]


class StatsReport(Record, kw_only=True):
    """Output of `hil farm top`."""

    stats: FarmStats


class EventList(Record, kw_only=True):
    """Output of `hil farm events`."""

    events: list[FarmEvent]


class LogList(Record, kw_only=True):
    """Output of `hil farm logs`."""

    logs: list[LogPiece]


class CreatedToken(Record, kw_only=True):
    """Output of `hil farm token add`."""

    token: Annotated[str, note("the secret, which the farm does not store")]
    user: str
    role: RoleName
    project: str
    rights: list[RightName]
    groups: list[str] = []


class TokenList(Record, kw_only=True):
    """Output of `hil farm token list`."""

    tokens: list[FarmToken]


class TokenRevocation(Record, kw_only=True):
    """Output of `hil farm token revoke`."""

    revoked: Annotated[int, note("number of the token")]
    user: str


class BoardAccessList(Record, kw_only=True):
    """Output of `hil farm access`."""

    boards: list[BoardPermission]


class FarmLogin(Record, kw_only=True):
    """Output of `hil farm login`."""

    farm: Annotated[str, note("address of the farm")]
    issuer: str
    user: str
    role: RoleName
    groups: list[str]


class FarmLogout(Record, kw_only=True):
    """Output of `hil farm logout`."""

    farm: str
    removed: Annotated[bool, note("false if there was no login")]


class WebhookList(Record, kw_only=True):
    """Output of `hil farm webhooks list`."""

    webhooks: list[WebhookStatus]


class AuditList(Record, kw_only=True):
    """Output of `hil farm audit`."""

    audit: list[AuditEntry]


class FarmCleanup(Record, kw_only=True):
    """Output of `hil farm gc`."""

    dry_run: Annotated[bool, note("true if nothing was deleted")]
    counts: Annotated[dict[str, Count], note("number of deleted objects by kind")]
    bytes: Annotated[Count, note("size of the deleted files")]


class FarmBackup(Record, kw_only=True):
    """Output of `hil farm backup`."""

    file: str
    size: Annotated[Count, note("size of the archive in bytes")]
    created: Annotated[str, note("time of the database's snapshot, in ISO 8601")]
    jobs: Count
    boards: Count
    tokens: Count
    files: Annotated[Count, note("number of files of the farm's store in the archive")]
    missing: Annotated[list[str], note("digests of files that jobs use, but that the store lacks or has damaged")]
    exit_code: int


class RestoredFarm(Record, kw_only=True):
    """Output of `hil farm restore`."""

    file: str
    home: Annotated[str, note("HIL_FARM_HOME of the restored farm")]
    dry_run: Annotated[bool, note("true if nothing was restored")]
    created: Annotated[str, note("time of the backup")]
    jobs: Count
    boards: Count
    tokens: Count
    files: Count


class InstallFiles(Record, kw_only=True):
    """Output of `hil farm install`."""

    dry_run: Annotated[bool, note("true if no file was written")]
    files: Annotated[list[str], note("paths of the files")]
    commands: Annotated[list[str], note("commands that complete the installation")]


class BoardStateChange(Record, kw_only=True):
    """Output of `hil farm drain` and `hil farm resume`."""

    board: str
    state: Annotated[str, note("state of the board after the change, or `unknown`")]


class HostStateChange(Record, kw_only=True):
    """Output of `hil farm drain --host` and `hil farm resume --host`."""

    host: str
    boards: Annotated[dict[str, str], note("board -> state after the change, or `unknown`")]


class ReservedBoard(Record, kw_only=True):
    """Output of `hil farm lease --at`."""

    reservation: FarmReservation


class ReservationList(Record, kw_only=True):
    """Output of `hil farm reservations`."""

    reservations: list[FarmReservation]


class BoardUnreserved(Record, kw_only=True):
    """Output of `hil farm reservations --cancel`."""

    cancelled: Annotated[int, note("number of the reservation")]
    board: str


class BoardPower(Record, kw_only=True):
    """Output of `hil farm power`."""

    board: str
    action: Annotated[str, note("on, off or cycle")]
    state: Annotated[str, note("state of the board after the action")]


class FarmProvisionReport(Record, kw_only=True):
    """Output of `hil farm provision`."""

    board: str
    file: Annotated[str, note("name of the image")]
    sha256: Annotated[str, note("digest of the image, in hex")]
    seconds: Annotated[float, note("from the upload to the end of the check")]
    state: Annotated[str, note("state of the board after the check")]
    reason: Annotated[str, note("reason for the state; empty if the board passed the check")] = ""
    exit_code: Annotated[int, note("0, or 4 if the board did not pass the check")]


class BoardRemoval(Record, kw_only=True):
    """Output of `hil farm forget`."""

    board: str
    ended: Annotated[list[str], note("names of queued jobs that required the board")]


class StartedFarm(Record, kw_only=True):
    """Output of `hil farm up --detach`."""

    pid: int
    address: Annotated[str, note("address of the gateway on this machine")]
    serving: Literal[True]
    ready: Annotated[bool, note("true if all boards have been checked")]
    listen: Annotated[str, note("address for other machines, or empty")]
    boards: Annotated[dict[str, Count], note("number of boards by state")]
    home: str


class StoppedFarm(Record, kw_only=True):
    """Output of `hil farm down`."""

    ended: Annotated[bool, note("false if no farm was running")]


class SubmittedJobs(Record, kw_only=True):
    """Output of `hil farm submit`."""

    submission: int
    jobs: Annotated[list[str], note("names of jobs")]
    uploaded_bytes: Annotated[Count, note("size of the files that the farm did not have")]


class SubmittedTarget(Record, kw_only=True):
    """A target of a submission."""

    name: str
    submission: int
    jobs: Annotated[list[str], note("names of jobs")]
    uploaded_bytes: Count


class SubmittedTargets(Record, kw_only=True):
    """Output of `hil farm submit` with multiple targets."""

    targets: list[SubmittedTarget]


class CancelReport(Record, kw_only=True):
    """Output of `hil farm cancel`."""

    cancelled: Annotated[list[str], note("names of jobs")]


class LeasedBoard(Record, kw_only=True):
    """Output of `hil farm lease` without a command."""

    board: str
    job: str
    lease: int
    config: Annotated[str, note("path of a board config, which is valid while the command runs")]
    boards: Annotated[list[str], note("names of all leased boards, in the order of the options")] = []
    configs: Annotated[list[str], note("paths of the configs of all leased boards")] = []
    for_s: Annotated[float, note("maximum lease time in seconds")]


class EndedJobReport(Record, kw_only=True):
    """Result of a job."""

    name: str
    exit_code: Count
    outcome: str
    reason: str
    infrastructure: Annotated[bool, note("true if the board or the farm failed, not the job")]
    record: Annotated[
        dict[str, Any] | UnsetType, note("as in `hil run --json`; absent for a suite, and empty if nothing ran")
    ] = UNSET
    files: Annotated[dict[str, str], note("path below the run's directory -> digest in the farm's store")]
    timings: Annotated[dict[str, float], note("seconds of each step on the host")]
    board_ns: Annotated[
        tuple[int, int],
        note("the host's CLOCK_MONOTONIC when the board's session opened, and when the board was returned"),
    ]


class FarmResult(Record, kw_only=True):
    """Output of `hil farm result`, and of `hil farm submit --wait`."""

    name: Annotated[str, note("requested submission or job")]
    suite: Annotated[SuiteDocument | UnsetType, note("for a suite, as in `hil suite run --json`")] = UNSET
    folder: Annotated[str | UnsetType, note("directory of the downloaded files, with --out")] = UNSET
    jobs: list[EndedJobReport]
    exit_code: int
