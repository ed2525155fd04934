"""The farm's documents (jobs, boards, leases, results) and the states that they are in.

:mod:`.rpc` turns them into messages of the protocol. :class:`JobSpec`, :class:`JobResult` and :class:`BoardCard` are
also stored in the database, as JSON (``to_json`` and ``of_json``).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar

from hil.core.text import jsonable
from hil.errors import UsageError

D = TypeVar("D", bound="Document")
_LONGEST_NAME = 40  # of a job
# A board never comes to this fence by use (a lease a second for 68 years). A higher one would lock out the board's
# next owner, so it is neither stored nor passed on. An agent that lost its fence takes a step of twice as much.
MOST_FENCE = 1 << 31


class Kind(str, Enum):
    """What a job does on its board."""

    RUN = "run"  # models: hil run
    BUNDLE = "bundle"  # hil bundle run
    SUITE = "suite"  # some cases of a suite: hil suite run
    LEASE = "lease"  # nothing: a person or a program has the board
    HEALTH = "health"  # a check: a tiny model must run and be right


class Priority(str, Enum):
    """A job's class: a higher one goes first (but see aging in :mod:`.scheduler.policy`)."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class JobState(str, Enum):
    """The state of a job."""

    QUEUED = "queued"
    RUNNING = "running"  # it has a board
    DONE = "done"  # it has its final result
    CANCELLED = "cancelled"  # a user ended it; its result says so


ENDED = (JobState.DONE, JobState.CANCELLED)


class BoardState(str, Enum):
    """The state of a board. Jobs are given online boards only; health jobs also suspect and quarantined ones."""

    ONLINE = "online"
    DRAINING = "draining"  # an admin holds it back: what runs may end, nothing new begins
    MAINTENANCE = "maintenance"  # drained, and nothing runs on it any more
    SUSPECT = "suspect"  # the infrastructure failed on it, or it was not checked for long: a health job decides
    QUARANTINED = "quarantined"  # its health job failed; it is checked again, ever more rarely
    OFFLINE = "offline"  # no host presents it


class Role(str, Enum):
    """What a token allows; each role also allows what the ones before it do."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    HOST = "host"  # present boards
    ADMIN = "admin"

    def covers(self, needed: Role) -> bool:
        """Whether this role allows what ``needed`` is required for."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True)
class Principal:
    """Who makes a call: the user, role and project of a token."""

    user: str
    role: Role
    project: str = ""
    token: int = 0
    peer: str = ""


@dataclass(frozen=True)
class Document:
    """A dataclass that is stored as JSON. Unknown keys are ignored, so that an older release reads a newer document."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        plain: dict[str, Any] = jsonable({one.name: getattr(self, one.name) for one in fields(self)})
        return plain

    @classmethod
    def of_json(cls: type[D], values: Mapping[str, Any]) -> D:
        """Return the document that JSON values hold; UsageError where they hold none."""
        known = {one.name: values[one.name] for one in fields(cls) if one.name in values}
        try:
            return cls(**known)
        except (TypeError, ValueError, KeyError) as error:
            raise UsageError(f"this is no {cls.__name__} of a farm: {error}") from error


@dataclass(frozen=True)
class JobSpec(Document):
    """What one job is to do."""

    kind: Kind
    # of the library call: fields of :class:`hil.controller.pipeline.options.Job` (run, bundle; ``models`` are paths in
    # ``files``), of :class:`hil.controller.workloads.suites.request.Request` (suite), ``purpose`` (lease). ``needs``
    # names the runtime that the board's agent must have, where that is known.
    options: Mapping[str, Any] = field(default_factory=dict)
    # path below the job's folder -> digest in the artifact store.
    files: Mapping[str, str] = field(default_factory=dict)
    affinity: str = ""  # what a board is warm for once it ran this; a warm board is preferred

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", Kind(self.kind))


@dataclass(frozen=True)
class Submission:
    """One or more jobs that belong together, and how they are scheduled."""

    title: str  # for people: the model's or suite's name
    specs: tuple[JobSpec, ...]  # the jobs; job N of submission S is called ``S.N``, and ``S`` where there is only one
    selector: str = ""  # what a board must be (:mod:`.selector`); "" is any
    board: str = ""
    priority: Priority = Priority.NORMAL
    timeout_s: float = 3600.0  # most seconds that a job may have a board, each time
    max_attempts: int = 3  # how often a job may be tried where the infrastructure fails
    project: str = ""  # whom it is counted for, beside the user; "" is the token's project
    # identifies the submission, so that sending it twice queues it once.
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        object.__setattr__(self, "priority", Priority(self.priority))


@dataclass(frozen=True)
class JobResult(Document):
    """How a job, or one attempt at it, ended."""

    exit_code: int  # what the command would have ended with (see :mod:`hil.errors`); 130 if it was cancelled
    outcome: str = ""  # the gravest outcome of its cases (``PASS``, ``FAIL``, ...); "" for leases
    reason: str = ""  # a line, unless it passed
    infrastructure: bool = False  # whether the board or the farm failed, so that another board may be tried
    # the run's or suite's record as ``--json`` prints it, without tensors.
    record: Mapping[str, Any] = field(default_factory=dict)
    # path below the run's folder -> digest in the artifact store.
    files: Mapping[str, str] = field(default_factory=dict)
    # seconds of each step on the host (fetch, open, run, upload).
    timings: Mapping[str, float] = field(default_factory=dict)
    # CLOCK_MONOTONIC of the host when the board's session was open, and when the board was given back.
    board_ns: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "board_ns", tuple(self.board_ns))


@dataclass(frozen=True)
class Grant:
    """A board given to a job: what its host is told, and the holder of a lease."""

    lease: int  # its number
    job: str  # the job's name (``17`` or ``17.3``)
    job_id: int
    board: str
    fence: int  # what sessions on the board must be opened with
    ttl_s: float  # the lease ends when nothing is heard of its host for so long
    timeout_s: float  # the lease ends after so long in any case
    attempt: int
    spec: JobSpec
    user: str = ""
    trace: str = ""  # W3C ``traceparent`` of the submission's span, "" for none


@dataclass(frozen=True)
class BoardCard(Document):
    """A board as its host presents it."""

    name: str  # in the whole farm. If two hosts present the same name, one owns the board and the other stands by.
    # site, host: where it is; the host's name is its machine's, made unique by its folder.
    site: str = ""
    host: str = ""
    # from the config and discovered; values are texts, numbers and truths; a list is a set of texts.
    labels: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""  # the board's config as TOML, without what only its host can use (files of keys)
    hw_type: str = ""
    fence: int = 0  # the highest that the board has seen
    powered: bool = False  # whether its host can switch its power
    direct: str = ""  # the agent's address for processes on the same machine, "" for none
    machine: str = ""  # identifies that machine (its boot id)


def job_name(submission: int, number: int, of: int) -> str:
    """Return the name of job ``number`` of ``of``: ``17`` or ``17.3``."""
    return str(submission) if of == 1 else f"{submission}.{number}"


def parse_job(text: str) -> tuple[int, int | None]:
    """Read a job's name: ``17`` -> (17, None), ``17.3`` -> (17, 3); UsageError where it is none."""
    submission, dot, number = text.partition(".")
    if len(text) > _LONGEST_NAME or not submission.isdecimal() or (dot and not number.isdecimal()):
        raise UsageError(
            f"{text[:_LONGEST_NAME]!r} is no job's name", hint="as `hil farm status` lists them: 17, or 17.3 of a suite"
        )
    return int(submission), int(number) if dot else None
