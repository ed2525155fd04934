"""What the index keeps of a stored folder: a session, and its cases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hil.controller.workloads.suites.reports.results import kind_of

# The kinds of outcomes, from the gravest down: a session has the gravest of its cases'. ``unfinished`` is a session's
# that is not over.
KINDS = ("board", "error", "fail", "unfinished", "pass", "quiet")
# Of a text that a record may make as long as it likes, so much is indexed.
TEXT_CHARS = 500
# Of a list of names so many.
NAMES = 2000


@dataclass(frozen=True)
class OutputEntry:
    """How far an output of a case is from its reference; None where nothing was compared."""

    name: str
    max_abs: float | None = None
    sqnr_db: float | None = None


@dataclass(frozen=True)
class CaseEntry:
    """A case of a session: what tables, comparisons and history show of it without opening its record."""

    name: str
    number: int  # its place in the session, from 0
    model: str = ""
    op: str = ""
    flow: str = ""
    runtime: str = ""
    board: str = ""
    outcome: str = ""
    ended: str = ""  # the outcome without regard to what was expected; "" where that is the outcome
    stage: str = ""
    message: str = ""
    # device_p50_ns, device_p90_ns, host_s, compile_s: None where it was not measured.
    device_p50_ns: float | None = None
    device_p90_ns: float | None = None
    iterations: int = 0
    cold: bool = False
    host_s: float | None = None
    compile_s: float | None = None
    program_bytes: int | None = None
    program: int = 0  # tells programs apart: see :func:`program_number`; 0 where nobody knows which it was
    # max_abs, max_ulp, sqnr_db: of all outputs the worst of each; None where nothing was compared.
    max_abs: float | None = None
    max_ulp: float | None = None
    sqnr_db: float | None = None
    output: str = ""  # the name of its only output
    outputs: tuple[OutputEntry, ...] = ()  # where there are several
    started: float | None = None  # seconds since the epoch
    # place, length: bytes of the session's file of lines that hold its whole record; 0, 0 where that is no line.
    place: int = 0
    length: int = 0


@dataclass(frozen=True)
class SessionEntry:
    """A stored folder: a run, a suite's run, a bench, a bisection, a study, a trace, or a matrix of these."""

    id: str  # its folder as seen from the folder of all runs
    kind: str  # run, suite, bench, bisect, study, trace, matrix; "damaged" where its record cannot be read
    title: str
    created: float | None = None  # seconds since the epoch
    finished: bool = True
    exit_code: int | None = None
    suite: str = ""
    place: str = ""  # the folder that a suite's models are of; "" where it is hil's own, or nobody knows
    flow: str = ""
    # boards, runtimes, compilers, models: names, each once.
    boards: tuple[str, ...] = ()
    runtimes: tuple[str, ...] = ()
    compilers: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    branch: str = ""
    commit: str = ""
    command: str = ""  # does it again; "" where nobody knows
    versions: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)  # model -> digest of its file, where that is known
    planned: int = 0  # number of cases that it is to have; 0 where nobody knows
    error: str = ""  # why its record cannot be read
    outcome: str = ""  # its own, where that is not its cases'
    lines: str = ""  # the file, in the folder, of its cases' records a line each; "" where its one record has all


def gravest_kind(outcomes: Iterable[str], *, finished: bool) -> str:
    """The gravest kind among outcomes, in the order of :data:`KINDS`; without one ``quiet``, or ``unfinished``."""
    found = {kind_of(outcome) for outcome in outcomes if outcome}
    if not finished:
        found.add("unfinished")
    return next((kind for kind in KINDS if kind in found), "quiet")


def text(value: Any) -> str:
    """A value of a record as text, cut to :data:`TEXT_CHARS`; "" for what is no text or number."""
    if isinstance(value, str):
        # Half of a pair of surrogates, which JSON may name, is no text that a database or a page can hold.
        return value[:TEXT_CHARS].encode(errors="replace").decode()
    try:
        return str(value)[:TEXT_CHARS] if isinstance(value, (int, float)) else ""
    except ValueError:  # more digits than Python writes
        return ""


def texts(values: Any) -> tuple[str, ...]:
    """Values of a record as texts, each once, in order; nothing for what is no list."""
    found = values[:NAMES] if isinstance(values, (list, tuple)) else ()
    return tuple(dict.fromkeys(filter(None, map(text, found))))


def program_number(digest: Any) -> int:
    """A program's digest as a number that SQLite holds: of 2**60, so that two programs hardly share one."""
    found = text(digest).rpartition(":")[2][:15]
    try:
        return int(found, 16)
    except ValueError:
        return 0


def real(value: Any) -> float | None:
    """A number of a record, which may be written as a text (inf, nan); None for anything else."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def whole(value: Any) -> int | None:
    """A whole number of a record that SQLite can hold; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        return None
    return value
