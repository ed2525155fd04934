"""Words of the farm: jobs, boards, leases, results, and the states that they are in.

What crosses the wire or a table is one of these as JSON (``to_json`` and ``of_json``): documents with the fields below.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar

from hil.errors import EXIT_BOARD, EXIT_FAIL, EXIT_INTERRUPTED, EXIT_NOTHING_RAN, EXIT_OK, EXIT_STAGE, UsageError

D = TypeVar("D", bound="Document")
# Exit codes from the lightest to the gravest (DESIGN: 4, 3, 1; what was cancelled counts as interrupted).
_GRAVITY = (EXIT_OK, EXIT_NOTHING_RAN, EXIT_FAIL, EXIT_STAGE, EXIT_BOARD, EXIT_INTERRUPTED)
_LONGEST_NAME = 40  # of a job
# No board comes to this fence by being used: a lease a second for 68 years. A higher one would lock out the board's
# next owner, so it is neither stored nor passed on. An agent that begins anew still takes a step of twice as much.
MOST_FENCE = 1 << 31


class Kind(str, Enum):
    """What a job does on its board."""

    RUN = "run"  # models: hil run
    BUNDLE = "bundle"  # hil bundle run
    SUITE = "suite"  # some cases of a suite: hil suite run
    LEASE = "lease"  # nothing by itself: a person or a program has the board
    HEALTH = "health"  # a tiny model must run and be right


class Priority(str, Enum):
    """A job's class: a higher one goes first, whoever waits in a lower one (but see aging in :mod:`.policy`)."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class JobState(str, Enum):
    """Where a job is."""

    QUEUED = "queued"
    RUNNING = "running"  # a board is leased to it
    DONE = "done"  # it has its final result
    CANCELLED = "cancelled"  # ended by somebody; its result says so


class BoardState(str, Enum):
    """How a board is. Only an online one is given to jobs; a suspect or quarantined one to health jobs alone."""

    ONLINE = "online"
    DRAINING = "draining"  # by hand: what runs may end, nothing new begins
    MAINTENANCE = "maintenance"  # drained, and nothing runs on it any more
    SUSPECT = "suspect"  # an infrastructure error, or not checked for long: a health job decides
    QUARANTINED = "quarantined"  # its health job failed: tried again later, ever more rarely
    OFFLINE = "offline"  # no host that has it is heard of


class Role(str, Enum):
    """What a token's bearer may do; each may all that the ones before it may."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    HOST = "host"  # attend boards, besides: lab hosts
    ADMIN = "admin"

    def covers(self, needed: Role) -> bool:
        """Whether a bearer of this role may do what another is needed for."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True)
class Principal:
    """Who calls: what a token stands for."""

    user: str
    role: Role
    project: str = ""
    token: int = 0
    peer: str = ""


@dataclass(frozen=True)
class Document:
    """A dataclass that can be JSON. Unknown keys are passed over, so that an older reader takes a newer document."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {key: _plain(value) for key, value in asdict(self).items()}

    @classmethod
    def of_json(cls: type[D], values: Mapping[str, Any]) -> D:
        """The document again.

        Raises:
            UsageError: a field that it needs is missing or makes no sense.
        """
        known = {one.name: values[one.name] for one in fields(cls) if one.name in values}
        try:
            return cls(**known)
        except (TypeError, ValueError, KeyError) as error:
            raise UsageError(f"this is no {cls.__name__} of a farm: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple, set, frozenset)) else value


def _set(document: object, name: str, value: Any) -> None:
    object.__setattr__(document, name, value)


@dataclass(frozen=True)
class JobSpec(Document):
    """What one job is to do.

    Attributes:
        kind: what it does on the board.
        options: of the library call: fields of :class:`hil.controller.workloads.run_job.Job` (run, bundle; ``models``
            are paths in ``files``), of :class:`hil.controller.workloads.suites.request.Request` (suite), ``purpose``
            (lease).
        files: path below the job's folder -> digest in the artifact store.
        affinity: what a board is warm for once it ran this: a board that is warm is preferred.
    """

    kind: Kind
    options: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    affinity: str = ""

    def __post_init__(self) -> None:
        _set(self, "kind", Kind(self.kind))


@dataclass(frozen=True)
class Submission(Document):
    """A submission: one or more jobs that belong together, and how they are to be scheduled.

    Attributes:
        title: for people: the model's or suite's name.
        specs: the jobs; job N of submission S is called ``S.N``, and ``S`` alone where there is but one.
        selector: what a board must be (:mod:`.selector`); "" is any.
        board: the board's name, where it must be this one; "" is any.
        priority: class.
        timeout_s: most seconds a job may have a board, each time.
        max_attempts: how often a job may be tried where the infrastructure fails.
        project: whom it is counted for, beside the user; "" is the token's.
        key: tells this submission from any other one, so that sending it twice queues it once.
    """

    title: str
    specs: tuple[JobSpec, ...]
    selector: str = ""
    board: str = ""
    priority: Priority = Priority.NORMAL
    timeout_s: float = 3600.0
    max_attempts: int = 3
    project: str = ""
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        _set(self, "priority", Priority(self.priority))
        specs = tuple(one if isinstance(one, JobSpec) else JobSpec.of_json(one) for one in self.specs)
        _set(self, "specs", specs)


@dataclass(frozen=True)
class JobResult(Document):
    """How a job, or one attempt at it, ended.

    Attributes:
        exit_code: what the command would have ended with (see :mod:`hil.errors`); 130 where it was cancelled.
        outcome: the gravest outcome of its cases (``PASS``, ``FAIL``, ...), "" where it has none (leases).
        reason: of anything but a pass, in a line.
        infrastructure: whether the board or the farm failed, so that another board may be tried.
        record: the run's or suite's record as ``--json`` prints it, without tensors.
        files: path below the run's folder -> digest in the artifact store.
        timings: seconds of each step on the host, by name (fetch, open, run, upload).
        board_ns: CLOCK_MONOTONIC of the host when the board began (its session was open), and when it was given back.
    """

    exit_code: int
    outcome: str = ""
    reason: str = ""
    infrastructure: bool = False
    record: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    board_ns: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        _set(self, "board_ns", tuple(self.board_ns))


@dataclass(frozen=True)
class Grant(Document):
    """A board given to a job: what its host is told, and whoever holds a lease.

    Attributes:
        lease: its number.
        job: the job's name (``17`` or ``17.3``).
        job_id: the job's number in the database.
        board: the board's name.
        fence: what sessions on the board must be opened with.
        ttl_s: the lease ends when nothing is heard of its host for so long.
        timeout_s: the lease ends after so long in any case.
        attempt: which one this is, from 1.
        spec: what to do.
        user: for whom.
        trace: W3C ``traceparent`` of the submission's span, "" for none.
    """

    lease: int
    job: str
    job_id: int
    board: str
    fence: int
    ttl_s: float
    timeout_s: float
    attempt: int
    spec: JobSpec
    user: str = ""
    trace: str = ""

    def __post_init__(self) -> None:
        _set(self, "spec", self.spec if isinstance(self.spec, JobSpec) else JobSpec.of_json(self.spec))


@dataclass(frozen=True)
class BoardCard(Document):
    """A board as its host presents it.

    Attributes:
        name: in the whole farm. Two hosts that present the same name both can reach it: one owns it,
            the other stands by.
        site, host: where; the host's name is its machine's, made unique by its folder.
        labels: written in the config and discovered: values are texts, numbers and truths; a list is a set of texts.
        config: the board's config as TOML, without what only its host can use (files of keys).
        hw_type: kind of hardware.
        fence: the highest that the board has seen.
        powered: whether its host can switch its power.
        direct: the agent's address for whoever is on the same machine, "" where there is none.
        machine: what tells that one is on the same machine (its boot id).
    """

    name: str
    site: str = ""
    host: str = ""
    labels: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    hw_type: str = ""
    fence: int = 0
    powered: bool = False
    direct: str = ""
    machine: str = ""


def gravest(codes: list[int]) -> int:
    """One exit code for several jobs: interrupted, then 4, 3, 1, 5, 0; what is unknown counts as 4."""
    known = [code if code in _GRAVITY else EXIT_BOARD for code in codes]
    return max(known, key=_GRAVITY.index, default=EXIT_NOTHING_RAN)


def job_name(submission: int, number: int, of: int) -> str:
    """``17`` or ``17.3``: how people call job ``number`` of ``of``."""
    return str(submission) if of == 1 else f"{submission}.{number}"


def parse_job(text: str) -> tuple[int, int | None]:
    """``17`` -> (17, None), ``17.3`` -> (17, 3).

    Raises:
        UsageError: it is neither.
    """
    submission, dot, number = text.partition(".")
    if len(text) > _LONGEST_NAME or not submission.isdecimal() or (dot and not number.isdecimal()):
        raise UsageError(
            f"{text[:_LONGEST_NAME]!r} is no job's name", hint="as `hil farm status` lists them: 17, or 17.3 of a suite"
        )
    return int(submission), int(number) if dot else None
