"""Tunnels: local Unix sockets for an agent on a board, and for data connections.

If the board's sshd does not forward Unix sockets, a helper on the board (``board_relay.py``) relays the connection. hil
reaches the helper over TCP, or over a command's stdin and stdout. The helper exits when its stdin closes, for example
when this process ends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hil.controller.devices.ssh.board_relay import NO_AGENT
from hil.controller.devices.ssh.shell import Shell, begin, open_session
from hil.controller.devices.ssh.transport import CommandSession, Forward, TooMuch, Transport
from hil.core.scratch import make_folder
from hil.core.text import TextSink
from hil.errors import BoardError, BoardLost
from hil.protocol.data_connection import get_data_path
from hil.protocol.local_socket import MAX_PATH_LENGTH, LocalSocket, NotCarried

_PIECE = 1 << 20
_SCRIPT = Path(__file__).with_name("board_relay.py")
_LOADER = (
    "import sys; exec(compile(sys.stdin.buffer.read({size}), 'board_relay.py', 'exec'), {{'__name__': '__main__'}})"
)
# Timeout in seconds to start the helper, because Python starts slowly on a slow board.
_RELAY_START_SECONDS = 60.0
_LAST_OF_ERR = 4000
_MAX_LINE_LENGTH = 4096
_PORT = re.compile(r"[0-9]{1,5}")


class NoTunnel(BoardError):
    """No tunnel to the agent's socket is possible, although commands run on the board."""


class NoRelay(NotCarried):
    """The helper does not run on the board; the text is the error."""


class NoAgent(NoRelay):
    """The helper could not connect to the agent's socket."""


class SshTunnel:
    """Tunnel to a socket on a board.

    Attributes:
        address: The local end, ``unix:PATH``.
    """

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder / 'agent.sock'}"
        self._ends: list[Forward] = []
        self._kept = contextlib.ExitStack()
        self._kept.callback(shutil.rmtree, folder, ignore_errors=True)

    def add(self, end: Forward) -> None:
        """Add a forward, which is closed with the tunnel."""
        self._ends.append(end)
        self._kept.callback(end.close)

    def alive(self) -> bool:
        """Return whether the tunnel is known to work. A broken link is detected within 15 seconds."""
        return Path(self.address.removeprefix("unix:")).exists() and all(end.alive() for end in self._ends)

    def log(self) -> str:
        """Return the errors of the forwards so far, such as a missing socket."""
        return "\n".join(dict.fromkeys(filter(None, (end.log() for end in self._ends))))

    def close(self) -> None:
        """Close the tunnel and remove the local sockets. Further calls do nothing."""
        self._kept.close()


def open_tunnel(shell: Shell, remote_socket: str) -> SshTunnel:
    """Open a tunnel to a Unix socket on a board. The socket may be created later.

    Raises:
        BoardLost: The shell's connection is broken.
    """
    with _close_on_failure(shell) as tunnel:
        socket_here = Path(tunnel.address.removeprefix("unix:"))
        tunnel.add(shell.transport.forward(socket_here, remote_socket))
        remote_data = get_data_path(f"unix:{remote_socket}")
        if len(os.fsencode(remote_data)) <= MAX_PATH_LENGTH:  # for longer paths the agent does not create the socket
            tunnel.add(shell.transport.forward(Path(get_data_path(tunnel.address)), remote_data))
    return tunnel


def open_any_tunnel(shell: Shell, remote_socket: str, python: str, say: TextSink) -> SshTunnel:
    """Open a tunnel to a listening Unix socket on a board, with the best method that sshd allows.

    Raises:
        NoTunnel: No method works.
        BoardLost: The shell's connection is broken.
    """
    try:
        refused = shell.transport.refusal(remote_socket)
        if not refused:
            return open_tunnel(shell, remote_socket)
        # sshd reports the same reason if the socket is missing, so the helper checks the socket.
        refused = f"the board's sshd does not forward Unix sockets ({refused})"
        with _close_on_failure(shell) as tunnel:
            socket_here = Path(tunnel.address.removeprefix("unix:"))
            relay = TcpRelay(shell.transport, python, remote_socket)
            if no_tcp := relay.refusal():
                relay.close()
                say(f"{refused} or TCP ({no_tcp}): using stdin and stdout of a command on the board")
                tunnel.add(StdioRelay(shell.transport, python, remote_socket, socket_here))
            else:
                tunnel.add(relay)
                say(f"{refused}: using TCP on the board's loopback interface, with a token")
                relay.listen(socket_here)
        return tunnel
    except NoAgent as error:
        raise BoardLost(f"the agent exited: {error}", board=shell.board) from error
    except NoRelay as error:
        what = f"no connection to the agent: {refused}; the helper on the board failed: {error}"
        raise NoTunnel(what, board=shell.board) from error
    except (EOFError, OSError) as error:
        raise BoardLost(f"the connection to {shell.address} broke: {error}", board=shell.board) from error


@contextlib.contextmanager
def _close_on_failure(shell: Shell) -> Iterator[SshTunnel]:
    """Provide a tunnel that is closed if the block fails."""
    tunnel = SshTunnel(make_folder("hil-ssh-", for_sockets=True))
    try:
        yield tunnel
    except (EOFError, OSError) as error:
        tunnel.close()
        raise BoardLost(f"the connection to {shell.address} broke: {error}", board=shell.board) from error
    except BaseException:
        tunnel.close()
        raise


class TcpRelay:
    """Helper that listens on a loopback port of the board and requires a token.

    Raises:
        NoRelay: The helper does not run.
        EOFError, OSError: The link broke.
    """

    def __init__(self, transport: Transport, python: str, remote: str) -> None:
        self._transport = transport
        self._token = secrets.token_hex(32)
        self._helper, port, rest = _start_helper(transport, python, remote, self._token)
        self._kept = contextlib.ExitStack()
        self._kept.callback(self._helper.close)
        self._socket: LocalSocket | None = None
        if not _PORT.fullmatch(port) or not 0 < int(port) < 1 << 16:
            self.close()
            raise NoRelay(f"invalid port {port[:100]!r}")
        self.port = int(port)
        # Stdout ends when the helper exits.
        self._watch = threading.Thread(target=_read_to_end, args=(rest,), daemon=True, name="hil-ssh-helper")
        self._watch.start()

    def refusal(self) -> str:
        """Return the server's reason for refusing TCP forwarding, or "" if the server allows forwarding."""
        return self._transport.refusal(self.port)

    def listen(self, local: Path) -> None:
        """Relay connections to a local Unix socket."""
        way = local.with_name("relay.sock")
        self._kept.callback(self._transport.forward(way, self.port).close)

        def relay_connection(near: socket.socket) -> None:
            with socket.socket(socket.AF_UNIX) as far:
                far.connect(str(way))
                far.sendall(self._token.encode())
                _relay_connection(
                    near, far.sendall, lambda: far.shutdown(socket.SHUT_WR), iter(lambda: far.recv(_PIECE), b"")
                )

        self._socket = LocalSocket(local, relay_connection, "hil-ssh-tunnel")
        self._kept.callback(self._socket.close)

    def alive(self) -> bool:
        """Return whether the helper runs."""
        return self._watch.is_alive() and self._socket is not None and self._socket.alive()

    def log(self) -> str:
        """Return the errors of failed connections."""
        return self._socket.log() if self._socket else ""

    def close(self) -> None:
        """End the helper and all connections."""
        self._kept.close()


class StdioRelay:
    """Relay with a helper process per connection, over the helper's stdin and stdout.

    Raises the errors of :class:`TcpRelay`.
    """

    def __init__(self, transport: Transport, python: str, remote: str, local: Path) -> None:
        self._transport = transport
        # The helper that tested this method serves the first connection. Without a connection, the helper ends at
        # close.
        self._first = first = [_start_helper(transport, python, remote, "")]
        self._kept = contextlib.ExitStack()
        self._kept.callback(self._close_unused)

        def relay_connection(near: socket.socket) -> None:
            try:
                helper, _, rest = first.pop() if first else _start_helper(transport, python, remote, "")
            except EOFError as error:
                raise NotCarried(f"{remote}: {error}") from error
            with contextlib.closing(helper):
                _relay_connection(near, helper.sendall, helper.shutdown_write, rest)

        self._socket = LocalSocket(local, relay_connection, "hil-ssh-tunnel")
        self._kept.callback(self._socket.close)
        self.log = self._socket.log

    def _close_unused(self) -> None:
        for helper, _, _ in self._first:
            helper.close()

    def alive(self) -> bool:
        """Return whether the connection is open."""
        return not self._transport.has_ended() and self._socket.alive()

    def close(self) -> None:
        """Close the relay and all connections."""
        self._kept.close()


def _relay_connection(
    near: socket.socket, send: Callable[[bytes], object], finish: Callable[[], object], pieces: Iterator[bytes]
) -> None:
    """Relay a connection in both directions until both sides have closed."""

    def copy_back() -> None:
        with contextlib.suppress(OSError):
            for piece in pieces:
                near.sendall(piece)
            near.shutdown(socket.SHUT_WR)

    returning = threading.Thread(target=copy_back, daemon=True)
    returning.start()
    with contextlib.suppress(OSError):
        while piece := near.recv(_PIECE):
            send(piece)
        finish()
    returning.join()


def _read_to_end(pieces: Iterator[bytes]) -> None:
    with contextlib.suppress(OSError):
        for _ in pieces:
            pass


def _start_helper(
    transport: Transport, python: str, remote: str, token: str
) -> tuple[CommandSession, str, Iterator[bytes]]:
    """Start a helper. Return the session, the first line, and an iterator over further output."""
    script = _SCRIPT.read_bytes()
    deadline: float | None = time.monotonic() + _RELAY_START_SECONDS

    def seconds_left() -> float | None:
        # After the start, wait without a limit, because the connection may be idle.
        return max(deadline - time.monotonic(), 0.01) if deadline else None

    session = open_session(transport, _RELAY_START_SECONDS)
    try:
        line = shlex.join([python, "-I", "-S", "-B", "-c", _LOADER.format(size=len(script))])
        pieces = begin(session, line, seconds_left)
        with contextlib.suppress(OSError):  # a helper that has exited printed the error to stderr
            session.sendall(script + json.dumps({"socket": remote, "token": token}).encode() + b"\n")
        begun = b""
        while b"\n" not in begun:
            if len(begun) > _MAX_LINE_LENGTH:
                raise TooMuch
            if not (piece := next(pieces, b"")):
                raise _make_helper_error(session)
            begun += piece
    except BaseException:
        session.close()
        raise
    deadline = None
    session.settimeout(None)
    first, _, rest = begun.partition(b"\n")
    return session, first.decode(errors="replace"), itertools.chain([rest] if rest else [], pieces)


def _make_helper_error(session: CommandSession) -> NoRelay:
    """Return the error for a helper that exited before the first line."""
    said = session.recv_stderr(_LAST_OF_ERR).decode(errors="replace").strip().rpartition("\n")[2]
    code = session.wait(_RELAY_START_SECONDS)
    return NoAgent(said) if code == NO_AGENT else NoRelay(said or f"exited with code {code}")
