"""Show a board's console: lines from before, and new lines until the user stops."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.console.lines import ConsoleLine
from hil.controller.devices.console.reader import ConsoleReader
from hil.controller.devices.console.spool import find_spool
from hil.controller.devices.power_control.power import is_silent
from hil.core.board_config import BoardConfig
from hil.core.line_pattern import MATCHED_CHARACTERS
from hil.core.text import TextSink
from hil.errors import BoardError, StorageError, UsageError

_POLL_SECONDS = 0.2
_WAIT_SECONDS = 5.0
# Lines that another process may append while this one begins to read.
_OVERLAP = 200


def require_console(choice: BoardChoice) -> BoardConfig:
    """Return the config of a board with a console. Raises UsageError if the board has none."""
    config = choice.config
    if config.console.is_set:
        return config
    if config.console.labgrid:
        raise UsageError(
            f"the console of {choice.name} is a labgrid resource, which only a farm host opens",
            board=choice.name,
            hint="use the board through the farm, or set [console] address to the port of the exporter",
        )
    raise UsageError(
        f"{choice.name} has no console",
        board=choice.name,
        hint='add to the board\'s config: [console] serial = "/dev/ttyUSB0", or command or address',
    )


def read_stored_lines(config: BoardConfig, since_s: float) -> list[ConsoleLine]:
    """Return the lines that hil read since a time, in seconds since the epoch."""
    with contextlib.suppress(StorageError):
        return find_spool(config.console).read_since(since_s)
    return []


@contextlib.contextmanager
def watch_console(config: BoardConfig, *, exclusive: bool = False) -> Iterator[ConsoleWatch]:
    """Open the console for a block. Raises the errors of :class:`ConsoleReader`."""
    lines: queue.SimpleQueue[ConsoleLine] = queue.SimpleQueue()

    def add_lines(found: Sequence[ConsoleLine]) -> None:
        for line in found:
            lines.put(line)

    reader = ConsoleReader(config, add_lines, retries=False, exclusive=exclusive)
    try:
        yield ConsoleWatch(config, reader, lines)
    finally:
        reader.close()


class ConsoleWatch:
    """An open console with its new lines."""

    def __init__(self, config: BoardConfig, reader: ConsoleReader, lines: queue.SimpleQueue[ConsoleLine]) -> None:
        self._config = config
        self._reader = reader
        self._lines = lines
        self._is_stopped = threading.Event()

    def iter_lines(self, since_s: float | None, seconds: float | None = None) -> Iterator[ConsoleLine]:
        """Yield the stored lines since a time, if given, and then new lines.

        Args:
            seconds: how long to wait for new lines; None waits until the user stops.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        known: set[ConsoleLine] = set()
        if since_s is not None:
            stored = read_stored_lines(self._config, since_s)
            known = set(stored[-_OVERLAP:])
            yield from stored
        while not self._is_stopped.is_set() and (deadline is None or time.monotonic() < deadline):
            left = _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, max(deadline - time.monotonic(), 0.0))
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=left)
                if line not in known:
                    yield line

    def stop(self) -> None:
        """End :meth:`iter_lines`. May be called from any thread."""
        self._is_stopped.set()

    def send_line(self, text: str) -> None:
        """Send a line to the board, which must own the console. Raises BoardUnreachable."""
        self._reader.write(encode_input(self._config, text))


def encode_input(config: BoardConfig, text: str) -> bytes:
    """Return the bytes to send for a line of input: a terminal sends CR, and a program reads lines from a pipe."""
    end = "\n" if config.console.command else "\r"
    return (text.rstrip("\r\n") + end).encode("utf-8", "replace")


def filter_lines(lines: Iterator[ConsoleLine], pattern: str) -> Iterator[ConsoleLine]:
    """Yield the lines that match a regular expression; all lines without one. Raises UsageError if it is invalid."""
    try:
        expression = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"invalid --grep {pattern!r}: {error}") from error
    return (line for line in lines if expression.search(line.text[:MATCHED_CHARACTERS]))


def format_line(line: ConsoleLine) -> str:
    """Return a line with the local time of its arrival."""
    at = datetime.fromtimestamp(line.time_s).strftime("%H:%M:%S.%f")[:-3]
    return f"{at} {line.text}" if line.kind == "output" else f"{at} -- {line.text}"


def _close_quietly(board: Board) -> None:
    with contextlib.suppress(BoardError):  # the board may be rebooting
        board.close()


@contextlib.contextmanager
def reserve_board(choice: BoardChoice, purpose: str, say: TextSink) -> Iterator[None]:
    """Reserve the board for a block, so that no run starts there. A board that does not respond runs nothing.

    Raises:
        BoardBusy: another session uses the board.
        BoardError: the board refuses the connection.
    """
    from hil.controller.devices.choosing.board_factory import connect_board

    with contextlib.ExitStack() as stack:
        if choice.target or choice.config.is_simulator:
            try:
                board = connect_board(replace(choice, purpose=purpose, wait_s=_WAIT_SECONDS, say=say))
                stack.callback(_close_quietly, board)
                board.take()
            except BoardError as error:
                if not is_silent(error):
                    raise
                say(f"{choice.name} does not respond ({error.message}); only the console is reserved")
        yield
