"""How the agent and its own processes talk: messages over a socket, and memory that both map.

A message has its length in front and is JSON, with numbers before it where a run's times are told. The other side may
run a program that means harm: no message is larger, holds more values or takes longer than the receiver allows.

Tensors pass through an :class:`Arena`: an unlinked file, so that nothing is left behind whoever is killed. It is a
memfd where there is one (no size limit of a tmpfs mount applies), else a temporary file. The descriptor is handed to
the other process, which maps it for itself. A memfd is sealed so that it only grows: a process that reads memory beyond
a file's end is killed by SIGBUS, and the worker, which has the descriptor as well, may cut it. A temporary file cannot
be sealed: there (macOS, Linux before 3.17) a program that cuts it ends the agent.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

from hil.core.tensors import Array, dtype_name, to_bytes
from hil.errors import RunFailed

# Room for the names and shapes of 20,000 tensors.
MOST_BYTES = 4 << 20
MOST_VALUES = 200_000
_LENGTH = struct.Struct("<I")
# Before numbers: a byte that no JSON begins with, and how many there are.
_NUMBERS = struct.Struct("<cI")
_MARK = b"\0"
_text = json.JSONEncoder(separators=(",", ":")).encode
_PIECE = 1 << 16
_ROUND = 1 << 16
ALIGN = 64


class Closed(Exception):
    """The other side is gone."""


class Late(Exception):
    """The other side did not answer in time."""


class Garbled(Exception):
    """What the other side sent is no message."""


def decode(body: bytes) -> Any:
    """What a message's bytes say. Raises Garbled: they are no JSON in UTF-8, or hold more than :data:`MOST_VALUES`."""
    # Each value that JSON can hold has one of these before it, but for the first: read, it takes many times its bytes.
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > MOST_VALUES:
        raise Garbled(f"it holds more than {MOST_VALUES} values")
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise Garbled(f"it is no JSON: {error}") from error


def encode(message: Any) -> bytes:
    """A message's JSON."""
    return _text(message).encode()


def joined(numbers: Sequence[int], text: bytes) -> bytes:
    """The bytes of a message: numbers of 64 bits, if there are any, before its JSON."""
    if not numbers:
        return text
    return _NUMBERS.pack(_MARK, len(numbers)) + struct.pack(f"<{len(numbers)}q", *numbers) + text


def split(body: bytes, most: int) -> tuple[bytes, tuple[int, ...]]:
    """The JSON of a message, and the numbers before it. Raises Garbled: they are more than ``most``, or cut off."""
    if body[:1] != _MARK:
        return body, ()
    if len(body) < _NUMBERS.size:
        raise Garbled("it is cut off")
    _, count = _NUMBERS.unpack_from(body)
    end = _NUMBERS.size + 8 * count
    if count > most or end > len(body):
        raise Garbled("it holds too many numbers, or fewer than it says")
    return body[end:], struct.unpack_from(f"<{count}q", body, _NUMBERS.size)


class Channel:
    """One end of a blocking socket that carries messages, either way, in order."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()

    def send(self, message: Any, fds: list[int] | None = None, timeout: float | None = None) -> None:
        """Send one message, with descriptors if any.

        Args:
            timeout: most seconds until all of it is taken; without one it waits for ever.

        Raises:
            Closed: the other side is gone.
            Late: the other side did not take it in time.
        """
        self.send_bytes(encode(message), fds, timeout)

    def send_bytes(self, body: bytes, fds: list[int] | None = None, timeout: float | None = None) -> None:
        """Send one message that :func:`encode` made; raises as :meth:`send`."""
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
        # A socket with a time limit of its own takes three system calls to send or receive anything.
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(BlockingIOError):
                data = data[self.sock.send(data, socket.MSG_DONTWAIT) :]
                if not data:
                    return
            self._wait(select.POLLOUT, deadline)

    def receive(self, timeout: float | None = None, most_bytes: int = MOST_BYTES) -> Any:
        """What the next message says; raises as :meth:`receive_bytes`, and :class:`Garbled` where it says nothing."""
        return decode(self.receive_bytes(timeout, most_bytes))

    def receive_bytes(self, timeout: float | None = None, most_bytes: int = MOST_BYTES) -> bytes:
        """The bytes of the next message; without a ``timeout`` it waits for ever.

        Raises:
            Closed: the other side is gone.
            Late: it was not there within ``timeout`` seconds.
            Garbled: it is larger.
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
                    continue  # a byte out of band is announced, and is not there to be read
                if not piece:
                    raise Closed("end of stream")
                self._buffer += piece
        except OSError as error:
            raise Closed(str(error)) from error
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return body

    def receive_fds(self, most: int) -> tuple[Any, list[int]]:
        """The next message and the descriptors that came with it; there is only one such message under way at a time.

        Raises:
            Closed: the other side is gone.
            Garbled: what it sent is no message.
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
        """Hang up."""
        self.sock.close()

    def _wait(self, event: int, deadline: float) -> None:
        """Wait until the socket can go on. Raises Late: it cannot by the monotonic clock's ``deadline``."""
        poll = select.poll()
        try:
            poll.register(self.sock, event)
        except ValueError as error:  # it was closed here
            raise OSError(str(error)) from error
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise Late

    def _end(self, most_bytes: int) -> int:
        """Where the next message ends in the buffer, as far as is known."""
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size
        size: int = _LENGTH.unpack_from(self._buffer)[0]
        if size > most_bytes:
            raise Garbled(f"it has {size} bytes, more than the {most_bytes} that it may have")
        return _LENGTH.size + size


def aligned(size: int) -> int:
    """A size rounded up to where the next tensor may start."""
    return (size + ALIGN - 1) // ALIGN * ALIGN


class Arena:
    """Shared memory behind a descriptor; either side may grow it and the other maps what it needs of it."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _anonymous_file() if fd is None else fd
        self._map: mmap.mmap | None = None

    def view(self, size: int, *, grow: bool) -> memoryview:
        """The first ``size`` bytes.

        Args:
            grow: make the file as large as needed; otherwise it must be already.

        Raises:
            RunFailed: there is not so much memory, or the other side's file is shorter than it said.
        """
        if size == 0:
            return memoryview(bytearray())
        if self._map is None or len(self._map) < size:
            try:
                actual = os.fstat(self.fd).st_size
                wanted = (size + _ROUND - 1) // _ROUND * _ROUND
                if actual < size:
                    if not grow:
                        raise RunFailed(f"{size} bytes of tensors were announced, {actual} are there")
                    actual = wanted
                    os.ftruncate(self.fd, actual)
                # Not the whole file, which may be of any size. Views of the old map may still be alive: it is dropped,
                # not closed.
                self._map = mmap.mmap(self.fd, min(actual, wanted))
            except (OSError, ValueError, OverflowError) as error:
                raise RunFailed(f"no memory for {size} bytes of tensors: {error}") from error
        return memoryview(self._map)[:size]

    def private_view(self, size: int) -> memoryview:
        """Return the first ``size`` bytes in a mapping of its own, where writing changes nothing but that mapping.

        Raises:
            RunFailed: the other side's file is shorter than it said, or there is no room for another mapping.
        """
        if size == 0:
            return memoryview(bytearray())
        try:
            return memoryview(mmap.mmap(self.fd, size, access=mmap.ACCESS_COPY))
        except (OSError, ValueError, OverflowError) as error:
            raise RunFailed(f"no memory for {size} bytes of inputs: {error}") from error

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last view of it."""
        self._map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def lay_out(arena: Arena, tensors: Iterable[tuple[str, Array]], size: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Copy tensors into an arena, behind the ``size`` bytes that are in use.

    Returns:
        Where each tensor is, as messages describe it, and how many bytes are in use then.
    """
    entries: list[dict[str, Any]] = []
    places: list[tuple[int, int, memoryview]] = []
    for name, array in tensors:
        data = to_bytes(array)
        place, nbytes = size, data.nbytes
        dtype, shape = dtype_name(array.dtype), list(array.shape)
        entries.append({"name": name, "dtype": dtype, "shape": shape, "at": place, "bytes": nbytes})
        places.append((place, place + nbytes, data))
        size += aligned(nbytes)
    view = arena.view(size, grow=True)
    for begin, end, data in places:
        view[begin:end] = data
    return entries, size


def _anonymous_file() -> int:
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):  # of a kernel that has none
            fd = os.memfd_create("hil", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # And no seal more: one against growing or writing would be the other side's to set.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            return fd
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
