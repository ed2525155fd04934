"""Tunnels: a Unix socket here that leads to one on a board, by OpenSSH's client or through our own connection.

Where the board's sshd forwards no Unix sockets, a helper on the board carries the connection (``relay.py``).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import paramiko

from hil.controller.devices.ssh import openssh
from hil.controller.devices.ssh.pump import FarSide, Pump, Streamlocal
from hil.controller.devices.ssh.relay import NoAgent, NoRelay, StdioRelay, TcpRelay
from hil.controller.devices.ssh.shell import Shell
from hil.errors import BoardError, BoardLost, BoardUnreachable

Say = Callable[[str], None]

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


class NoWay(BoardError):
    """Nothing leads to the agent's socket, though commands run on the board."""


class _Way(Protocol):
    """What makes a tunnel."""

    def alive(self) -> bool: ...

    def log(self) -> str: ...

    def close(self) -> None: ...


class Tunnel:
    """A tunnel to a socket on a board.

    Attributes:
        address: the local end, ``unix:PATH``.
    """

    def __init__(self, shell: Shell, remote_socket: str, far: FarSide | None) -> None:
        self._kept = contextlib.ExitStack()
        with contextlib.ExitStack() as opening:
            folder = opening.enter_context(openssh.private_folder())
            socket = folder / "agent.sock"
            self.address = f"unix:{socket}"
            self._way: _Way
            if far is None:
                self._way = _OpenSSH(shell, folder, socket, remote_socket)
            else:
                self._way = Pump(shell.transport, socket, remote_socket, far)
            self._kept = opening.pop_all()

    def alive(self) -> bool:
        """Whether it still leads there, as far as is known: a broken link is noticed within 15 seconds."""
        return self._way.alive()

    def log(self) -> str:
        """What it had to say so far, such as a socket that is not there."""
        return self._way.log()

    def close(self) -> None:
        """End it, and remove the local socket. Closing it again does nothing."""
        with self._kept:
            self._way.close()


def open_tunnel(
    shell: Shell, remote_socket: str, *, openssh_client: bool | None = None, say: Say = lambda text: None
) -> Tunnel:
    """Make a way to a Unix socket on a board; the socket may come to be there later.

    Args:
        shell: a login on the board. OpenSSH's client logs in again, with the same key to the same host keys, through
            the same jumps.
        remote_socket: the socket's absolute path there.
        openssh_client: whether to use OpenSSH's client, which is the faster one; by default where there is one
            that can log in: it is given no passwords. What it cannot do then, our own connection does.
        say: told where OpenSSH's client could not do it.

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
    return Tunnel(shell, remote_socket, Streamlocal(shell.transport, remote_socket))


def open_any_tunnel(shell: Shell, remote_socket: str, python: str, say: Say) -> Tunnel:
    """Make a way to a Unix socket on a board on which somebody listens now, by the best means that its sshd allows.

    Args:
        shell: a login on the board.
        remote_socket: the socket's absolute path there.
        python: an interpreter there.
        say: told the way where it is not the usual one.

    Raises:
        NoWay: there is none.
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
            return Tunnel(shell, remote_socket, StdioRelay(shell.transport, python, remote_socket))
        say(f"{refused}: going through TCP on the board's own loopback, with a token")
        return Tunnel(shell, remote_socket, tcp)
    except NoAgent as error:
        raise BoardLost(f"the agent left just now: {error}", board=shell.board) from error
    except NoRelay as error:
        raise NoWay(
            f"no way leads to the agent: {refused}; a helper there failed: {error}", board=shell.board
        ) from error
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
        forward = ["-T", "-L", f"{socket}:{remote_socket}", openssh.BOARD, "exec cat"]
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
            self._wait(socket, shell)
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
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # the sh and its ssh
            self._process.wait()

    def _wait(self, socket: Path, shell: Shell) -> None:
        deadline = time.monotonic() + _START_S
        while not socket.exists():
            if not self.alive() or time.monotonic() > deadline:
                raise BoardUnreachable(
                    f"ssh made no tunnel to {shell.address}" + ("" if not self.alive() else f" within {_START_S:g} s"),
                    board=shell.board,
                    hint="ssh's own words are below",
                    detail=self.log().strip(),
                )
            time.sleep(_POLL_S)
