"""JSON messages with a length in front over a socket between the agent and its own processes."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<I")
_PIECE = 1 << 16


class Closed(Exception):
    """The other side is gone."""


class Late(Exception):
    """The other side did not answer in time."""


class Channel:
    """One end of a socket that carries messages, either way, in order."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""

    def send(self, message: Any, fds: list[int] | None = None) -> None:
        """Send one message, with descriptors if any.

        Raises:
            Closed: the other side is gone.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        data = _LENGTH.pack(len(body)) + body
        try:
            if fds:
                sent = socket.send_fds(self.sock, [data], fds)
                data = data[sent:]
            self.sock.sendall(data)
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self, timeout: float | None = None) -> Any:
        """The next message.

        Args:
            timeout: most seconds to wait for a piece of it, None is for ever.

        Raises:
            Closed: the other side is gone, or what it sent is no message.
            Late: nothing came within ``timeout`` seconds.
        """
        try:
            if self.sock.gettimeout() != timeout:
                self.sock.settimeout(timeout)
            while (end := self._end()) > len(self._buffer):
                piece = self.sock.recv(max(_PIECE, end - len(self._buffer)))
                if not piece:
                    raise Closed("end of stream")
                self._buffer += piece
            body, self._buffer = self._buffer[_LENGTH.size : end], self._buffer[end:]
            return json.loads(body)
        except TimeoutError:
            raise Late from None
        except (OSError, ValueError) as error:
            raise Closed(str(error)) from error

    def receive_fds(self, most: int) -> tuple[Any, list[int]]:
        """The next message and the descriptors that came with it; there is only one such message under way at a time.

        Raises:
            Closed: the other side is gone, or what it sent is no message.
        """
        try:
            self._buffer, fds, _, _ = socket.recv_fds(self.sock, _PIECE, most)
        except OSError as error:
            raise Closed(str(error)) from error
        if not self._buffer:
            raise Closed("end of stream")
        return self.receive(), fds

    def close(self) -> None:
        """Hang up."""
        self.sock.close()

    def _end(self) -> int:
        """Where the next message ends in the buffer, as far as is known."""
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size
        size: int = _LENGTH.unpack_from(self._buffer)[0]
        return _LENGTH.size + size
