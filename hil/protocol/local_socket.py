"""Unix socket server with a thread for every connection."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

# Maximum length of a Unix socket's path on Linux, in bytes.
MAX_PATH_LENGTH = 107
_LINES = 100
_AGAIN_SECONDS = 0.05


class NotCarried(Exception):
    """Reason why a connection was rejected or interrupted."""


class LocalSocket:
    """Listener that serves each connection in a separate thread until :meth:`close`.

    ``carry`` serves one connection until either side ends it. ``carry`` may raise :class:`NotCarried` or OSError.
    Closing the listener closes all connections and wakes up threads that wait for them. Raises OSError if listening
    failed.
    """

    def __init__(self, path: Path, carry: Callable[[socket.socket], None], name: str) -> None:
        self._carry, self._name = carry, name
        self._said: deque[str] = deque(maxlen=_LINES)
        self._open: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(path))
        except OSError:
            self._listener.close()
            raise
        # Use the largest backlog, because the kernel rejects connections above the backlog.
        self._listener.listen(socket.SOMAXCONN)
        threading.Thread(target=self._accept, daemon=True, name=name).start()

    def alive(self) -> bool:
        """Return True until the listener is closed."""
        return self._listener.fileno() >= 0

    def log(self) -> str:
        """Return the errors of recent connections, one per line."""
        return "\n".join(self._said.copy())

    def close(self) -> None:
        """Close the listener and all connections. Further calls do nothing."""
        for one in (self._listener, *list(self._open)):
            # Wake up threads that wait for the socket.
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while self.alive():
            try:
                near, _ = self._listener.accept()
            except OSError:
                # For example, the process has no free file descriptors. Clients wait until a descriptor is free.
                time.sleep(_AGAIN_SECONDS)
                continue
            try:
                threading.Thread(target=self._serve, args=(near,), daemon=True, name=self._name).start()
            except RuntimeError as error:  # the system cannot start a thread
                self._said.append(str(error))
                near.close()

    def _serve(self, near: socket.socket) -> None:
        self._open.add(near)
        try:
            with near:
                self._carry(near)
        except (NotCarried, OSError) as error:
            self._said.append(str(error))
        finally:
            self._open.discard(near)
