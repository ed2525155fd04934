"""The way to an agent's socket where sshd forwards none: a helper on the board, reached by TCP or by a command's stdio.

The helper (``board_relay.py``) lives as long as its command's input stays open: when this process ends, so does it.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko

from hil.controller.devices.local_socket import NotCarried
from hil.controller.devices.ssh.command import TooMuch, begin, own_output
from hil.controller.devices.ssh.pump import Carried
from hil.controller.devices.ssh.transport import Transport

_SCRIPT = Path(__file__).with_name("board_relay.py")
_LOADER = (
    "import sys; exec(compile(sys.stdin.buffer.read({size}), 'board_relay.py', 'exec'), {{'__name__': '__main__'}})"
)
_LOOPBACK = "127.0.0.1"
# As board_relay.py says it.
_NOBODY = "the agent's socket: "
# Starting Python on a slow board takes its time.
_START_S = 60.0
_LAST_OF_ERR = 4000
_LONGEST_LINE = 4096
_PORT = re.compile(r"[0-9]{1,5}")


class NoRelay(NotCarried):
    """The helper does not run on the board; its own words."""


class NoAgent(NoRelay):
    """The helper found nobody at the agent's socket."""


class TcpRelay:
    """A helper that listens on a loopback port of the board, for whoever has its token.

    Args:
        transport: an open connection.
        python: the board's interpreter.
        remote: the agent's socket there.

    Raises:
        NoRelay: it does not run.
        paramiko.ChannelException: sshd does not forward TCP; the error has its words.
        paramiko.SSHException, EOFError, OSError: the link broke.
    """

    def __init__(self, transport: Transport, python: str, remote: str) -> None:
        self._transport = transport
        self._token = secrets.token_hex(32)
        self._helper, port, _ = _started(transport, python, remote, self._token)
        try:
            if not _PORT.fullmatch(port) or not 0 < int(port) < 1 << 16:
                raise NoRelay(f"it tells no port but {port[:100]!r}")
            self._port = int(port)
            self._connection().close()
        except BaseException:
            self._helper.close()
            raise

    def open(self) -> Carried:
        """A connection to the agent."""
        channel = self._connection()
        channel.sendall(self._token.encode())
        return channel, _pieces(channel)

    def alive(self) -> bool:
        """Whether the helper runs."""
        return not self._helper.closed and not self._helper.eof_received

    def close(self) -> None:
        """End the helper."""
        self._helper.close()

    def _connection(self) -> paramiko.Channel:
        place = (_LOOPBACK, self._port)
        return self._transport.open_channel("direct-tcpip", place, (_LOOPBACK, 0), timeout=_START_S)


class StdioRelay:
    """A helper for each connection, which goes on over the helper's own input and output; as :class:`TcpRelay`."""

    def __init__(self, transport: Transport, python: str, remote: str) -> None:
        self._start: Callable[[], Carried] = lambda: _started(transport, python, remote, "")[::2]
        self._first: list[Carried] = [self._start()]

    def open(self) -> Carried:
        """A connection to the agent: the one that showed that there are any, then new ones."""
        return self._first.pop() if self._first else self._start()

    def alive(self) -> bool:
        """Each connection has a helper of its own."""
        return True

    def close(self) -> None:
        """A helper ends with its connection."""
        for channel, _ in self._first:
            channel.close()


def _started(
    transport: Transport, python: str, remote: str, token: str
) -> tuple[paramiko.Channel, str, Iterator[bytes]]:
    """A helper that runs: its channel, its first line, and what follows that."""
    script = _SCRIPT.read_bytes()
    deadline: float | None = time.monotonic() + _START_S

    def left() -> float | None:
        # Afterwards it is a connection, on which nothing may be said for any time.
        return max(deadline - time.monotonic(), 0.01) if deadline else None

    channel = transport.open_session(timeout=_START_S)
    try:
        channel.settimeout(_START_S)
        begin(channel, shlex.join([python, "-I", "-S", "-B", "-c", _LOADER.format(size=len(script))]), _START_S)
        channel.sendall(script + json.dumps({"socket": remote, "token": token}).encode() + b"\n")
        pieces = own_output(channel, left)
        begun = b""
        while b"\n" not in begun:
            if len(begun) > _LONGEST_LINE:
                raise TooMuch
            if not (piece := next(pieces, b"")):
                said = channel.recv_stderr(_LAST_OF_ERR).decode(errors="replace").strip()
                last = said.rpartition("\n")[2]
                raise NoAgent(last) if _NOBODY in last else NoRelay(last or "it ended at once")
            begun += piece
    except BaseException:
        channel.close()
        raise
    deadline = None
    channel.settimeout(None)
    line, _, rest = begun.partition(b"\n")
    return channel, line.decode(errors="replace"), itertools.chain([rest] if rest else [], pieces)


def _pieces(channel: paramiko.Channel) -> Iterator[bytes]:
    return iter(lambda: channel.recv(1 << 20), b"")
