"""The farm's documents (jobs, boards, leases, results) and their states.

:mod:`.rpc` converts them to protocol messages. The database stores :class:`JobSpec`,
:class:`JobResult` and :class:`BoardCard` as JSON.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hil.controller.records.base import Record
from hil.controller.records.lab.board_image import ProvisionedImage
from hil.errors import UsageError

_MAX_NAME_LENGTH = 40  # maximum characters in a job's name
# Normal use never reaches this fence (one lease a second takes 68 years). A higher fence would lock out later sessions,
# so the farm neither stores nor sends a higher fence. An agent that lost its stored fence adds twice this value.
MAX_FENCE = 1 << 31
# After a job's timeout, the lease continues for this many seconds, so that the host can check the board.
PROBE_SECONDS = 60.0
# Option of a lease without a requested time: the farm shortens it to the user's limit.
LONGEST = "longest"
# Label of boards whose host runs commands of users.
COMMANDS_LABEL = "commands"
# Label of boards whose host runs commands with several boards. Hosts of older releases ignore the other boards.
SEVERAL_BOARDS_LABEL = "several_boards"
# Start of the labels for the parts of the stack: "stack.driver".
STACK_LABEL = "stack."
# Actions of `hil farm power`.
POWER_ACTIONS = ("on", "off", "cycle")
# Action that writes an image to a board.
PROVISION = "provision"


# Reserved user name for health jobs. No token can have it.
FARM_USER = "farm"
# Group of admins, which gives access to all boards. No token can have it, because names of groups have no asterisk.
ALL_BOARDS = "*"


class Kind(str, Enum):
    """Type of job."""

    RUN = "run"  # run models: hil run
    BUNDLE = "bundle"  # run a bundle: hil bundle run
    SUITE = "suite"  # run some cases of a suite: hil suite run
    COMMAND = "command"  # run a command of the user on the board's host
    LEASE = "lease"  # lease the board to a user or a program
    HEALTH = "health"  # check the board with a tiny model and compare outputs


class Priority(str, Enum):
    """Priority class of a job. Higher classes are scheduled first, subject to aging (:mod:`.scheduler.policy`)."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class JobState(str, Enum):
    """State of a job."""

    QUEUED = "queued"
    RUNNING = "running"  # has a board
    DONE = "done"  # has a final result
    CANCELLED = "cancelled"  # cancelled by a user; the result contains the reason


ENDED = (JobState.DONE, JobState.CANCELLED)


class BoardState(str, Enum):
    """State of a board. Only online boards receive jobs; suspect and quarantined boards also receive health jobs."""

    ONLINE = "online"
    DRAINING = "draining"  # drained by an admin: the current job may finish, no new job starts
    MAINTENANCE = "maintenance"  # drained and idle
    SUSPECT = "suspect"  # infrastructure failure or overdue check: a health job decides
    QUARANTINED = "quarantined"  # failed a health job; checked at increasing intervals
    OFFLINE = "offline"  # not presented by any host


class Role(str, Enum):
    """Role of a token. Each role includes the permissions of the previous ones."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    HOST = "host"  # presents boards
    ADMIN = "admin"

    def covers(self, needed: Role) -> bool:
        """Return True if this role includes ``needed``."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


class Right(str, Enum):
    """Permission that a token can have in addition to its role. Admins have all permissions."""

    POWER = "power"  # switch the power of free boards, and of boards that the user leases
    COMMANDS = "commands"  # run any command on hosts that allow commands
    PROVISION = "provision"  # write images to free boards, and to boards that the user leases


@dataclass(frozen=True)
class Principal:
    """Authenticated caller: user, role, project, rights and groups of a token."""

    user: str
    role: Role
    project: str = ""
    token: int = 0
    peer: str = ""
    rights: frozenset[Right] = frozenset()
    groups: frozenset[str] = frozenset()

    def has_right(self, right: Right) -> bool:
        """Return True if the token has a right."""
        return self.role is Role.ADMIN or (right in self.rights and self.role.covers(Role.SUBMITTER))

    @property
    def board_groups(self) -> frozenset[str]:
        """Groups that decide which boards the user may use."""
        return self.groups | {ALL_BOARDS} if self.role is Role.ADMIN else self.groups


class JobSpec(Record):
    """Work of one job."""

    kind: Kind
    # Options of the library call. For run and bundle: fields of
    # :class:`hil.controller.pipeline.settings.options.Job`, with ``models`` as paths in ``files``. For suite: fields of
    # :class:`hil.controller.workloads.suites.request.SuiteRequest`.
    # For lease: ``purpose``. ``needs`` names the runtime that the board's agent must have, if known.
    options: dict[str, Any] = {}
    # path below the job's directory -> digest in the artifact store
    files: dict[str, str] = {}
    affinity: str = ""  # cache affinity: boards that ran a job with the same key are preferred
    title: str = ""  # display title: the model's name; "" uses the submission's title


@dataclass(frozen=True)
class BoardRequest:
    """Board that a job needs."""

    selector: str = ""  # board selector (:mod:`.selector`); "" matches any board
    board: str = ""  # required board; "" for any


@dataclass(frozen=True)
class Submission:
    """Related jobs and their scheduling options."""

    title: str  # display title: name of the model or suite
    specs: tuple[JobSpec, ...]  # job N of submission S is named ``S.N``, or ``S`` if it is the only job
    selector: str = ""  # board selector (:mod:`.selector`); "" matches any board
    board: str = ""
    priority: Priority = Priority.NORMAL
    timeout_s: float = 3600.0  # limit for each attempt on a board, in seconds
    max_attempts: int = 3  # limit on attempts after infrastructure failures
    project: str = ""  # project for accounting; "" is the token's project
    # Boards after the first. The job gets all boards at the same time.
    more: tuple[BoardRequest, ...] = ()
    # Idempotency key: sending the submission twice queues it once.
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        object.__setattr__(self, "priority", Priority(self.priority))

    @property
    def requests(self) -> tuple[BoardRequest, ...]:
        """All boards of the job, in order."""
        return BoardRequest(self.selector, self.board), *self.more


class JobResult(Record):
    """Result of a job or of one attempt."""

    exit_code: int  # exit code of the command (see :mod:`hil.errors`); 130 if cancelled
    outcome: str = ""  # worst outcome of all cases (``PASS``, ``FAIL``, ...); "" for leases
    reason: str = ""  # one line; "" if the job passed
    infrastructure: bool = False  # True if the board or the farm failed; retried on other boards
    # record of the run or suite as printed by ``--json``, without tensors
    record: dict[str, Any] = {}
    # path below the run's directory -> digest in the artifact store
    files: dict[str, str] = {}
    # seconds per step on the host (fetch, open, run, upload)
    timings: dict[str, float] = {}
    # The host's CLOCK_MONOTONIC, in ns, when the board session was open and when the board was returned.
    board_ns: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Grant:
    """Grant of a board to a job, as sent to the board's host and to the lease holder."""

    lease: int  # lease number
    job: str  # job name (``17`` or ``17.3``)
    job_id: int
    board: str
    fence: int  # fence for sessions on the board
    ttl_s: float  # the lease expires after this many seconds without a heartbeat
    timeout_s: float  # maximum duration of the lease, in seconds
    attempt: int
    spec: JobSpec
    user: str = ""
    trace: str = ""  # W3C ``traceparent`` of the submission's span; "" without tracing
    more: tuple[GrantedLease, ...] = ()  # boards of the job after the first


@dataclass(frozen=True)
class GrantedLease:
    """Granted lease with board and secret."""

    grant: Grant
    card: BoardCard
    key: str  # secret that proves ownership of the lease


@dataclass(frozen=True)
class BoardAccess:
    """Users and groups that may use a board. Without both, everyone may use the board. Admins always may."""

    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    def allows(self, user: str, groups: Collection[str]) -> bool:
        """Return True if a user with these groups may use the board."""
        if not (self.users or self.groups) or ALL_BOARDS in groups:
            return True
        return user in self.users or any(group in groups for group in self.groups)


class MeterCard(Record):
    """Meter of a board. Only a sensor of the board has the settings after ``on_board``."""

    kind: str
    on_board: bool = False  # True if the board's agent reads it. Otherwise, only jobs on the board's host can.
    path: str = ""  # directory of the sensor on the board
    channel: int = 1
    rate_hz: float = 0.0
    idle_s: float = 0.0


class BoardCard(Record):
    """Description of a board, presented by the host."""

    name: str  # unique in the farm; if two hosts present it, one owns the board and the other is standby
    # Location. The host name is the machine's name, made unique by the host's directory.
    site: str = ""
    host: str = ""
    # Configured and discovered labels. Values are strings, numbers, booleans, or lists of strings that act as sets.
    labels: dict[str, Any] = {}
    config: str = ""  # board config as TOML, without settings that only its host can use (key files)
    hw_type: str = ""
    fence: int = 0  # highest fence that the board has accepted
    powered: bool = False  # True if the host can switch the board's power
    direct: str = ""  # agent address for processes on the same machine; "" if unavailable
    machine: str = ""  # boot id of that machine
    # Power actions that the host can do on request. Hosts of older releases can do none.
    power: list[str] = []
    access: BoardAccess = BoardAccess()
    provisions: bool = False  # True if the host can write images to the board
    image: ProvisionedImage | None = None  # image that hil wrote to the board
    meter: MeterCard | None = None  # meter of the board, if any. Hosts of older releases do not report it.
    # Table `console` for the config of a lease, as TOML; "" if the host cannot read a console.
    console: str = ""


def format_job_name(submission: int, number: int, of: int) -> str:
    """Return the name of job ``number`` out of ``of``: ``17`` or ``17.3``."""
    return str(submission) if of == 1 else f"{submission}.{number}"


def parse_job(text: str) -> tuple[int, int | None]:
    """Parse a job name: ``17`` -> (17, None), ``17.3`` -> (17, 3). Raises UsageError if the name is invalid."""
    submission, dot, number = text.partition(".")
    if len(text) > _MAX_NAME_LENGTH or not submission.isdecimal() or (dot and not number.isdecimal()):
        raise UsageError(
            f"invalid job name {text[:_MAX_NAME_LENGTH]!r}",
            hint="use a name from `hil farm status`, such as 17, or 17.3 for a suite",
        )
    return int(submission), int(number) if dot else None
