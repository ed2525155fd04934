"""Byte streams to microcontrollers: a serial device, or a Unix socket of an emulator."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import time
from pathlib import Path
from typing import Protocol

from hil.errors import BoardBusy, BoardUnreachable, UsageError

PREFIX = "serial:"
_SOCKET = "unix:"
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
        UsageError: pyserial is not installed, or the address is invalid.
        BoardUnreachable: the device does not exist or cannot be opened.
        BoardBusy: another process uses the device.
    """
    place = address.removeprefix(PREFIX)
    try:
        if place.startswith(_SOCKET):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(place.removeprefix(_SOCKET))
            except BaseException:
                connection.close()
                raise
            return DescriptorStream(connection.fileno(), contextlib.closing(connection))
        return _open_device(place, baud)
    except OSError as error:
        raise BoardUnreachable(
            f"cannot open the serial line {place}: {error.strerror or error}",
            hint="check the cable, and that you may read and write the device (group dialout)",
        ) from error


def _open_device(path: str, baud: int) -> SerialStream:
    try:
        import serial
    except ImportError as error:
        raise UsageError("serial lines need pyserial, which is not installed", hint="pip install 'hil[mcu]'") from error
    if not Path(path).is_absolute():
        raise UsageError(f"{path!r} is not a serial device", hint="expected serial:/dev/ttyACM0 or serial:unix:PATH")
    device = serial.Serial(path, baud, timeout=0)
    until = time.monotonic() + _LOCK_SECONDS
    while not _try_lock(device.fileno()):
        if time.monotonic() > until:
            device.close()
            raise BoardBusy(f"another process uses the serial line {path}", hint="wait until it ends")
        time.sleep(0.02)
    return DescriptorStream(device.fileno(), contextlib.closing(device))


def _try_lock(device: int) -> bool:
    try:
        fcntl.flock(device, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
