"""Index entries for a stored session and the cases."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hil.controller.storage.outcomes import classify_outcome
from hil.core.text import replace_surrogates

# Kinds of outcomes, most severe first. A session has the most severe kind among its cases. Only sessions can be
# ``unfinished``.
KINDS = ("board", "error", "fail", "unfinished", "pass", "quiet")
# Maximum characters to index per text, because records do not limit text.
TEXT_CHARS = 500
# Maximum entries to index per list.
NAMES = 2000


@dataclass(frozen=True)
class OutputEntry:
    """Differences between an output and the reference, or None if the tensors were not compared."""

    name: str
    max_abs: float | None = None
    sqnr_db: float | None = None


@dataclass(frozen=True)
class CaseEntry:
    """Case of a session, with the data that tables, comparisons and histories need without reading the record."""

    name: str
    number: int  # position in the session, from 0
    model: str = ""
    op: str = ""
    flow: str = ""
    runtime: str = ""
    board: str = ""
    outcome: str = ""
    ended: str = ""  # outcome without expectations, if different
    stage: str = ""
    message: str = ""
    # device_p50_ns, device_p90_ns, host_s, compile_s: None if not measured.
    device_p50_ns: float | None = None
    device_p90_ns: float | None = None
    iterations: int = 0
    cold: bool = False
    grade: str = ""  # A, B or F; "" without a grade
    host_s: float | None = None
    compile_s: float | None = None
    program_bytes: int | None = None
    joules: float | None = None  # energy of an inference above idle; None if not measured, or refused
    program: int = 0  # identifies the program, see :func:`parse_program_number`; 0 if unknown
    # max_abs, max_ulp, sqnr_db: worst value in all outputs; None if not compared.
    max_abs: float | None = None
    max_ulp: float | None = None
    sqnr_db: float | None = None
    output: str = ""  # output name, for cases with a single output
    outputs: tuple[OutputEntry, ...] = ()  # for cases with multiple outputs
    started: float | None = None  # seconds since the epoch
    # place, length: byte range for the case's record in the session's lines file; 0, 0 for other records.
    place: int = 0
    length: int = 0

    @property
    def comparable(self) -> int:
        """Number of iterations of a time that can be compared; 0 for grade F."""
        return 0 if self.grade == "F" else self.iterations


@dataclass(frozen=True)
class SessionEntry:
    """Stored session: a run, a suite run, a bench, a bisection, a study, a gate, a trace, or a matrix of sessions."""

    id: str  # directory relative to the runs directory
    kind: str  # run, suite, bench, bisect, study, gate, trace, matrix; "damaged" if the record is unreadable
    title: str
    created: float | None = None  # seconds since the epoch
    finished: bool = True
    exit_code: int | None = None
    suite: str = ""
    place: str = ""  # the suite's model directory; "" for a built-in suite, or if unknown
    flow: str = ""
    # boards, runtimes, compilers, models: unique names.
    boards: tuple[str, ...] = ()
    runtimes: tuple[str, ...] = ()
    compilers: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    branch: str = ""
    commit: str = ""
    command: str = ""  # command that repeats the session; "" if unknown
    versions: Mapping[str, str] = field(default_factory=dict)
    stack: Mapping[str, str] | None = None  # part of the board's stack -> version, "" if unknown; None without a stack
    digests: Mapping[str, str] = field(default_factory=dict)  # model -> file digest, if known
    planned: int = 0  # planned cases; 0 if unknown
    error: str = ""  # reason why the record is unreadable
    outcome: str = ""  # the session's outcome, if it does not follow from its cases
    lines: str = ""  # file name for one case record per line; "" if a single record contains all cases


def find_worst_kind(outcomes: Iterable[str], *, finished: bool) -> str:
    """Return the most severe kind of outcome, in the order of :data:`KINDS`.

    Without outcomes, return ``quiet``, or ``unfinished`` if the session is not finished.
    """
    found = {classify_outcome(outcome) for outcome in outcomes if outcome}
    if not finished:
        found.add("unfinished")
    return next((kind for kind in KINDS if kind in found), "quiet")


@functools.lru_cache(maxsize=256)
def is_failure(outcome: str) -> bool:
    """Return True if an outcome is a mismatch, an error, or a failure of the board."""
    return find_worst_kind([outcome], finished=True) in ("board", "error", "fail")


def read_text(value: Any) -> str:
    """Return a record's value as text, cut to :data:`TEXT_CHARS`. Values that are not text or numbers become ""."""
    if isinstance(value, str):
        # JSON can contain a lone surrogate, which neither a database nor a page can encode.
        return replace_surrogates(value[:TEXT_CHARS])
    try:
        return str(value)[:TEXT_CHARS] if isinstance(value, (int, float)) else ""
    except ValueError:  # the integer exceeds Python's limit for digits
        return ""


def read_texts(values: Any) -> tuple[str, ...]:
    """Return the unique texts in a record's list, in order. A value that is not a list becomes ()."""
    found = values[:NAMES] if isinstance(values, (list, tuple)) else ()
    return tuple(dict.fromkeys(filter(None, map(read_text, found))))


def parse_program_number(digest: Any) -> int:
    """Return 60 bits from a digest, which fit in an SQLite integer and rarely collide. Return 0 if invalid."""
    found = read_text(digest).rpartition(":")[2][:15]
    try:
        return int(found, 16)
    except ValueError:
        return 0


def read_real(value: Any) -> float | None:
    """Return a record's number as float, including texts such as "inf" and "nan". Return None for other values."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def read_int(value: Any) -> int | None:
    """Return a record's integer if SQLite can store it, else None."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        return None
    return value
