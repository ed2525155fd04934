"""Console of a leased board as a source of lines for :class:`hil.controller.devices.console.reader.ConsoleReader`."""

from __future__ import annotations

import contextlib
import queue
import threading

from hil.controller.devices.console.lines import ConsoleLine
from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.client.console import FarmConsole
from hil.controller.farm.client.host_clock import HostClock
from hil.errors import BoardUnreachable, HilError

# Time until the host has opened the console.
_OPEN_SECONDS = 10.0
# Maximum lines that wait for the reader. Further lines are lost.
_MAX_WAITING = 20_000


class FarmLineSource:
    """Lines that the host of a farm's board reads: see :class:`hil.controller.devices.console.sources.LineSource`.

    Args:
        farm: connection that this object closes.
        since_s: time of the first wanted line, in seconds since the epoch.

    Raises:
        BoardUnreachable: the host did not open the console.
    """

    def __init__(self, farm: FarmClient, board: str, since_s: float) -> None:
        self._farm = farm
        self._clock = HostClock()
        self._console = FarmConsole(farm, board, since_s, None, None, host_clock=self._clock)
        self._lines: queue.Queue[ConsoleLine] = queue.Queue(_MAX_WAITING)
        self._is_ended = threading.Event()
        self._error: HilError | None = None
        self.is_complete = False
        self._thread = threading.Thread(target=self._run, name=f"console of {board}", daemon=True)
        self._thread.start()
        if not self._clock.is_known.wait(_OPEN_SECONDS) or self._is_ended.is_set():
            self.close()
            raise BoardUnreachable(
                self._error.message if self._error else f"the host did not respond within {_OPEN_SECONDS:g} s"
            )

    def read_lines(self, timeout_s: float) -> list[ConsoleLine] | None:
        """Return received lines, [] after the timeout, or None at the end of the stream."""
        found: list[ConsoleLine] = []
        is_ended = self._is_ended.is_set()  # before the search: no further line follows
        with contextlib.suppress(queue.Empty):
            found.append(self._lines.get(timeout=timeout_s))
            while len(found) < _MAX_WAITING:
                found.append(self._lines.get_nowait())
        return None if is_ended and not found else found

    def write(self, data: bytes) -> None:
        """Raise OSError: the farm takes input only from `hil farm console --write`."""
        raise OSError("the console of a leased board is read-only here; use hil farm console --write")

    def close(self) -> None:
        """Close the connection."""
        self._console.stop()
        self._thread.join(_OPEN_SECONDS)
        self._farm.close()

    def _run(self) -> None:
        try:
            for line in self._console.iter_lines():
                with contextlib.suppress(queue.Full):
                    self._lines.put_nowait(line)
        except HilError as error:
            self._error = error
        finally:
            self._is_ended.set()
            self._clock.is_known.set()
