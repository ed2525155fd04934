"""Who has the device: one session at a time, with a fence number that only rises."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hil.agent.journal import Journal
from hil.errors import BoardBusy, SessionEnded

MIN_TTL_S = 0.5
MAX_TTL_S = 3600.0


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


class Sessions:
    """The sessions of one agent: none or one is open.

    Args:
        fence_file: where the highest fence is kept, so that an old owner stays locked out over a restart.
        on_end: called whenever a session has ended, to kill and free what it held.
        journal: is told of each session.
    """

    def __init__(self, fence_file: Path, on_end: Callable[[], None], journal: Journal) -> None:
        self._file = fence_file
        self._on_end = on_end
        self.journal = journal
        self._changed = threading.Condition()
        self._current: Session | None = None
        self._ended_at = time.monotonic()
        try:
            self.fence = int(fence_file.read_text())
        except (OSError, ValueError):
            self.fence = 0
        journal.note("agent started", fence=self.fence, pid=os.getpid())
        threading.Thread(target=self._watch, daemon=True, name="session-ttl").start()

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
            owner, purpose, ttl_s, on_end: the session's.
            fence: 0 waits for its turn and gets the next fence. A higher one than any before ends what is open. The
                highest again is whoever had it last: it waits while a session is open, and comes in where none is.

        Raises:
            BoardBusy: the fence is below one given before.
        """
        with self._changed:
            if fence and fence < self.fence:
                raise BoardBusy(f"fence {fence} is too old: the board has seen {self.fence}")
            if self._current and fence in (0, self.fence):
                return None
            if self._current:
                self._end(self._current, f"{owner} took the device with fence {fence}")
            self.fence = fence or self.fence + 1
            temporary = self._file.with_suffix(".new")
            temporary.write_text(str(self.fence))
            temporary.replace(self._file)
            ttl_s = min(max(ttl_s, MIN_TTL_S), MAX_TTL_S)
            self._current = Session(owner, purpose, ttl_s, self.fence, on_end)
            self.journal.note("session opened", fence=self.fence, owner=owner, purpose=purpose)
            return self._current

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
        """The session of a token.

        Raises:
            SessionEnded: the token is not the current session's.
        """
        session = self._current
        if session is None or not hmac.compare_digest(session.token, token):
            raise SessionEnded("this call carries no token of the session that has the device", hint="open a session")
        return session

    def require(self, session: Session) -> None:
        """See to it that a session goes on: a call may last longer than the one that it was begun in.

        Raises:
            SessionEnded: it does not.
        """
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
        self.journal.note("session ended", fence=session.fence, owner=session.owner, reason=reason)
        with contextlib.suppress(Exception):
            session.on_end(reason)
        self._changed.notify_all()

    def _watch(self) -> None:
        while True:
            session = self._current
            time.sleep(min(0.2, session.ttl_s / 4) if session else 0.2)
            if session and time.monotonic() - session.heard_at > session.ttl_s:
                self.end(session, f"nothing was heard for {session.ttl_s:g} s")
