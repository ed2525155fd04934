"""Connections to SSH servers: fabric's, with its defaults mended.

fabric takes any host key, reads no known_hosts, and knows no ``ProxyJump none``. Here the key of every machine on the
way is checked against pinned ones before anything is sent to it, and jumps are those of the ssh config.
"""

from __future__ import annotations

import errno
import getpass
import logging
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import fabric
import paramiko
import tenacity
from paramiko.auth_strategy import (
    AuthFailure,
)

from hil.controller.devices.ssh.address import Address, parse_address, read_ssh_config, route, settings_for
from hil.controller.devices.ssh.known_hosts import KnownHosts, name_of, user_files
from hil.controller.devices.ssh.login import PASSWORD_VARIABLE, Login
from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.transport import END_S, AgentKey, FileKey, Hop, Transport, close_hops
from hil.core.board_config import Connection
from hil.core.processes import wait_or_kill
from hil.errors import BoardUnreachable, UsageError

# paramiko tells of every lost connection with a traceback: neither a terminal nor a test's report (pytest shows what
# comes to the root logger) is the place for it. Whoever wants them adds a handler to this logger.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False

_TRIES = 3
# paramiko's words for a server, or for one behind a jump, that said nothing until the time was over.
_SILENT = ("No existing session", "Timeout opening channel")
# What a shell says of a program that is not there, and of one that it cannot run.
_NOT_FOUND, _NOT_RUN = 127, 126


class NoSuchHost(BoardUnreachable):
    """The board's name leads nowhere."""


class ProxyFailed(BoardUnreachable):
    """The ssh config's ProxyCommand did not lead to the board."""


def connect(address: Address, settings: Connection, *, board: str, base: Path, timeout: float) -> tuple[Hop, ...]:
    """Log in to a machine, through others where the ssh config says so; the last hop is the machine itself.

    Arguments and errors are those of :func:`open_shell`.
    """
    _check_login()
    request = _ConnectRequest(settings, board, base, timeout)
    config = read_ssh_config(address)
    hops: list[Hop] = []
    try:
        for machine in route(config, address):
            hops.append(_MachineLogin(machine, request, config, hops, is_board=machine is address).open())
    except BaseException:
        close_hops(hops)
        raise
    return tuple(hops)


def open_shell(address: str, connection: Connection, *, board: str, base: Path, timeout: float = 10.0) -> Shell:
    """Log in to a board.

    Args:
        base: the folder that relative paths in the config are relative to.
        timeout: seconds for each of: connecting, the server's greeting, logging in.

    Raises:
        UsageError: the address, or a file of the config or of ssh's own, is wrong.
        HostKeyRefused: the host key is not the pinned one, or none is pinned.
        BoardUnreachable: nobody answers, or we are not let in.
    """
    place = parse_address(address)
    return Shell(connect(place, connection, board=board, base=base, timeout=timeout), place, board)


def _check_login() -> None:
    """See that this user has a name and a home, as not everybody in a container has: both are used everywhere below."""
    try:
        Path.home()
        getpass.getuser()
    except (RuntimeError, KeyError, OSError) as error:
        raise UsageError(
            "this login has no name or no home, which SSH needs for its keys and settings",
            hint="set HOME and USER in the environment",
        ) from error


@dataclass(frozen=True)
class _ConnectRequest:
    """What :func:`connect` was asked for."""

    settings: Connection
    board: str
    base: Path
    timeout: float

    @property
    def identity(self) -> Path | None:
        return self._file(self.settings.identity)

    @property
    def known_hosts(self) -> list[Path]:
        path = self._file(self.settings.known_hosts)
        return [path] if path else []

    def _file(self, name: str) -> Path | None:
        try:
            return self.base / Path(name).expanduser() if name else None
        except RuntimeError as error:
            raise UsageError(f"{name} lies in the home of a user that there is not", board=self.board) from error


class _MachineLogin:
    """One machine to log in to, through those of ``via``."""

    def __init__(
        self,
        address: Address,
        request: _ConnectRequest,
        config: paramiko.SSHConfig,
        via: Sequence[Hop],
        *,
        is_board: bool,
    ) -> None:
        self._address = address
        self._request = request
        self._config = fabric.Config(ssh_config=config, lazy=True)
        self._via = via
        self._host = settings_for(config, address.host)
        # What was asked for is meant for the board: a jump's key is looked for where it usually is, too.
        self._is_board = is_board
        self._identity = request.identity if is_board else None
        usual = [] if is_board and request.known_hosts else self._host.known_hosts or user_files()
        self._known_hosts = KnownHosts(
            [*request.known_hosts, *usual],
            accept_new=request.settings.accept_new_host_key,
            board=request.board,
            direct=not via and not self._host.proxy_command,
        )

    def open(self) -> Hop:
        """Log in; a server that is not ready yet is asked again, a few times."""
        asking = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            stop=tenacity.stop_after_attempt(_TRIES) | tenacity.stop_after_delay(self._request.timeout),
            wait=tenacity.wait_exponential(0.2, max=1),
            reraise=True,
        )
        return asking(self._log_in)

    def _log_in(self) -> Hop:
        try:
            connection = fabric.Connection(
                self._address.host,
                user=self._address.user or None,
                port=self._address.port or None,
                config=self._config,
                gateway=self._via[-1].connection if self._via else False,
                forward_agent=False,
                connect_timeout=max(1, round(self._request.timeout)),
            )
        except ValueError as error:
            raise UsageError(f"the ssh config for {self._address.host} is wrong: {error}") from error
        connection.host = connection.host.lower()  # as known_hosts files have it
        login = Login(
            connection.user,
            str(Address(self._address.host, port=connection.port)),
            identity=self._identity,
            identities=self._host.identities,
            password=os.environ.get(PASSWORD_VARIABLE, "") if self._is_board else "",
            only_identities=self._host.only_identities,
        )
        self._known_hosts.guard(connection.client)
        proxy = None
        connection.connect_kwargs = {
            "auth_strategy": login,
            "transport_factory": Transport,
            **dict.fromkeys(("banner_timeout", "auth_timeout", "channel_timeout"), self._request.timeout),
        }
        if self._host.proxy_command and not self._via:
            proxy, connection.connect_kwargs["sock"] = _through(self._host.proxy_command)
        try:
            tried = connection.open()
        except BaseException as error:
            translated = self._translated(error, connection, login)
            connection.client.close()
            if proxy:
                if isinstance(translated, BoardUnreachable):
                    translated = self._proxy_failed(proxy) or translated
                proxy.terminate()
                wait_or_kill(proxy, END_S)
            if translated is error:
                raise
            raise translated from error
        # Of several that were needed together, one that only our own connection has: ssh's client has no other.
        used = [one.source for one in tried if not isinstance(one.result, Exception)]
        source = next((one for one in used if not isinstance(one, (AgentKey, FileKey))), used[-1])
        key = connection.transport.get_remote_server_key()
        return Hop(connection, source, key, self._host.proxy_command if proxy else "", proxy)

    def _translated(self, error: BaseException, connection: fabric.Connection, login: Login) -> BaseException:
        place = Address(connection.host, connection.user, connection.port)
        server = name_of(connection.host, connection.port)
        if isinstance(error, paramiko.BadHostKeyException):
            return self._known_hosts.changed(server, error.key, error.expected_key)
        if isinstance(error, AuthFailure):
            transport = connection.client.get_transport()
            hung_up = transport is None or not transport.is_active()
            return login.refused(error.result, str(place), hung_up).located(board=self._request.board)
        # Of a name that cannot be one, its parts empty or too long, Python says the latter.
        if isinstance(error, (socket.gaierror, UnicodeError)):
            return NoSuchHost(
                f"there is no host {connection.host!r}",
                board=self._request.board,
                hint="is the name right? ssh config is read, too",
            )
        if isinstance(error, TimeoutError) or str(error).startswith(_SILENT):
            return self._unreachable(
                f"{server} did not answer within {self._request.timeout:g} s",
                "is it on, and in this network? try: ping",
            )
        if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
            reasons = "; ".join(sorted({getattr(one, "strerror", None) or str(one) for one in error.errors.values()}))
            return self._unreachable(
                f"{server} cannot be reached: {reasons}",
                "is it on, and in this network? does sshd run there, on that port? another: USER@HOST:PORT",
            )
        if isinstance(error, paramiko.ChannelException):
            return self._unreachable(
                f"{server} cannot be reached from {self._via[-1].connection.host}: {error.text}",
                "is it on, and does that machine allow to go through it?",
            )
        if isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return self._unreachable(
                f"{server} cannot be reached: {error.strerror}", "is it on, and is this machine in its network?"
            )
        if isinstance(error, (OSError, EOFError, paramiko.SSHException)):
            said = str(error) or "the connection was closed"
            return self._unreachable(f"{server} does not go on with SSH: {said}", "is that an SSH server's port?")
        return error

    def _proxy_failed(self, proxy: subprocess.Popen[bytes]) -> ProxyFailed | None:
        """The error for a ProxyCommand that ended by itself; None for one that runs."""
        try:
            code = proxy.wait(END_S)
        except subprocess.TimeoutExpired:
            return None
        command = self._host.proxy_command
        name = command.split()[0]
        why = {
            _NOT_FOUND: f"there is no program {name!r}",
            _NOT_RUN: f"{name!r} cannot be run",
        }.get(code, f"it ended with code {code}")
        return ProxyFailed(
            f"the ProxyCommand to {self._address.host} failed: {why}",
            board=self._request.board,
            hint=f"the ssh config says `{command}`: try it by hand",
        )

    def _unreachable(self, message: str, hint: str) -> BoardUnreachable:
        return BoardUnreachable(message, board=self._request.board, hint=hint)


def _may_pass(error: BaseException) -> bool:
    """Whether a server refuses for the moment: it restarts, or has too many at its door."""
    if isinstance(error, ProxyFailed):
        return False
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
