"""Sessions and their journal. One session at a time has the device, with a fence number that only rises."""

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

from hil.agent.board_claim import BoardClaim, Holder
from hil.core.disk_faults import make_disk_error
from hil.core.files import read_end
from hil.errors import BoardBusy, BoardError, SessionEnded, UsageError
from hil.protocol import wire

MIN_TTL_SECONDS = 0.5
MAX_TTL_SECONDS = 3600.0
# Largest fence. The farm's database stores fences up to this value, so a higher fence does not come from the farm.
MAX_FENCE = (1 << 62) - 1
# Maximum increase of the fence in one step. A new board starts at fence 0, but its farm may have counted for years. At
# one lease per second, reaching this value takes a century.
MAX_FENCE_JUMP = 1 << 32
_RESET = "if the board is unused, restart the fence count with `hil board reset-fence`"
_JOURNAL_BYTES = 8 << 20
# Linux only: this clock includes suspend and is the same for all processes.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Cancellable(Protocol):
    """A call or connection that can be cancelled."""

    def cancel(self) -> Any:
        """Cancel the call."""


class CallContext(Cancellable, Protocol):
    """Call context that services and sessions need. gRPC's context implements this interface."""

    def invocation_metadata(self) -> Any:
        """Return the metadata that the client sent with the call."""

    def is_active(self) -> bool:
        """Return True while the call is open."""


@dataclass
class Session:
    """Opened session. ``on_end`` is called exactly once, with the reason."""

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
    """Sessions of one agent. At most one is open.

    Args:
        fence_file: file with the highest fence, so that an old owner stays locked out after a restart.
        on_end: called after each session, to kill workers and release resources.
        journal: journal of the agent.
        claim: claim to take while a session is open, so that agents of other logins wait; None disables the claim.
    """

    def __init__(
        self, fence_file: Path, on_end: Callable[[], None], journal: Journal, claim: BoardClaim | None = None
    ) -> None:
        self._file = fence_file
        self._on_end = on_end
        self._claim = claim
        self.journal = journal
        self._changed = threading.Condition()
        self._current: Session | None = None
        self._ended_at = time.monotonic()
        self._fence, self._damage = _read_fence(fence_file)
        damage = {"damage": self._damage} if self._damage else {}
        journal.note("agent started", fence=self._fence, pid=os.getpid(), **damage)
        threading.Thread(target=self._watch, daemon=True, name="session-ttl").start()

    @property
    def fence(self) -> int:
        """Highest fence so far.

        Raises:
            BoardError: the fence file is damaged, so it is unknown who may use the board.
        """
        if self._damage:
            raise BoardError(f"the agent's fence file {self._file} {self._damage}", hint=_RESET)
        return self._fence

    @property
    def current(self) -> Session | None:
        """Active session, or None."""
        return self._current

    def get_holder(self) -> Holder | None:
        """Return the current owner of the device: this agent's session, or a session of a different login."""
        if session := self._current:
            return Holder(session.owner, session.purpose, time.monotonic() - session.opened_at, session.fence)
        return self._claim.find_other_holder() if self._claim else None

    def get_idle_seconds(self) -> float:
        """Return the number of seconds since the last session ended, or 0 during a session."""
        return 0.0 if self._current else time.monotonic() - self._ended_at

    def open(self, owner: str, purpose: str, ttl_s: float, fence: int, on_end: Callable[[str], None]) -> Session | None:
        """Open a session. Return None if the device is in use and this caller may not end that session.

        Args:
            owner: name of the new owner.
            purpose: purpose of the session.
            ttl_s: time to live without a message, in seconds.
            fence: 0 waits for the device and uses the next fence. A fence above the highest ends the active session.
                The highest fence belongs to the last owner, who must wait while a session is open.
            on_end: called once with the reason when the session ends.

        Raises:
            BoardBusy: the fence is stale.
            UsageError: the fence is out of range, or the time to live is invalid.
            BoardUnfit: storing the fence failed: the disk is full, read-only or faulty.
            BoardError: the fence file is damaged, or the fence has reached the maximum.
        """
        if not ttl_s >= 0:
            raise UsageError(f"invalid time to live {ttl_s:g} s for a session: expected at least 0 s")
        with self._changed:
            seen = self.fence
            if fence and fence < seen:
                raise BoardBusy(f"stale fence {fence}: the board has already accepted fence {seen}")
            if self._current and fence in (0, seen):
                return None
            if fence > min(seen + MAX_FENCE_JUMP, MAX_FENCE):
                raise UsageError(
                    f"invalid fence {fence}: the board is at fence {seen} and accepts at most "
                    f"{min(seen + MAX_FENCE_JUMP, MAX_FENCE)}"
                )
            if not fence and seen >= MAX_FENCE:
                raise BoardError(
                    f"the board accepts no new session: the fence has reached the maximum of {seen}", hint=_RESET
                )
            if self._claim and not self._claim.take(owner, purpose):
                return None
            wanted = fence or seen + 1
            try:
                if wanted != seen:
                    self._keep(wanted)
            except BoardError:
                self._release_claim()
                raise
            if self._current:
                self._end(self._current, f"{owner} took over the board with fence {fence}")
            self._fence = wanted
            ttl_s = min(max(ttl_s, MIN_TTL_SECONDS), MAX_TTL_SECONDS)
            self._current = Session(owner, purpose, ttl_s, wanted, on_end)
            self.journal.note("session opened", fence=wanted, owner=owner, purpose=purpose)
            self._changed.notify_all()
            return self._current

    def _keep(self, fence: int) -> None:
        """Store a fence durably, so that it survives a power cut."""
        temporary = self._file.with_suffix(".new")
        try:
            _write(temporary, "w", fence)
            temporary.replace(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            try:
                # On a full disk, overwriting the existing few bytes still works. A full disk therefore does not block
                # sessions.
                _write(self._file, "r+", fence)
            except OSError:
                raise make_disk_error(error, self._file) from error

    def run_while_free(self, work: Callable[[], None]) -> None:
        """Call ``work`` if no session is open. New sessions wait until ``work`` returns."""
        with self._changed:
            if self._current is None:
                work()

    def wait_free(self, timeout_s: float) -> None:
        """Wait until the device may be free, or until the timeout."""
        with self._changed:
            if self._current:
                self._changed.wait_for(lambda: self._current is None, timeout_s)
                return
        if self._claim:
            self._claim.wait_free(timeout_s)

    def check(self, token: str) -> Session:
        """Return the active session. Raises SessionEnded if the token does not match."""
        session = self._current
        if session is None or not hmac.compare_digest(session.token.encode(), token.encode(errors="replace")):
            raise SessionEnded("the call does not include the token of the active session", hint="open a session")
        return session

    def find_session(self, context: CallContext) -> Session:
        """Return the session of a call by the token in its metadata. Raises the same errors as :meth:`check`."""
        return self.check(str(dict(context.invocation_metadata()).get(wire.SESSION_KEY, "")))

    def record_message(self, session: Session) -> None:
        """Record that the session's owner sent a message. Raises the same errors as :meth:`require`."""
        self.require(session)
        session.heard_at = time.monotonic()

    def require(self, session: Session) -> None:
        """Check that a session is still active. Raises SessionEnded otherwise."""
        if self._current is not session:
            raise SessionEnded("the session of this call has ended", hint="open a session")

    def end(self, session: Session, reason: str) -> None:
        """End a session if it is still active."""
        with self._changed:
            if self._current is session:
                self._end(session, reason)
                self._release_claim()

    def _release_claim(self) -> None:
        if self._claim and self._current is None:
            self._claim.release()

    def _end(self, session: Session, reason: str) -> None:
        self._ended_at = time.monotonic()
        self._current = None
        # Release all resources of the session before the next session can open.
        self._on_end()
        session.ended_at = time.monotonic()
        self.journal.note("session ended", fence=session.fence, owner=session.owner, reason=reason)
        with contextlib.suppress(Exception):
            session.on_end(reason)
        self._changed.notify_all()

    def _watch(self) -> None:
        while True:
            with self._changed:
                # An unused agent does not wake up.
                self._changed.wait_for(lambda: self._current is not None)
                session = self._current
            assert session is not None
            time.sleep(min(0.2, session.ttl_s / 4))
            if time.monotonic() - session.heard_at > session.ttl_s:
                self.end(session, f"the controller sent no message for {session.ttl_s:g} s")


def _read_fence(file: Path) -> tuple[int, str]:
    """Read the stored fence, 0 if the file is missing. Also return a description of damage, or ""."""
    try:
        text = read_end(file, 100).encode()
    except FileNotFoundError:
        return 0, ""
    except OSError as error:
        return 0, f"is unreadable: {error.strerror}"
    if not text.isdigit() or int(text) > MAX_FENCE:
        return 0, f"is corrupt: it contains {text[:40]!r} instead of a fence"
    return int(text), ""


def _write(file: Path, mode: str, fence: int) -> None:
    with file.open(mode) as opened:
        opened.write(str(fence))
        opened.flush()
        os.fsync(opened.fileno())


class Journal:
    """Journal file with one JSON object per line: ``at_ns`` (since boot), ``wall_ns``, ``what`` and further fields.

    The journal serves later diagnosis. Write errors are ignored and never fail a run.

    Args:
        path: the file; above ``most_bytes`` it is renamed to ``NAME.1``, which replaces an older file.
        most_bytes: maximum size of the file.
    """

    def __init__(self, path: Path, most_bytes: int = _JOURNAL_BYTES) -> None:
        self._path = path
        self._most = most_bytes
        self._lock = threading.Lock()
        self._file = -1
        self._size = 0

    def note(self, what: str, **more: Any) -> None:
        """Append a line."""
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
    def record_operation(self, what: str, **more: Any) -> Iterator[dict[str, Any]]:
        """Record the start and the end of an operation. Fields added to the yielded dict are written with the end."""
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
