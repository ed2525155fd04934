"""Limit a machine to one session at a time, even if each login has a separate agent.

The agent with the active session binds an abstract Unix socket. The kernel lets one process bind a name and frees it
when that process ends. A claim is therefore never stale, and no directory writable by all logins is needed. The name
contains the mount namespace: containers and simulated boards on one machine do not block each other.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import math
import pwd
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.core.text import escape_controls

_NAMESPACE = Path("/proc/self/ns/mnt")
# Timeout for a response. A running agent responds immediately; a stopped agent or another process may never respond.
_ANSWER_SECONDS = 0.5
# Pause before the next probe of a process that closed the connection but still has the name.
_PAUSE_SECONDS = 0.1
_MAX_ANSWER = 4096
_MAX_TEXT = 200
# Maximum number of waiting agents. Above the limit, the oldest is disconnected and retries.
_MAX_WAITING = 64
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Holder:
    """Owner of the device, with the duration of the ownership in seconds."""

    owner: str
    purpose: str
    held_s: float
    fence: int = 0  # fence of this agent's session; 0 for other agents


class BoardClaim:
    """Claim of an agent on the machine. Calls of :meth:`take` and :meth:`release` must not overlap."""

    def __init__(self, name: str = "") -> None:
        self._name = f"\0hil-board-{name or _get_mount_namespace()}"
        self._listener: socket.socket | None = None
        self._server = threading.Thread()
        self._owner = self._purpose = ""
        self._since = 0.0

    def take(self, owner: str, purpose: str) -> bool:
        """Claim the machine, or change the owner of an existing claim.

        Return False if a different process has the claim.

        Systems without abstract sockets do not support claims. On such systems, always return True.
        """
        if self._listener is None:
            listener = socket.socket(socket.AF_UNIX)
            try:
                listener.bind(self._name)
                listener.listen(_MAX_WAITING)
            except OSError as error:
                listener.close()
                return error.errno != errno.EADDRINUSE
            self._listener = listener
            self._server = threading.Thread(target=self._serve, args=(listener,), daemon=True, name="board-claim")
            self._server.start()
        self._owner, self._purpose, self._since = owner, purpose, time.monotonic()
        return True

    def release(self) -> None:
        """Release the claim, if any. Waiting agents notice at once."""
        if self._listener is not None:
            # Shutdown makes accept fail in the server thread, which then closes the socket.
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._server.join()
            self._listener = None

    def find_other_holder(self) -> Holder | None:
        """Return the process that has the claim, or None if the machine is free or claimed by this agent."""
        if self._listener is not None:
            return None
        with contextlib.suppress(OSError), self._connect_holder() as link:
            pid, user = _identify_peer(link)
            answer = b""
            with contextlib.suppress(TimeoutError):
                answer = link.recv(_MAX_ANSWER)
            return _parse_holder(answer, user) or Holder(f"process {pid} of user {user}", "", 0.0)
        return None

    def wait_free(self, timeout_s: float) -> None:
        """Wait until the other process releases the claim or ends, or until the timeout."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError), self._connect_holder() as link:
            while (left := deadline - time.monotonic()) > 0:
                link.settimeout(left)
                if not link.recv(_MAX_ANSWER):
                    break
        time.sleep(max(min(deadline - time.monotonic(), _PAUSE_SECONDS), 0))

    def _connect_holder(self) -> socket.socket:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.settimeout(_ANSWER_SECONDS)
            link.connect(self._name)
        except OSError:
            link.close()
            raise
        return link

    def _serve(self, listener: socket.socket) -> None:
        """Send the current owner to connecting processes. Releasing the claim closes the connections."""
        waiting: collections.deque[socket.socket] = collections.deque()
        with contextlib.suppress(OSError):
            while True:
                link, _ = listener.accept()
                waiting.append(link)
                if len(waiting) > _MAX_WAITING:
                    waiting.popleft().close()
                held_s = time.monotonic() - self._since
                answer = {"owner": self._owner, "purpose": self._purpose, "held_s": held_s}
                with contextlib.suppress(OSError):
                    link.setblocking(False)
                    link.send(json.dumps(answer).encode())
        # Free the name before the waiting agents notice.
        listener.close()
        for link in waiting:
            link.close()


def _get_mount_namespace() -> int:
    """Return the inode number of the mount namespace, or 0 if the system does not show it."""
    try:
        return _NAMESPACE.stat().st_ino
    except OSError:
        return 0


def _identify_peer(link: socket.socket) -> tuple[int, str]:
    """Return the peer's process id and user name. The kernel reports both values, so the peer cannot forge them."""
    packed = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    try:
        return pid, pwd.getpwuid(uid).pw_name
    except KeyError:
        return pid, str(uid)


def _parse_holder(answer: bytes, user: str) -> Holder | None:
    """Parse the owner message of an agent. Return None if the message is invalid."""
    try:
        parsed: Any = json.loads(answer)
        owner, purpose, held_s = parsed["owner"], parsed["purpose"], float(parsed["held_s"])
        if math.isfinite(held_s) and held_s >= 0:
            owner, purpose = (escape_controls(str(text)[:_MAX_TEXT]) for text in (owner, purpose))
            return Holder(f"{owner}, logged in as {user},", purpose, held_s)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        pass
    return None
