"""Show the stderr of a board's workers live (:mod:`hil.controller.storage.screen.live`)."""

from __future__ import annotations

import contextlib
import threading
from collections import deque

from hil.controller.devices.agent_client.answers import LOG_CHARACTERS, LOG_LINES
from hil.controller.devices.agent_client.call import CallFailed
from hil.controller.devices.board_client import BoardClient
from hil.controller.storage.screen import live
from hil.errors import BoardError

_JOIN_SECONDS = 2.0


class WorkerLog:
    """Follower for the stderr of all programs loaded through one client, over one stream."""

    def __init__(self, board: str, client: BoardClient) -> None:
        self.client = client
        self._board = board
        self._lock = threading.Lock()
        self._shown: dict[str, int] = {}  # program -> number of lines shown
        # Lines of programs that were not added yet. A stream may also begin with lines of programs that hil never adds.
        self._early: deque[tuple[str, str]] = deque()
        self._room = LOG_CHARACTERS  # memory limit for lines of programs that are not shown
        self._stream = client.follow_logs()
        self._thread = threading.Thread(target=self._read, name="hil-worker-log", daemon=True)
        self._thread.start()

    def add(self, program_id: str) -> None:
        """Show a program's lines from the first on."""
        with self._lock:
            self._shown[program_id] = 0
            for whose, text in self._early:
                if whose == program_id:
                    self._show(program_id, text)

    def finish(self, program_id: str) -> None:
        """Show the lines of a program that the stream has not delivered yet, and stop following it."""
        if program_id not in self._shown:  # the program was loaded while live output was off
            return
        lines: list[str] = []
        with contextlib.suppress(BoardError):
            lines = self.client.logs(program_id)
        with self._lock:
            for text in lines[self._shown[program_id] :]:
                self._show(program_id, text)
            del self._shown[program_id]

    def close(self) -> None:
        """Cancel the stream."""
        cancel = getattr(self._stream, "cancel", None)
        if cancel is not None:
            cancel()
        self._thread.join(_JOIN_SECONDS)

    def _read(self) -> None:
        # Ignore errors, because the program's calls report the loss of the board.
        with contextlib.suppress(CallFailed, BoardError):
            for line in self._stream:
                with self._lock:
                    if line.program_id in self._shown:
                        self._show(line.program_id, line.text)
                    else:
                        self._keep(line.program_id, line.text)

    def _keep(self, program_id: str, text: str) -> None:
        self._early.append((program_id, text))
        self._room -= _measure_size(program_id, text)
        while self._room < 0 or len(self._early) > LOG_LINES:
            self._room += _measure_size(*self._early.popleft())

    def _show(self, program_id: str, text: str) -> None:
        self._shown[program_id] += 1
        live.show(self._board, text)


def _measure_size(program_id: str, text: str) -> int:
    return len(program_id) + len(text) + 1
