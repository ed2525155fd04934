"""Connections to SSH servers: fabric's, with its defaults mended.

fabric takes any host key, reads no known_hosts, and knows no ``ProxyJump none``. Here the key of every machine on the
way is checked against pinned ones before anything is sent to it, and jumps are those of the ssh config.
"""

from __future__ import annotations

import logging
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import fabric  # type: ignore[import-untyped]
import paramiko
import tenacity
from paramiko.auth_strategy import AuthFailure, AuthSource

from hil.boards import Connection
from hil.controller.ssh.address import Address
from hil.controller.ssh.host_keys import KnownHosts, name_of, user_files
from hil.controller.ssh.login import Login
from hil.controller.ssh.ssh_config import read_ssh_config, route, settings_for
from hil.controller.ssh.transport import Transport
from hil.errors import BoardUnreachable

# paramiko tells of every lost connection with a traceback; without a handler those would be printed.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

_TRIES = 3


@dataclass(frozen=True)
class Hop:
    """A machine that we are logged in to: the board, or one on the way to it.

    Attributes:
        connection: fabric's, open.
        source: what let us in.
        proxy_command: the command that leads there in place of a TCP connection, or "".
        proxy: that command, running.
    """

    connection: fabric.Connection
    source: AuthSource
    proxy_command: str = ""
    proxy: subprocess.Popen[bytes] | None = None

    @property
    def transport(self) -> Transport:
        """The open transport."""
        transport = self.connection.transport
        assert isinstance(transport, Transport)
        return transport

    @property
    def host_key(self) -> paramiko.PKey:
        """The key that the machine showed."""
        return self.transport.get_remote_server_key()

    def close(self) -> None:
        """Log out."""
        self.connection.close()
        if self.proxy:
            self.proxy.terminate()
            self.proxy.wait()


def connect(address: Address, settings: Connection, *, board: str, base: Path, timeout: float) -> tuple[Hop, ...]:
    """Log in to a machine, through others where the ssh config says so; the last hop is the machine itself.

    Args:
        address: the machine.
        settings: which key and which pinned host keys to use.
        board: for errors.
        base: the folder that relative paths of the settings are relative to.
        timeout: seconds for each of: connecting, the server's greeting, logging in.

    Raises:
        UsageError: a file of the settings or of the ssh config is wrong.
        HostKeyRefused: a host key is not the pinned one.
        BoardUnreachable: nobody answers, or we are not let in.
    """
    config = read_ssh_config()
    hops: list[Hop] = []
    try:
        for machine in route(config, address):
            is_board = machine is address
            hops.append(_Door(machine, settings, base if is_board else None, config, hops, board, timeout).open())
    except BaseException:
        close(hops)
        raise
    return tuple(hops)


def close(hops: Sequence[Hop]) -> None:
    """Log out everywhere, the nearest machine first: what waits for a farther one then ends."""
    for hop in hops:
        hop.close()


class _Door:
    """One machine to log in to."""

    def __init__(
        self,
        address: Address,
        settings: Connection,
        base: Path | None,
        config: paramiko.SSHConfig,
        via: Sequence[Hop],
        board: str,
        timeout: float,
    ) -> None:
        self._address = address
        self._config = fabric.Config(ssh_config=config, lazy=True)
        self._via = via
        self._board = board
        self._timeout = timeout
        self._host = settings_for(config, address.host)

        def file(name: str) -> list[Path]:
            return [(base or Path()) / Path(name).expanduser()] if name else []

        asked = file(settings.known_hosts)
        usual = list(self._host.known_hosts or user_files())
        self._identity = file(settings.identity)[0] if settings.identity and base else None
        self._known_hosts = KnownHosts(
            # A jump's key is looked for where it usually is, too: what was asked for is meant for the board.
            asked + usual if asked and not base else asked or usual,
            accept_new=settings.accept_new_host_key,
            board=board,
            direct=not via and not self._host.proxy_command,
        )

    def open(self) -> Hop:
        """Log in; a server that is not ready yet is asked again, a few times."""
        asking = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            stop=tenacity.stop_after_attempt(_TRIES) | tenacity.stop_after_delay(self._timeout),
            wait=tenacity.wait_exponential(0.2, max=1),
            reraise=True,
        )
        return asking(self._log_in)

    def _log_in(self) -> Hop:
        connection = fabric.Connection(
            self._address.host,
            user=self._address.user or None,
            port=self._address.port or None,
            config=self._config,
            gateway=self._via[-1].connection if self._via else False,
            forward_agent=False,
            connect_timeout=max(1, round(self._timeout)),
        )
        login = Login(
            connection.user,
            self._address.host,
            identity=self._identity,
            identities=self._host.identities,
            only_identities=self._host.only_identities,
        )
        self._known_hosts.guard(connection.client)
        proxy = None
        connection.connect_kwargs = {
            "auth_strategy": login,
            "transport_factory": Transport,
            **dict.fromkeys(("banner_timeout", "auth_timeout", "channel_timeout"), self._timeout),
        }
        if self._host.proxy_command and not self._via:
            proxy, connection.connect_kwargs["sock"] = _through(self._host.proxy_command)
        try:
            source = connection.open()[-1].source
        except BaseException as error:
            connection.client.close()
            if proxy:
                proxy.terminate()
                proxy.wait()
            raise self._translated(error, connection, login) from error
        login.remember(source)
        return Hop(connection, source, self._host.proxy_command if proxy else "", proxy)

    def _translated(self, error: BaseException, connection: fabric.Connection, login: Login) -> BaseException:
        place = Address(connection.host, connection.user, connection.port)
        server = name_of(connection.host, connection.port)
        if isinstance(error, paramiko.BadHostKeyException):
            return self._known_hosts.changed(server, error.key, error.expected_key)
        if isinstance(error, AuthFailure):
            return login.refused(error.result, str(place)).located(board=self._board)
        if isinstance(error, socket.gaierror):
            return self._unreachable(
                f"there is no host {connection.host!r}", "is the name right? ssh config is read, too"
            )
        if isinstance(error, TimeoutError):
            return self._unreachable(
                f"{server} did not answer within {self._timeout:g} s", "is it on, and in this network? try: ping"
            )
        if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
            reasons = "; ".join(sorted({getattr(one, "strerror", None) or str(one) for one in error.errors.values()}))
            return self._unreachable(
                f"{server} cannot be reached: {reasons}", "does sshd run there, on that port? another: USER@HOST:PORT"
            )
        if isinstance(error, paramiko.ChannelException):
            return self._unreachable(
                f"{server} cannot be reached from {self._via[-1].connection.host}: {error.text}", ""
            )
        if isinstance(error, (OSError, EOFError, paramiko.SSHException)):
            said = str(error) or "the connection was closed"
            return self._unreachable(f"{server} does not go on with SSH: {said}", "is that an SSH server's port?")
        return error

    def _unreachable(self, message: str, hint: str) -> BoardUnreachable:
        return BoardUnreachable(message, board=self._board, hint=hint)


def _may_pass(error: BaseException) -> bool:
    """Whether a server refuses for the moment: it restarts, or has too many at its door."""
    cause = error.__cause__
    refused = isinstance(cause, (paramiko.ssh_exception.NoValidConnectionsError, ConnectionError, EOFError))
    return refused or type(cause) is paramiko.SSHException


def _through(command: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A command of the ssh config that stands for a connection, on a socket: paramiko's own never sees its end."""
    ours, its = socket.socketpair()
    with its:
        end = its.fileno()
        process = subprocess.Popen(["/bin/sh", "-c", f"exec {command}"], stdin=end, stdout=end, start_new_session=True)
    return process, ours
