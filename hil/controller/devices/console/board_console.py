"""The console of a board in use: open before the power is switched, with the boot time and causes of failures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from hil.controller.devices.console.reader import ConsoleReader
from hil.controller.devices.console.recording import ConsoleRecording
from hil.controller.records.console import StoredConsole
from hil.core import clock
from hil.core.board_config import BoardConfig
from hil.core.clock import ClockFit
from hil.core.text import TextSink
from hil.core.timeline import Span
from hil.errors import BoardLost, BoardUnfit, BoardUnreachable, HilError, RunCrashed

# After a failure, the cause may arrive a moment later, because a serial port is slow.
_QUIET_SECONDS, _MAX_WAIT_SECONDS = 0.3, 1.5
_MAX_QUOTED = 5
# Maximum number of lines in a trace, and the time that a line takes there.
_MAX_SPANS, _SPAN_NS = 20_000, 1000
# Time between two writes of the run's file.
_SAVE_SECONDS = 5.0
# An error with a longer text is hard to read.
_MAX_TEXT = 160


class BoardConsole:
    """Console of a board, read until :meth:`close`.

    Attributes:
        boot: the last boot that hil waited for, on the host's clock; None without one.

    Raises:
        UsageError: pyserial or the console's command is missing.
    """

    def __init__(self, config: BoardConfig, say: TextSink = lambda text: None) -> None:
        self.recording = ConsoleRecording(config.console.patterns)
        self.boot: Span | None = None
        self._taken: Span | None = None
        self._saved: StoredConsole | None = None
        self._saved_at = 0.0
        self._since_ns = 0
        self._config = config
        self._say = say
        self._reader = ConsoleReader(config, self.recording.add)
        if self._reader.problem:
            say(f"{self._reader.problem}; continuing without the console")

    @contextlib.contextmanager
    def time_boot(self) -> Iterator[None]:
        """Switch the power in this block. Then wait until the console shows the pattern of ``[console] boot``.

        Does nothing else without a pattern, or while the console is not connected.

        Raises:
            BoardUnreachable: the pattern did not appear in time.
        """
        position, start_ns = self._reader.position, clock.get_time_ns()
        yield
        console = self._config.console
        if not console.boot or not self._reader.is_open:
            return
        line = self._reader.wait_for(console.boot, position, console.boot_s)
        if line is None:
            error = BoardUnreachable(
                f"the board did not boot: the console did not show {console.boot!r} within {console.boot_s:g} s",
                board=self._config.name,
                hint="read the console with hil board console, or increase [console] boot_s",
            )
            last = [one.text for one in self._reader.get_lines(position)][-20:]
            error.detail = "\n".join(last)
            self.explain(error)
            raise error
        self.boot = Span("boot", start_ns, max(line.host_ns, start_ns), {"line": line.text[:_MAX_TEXT]})
        self._say(f"{self._config.name} booted in {self.boot_s:.1f} s")

    @property
    def boot_s(self) -> float | None:
        """Seconds of the last boot that hil waited for; None without one."""
        return None if self.boot is None else (self.boot.end_ns - self.boot.start_ns) / 1e9

    @property
    def board(self) -> str:
        """Name of the board."""
        return self._config.name

    def take_boot(self) -> Span | None:
        """Return the boot if no case has it yet."""
        if self.boot is self._taken:
            return None
        self._taken = self.boot
        return self.boot

    def set_clock(self, fit: ClockFit | None) -> None:
        """Set the board's clock, for the lines' board times."""
        self.recording.set_clock(fit)

    def end_case(self) -> None:
        """Do not use the lines so far to explain failures of later cases."""
        self._since_ns = clock.get_time_ns()

    def explain(self, error: HilError) -> None:
        """Add the lines since the last case that match a pattern to the error of a lost board or a crashed program."""
        if error.console or not isinstance(error, (BoardLost, BoardUnreachable, BoardUnfit, RunCrashed)):
            return
        self._reader.wait_until_quiet(_QUIET_SECONDS, _MAX_WAIT_SECONDS)
        found = self.recording.find_quotes(self._since_ns)
        if not found:
            return
        # The first lines are nearest to the cause: an oops is followed by a panic and a reset.
        error.console = tuple(found[:_MAX_QUOTED])
        first = error.console[0]
        text = first.text if len(first.text) <= _MAX_TEXT else f"{first.text[:_MAX_TEXT]}..."
        error.add(f'console: "{text}"' + (f" ({first.meaning})" if first.meaning else f" ({first.pattern})"))

    def list_spans(self, since_ns: int) -> list[Span]:
        """Return the lines since a host time as spans for a trace, in order and without overlaps."""
        found: list[Span] = []
        end_ns = 0
        for line in self.recording.get_lines():
            if line.host_ns >= since_ns and len(found) < _MAX_SPANS:
                start_ns = max(line.host_ns, end_ns)
                end_ns = start_ns + _SPAN_NS
                found.append(Span(line.text[:_MAX_TEXT], start_ns, end_ns, {"kind": line.kind}))
        return found

    def save(self, folder: Path, file: str, board: str, *, is_last: bool = False) -> StoredConsole:
        """Write the lines to a file: see :meth:`ConsoleRecording.save`. Does so every few seconds, and at the end."""
        now = time.monotonic()
        if self._saved is None or is_last or now - self._saved_at > _SAVE_SECONDS:
            self._saved, self._saved_at = self.recording.save(folder, file, board, self.boot_s), now
        return self._saved

    def close(self) -> None:
        """Stop reading."""
        self._reader.close()


def open_console(config: BoardConfig, say: TextSink = lambda text: None) -> BoardConsole | None:
    """Open the console of a board; None if the config has no console.

    A console that cannot be opened is a note for the user, and hil tries again during the run.
    """
    return BoardConsole(config, say) if config.console.is_set else None


@contextlib.contextmanager
def use_console(config: BoardConfig | None, say: TextSink) -> Iterator[BoardConsole | None]:
    """Open the console of a board for a block; see :func:`open_console`. Without a config, yield None."""
    console = None if config is None else open_console(config, say)
    try:
        yield console
    finally:
        if console is not None:
            console.close()
