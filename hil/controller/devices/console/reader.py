"""Read a board's console in a thread, and reconnect if the link ends."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from hil.controller.devices.console.lines import ConsoleLine, LineKind, LineSplitter
from hil.controller.devices.console.sources import ConsoleSource, LineSource, open_source
from hil.controller.devices.console.spool import Spool, SpoolFollower, find_spool
from hil.core import clock
from hil.core.board_config import BoardConfig
from hil.core.line_pattern import LinePattern
from hil.errors import BoardBusy, BoardUnreachable, HilError, StorageError

LineSink = Callable[[Sequence[ConsoleLine]], None]

# A faster console loses bytes: a board in an endless loop of errors must not use the host's CPU and disk.
MAX_BYTES_PER_SECOND = 512 << 10
MAX_LINES_PER_SECOND = 5000
# Lines in memory, for patterns and waits.
MAX_RECENT_LINES = 2000
# A line without an end, such as a login prompt, counts as a line after this silence.
IDLE_SECONDS = 0.2
_POLL_SECONDS = 0.1
# After a lost connection, ask for the lines after the last one.
_AFTER_SECONDS = 1e-6
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.5, 10.0
_CLOSE_SECONDS = 4.0


class ConsoleReader:
    """Reads a console until :meth:`close`. Thread-safe.

    If another process of this user already reads the console, the lines come from that process.

    Args:
        sink: Receives lines in the reader's thread, in order.

    Raises:
        UsageError: pyserial or the console's command is missing.
        BoardBusy, BoardUnreachable: the console cannot be opened. With ``retries``, hil tries again in the background.
    """

    def __init__(
        self, config: BoardConfig, sink: LineSink = lambda lines: None, *, retries: bool = True, exclusive: bool = False
    ) -> None:
        self._config = config
        self._sink = sink
        self._recent: deque[ConsoleLine] = deque(maxlen=MAX_RECENT_LINES)
        self._count = 0
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._source: ConsoleSource | LineSource | None = None
        self._last_s = time.time()  # arrival of the last line
        self._follower: SpoolFollower | None = None
        self._spool = _find_spool_if_possible(config)
        self.problem = ""  # why the console is not open; "" if it is open
        if self._spool is not None and not self._spool.try_lock():
            if exclusive:
                raise BoardBusy(
                    f"another hil process reads the console {config.console.place}",
                    board=config.name,
                    hint="end the run or `hil board console --write` that uses the board",
                )
            self._follower = self._spool.follow()
        else:
            self._open_first(retries)
        self._thread = threading.Thread(target=self._run, name=f"console {config.name}", daemon=True)
        self._thread.start()

    def _open_first(self, retries: bool) -> None:
        try:
            self._source = open_source(self._config, self._last_s)
        except (BoardBusy, BoardUnreachable) as error:
            self.problem = error.message
            if not retries:
                self._release_spool()
                raise
        except BaseException:
            self._release_spool()
            raise

    @property
    def position(self) -> int:
        """Number of lines so far, for :meth:`wait_for` and :meth:`get_lines`."""
        with self._changed:
            return self._count

    @property
    def is_open(self) -> bool:
        """True if the console is connected, by this process or another."""
        return self._source is not None or self._follower is not None

    def get_lines(self, position: int = 0) -> list[ConsoleLine]:
        """Return the latest lines after a position."""
        with self._changed:
            count = min(self._count - position, len(self._recent))
            return list(self._recent)[len(self._recent) - count :] if count > 0 else []

    def wait_for(self, pattern: str, position: int, timeout_s: float) -> ConsoleLine | None:
        """Return the first line after a position that matches a regular expression, or None after the timeout."""
        expression = LinePattern(pattern)
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                lines = self.get_lines(position)
                position = self._count
            for line in lines:
                if line.kind == "output" and expression.matches(line.text):
                    return line
            with self._changed:
                left = deadline - time.monotonic()
                if left <= 0 or self._stop.is_set():
                    return None
                if self._count == position:
                    self._changed.wait(min(left, _POLL_SECONDS))

    def wait_until_quiet(self, quiet_s: float, timeout_s: float) -> None:
        """Wait until no line arrives for ``quiet_s`` seconds, for at most ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while not self._stop.is_set() and time.monotonic() < deadline:
            before = self.position
            self._stop.wait(min(quiet_s, max(deadline - time.monotonic(), 0.0)))
            if self.position == before:
                return

    def write(self, data: bytes) -> None:
        """Send bytes to the board. Raises BoardUnreachable if the console is not open in this process."""
        source = self._source
        try:
            if source is None:
                raise OSError("not connected")
            source.write(data)
        except (OSError, ValueError) as error:
            raise BoardUnreachable(
                f"cannot write to console {self._config.console.place}: {error}", board=self._config.name
            ) from error

    def close(self) -> None:
        """Stop reading, within a few seconds. Lines that have arrived reach the sink first."""
        self._stop.set()
        self._thread.join(_CLOSE_SECONDS)

    # The thread.

    def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        try:
            if self.problem:
                self._add_note(f"{self.problem}; retrying")
            while not self._stop.is_set():
                if self._follower is not None:
                    self._follow(self._follower)
                    continue
                if self._source is not None:
                    began = time.monotonic()
                    is_complete = self._read_until_end(self._source)
                    self._close_source()
                    if self._stop.is_set():
                        break
                    if is_complete:
                        self._add_note("the console's command ended")
                        self._stop.wait()
                        break
                    pause = _FIRST_PAUSE_SECONDS if time.monotonic() - began > _MAX_PAUSE_SECONDS else pause
                    self._add_note(f"connection to console {self._config.console.place} lost; reconnecting")
                self._stop.wait(pause)
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)
                if not self._stop.is_set():
                    self._reopen()
        finally:
            self._close_source()
            if self._follower is not None:
                self._follower.close()
            self._release_spool()

    def _reopen(self) -> None:
        try:
            self._source = open_source(self._config, self._last_s + _AFTER_SECONDS)
            self.problem = ""
            self._add_note(f"connected to console {self._config.console.place}")
        except HilError as error:
            if not self.problem:  # one note for each time without a connection
                self._add_note(error.message)
            self.problem = error.message

    def _follow(self, follower: SpoolFollower) -> None:
        """Read lines of another process, until that process ends. Then read the console here."""
        assert self._spool is not None
        while not self._stop.wait(_POLL_SECONDS):
            with contextlib.suppress(OSError):
                self._publish(follower.read_new())
            if self._spool.try_lock():
                with contextlib.suppress(OSError):
                    self._publish(follower.read_new())
                follower.close()
                self._follower = None
                self._reopen()
                return

    def _read_until_end(self, source: ConsoleSource | LineSource) -> bool:
        """Read to the end of the stream, and return whether the source is complete."""
        return self._read_lines(source) if isinstance(source, LineSource) else self._read_bytes(source)

    def _read_lines(self, source: LineSource) -> bool:
        """Read lines that a farm host has split, with the times of the host."""
        limit = _RateLimit()
        while True:
            is_stopping = self._stop.is_set()
            try:
                # The last lines may still be on their way.
                lines = source.read_lines(IDLE_SECONDS if is_stopping else _POLL_SECONDS)
            except OSError:
                lines = None
            if lines is None:
                return source.is_complete
            if lines:
                self._publish(lines[: limit.take_lines(len(lines))])
                self._last_s = max(self._last_s, lines[-1].time_s)
            if note := limit.take_note():
                self._add_note(note)
            if is_stopping:
                return False

    def _read_bytes(self, source: ConsoleSource) -> bool:
        """Read bytes, and split them into lines."""
        splitter, limit = LineSplitter(), _RateLimit()
        arrived = (clock.get_time_ns(), time.time())
        while True:
            try:
                data = source.read(IDLE_SECONDS if splitter.has_rest else _POLL_SECONDS)
            except (OSError, ValueError):
                data = None
            if data is None or (not data and splitter.has_rest) or (self._stop.is_set() and not data):
                self._publish_texts(splitter.flush(), *arrived)
            if data is None:
                return source.is_complete
            if data:
                now = (clock.get_time_ns(), time.time())
                first = arrived if splitter.has_rest else now
                texts = splitter.feed(data) if limit.take_bytes(len(data)) else []
                texts = texts[: limit.take_lines(len(texts))]
                self._publish_texts(texts[:1], *first)
                self._publish_texts(texts[1:], *now)
                arrived = now if texts else first
            if note := limit.take_note():
                self._add_note(note)
            if self._stop.is_set():
                self._publish_texts(splitter.flush(), *arrived)
                return False

    def _publish_texts(self, texts: Sequence[str], host_ns: int, time_s: float) -> None:
        if texts:
            self._publish([ConsoleLine(host_ns, time_s, text) for text in texts], store=True)

    def _add_note(self, text: str, kind: LineKind = "note") -> None:
        self._publish([ConsoleLine(clock.get_time_ns(), time.time(), text, kind)], store=True)

    def _publish(self, lines: Sequence[ConsoleLine], *, store: bool = False) -> None:
        if not lines:
            return
        if store and self._spool is not None and self._spool.is_ours:
            try:
                self._spool.append(lines)
            except StorageError:  # the console is still read, but not shared
                self._release_spool()
        with self._changed:
            self._recent.extend(lines)
            self._count += len(lines)
            self._changed.notify_all()
        self._sink(lines)

    def _close_source(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            with contextlib.suppress(OSError):
                source.close()

    def _release_spool(self) -> None:
        spool, self._spool = self._spool, None
        if spool is not None:
            spool.unlock()


def _find_spool_if_possible(config: BoardConfig) -> Spool | None:
    """Return the console's spool; None if the user has no directory for it, so that consoles are not shared.

    A farm shares the consoles of its boards itself.
    """
    if config.console.farm:
        return None
    try:
        return find_spool(config.console)
    except StorageError:
        return None


class _RateLimit:
    """Limits bytes and lines per second, and counts what exceeds the limits."""

    def __init__(self) -> None:
        self._second = 0
        self._bytes = self._lines = self._dropped = 0

    def take_bytes(self, count: int) -> bool:
        """Return True if the bytes are within the limit."""
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._bytes, self._lines = second, 0, 0
        self._bytes += count
        if self._bytes <= MAX_BYTES_PER_SECOND:
            return True
        self._dropped += count
        time.sleep(0.01)  # let the sender wait instead of reading at full speed
        return False

    def take_lines(self, count: int) -> int:
        """Return how many of the lines are within the limit."""
        taken = max(min(count, MAX_LINES_PER_SECOND - self._lines), 0)
        self._lines += taken
        self._dropped += count - taken
        return taken

    def take_note(self) -> str:
        """Return a note about the losses of the last second; "" without losses."""
        if not self._dropped or int(time.monotonic()) == self._second:
            return ""
        self._dropped = 0
        return (
            f"output lost: the console sends more than {MAX_BYTES_PER_SECOND >> 10} KiB "
            f"or {MAX_LINES_PER_SECOND} lines a second"
        )
