"""Communication between the agent and the child processes: messages over a socket, and shared memory.

A message is JSON with a length prefix. A run's timestamps precede the JSON as binary numbers. The peer may run a
hostile program, so the receiver limits the size, the number of values and the duration of each message.

Tensors pass through an :class:`Arena`: an unlinked file, which leaves nothing behind when a process is killed. The file
is a memfd if the system supports memfds (a tmpfs size limit does not apply), else a temporary file. The other process
receives the file descriptor and maps the file. A memfd is sealed against shrinking: reading mapped memory beyond the
end of a file raises SIGBUS, and the worker could truncate the file. Temporary files cannot be sealed, so on macOS and
on Linux before 3.17 a program that truncates the file kills the agent.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import resource
import select
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

from hil.core.tensors import Array, get_dtype_name, to_bytes
from hil.errors import BoardUnfit, HilError, RunFailed

# Maximum message size: enough for 20,000 tensors with names and shapes.
MAX_BYTES = 4 << 20
MAX_VALUES = 200_000
_LENGTH = struct.Struct("<I")
# Header of the numbers: a byte that cannot start a JSON text, and the count.
_NUMBERS = struct.Struct("<cI")
_MARK = b"\0"
_text = json.JSONEncoder(separators=(",", ":")).encode
_PIECE = 1 << 16
_ROUND = 1 << 16
ALIGN = 64


class Closed(Exception):
    """The peer closed the connection."""


class Late(Exception):
    """The peer did not respond in time."""


class Garbled(Exception):
    """The peer sent an invalid message."""


def decode(body: bytes) -> Any:
    """Decode a message's JSON. Raises Garbled if the JSON is invalid or has more than :data:`MAX_VALUES` values."""
    # Each value except the first follows one of these characters. Count them before parsing, because parsed values need
    # many times more memory than their text.
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES:
        raise Garbled(f"the message has more than {MAX_VALUES} values")
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise Garbled(f"invalid JSON: {error}") from error


def encode(message: Any) -> bytes:
    """Encode a message as JSON."""
    return _text(message).encode()


def join_message(numbers: Sequence[int], text: bytes) -> bytes:
    """Return a message's bytes: the 64-bit numbers, if any, followed by the JSON."""
    if not numbers:
        return text
    return _NUMBERS.pack(_MARK, len(numbers)) + struct.pack(f"<{len(numbers)}q", *numbers) + text


def split(body: bytes, most: int) -> tuple[bytes, tuple[int, ...]]:
    """Split a message into JSON and numbers.

    Raises Garbled for more than ``most`` numbers or a truncated message.
    """
    if body[:1] != _MARK:
        return body, ()
    if len(body) < _NUMBERS.size:
        raise Garbled("the message is truncated")
    _, count = _NUMBERS.unpack_from(body)
    end = _NUMBERS.size + 8 * count
    if count > most or end > len(body):
        raise Garbled(f"the message announces an invalid number of values: {count}")
    return body[end:], struct.unpack_from(f"<{count}q", body, _NUMBERS.size)


class Channel:
    """One end of a blocking socket that carries ordered messages in both directions."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()

    def send(self, message: Any, fds: list[int] | None = None, timeout: float | None = None) -> None:
        """Send a message, optionally with file descriptors.

        Args:
            message: JSON value.
            fds: file descriptors to pass to the peer.
            timeout: seconds until the peer must have accepted all bytes; None waits forever.

        Raises:
            Closed: the peer closed the connection.
            Late: the timeout expired.
        """
        self.send_bytes(encode(message), fds, timeout)

    def send_bytes(self, body: bytes, fds: list[int] | None = None, timeout: float | None = None) -> None:
        """Send an encoded message. Raises the same errors as :meth:`send`."""
        data = _LENGTH.pack(len(body)) + body
        try:
            if fds:
                sent = socket.send_fds(self.sock, [data], fds)
                data = data[sent:]
            if timeout is None:
                self.sock.sendall(data)
            else:
                self._send_within(data, timeout)
        except OSError as error:
            raise Closed(str(error)) from error

    def _send_within(self, data: bytes, timeout: float) -> None:
        # Do not use socket timeouts: with them, each send or receive takes three system calls.
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(BlockingIOError):
                data = data[self.sock.send(data, socket.MSG_DONTWAIT) :]
                if not data:
                    return
            self._wait(select.POLLOUT, deadline)

    def receive(self, timeout: float | None = None, most_bytes: int = MAX_BYTES) -> Any:
        """Receive and decode the next message.

        Raises the errors of :meth:`receive_bytes`, and :class:`Garbled` for bad JSON.
        """
        return decode(self.receive_bytes(timeout, most_bytes))

    def receive_bytes(self, timeout: float | None = None, most_bytes: int = MAX_BYTES) -> bytes:
        """Receive the bytes of the next message. Without a ``timeout``, wait forever.

        Raises:
            Closed: the peer closed the connection.
            Late: no complete message arrived within ``timeout`` seconds.
            Garbled: the message is larger than ``most_bytes``.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while (end := self._end(most_bytes)) > len(self._buffer):
                try:
                    if deadline is None:
                        piece = self.sock.recv(_PIECE)
                    else:
                        self._wait(select.POLLIN, deadline)
                        piece = self.sock.recv(_PIECE, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue  # poll reports out-of-band bytes, which recv does not return
                if not piece:
                    raise Closed("end of stream")
                self._buffer += piece
        except OSError as error:
            raise Closed(str(error)) from error
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return body

    def receive_fds(self, most: int) -> tuple[Any, list[int]]:
        """Receive a message with file descriptors. At most one such message may be in flight.

        Raises:
            Closed: the peer closed the connection.
            Garbled: the message is invalid.
        """
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, _PIECE, most)
        except OSError as error:
            raise Closed(str(error)) from error
        if not data:
            raise Closed("end of stream")
        self._buffer += data
        return self.receive(), fds

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def _wait(self, event: int, deadline: float) -> None:
        """Wait until the socket is ready. Raises Late at ``deadline`` (monotonic clock, seconds)."""
        poll = select.poll()
        try:
            poll.register(self.sock, event)
        except ValueError as error:  # this end was closed
            raise OSError(str(error)) from error
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise Late

    def _end(self, most_bytes: int) -> int:
        """Return the end offset of the next message, or of an incomplete length prefix."""
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size
        size: int = _LENGTH.unpack_from(self._buffer)[0]
        if size > most_bytes:
            raise Garbled(f"the message has {size} bytes, maximum {most_bytes}")
        return _LENGTH.size + size


def align_offset(size: int) -> int:
    """Round a size up to the next tensor offset."""
    return (size + ALIGN - 1) // ALIGN * ALIGN


class Arena:
    """Shared memory behind a file descriptor. Both processes may grow the file, and map only the needed part."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _create_anonymous_file() if fd is None else fd
        self._map: mmap.mmap | None = None

    def view(self, size: int, *, grow: bool) -> memoryview:
        """Return the first ``size`` bytes.

        Args:
            size: number of bytes.
            grow: grow the file if needed; otherwise a short file is an error.

        Raises:
            RunFailed: a memory limit was reached, or the other process's file is shorter than announced.
            BoardUnfit: the board is out of memory.
        """
        if size == 0:
            return memoryview(bytearray())
        if self._map is None or len(self._map) < size:
            try:
                actual = os.fstat(self.fd).st_size
                wanted = (size + _ROUND - 1) // _ROUND * _ROUND
                if actual < size:
                    if not grow:
                        raise RunFailed(f"expected {size} bytes of tensors, got {actual}")
                    actual = wanted
                    os.ftruncate(self.fd, actual)
                # Map only the needed part, because the file may have any size. Old views may still exist: drop the old
                # map without closing it.
                self._map = mmap.mmap(self.fd, min(actual, wanted))
            except (OSError, ValueError, OverflowError) as error:
                raise _make_memory_error(error, size, "tensors") from error
        return memoryview(self._map)[:size]

    def map_private_view(self, size: int) -> memoryview:
        """Return the first ``size`` bytes in a private mapping. Writes to it do not change the file.

        Raises:
            RunFailed: the mapping failed, or a memory limit was reached.
            BoardUnfit: the board is out of memory.
        """
        if size == 0:
            return memoryview(bytearray())
        try:
            return memoryview(mmap.mmap(self.fd, size, access=mmap.ACCESS_COPY))
        except (OSError, ValueError, OverflowError) as error:
            raise _make_memory_error(error, size, "inputs") from error

    def close(self) -> None:
        """Close the file descriptor. The memory is freed with the last view."""
        self._map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _make_memory_error(error: Exception, size: int, what: str) -> HilError:
    """Return the error for a failed allocation. The board is at fault unless this process has a memory limit."""
    message = f"not enough memory for {size} bytes of {what}: {error}"
    if (
        getattr(error, "errno", 0) == errno.ENOMEM
        and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    ):
        return BoardUnfit(message, hint="stop other processes on the board")
    return RunFailed(message)


def lay_out(arena: Arena, tensors: Iterable[tuple[str, Array]], size: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Copy tensors into an arena, after the first ``size`` bytes.

    Returns:
        Description of each tensor in message form, and the number of arena bytes in use afterwards.
    """
    entries: list[dict[str, Any]] = []
    places: list[tuple[int, int, memoryview]] = []
    for name, array in tensors:
        data = to_bytes(array)
        place, nbytes = size, data.nbytes
        dtype, shape = get_dtype_name(array.dtype), list(array.shape)
        entries.append({"name": name, "dtype": dtype, "shape": shape, "at": place, "bytes": nbytes})
        places.append((place, place + nbytes, data))
        size += align_offset(nbytes)
    view = arena.view(size, grow=True)
    for begin, end, data in places:
        view[begin:end] = data
    return entries, size


def _create_anonymous_file() -> int:
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):  # the kernel lacks memfd_create
            fd = os.memfd_create("hil", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # F_SEAL_SEAL prevents the other process from adding seals against growing or writing.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            return fd
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
