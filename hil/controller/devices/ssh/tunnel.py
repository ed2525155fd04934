"""Tunnels: a Unix socket here that leads to one on a board, by OpenSSH's client or through our own connection.

Beside an agent's socket they lead to that of its data connections.

Where the board's sshd forwards no Unix sockets, a helper on the board (``board_relay.py``) carries the connection,
reached by TCP or by a command's input and output. It lives as long as its command's input stays open: when this process
ends, so does it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import secrets
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko

from hil.controller.devices.ssh import openssh
from hil.controller.devices.ssh.shell import Shell, TooMuch, begin, own_output
from hil.controller.devices.ssh.transport import Transport
from hil.core.processes import wait_or_kill
from hil.core.text import TextSink
from hil.errors import BoardError, BoardLost, BoardUnreachable
from hil.protocol.data_connection import data_path
from hil.protocol.local_socket import LocalSocket, NotCarried

_OPEN_S = 10.0
_PIECE = 1 << 20
# A channel to the far side, and what comes from it.
Carried = tuple[paramiko.Channel, Iterator[bytes]]


@dataclass
class FarSide:
    """What leads to a socket on a board."""

    open: Callable[[], Carried]  # makes a connection to it
    alive: Callable[[], bool] = lambda: True  # whether it still leads there, if the connection is up
    close: Callable[[], object] = lambda: None  # ends what it started, if anything


def _carried(channel: paramiko.Channel) -> Carried:
    return channel, iter(lambda: channel.recv(_PIECE), b"")


class ChannelForwarder:
    """Listens on a local socket, and carries what comes in to a socket on the far side and back."""

    def __init__(self, transport: Transport, local: Path, remote: str, far: FarSide) -> None:
        self._transport = transport
        self._remote = remote
        self._far = far
        self._socket = LocalSocket(local, self._carry, "hil-ssh-tunnel")
        self.log = self._socket.log

    def alive(self) -> bool:
        """Whether the connection is up."""
        return self._transport.is_active() and self._socket.alive() and self._far.alive()

    def close(self) -> None:
        """End it and all that it carries."""
        self._socket.close()
        self._far.close()

    def _carry(self, near: socket.socket) -> None:
        try:
            channel, pieces = self._far.open()
            with contextlib.closing(channel) as far:
                back = threading.Thread(target=_copy_back, args=(far, pieces, near), daemon=True)
                back.start()
                with contextlib.suppress(OSError):
                    while piece := near.recv(_PIECE):
                        far.sendall(piece)
                    far.shutdown_write()
                back.join()
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise NotCarried(f"{self._remote}: {error}") from error


def _copy_back(far: paramiko.Channel, pieces: Iterator[bytes], near: socket.socket) -> None:
    with contextlib.suppress(OSError):
        for piece in pieces:
            near.sendall(piece)
        near.shutdown(socket.SHUT_RDWR if far.closed else socket.SHUT_WR)


_SCRIPT = Path(__file__).with_name("board_relay.py")
_LOADER = (
    "import sys; exec(compile(sys.stdin.buffer.read({size}), 'board_relay.py', 'exec'), {{'__name__': '__main__'}})"
)
_LOOPBACK = "127.0.0.1"
# As board_relay.py says it.
_NOBODY = "the agent's socket: "
# Starting Python on a slow board takes its time.
_RELAY_START_S = 60.0
_LAST_OF_ERR = 4000
_LONGEST_LINE = 4096
_PORT = re.compile(r"[0-9]{1,5}")


class NoRelay(NotCarried):
    """The helper does not run on the board; its own words."""


class NoAgent(NoRelay):
    """The helper found nobody at the agent's socket."""


class TcpRelay(FarSide):
    """A helper that listens on a loopback port of the board, for whoever has its token.

    Raises:
        NoRelay: it does not run.
        paramiko.ChannelException: sshd does not forward TCP; the error has its words.
        paramiko.SSHException, EOFError, OSError: the link broke.
    """

    def __init__(self, transport: Transport, python: str, remote: str) -> None:
        self._transport = transport
        self._token = secrets.token_hex(32)
        helper, port, _ = _started(transport, python, remote, self._token)
        super().__init__(self._connect, lambda: not helper.closed and not helper.eof_received, helper.close)
        try:
            if not _PORT.fullmatch(port) or not 0 < int(port) < 1 << 16:
                raise NoRelay(f"it tells no port but {port[:100]!r}")
            self._port = int(port)
            self._connection().close()
        except BaseException:
            helper.close()
            raise

    def _connect(self) -> Carried:
        channel = self._connection()
        channel.sendall(self._token.encode())
        return _carried(channel)

    def _connection(self) -> paramiko.Channel:
        place = (_LOOPBACK, self._port)
        return self._transport.open_channel("direct-tcpip", place, (_LOOPBACK, 0), timeout=_RELAY_START_S)


def stdio_relay(transport: Transport, python: str, remote: str) -> FarSide:
    """A helper for each connection, which goes on over the helper's own input and output; as :class:`TcpRelay`."""

    def start() -> Carried:
        return _started(transport, python, remote, "")[::2]

    # The connection that showed that there are any is the first. A helper that nobody used is ended.
    first = [start()]

    def close() -> None:
        for channel, _ in first:
            channel.close()

    return FarSide(lambda: first.pop() if first else start(), close=close)


def _started(
    transport: Transport, python: str, remote: str, token: str
) -> tuple[paramiko.Channel, str, Iterator[bytes]]:
    """A helper that runs: its channel, its first line, and what follows that."""
    script = _SCRIPT.read_bytes()
    deadline: float | None = time.monotonic() + _RELAY_START_S

    def left() -> float | None:
        # Afterwards it is a connection, on which nothing may be said for any time.
        return max(deadline - time.monotonic(), 0.01) if deadline else None

    channel = transport.open_session(timeout=_RELAY_START_S)
    try:
        channel.settimeout(_RELAY_START_S)
        begin(channel, shlex.join([python, "-I", "-S", "-B", "-c", _LOADER.format(size=len(script))]), _RELAY_START_S)
        channel.sendall(script + json.dumps({"socket": remote, "token": token}).encode() + b"\n")
        pieces = own_output(channel, left)
        begun = b""
        while b"\n" not in begun:
            if len(begun) > _LONGEST_LINE:
                raise TooMuch
            if not (piece := next(pieces, b"")):
                stderr = channel.recv_stderr(_LAST_OF_ERR).decode(errors="replace").strip()
                last = stderr.rpartition("\n")[2]
                raise NoAgent(last) if _NOBODY in last else NoRelay(last or "it ended at once")
            begun += piece
    except BaseException:
        channel.close()
        raise
    deadline = None
    channel.settimeout(None)
    line, _, rest = begun.partition(b"\n")
    return channel, line.decode(errors="replace"), itertools.chain([rest] if rest else [], pieces)


_START_S = 20.0
_POLL_S = 0.002
_CLOSE_S = 5.0
# A socket's path that ssh's LocalForward takes as it is.
_PLAIN_PATH = re.compile(r"/[\w./+,@=-]*")
# Runs a command for as long as its stdin is open: when this process ends, however it ends, so does the command, and
# the folder that it read from goes. What removes that waits by itself, for the command may end first.
# A file that it writes, what it says, has so many blocks at most: the board has a part in that.
_WHILE_WE_LIVE = """
ulimit -f 4096
folder=$1
shift
exec 3<&0 </dev/null
{ read -r line <&3; rm -rf "$folder"; } &
"$@" <&3 3<&- & command=$!
{ read -r line <&3; kill "$command"; } & watch=$!
wait "$command"
kill "$watch"
"""


class NoTunnel(BoardError):
    """Nothing leads to the agent's socket, though commands run on the board."""


class Tunnel:
    """A tunnel to a socket on a board.

    Attributes:
        address: its local end, ``unix:PATH``.
        alive: whether it still leads there, as far as is known: a broken link is noticed within 15 seconds.
        log: what it had to say so far, such as a socket that is not there.
    """

    def __init__(self, shell: Shell, remote_socket: str, far: FarSide | None, data: FarSide | None = None) -> None:
        self._kept = contextlib.ExitStack()
        with contextlib.ExitStack() as opening:
            folder = opening.enter_context(openssh.private_folder())
            socket = folder / "agent.sock"
            self.address = f"unix:{socket}"
            carrier: ChannelForwarder | _OpenSSH
            if far is None:
                carrier = _OpenSSH(shell, folder, socket, remote_socket)
            else:
                carrier = ChannelForwarder(shell.transport, socket, remote_socket, far)
            opening.callback(carrier.close)
            if data is not None:
                way = ChannelForwarder(
                    shell.transport, Path(data_path(self.address)), data_path(f"unix:{remote_socket}"), data
                )
                opening.callback(way.close)
            self.alive, self.log = carrier.alive, carrier.log
            self._kept = opening.pop_all()

    def close(self) -> None:
        """End it, and remove the local sockets. Closing it again does nothing."""
        self._kept.close()


def open_tunnel(
    shell: Shell, remote_socket: str, *, openssh_client: bool | None = None, say: TextSink = lambda text: None
) -> Tunnel:
    """Make a way to a Unix socket on a board; the socket may come to be there later.

    Args:
        openssh_client: whether to use OpenSSH's client, which is the faster one and logs in again, with the same key
            to the same host keys, through the same jumps; by default where there is one that can: it is given no
            passwords. What it cannot do then, our own connection does, and ``say`` is told.

    Raises:
        BoardLost: the shell's connection is broken.
        BoardUnreachable: OpenSSH's client, which was asked for, did not get there.
    """
    if not shell.is_alive():
        raise BoardLost(f"the connection to {shell.address} broke", board=shell.board)
    by_openssh = openssh_client
    if by_openssh is None:
        by_openssh = openssh.can_log_in(shell.hops) and _PLAIN_PATH.fullmatch(remote_socket) is not None
    if by_openssh:
        try:
            return Tunnel(shell, remote_socket, None)
        except BoardUnreachable as error:
            if openssh_client or not shell.is_alive():
                raise
            last = error.detail.rpartition("\n")[2].strip() or error.message
            say(f"ssh made no tunnel ({last}): going through hil's own connection, which is slower")

    def far(path: str) -> FarSide:
        return FarSide(lambda: _carried(shell.transport.open_streamlocal(path, _OPEN_S)))

    return Tunnel(shell, remote_socket, far(remote_socket), far(data_path(f"unix:{remote_socket}")))


def open_any_tunnel(shell: Shell, remote_socket: str, python: str, say: TextSink) -> Tunnel:
    """Make a way to a Unix socket on a board on which somebody listens now, by the best means that its sshd allows.

    Raises:
        NoTunnel: there is none.
        BoardLost: the shell's connection is broken.
    """
    try:
        refused = _refusal(lambda: shell.transport.open_streamlocal(remote_socket, _START_S))
        if not refused:
            return open_tunnel(shell, remote_socket, say=say)
        # sshd has the same words for a socket that is not there; so the helper looks whether it is.
        refused = f"the board's sshd forwards no Unix sockets (it says: {refused})"
        try:
            tcp = TcpRelay(shell.transport, python, remote_socket)
        except paramiko.ChannelException as error:
            say(f"{refused}, and no TCP ({error.text}): going through the input and output of a command there")
            return Tunnel(shell, remote_socket, stdio_relay(shell.transport, python, remote_socket))
        say(f"{refused}: going through TCP on the board's own loopback, with a token")
        return Tunnel(shell, remote_socket, tcp)
    except NoAgent as error:
        raise BoardLost(f"the agent left just now: {error}", board=shell.board) from error
    except NoRelay as error:
        what = f"no way leads to the agent: {refused}; a helper there failed: {error}"
        raise NoTunnel(what, board=shell.board) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise BoardLost(f"the connection to {shell.address} broke: {error}", board=shell.board) from error


def _refusal(connect: Callable[[], paramiko.Channel]) -> str:
    """sshd's words for a connection that it does not make; "" for one that it does."""
    try:
        connect().close()
    except paramiko.ChannelException as error:
        return error.text
    return ""


class _OpenSSH:
    """A tunnel that an ``ssh -L`` of our own keeps."""

    def __init__(self, shell: Shell, folder: Path, socket: Path, remote_socket: str) -> None:
        # A command, and not -N: sshd sends small pieces at once only on a connection on which one was run. This one
        # ends with its input, which is ours.
        data = Path(data_path(f"unix:{socket}"))
        leads = ["-L", f"{socket}:{remote_socket}", "-L", f"{data}:{data_path(f'unix:{remote_socket}')}"]
        forward = ["-T", *leads, openssh.BOARD, "exec cat"]
        command = [*openssh.command(shell.hops, folder), *forward]
        self._log = folder / "log"
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C in the terminal is the controller's to handle.
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _WHILE_WE_LIVE, "sh", str(folder), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # the command's own, of which nothing is expected
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait((socket, data), shell)
        except BaseException:
            self.close()
            raise

    def alive(self) -> bool:
        return self._process.poll() is None

    def log(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_text(errors="replace")
        return ""

    def close(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        wait_or_kill(self._process, _CLOSE_S, group=True)  # the sh and its ssh

    def _wait(self, sockets: tuple[Path, ...], shell: Shell) -> None:
        deadline = time.monotonic() + _START_S
        while not all(one.exists() for one in sockets):
            if not self.alive() or time.monotonic() > deadline:
                raise BoardUnreachable(
                    f"ssh made no tunnel to {shell.address}" + ("" if not self.alive() else f" within {_START_S:g} s"),
                    board=shell.board,
                    hint="ssh's own words are below",
                    detail=self.log().strip(),
                )
            time.sleep(_POLL_S)
