"""A Unix socket whose connections are served in threads: answered here, or carried elsewhere."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

_LINES = 100
_AGAIN_S = 0.05


class NotCarried(Exception):
    """Why a connection was not carried to its other end, or not any further."""


class LocalSocket:
    """Listens, and has each connection carried in a thread of its own, until it is closed.

    ``carry`` carries one until either side ends it; it may raise :class:`NotCarried` or OSError. Whoever closes this
    socket closes its connections, which wakes a thread that waits in one. Raises OSError: it cannot listen there.
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
        # Where many connect at once, one for whom there is no room is refused at once.
        self._listener.listen(socket.SOMAXCONN)
        threading.Thread(target=self._accept, daemon=True, name=name).start()

    def alive(self) -> bool:
        """Whether it was not closed yet."""
        return self._listener.fileno() >= 0

    def log(self) -> str:
        """Why connections were not carried."""
        return "\n".join(self._said.copy())

    def close(self) -> None:
        """End it and all that it carries. Closing it again does nothing."""
        for one in (self._listener, *list(self._open)):
            # A thread that waits in it wakes up.
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while self.alive():
            try:
                near, _ = self._listener.accept()
            except OSError:
                # There is no descriptor left, say: who connects waits until there is.
                time.sleep(_AGAIN_S)
                continue
            try:
                threading.Thread(target=self._serve, args=(near,), daemon=True, name=self._name).start()
            except RuntimeError as error:  # no room for another thread
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
