"""The loop that every fuzzer shares: inputs made from those that taught something, tried, judged and kept.

What is new is worth keeping: an error raised at a place where none was raised before, an answer of another kind, and
on Python 3.12 and newer a line of hil that had not run yet (`sys.monitoring` tells each line once and then costs
nothing).
"""

from __future__ import annotations

import contextlib
import hashlib
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import CodeType
from typing import Any

from hil.errors import HilError, UsageError

ROOT = Path(__file__).resolve().parents[2]
_HIL = f"{ROOT / 'hil'}/"
_MIB = 1 << 20
_POOL, _KEPT_BYTES = 2000, 1 << 17
_MOST_SIGNATURES = 10_000


class Broken(Exception):
    """A promise that was broken though nothing was raised: the text says which."""


@dataclass(frozen=True)
class Tried:
    """What came of an input that raised nothing.

    Attributes:
        messages: how many messages or files it was.
        kinds: what happened, as far as it tells one input from another.
    """

    messages: int = 1
    kinds: tuple[str, ...] = ()


Attempt = Callable[[bytes], Tried | None]


@dataclass(frozen=True)
class Fuzzer:
    """What is attacked, and with what.

    Attributes:
        name: of the command line.
        about: what is attacked.
        open: gives, for a folder of its own, the function that tries one input.
        seeds: inputs to begin with.
        mutate: makes another input of one.
        allowed: the errors that may come of one; every other is a failure.
        confirm: tries an input that the process died of once more, the way users go, where what reads it has a process
            of its own; None where no input may end the process.
        limit_s: most seconds for one input.
        limit_mib: by how much one input may raise the process's memory.
        address_mib: how much address space the process gets beyond what it begins with; 0 is no limit.
        history: how many inputs before the one that failed are part of the failure: what is attacked remembers them.
        lacking: why it cannot run here, "" where it can.
    """

    name: str
    about: str
    open: Callable[[Path], contextlib.AbstractContextManager[Attempt]]
    seeds: Callable[[], Sequence[bytes]]
    mutate: Callable[[bytes, Random], bytes]
    allowed: tuple[type[HilError], ...] = (UsageError,)
    confirm: Callable[[Path, bytes], None] | None = None
    limit_s: float = 60.0
    limit_mib: int = 256
    address_mib: int = 2048
    history: int = 0
    lacking: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Failure:
    """An input, and what it broke.

    Attributes:
        kind: ``error``, ``memory``, ``slow``, ``hang``, ``death``, ``promise``.
        signature: what tells it from other failures.
        text: what happened.
    """

    kind: str
    signature: str
    text: str
    data: bytes

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.kind}-{hashlib.sha256(self.signature.encode()).hexdigest()[:12]}"


@dataclass
class Counts:
    """What was done so far."""

    inputs: int = 0
    messages: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    slowest_s: float = 0.0
    most_mib: int = 0
    pool: int = 0
    seconds: float = 0.0


class Loop:
    """One fuzzer's loop in this process.

    Args:
        fuzzer: what is attacked.
        attempt: tries one input.
        seed: of all that is left to chance.
        corpus: folder of inputs that taught something; None keeps them in memory alone.
        known: inputs to try before any is made.
    """

    def __init__(
        self, fuzzer: Fuzzer, attempt: Attempt, seed: int, corpus: Path | None = None, known: Sequence[bytes] = ()
    ) -> None:
        self.fuzzer, self._attempt, self._seed, self._corpus = fuzzer, attempt, seed, corpus
        self._pool = [*fuzzer.seeds(), *known]
        self._first = len(self._pool)
        self._seen: set[str] = set()
        self._history: list[bytes] = []
        self.counts = Counts()
        assert self._pool, f"{fuzzer.name} has no seeds"

    def input(self, number: int) -> bytes:
        """The input of a number; it depends on what was learned before."""
        if number < self._first:
            return self._pool[number]
        rng = Random(f"{self._seed}:{number}")
        # Recent inputs are the least explored. Prefer short ones: mutation makes inputs grow, and long ones are slow.
        base = min(rng.choices(self._pool[-20:] if rng.random() < 0.25 else self._pool, k=2), key=len)
        if rng.random() < 0.03:
            other = rng.choice(self._pool)
            base = base[: rng.randrange(len(base) + 1)] + other[rng.randrange(len(other) + 1) :]
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            base = self.fuzzer.mutate(base, rng)
        return base

    def step(self, number: int, data: bytes) -> Failure | None:
        """Try an input; returns what it broke."""
        before = _peak_mib()
        began, cpu = time.monotonic(), time.process_time()
        kinds, failure = judge(self.fuzzer, self._attempt, data, self.counts)
        took, cpu = time.monotonic() - began, time.process_time() - cpu
        grown = _peak_mib() - before
        self.counts.inputs += 1
        self.counts.slowest_s = max(self.counts.slowest_s, took)
        self.counts.most_mib = max(self.counts.most_mib, grown)
        if failure is None and grown > self.fuzzer.limit_mib:
            where = ", ".join(kinds)
            failure = Failure("memory", f"memory {where}", f"it took {grown} MiB more memory: {where}", data)
        if failure is None and min(took, cpu) > self.fuzzer.limit_s / 6:
            where = ", ".join(kinds)
            failure = Failure("slow", f"slow {where}", f"it took {cpu:.1f} s of the CPU: {where}", data)
        self._learn(kinds, data)
        if self.fuzzer.history:
            if failure is not None:
                failure = Failure(failure.kind, failure.signature, failure.text, b"".join([*self._history, data]))
            self._history = [*self._history[1 - self.fuzzer.history :], data]
        if failure is not None:
            self.counts.failures[failure.name] = self.counts.failures.get(failure.name, 0) + 1
        return failure

    def _learn(self, kinds: Sequence[str], data: bytes) -> None:
        new = [kind for kind in kinds if kind not in self._seen]
        if len(self._seen) < _MOST_SIGNATURES:
            self._seen.update(new)
        for kind in kinds:
            if len(self.counts.kinds) < 500 or kind in self.counts.kinds:
                self.counts.kinds[kind] = self.counts.kinds.get(kind, 0) + 1
        if not (COVERAGE.take() or new) or len(data) > _KEPT_BYTES or self.counts.inputs <= self._first:
            return
        self._pool.append(data)
        if len(self._pool) > self._first + _POOL:
            del self._pool[self._first]
        self.counts.pool = len(self._pool)
        if self._corpus is not None:
            (self._corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def judge(fuzzer: Fuzzer, attempt: Attempt, data: bytes, counts: Counts) -> tuple[list[str], Failure | None]:
    """Try one input: what happened, and what was broken if anything."""
    try:
        tried = attempt(data)
    except fuzzer.allowed as error:
        counts.messages += 1
        kind = f"{type(error).__name__} {_place(error)}"
        try:
            str(error).encode()
        except UnicodeEncodeError:
            text = f"its message is no Unicode text: {str(error)[:200]!r}\n{''.join(traceback.format_exception(error))}"
            return [kind], Failure("promise", f"unicode {kind}", text, data)
        return [kind], None
    except Broken as error:
        counts.messages += 1
        # Numbers in it differ from time to time.
        signature = "".join(one for one in str(error)[:100] if not one.isdigit())
        return [f"broken {signature}"], Failure("promise", signature, str(error), data)
    except (Exception, SystemExit) as error:
        counts.messages += 1
        kind = f"{type(error).__name__} {_place(error)}"
        what = "memory" if isinstance(error, MemoryError) else "error"
        return [kind], Failure(what, kind, "".join(traceback.format_exception(error)), data)
    tried = tried or Tried()
    counts.messages += tried.messages
    return list(tried.kinds) or ["read"], None


def _place(error: BaseException) -> str:
    """Where in hil an error was raised."""
    walk = traceback.walk_tb(error.__traceback__)
    places = [(one.f_code.co_filename, line) for one, line in walk if one.f_code.co_filename.startswith(_HIL)]
    if not places:
        return "outside hil"
    file, line = places[1 if len(places) > 40 else -1]  # so many are a recursion
    return f"{file.removeprefix(_HIL)}:{line}"


def _peak_mib() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // (_MIB if sys.platform == "darwin" else 1024)


def confine(fuzzer: Fuzzer) -> None:
    """Limit this process's address space to what it has now and what the fuzzer grants."""
    if fuzzer.address_mib and sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + fuzzer.address_mib * _MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class _Coverage:
    """Which lines of hil have run, told once each."""

    def __init__(self) -> None:
        self._new = 0

    def start(self) -> None:
        """Begin to watch, where this Python can."""
        if sys.version_info < (3, 12):
            return
        watch = sys.monitoring
        if watch.get_tool(watch.COVERAGE_ID) is None:
            watch.use_tool_id(watch.COVERAGE_ID, "hil-fuzz")
            watch.register_callback(watch.COVERAGE_ID, watch.events.LINE, self._line)
            watch.set_events(watch.COVERAGE_ID, watch.events.LINE)

    def _line(self, code: CodeType, _: int) -> Any:
        if code.co_filename.startswith(_HIL):
            self._new += 1
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]

    def take(self) -> bool:
        """Whether there were new ones since this was asked last."""
        new, self._new = self._new, 0
        return new > 0


COVERAGE = _Coverage()


@contextlib.contextmanager
def looping(
    fuzzer: Fuzzer, folder: Path, seed: int, corpus: Path | None = None, known: Sequence[bytes] = ()
) -> Iterator[Loop]:
    """A fuzzer's loop, ready to go."""
    with fuzzer.open(folder) as attempt:
        yield Loop(fuzzer, attempt, seed, corpus, known)
