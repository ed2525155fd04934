"""Open the link to a board's console: a serial port, a command, TCP, or telnet."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import shlex
import signal
import socket
import subprocess
from typing import Protocol, cast, runtime_checkable

from hil.controller.devices.console.lines import ConsoleLine
from hil.controller.devices.console.telnet import TelnetFilter
from hil.core.board_config import BoardConfig
from hil.core.console_config import ConsoleConfig, split_console_address
from hil.core.install_hints import make_install_command
from hil.core.processes import signal_group, wait_or_kill
from hil.errors import BoardBusy, BoardUnreachable, HilError, UsageError

_CHUNK_BYTES = 1 << 16
_CONNECT_SECONDS = 5.0
# Time for a command to exit after SIGTERM.
_END_SECONDS = 1.0


class ConsoleSource(Protocol):
    """Open link to a console. Only one thread reads. ``write`` and ``close`` may be called from other threads."""

    # True if the link ended as intended, so that it is not opened again.
    is_complete: bool

    def read(self, timeout_s: float) -> bytes | None:
        """Return received bytes, b"" after the timeout, or None at the end of the stream. Raises OSError."""

    def write(self, data: bytes) -> None:
        """Send bytes to the board. Raises OSError."""

    def close(self) -> None:
        """Close the link, within about two seconds."""


@runtime_checkable
class LineSource(Protocol):
    """Console that a farm host reads and splits into lines. Only one thread calls read_lines."""

    is_complete: bool

    def read_lines(self, timeout_s: float) -> list[ConsoleLine] | None:
        """Return received lines, [] after the timeout, or None at the end of the stream. Raises OSError."""

    def write(self, data: bytes) -> None:
        """Raise OSError if lines cannot be sent."""

    def close(self) -> None:
        """Close the connection, within about two seconds."""


class ConsoleProvider(Protocol):
    """Board provider that reads consoles."""

    def open_console(self, board: str, since_s: float) -> LineSource:
        """Open the console of a board.

        Args:
            since_s: time of the first wanted line, in seconds since the epoch.

        Raises:
            UsageError: no farm is selected, or the board has no console.
            BoardError: the console cannot be opened.
        """


def open_source(config: BoardConfig, since_s: float = 0.0) -> ConsoleSource | LineSource:
    """Open the console of a board.

    Args:
        since_s: time of the first wanted line of a console that a farm reads, in seconds since the epoch.

    Raises:
        UsageError: pyserial or the command is missing.
        BoardBusy: another program uses the serial port.
        BoardUnreachable: the console cannot be opened.
    """
    console, board = config.console, config.name
    try:
        if console.serial:
            return _open_serial(console, board)
        if console.command:
            return CommandSource(console.command)
        if console.farm:
            return _open_farm_console(console, board, since_s)
        protocol, host, port = split_console_address(console.address, "[console]")
        connected = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        return SocketSource(connected, TelnetFilter() if protocol == "telnet" else None)
    except OSError as error:
        if console.command and error.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC):
            raise UsageError(
                f"cannot start the console command: {error}",
                board=board,
                hint="check [console] command in the board's config",
            ) from error
        raise _make_open_error(console, board, error.strerror or str(error)) from error


def _open_farm_console(console: ConsoleConfig, board: str, since_s: float) -> LineSource:
    # Only leased boards need the providers.
    from hil.controller.devices.links.package_links import find_provider

    try:
        provider, name = find_provider(f"farm:{console.farm}")
        return cast(ConsoleProvider, provider).open_console(name, since_s)
    except HilError as error:  # a run continues without the console
        raise BoardUnreachable(
            f"cannot open the console of {console.place}: {error.message}",
            board=board,
            hint=error.hint or f"hil farm console {console.farm}",
        ) from error


def _make_open_error(console: ConsoleConfig, board: str, why: str) -> HilError:
    hint = "check [console] in the board's config, the cable, and the permissions of the port"
    return BoardUnreachable(f"cannot open console {console.place}: {why}", board=board, hint=hint)


def _open_serial(console: ConsoleConfig, board: str) -> ConsoleSource:
    try:
        import serial
    except ImportError as error:
        raise UsageError(
            "serial consoles need the package pyserial", board=board, hint=make_install_command("console")
        ) from error
    try:
        port = serial.Serial(console.serial, console.baud, timeout=0, write_timeout=_CONNECT_SECONDS, exclusive=True)
    except (serial.SerialException, ValueError) as error:
        number = getattr(error, "errno", None)
        if number in (errno.EAGAIN, errno.EBUSY):  # pyserial could not lock the port
            raise BoardBusy(
                f"another program uses serial port {console.serial}", board=board, hint=f"fuser -v {console.serial}"
            ) from error
        why = os.strerror(number) if number else str(error)
        raise _make_open_error(console, board, why) from error
    return SerialSource(port)


class CommandSource:
    """Program that prints the console on stdout and stderr. It runs in its own process group.

    A program that exits with code 0 is complete. Otherwise hil starts the program again.
    """

    def __init__(self, argv: tuple[str, ...]) -> None:
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self.name = shlex.join(argv)
        self.is_complete = False

    def read(self, timeout_s: float) -> bytes | None:
        """Return received bytes: see :class:`ConsoleSource`."""
        assert self._process.stdout is not None
        if not self._selector.select(timeout_s):
            return b""
        data = os.read(self._process.stdout.fileno(), _CHUNK_BYTES)
        if not data:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.is_complete = self._process.wait(_END_SECONDS) == 0
        return data or None

    def write(self, data: bytes) -> None:
        """Send bytes to the board."""
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    def close(self) -> None:
        """Stop the program with all processes of its group."""
        if self._process.poll() is None:
            signal_group(self._process.pid, signal.SIGTERM)
        wait_or_kill(self._process, _END_SECONDS, group=True)
        # Children may still run after the program's exit.
        signal_group(self._process.pid)
        self._selector.close()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class SocketSource:
    """TCP connection, with telnet commands if ``telnet`` is set."""

    def __init__(self, connection: socket.socket, telnet: TelnetFilter | None = None) -> None:
        self._socket = connection
        self._telnet = telnet
        self.is_complete = False
        # Detect a server that disappeared without closing the connection.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def read(self, timeout_s: float) -> bytes | None:
        """Return received bytes: see :class:`ConsoleSource`."""
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except TimeoutError:
            return b""
        if not data:
            return None
        if self._telnet is None:
            return data
        text, answer = self._telnet.receive(data)
        if answer:
            self._socket.sendall(answer)
        return text

    def write(self, data: bytes) -> None:
        """Send bytes to the board."""
        self._socket.sendall(data if self._telnet is None else self._telnet.send(data))

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class SerialPort(Protocol):
    """Methods of ``serial.Serial`` that hil uses."""

    def fileno(self) -> int:
        """Return the file descriptor."""

    def write(self, data: bytes) -> int | None:
        """Send bytes."""

    def close(self) -> None:
        """Close the port."""


class SerialSource:
    """Serial port, opened by pyserial and locked for this process."""

    def __init__(self, port: SerialPort) -> None:
        self._port = port
        self._selector = selectors.DefaultSelector()
        self._selector.register(port.fileno(), selectors.EVENT_READ)
        self.is_complete = False

    def read(self, timeout_s: float) -> bytes | None:
        """Return received bytes: see :class:`ConsoleSource`."""
        if not self._selector.select(timeout_s):
            return b""
        # Not pyserial's read, which reports an unplugged adapter only as an empty result on some systems.
        return os.read(self._port.fileno(), _CHUNK_BYTES) or None

    def write(self, data: bytes) -> None:
        """Send bytes to the board."""
        self._port.write(data)

    def close(self) -> None:
        """Close the port."""
        self._selector.close()
        with contextlib.suppress(OSError):
            self._port.close()
