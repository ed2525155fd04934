"""Byte streams to microcontrollers: a serial device, or a Unix socket of an emulator."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import termios
import time
from typing import Protocol

from hil.core.install_hints import make_install_command
from hil.core.serial_device import SOCKET, check_serial_device, list_holders, parse_serial_address
from hil.errors import BoardBusy, BoardUnreachable, UsageError

_CHUNK = 1 << 16
_WRITE_SECONDS = 10.0
# The worker of the previous program may still be ending.
_LOCK_SECONDS = 3.0


class SerialStream(Protocol):
    """Open line to a microcontroller."""

    def read(self, timeout_s: float) -> bytes:
        """Return the bytes that arrived, or b"" after the timeout. Raises OSError if the line is closed."""

    def write(self, data: bytes) -> None:
        """Send bytes. Raises OSError if the line is closed or does not accept the bytes."""

    def close(self) -> None:
        """Close the line."""


class DescriptorStream:
    """Stream of a file descriptor."""

    def __init__(self, descriptor: int, close: contextlib.AbstractContextManager[object]) -> None:
        self._descriptor = descriptor
        self._close = close

    def read(self, timeout_s: float) -> bytes:
        """Return the bytes that arrived. See :class:`SerialStream`."""
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            return b""
        data = os.read(self._descriptor, _CHUNK)
        if not data:
            raise ConnectionResetError("the serial line was closed")
        return data

    def write(self, data: bytes) -> None:
        """Send bytes. See :class:`SerialStream`."""
        view = memoryview(data)
        while view:
            if not select.select([], [self._descriptor], [], _WRITE_SECONDS)[1]:
                raise TimeoutError("the serial line does not accept data")
            view = view[os.write(self._descriptor, view) :]

    def close(self) -> None:
        """Close the line."""
        self._close.__exit__(None, None, None)


def open_stream(address: str, baud: int) -> SerialStream:
    """Open the line of an address: ``serial:/dev/ttyACM0`` or ``serial:unix:PATH``.

    Raises:
        UsageError: pyserial is not installed, the address is invalid, or the device does not support the baud rate.
        BoardUnreachable: the device does not exist or cannot be opened.
        BoardBusy: another process uses the device.
    """
    place = parse_serial_address(address)
    check_serial_device(place)
    try:
        if place.startswith(SOCKET):
            return _connect_socket(place.removeprefix(SOCKET))
        return _open_device(place, baud)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise _make_busy_error(place) from error
        raise BoardUnreachable(
            f"cannot open the serial line {place}: {_read_reason(error)}", hint="check the cable and the driver"
        ) from error


def _connect_socket(path: str) -> SerialStream:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return DescriptorStream(connection.fileno(), contextlib.closing(connection))


def _open_device(path: str, baud: int) -> SerialStream:
    try:
        import serial
    except ImportError as error:
        raise UsageError(
            "serial lines need pyserial, which is not installed", hint=make_install_command("mcu")
        ) from error
    with contextlib.ExitStack() as stack:
        # Before pyserial opens the device: pyserial sets the speed, and discards bytes of another process.
        lock = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        stack.callback(os.close, lock)
        until = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(lock):
            if time.monotonic() > until:
                raise _make_busy_error(path)
            time.sleep(0.02)
        try:
            device = stack.enter_context(contextlib.closing(serial.Serial(path, baud, timeout=0)))
        except ValueError as error:
            raise UsageError(
                f"{path} does not support {baud} baud", hint="set [mcu] baud to a speed that the adapter supports"
            ) from error
        return DescriptorStream(device.fileno(), stack.pop_all())


def _try_lock(device: int) -> bool:
    try:
        fcntl.flock(device, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_busy_error(path: str) -> BoardBusy:
    holders = list_holders(path)
    return BoardBusy(
        f"another process uses the serial line {path}" + (f": {', '.join(holders)}" if holders else ""),
        hint="wait until it ends, or end it",
    )


def _read_reason(error: OSError) -> str:
    """Return the system's reason. pyserial's errors contain it in a longer text, or in the error that they replace."""
    code = error.errno or (error.__context__.args[0] if isinstance(error.__context__, termios.error) else None)
    return os.strerror(code) if code else str(error)
