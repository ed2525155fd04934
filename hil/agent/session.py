"""Who has the device: one session at a time, with a fence number that only rises; and the journal of that."""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hil.errors import BoardBusy, BoardError, SessionEnded, UsageError
from hil.protocol import wire

MIN_TTL_S = 0.5
MAX_TTL_S = 3600.0
# The farm's database keeps fences below this; a board that got so far has had no farm's fences.
MOST_FENCE = (1 << 62) - 1
# A board that was set up anew starts at 0 in a farm that has counted for years: a lease a second takes a century to
# get so far.
MOST_JUMP = 1 << 32
_RESET = "if nobody uses the board, `hil board reset-fence` lets its count begin anew"
_JOURNAL_BYTES = 8 << 20
# Of Linux: it goes on while the machine sleeps, and it is the same for every process.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Cancellable(Protocol):
    """What a room can end."""

    def cancel(self) -> Any:
        """End it."""


class CallContext(Cancellable, Protocol):
    """What of a call's context services and sessions need: gRPC's has it."""

    def invocation_metadata(self) -> Any:
        """What its caller says beside its messages."""

    def is_active(self) -> bool:
        """Whether the call goes on."""


@dataclass
class Session:
    """A session that was opened. ``on_end`` is called once, with the reason, whoever ends it."""

    owner: str
    purpose: str
    ttl_s: float
    fence: int
    on_end: Callable[[str], None]
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    opened_at: float = field(default_factory=time.monotonic)
    heard_at: float = field(default_factory=time.monotonic)
    ended_at: float = math.inf


class Sessions:
    """The sessions of one agent: none or one is open.

    Args:
        fence_file: where the highest fence is kept, so that an old owner stays locked out over a restart.
        on_end: called whenever a session has ended, to kill and free what it held.
    """

    def __init__(self, fence_file: Path, on_end: Callable[[], None], journal: Journal) -> None:
        self._file = fence_file
        self._on_end = on_end
        self.journal = journal
        self._changed = threading.Condition()
        self._current: Session | None = None
        self._ended_at = time.monotonic()
        self._fence, self._damage = _stored(fence_file)
        damage = {"damage": self._damage} if self._damage else {}
        journal.note("agent started", fence=self._fence, pid=os.getpid(), **damage)
        threading.Thread(target=self._watch, daemon=True, name="session-ttl").start()

    @property
    def fence(self) -> int:
        """The highest fence so far. Raises BoardError: its file is damaged: nobody can say who may have the board."""
        if self._damage:
            raise BoardError(f"the agent's fence file {self._file} {self._damage}", hint=_RESET)
        return self._fence

    @property
    def current(self) -> Session | None:
        """The session that has the device."""
        return self._current

    def idle_s(self) -> float:
        """For how long nobody has had the device."""
        return 0.0 if self._current else time.monotonic() - self._ended_at

    def open(self, owner: str, purpose: str, ttl_s: float, fence: int, on_end: Callable[[str], None]) -> Session | None:
        """Open a session; None when another has the device which this one may not end.

        Args:
            fence: 0 waits for its turn and gets the next fence. A higher one than any before ends what is open. The
                highest again is whoever had it last: it waits while a session is open, and comes in where none is.

        Raises:
            BoardBusy: the fence is below one given before.
            UsageError: nobody gives such a fence, or the time to live is no number of seconds.
            BoardError: the fence cannot be kept, or the one that is kept is damaged.
        """
        if not ttl_s >= 0:
            raise UsageError(f"a session's time to live cannot be {ttl_s:g} s")
        with self._changed:
            seen = self.fence
            if fence and fence < seen:
                raise BoardBusy(f"fence {fence} is too old: the board has seen {seen}")
            if self._current and fence in (0, seen):
                return None
            if fence > min(seen + MOST_JUMP, MOST_FENCE):
                raise UsageError(f"{fence} is no fence that a farm gives: the board has seen {seen}")
            if not fence and seen >= MOST_FENCE:
                raise BoardError(f"the board has seen fence {seen}, and there is none above it", hint=_RESET)
            wanted = fence or seen + 1
            if wanted != seen:
                self._keep(wanted)
            if self._current:
                self._end(self._current, f"{owner} took the device with fence {fence}")
            self._fence = wanted
            ttl_s = min(max(ttl_s, MIN_TTL_S), MAX_TTL_S)
            self._current = Session(owner, purpose, ttl_s, wanted, on_end)
            self.journal.note("session opened", fence=wanted, owner=owner, purpose=purpose)
            self._changed.notify_all()
            return self._current

    def _keep(self, fence: int) -> None:
        """Write a fence down, so that it is there after a power cut too."""
        temporary = self._file.with_suffix(".new")
        try:
            _write(temporary, "w", fence)
            temporary.replace(self._file)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            try:
                # On a full disk a few bytes in place of those that are there still fit: who fills it keeps nobody out.
                _write(self._file, "r+", fence)
            except OSError:
                raise BoardError(
                    f"the agent cannot keep the session's fence in {self._file}: {error.strerror}",
                    hint="make room on the board's disk, or mend the rights of that folder",
                ) from error

    def while_free(self, work: Callable[[], None]) -> None:
        """Do something while nobody has the device, if so it is: whoever wants it waits meanwhile."""
        with self._changed:
            if self._current is None:
                work()

    def wait_free(self, timeout_s: float) -> None:
        """Wait until the device may be free, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._current is None, timeout_s)

    def check(self, token: str) -> Session:
        """The session of a token. Raises SessionEnded: the token is not the current session's."""
        session = self._current
        if session is None or not hmac.compare_digest(session.token.encode(), token.encode(errors="replace")):
            raise SessionEnded("this call carries no token of the session that has the device", hint="open a session")
        return session

    def of_call(self, context: CallContext) -> Session:
        """The session of a call, by the token in its metadata; raises as :meth:`check`."""
        return self.check(str(dict(context.invocation_metadata()).get(wire.SESSION_KEY, "")))

    def heard(self, session: Session) -> None:
        """Note that a session's owner sent something; raises as :meth:`require`."""
        self.require(session)
        session.heard_at = time.monotonic()

    def require(self, session: Session) -> None:
        """See to it that a session goes on, which a call may outlast. Raises SessionEnded: it does not."""
        if self._current is not session:
            raise SessionEnded("the session that this call belongs to has ended", hint="open a session")

    def end(self, session: Session, reason: str) -> None:
        """End a session, if it is still the current one."""
        with self._changed:
            if self._current is session:
                self._end(session, reason)

    def _end(self, session: Session, reason: str) -> None:
        self._ended_at = time.monotonic()
        self._current = None
        # Everything the session held is gone before anybody else may come.
        self._on_end()
        session.ended_at = time.monotonic()
        self.journal.note("session ended", fence=session.fence, owner=session.owner, reason=reason)
        with contextlib.suppress(Exception):
            session.on_end(reason)
        self._changed.notify_all()

    def _watch(self) -> None:
        while True:
            with self._changed:
                # An agent that nobody uses does not wake up.
                self._changed.wait_for(lambda: self._current is not None)
                session = self._current
            assert session is not None
            time.sleep(min(0.2, session.ttl_s / 4))
            if time.monotonic() - session.heard_at > session.ttl_s:
                self.end(session, f"nothing was heard for {session.ttl_s:g} s")


def _stored(file: Path) -> tuple[int, str]:
    """The fence that a file keeps, 0 where there is none yet, and what is wrong with the file."""
    try:
        text = file.read_bytes()[:100]
    except FileNotFoundError:
        return 0, ""
    except OSError as error:
        return 0, f"cannot be read: {error.strerror}"
    if not text.isdigit() or int(text) > MOST_FENCE:
        return 0, f"is damaged: it holds {text[:40]!r} and no fence"
    return int(text), ""


def _write(file: Path, mode: str, fence: int) -> None:
    with file.open(mode) as opened:
        opened.write(str(fence))
        opened.flush()
        os.fsync(opened.fileno())


class Journal:
    """Lines of JSON in a file, each with ``at_ns`` (since the machine's boot), ``wall_ns`` and ``what``.

    It is for those who look later: one that cannot be written is no error, and never keeps a run from running.

    Args:
        path: the file; when it has grown large it becomes ``NAME.1``, in place of an older one.
    """

    def __init__(self, path: Path, most_bytes: int = _JOURNAL_BYTES) -> None:
        self._path = path
        self._most = most_bytes
        self._lock = threading.Lock()
        self._file = -1
        self._size = 0

    def note(self, what: str, **more: Any) -> None:
        """Add a line."""
        with self._lock, contextlib.suppress(OSError):
            stamps = {"at_ns": time.clock_gettime_ns(_CLOCK), "wall_ns": time.time_ns()}
            line = json.dumps({**stamps, "what": what, **more}).encode() + b"\n"
            if self._file < 0:
                self._open()
            elif self._size + len(line) > self._most:
                os.close(self._file)
                self._file = -1
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                self._open()
            self._size += os.write(self._file, line)

    @contextlib.contextmanager
    def during(self, what: str, **more: Any) -> Iterator[dict[str, Any]]:
        """Note that something begins and that it has ended; what it gives takes more to say at the end."""
        self.note(f"{what} begins", **more)
        found: dict[str, Any] = {}
        try:
            yield found
        except BaseException as error:
            found["error"] = type(error).__name__
            raise
        finally:
            self.note(f"{what} ended", **more, **found)

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size
