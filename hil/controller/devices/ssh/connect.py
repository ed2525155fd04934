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
from dataclasses import replace
from pathlib import Path
from typing import Any

import fabric
import paramiko
import tenacity
from paramiko.auth_strategy import AuthFailure

from hil.controller.devices.ssh import address as addresses
from hil.controller.devices.ssh.address import Address
from hil.controller.devices.ssh.known_hosts import KnownHosts, user_files
from hil.controller.devices.ssh.login import PASSWORD_VARIABLE, Login
from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.transport import END_S, AgentKey, FileKey, Hop, Transport, close_hops
from hil.controller.storage.paths import located
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


class NoSuchHost(BoardUnreachable):
    """The board's name leads nowhere."""


class ProxyFailed(BoardUnreachable):
    """The ssh config's ProxyCommand did not lead to the board."""


def open_shell(address: str, connection: Connection, *, board: str, base: Path, timeout: float = 10.0) -> Shell:
    """Log in to a board, through other machines where the ssh config says so.

    Args:
        base: the folder that relative paths in the config are relative to.
        timeout: seconds for each of: connecting, the server's greeting, logging in.

    Raises:
        UsageError: the address, or a file of the config or of ssh's own, is wrong.
        HostKeyRefused: the host key is not the pinned one, or none is pinned.
        BoardUnreachable: nobody answers, or we are not let in.
    """
    place = addresses.parse_address(address)
    _check_login()
    files = {name: getattr(connection, name) for name in ("identity", "known_hosts")}
    absolute: dict[str, Any] = {name: str(located(file, base, board=board)) for name, file in files.items() if file}
    settings = replace(connection, **absolute)
    config = addresses.read_ssh_config(place)
    hops: list[Hop] = []
    try:
        for machine in addresses.route(config, place):
            login = _MachineLogin(machine, settings, board, timeout, config, hops, is_board=machine is place)
            hops.append(login.open())
    except BaseException:
        close_hops(hops)
        raise
    return Shell(tuple(hops), place, board)


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


class _MachineLogin:
    """One machine to log in to, through those of ``via``."""

    def __init__(
        self,
        address: Address,
        settings: Connection,
        board: str,
        timeout: float,
        config: paramiko.SSHConfig,
        via: Sequence[Hop],
        *,
        is_board: bool,
    ) -> None:
        self._address = address
        self._board = board
        self._timeout = timeout
        self._config = fabric.Config(ssh_config=config, lazy=True)
        self._via = via
        self._host = host = addresses.settings_for(config, address.host)
        # What was asked for is meant for the board: a jump's key is looked for where it usually is, too.
        self._is_board = is_board
        self._identity = Path(settings.identity) if is_board and settings.identity else None
        given = [Path(settings.known_hosts)] if settings.known_hosts else []
        usual = [] if is_board and given else host.known_hosts or user_files()
        direct = not via and not host.proxy_command
        accept = settings.accept_new_host_key
        self._known_hosts = KnownHosts([*given, *usual], accept_new=accept, board=board, direct=direct)

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
        try:
            connection = fabric.Connection(
                self._address.host,
                user=self._address.user or None,
                port=self._address.port or None,
                config=self._config,
                gateway=self._via[-1].connection if self._via else False,
                forward_agent=False,
                connect_timeout=max(1, round(self._timeout)),
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
            **dict.fromkeys(("banner_timeout", "auth_timeout", "channel_timeout"), self._timeout),
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
        server = addresses.name_of(connection.host, connection.port)
        kind = BoardUnreachable
        if isinstance(error, paramiko.BadHostKeyException):
            return self._known_hosts.changed(server, error.key, error.expected_key)
        if isinstance(error, AuthFailure):
            transport = connection.client.get_transport()
            hung_up = transport is None or not transport.is_active()
            return login.refused(error.result, str(place), hung_up).located(board=self._board)
        # Of a name that cannot be one, its parts empty or too long, Python says the latter.
        if isinstance(error, (socket.gaierror, UnicodeError)):
            kind, what = NoSuchHost, f"there is no host {connection.host!r}"
            hint = "is the name right? ssh config is read, too"
        elif isinstance(error, TimeoutError) or str(error).startswith(_SILENT):
            what = f"{server} did not answer within {self._timeout:g} s"
            hint = "is it on, and in this network? try: ping"
        elif isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
            reasons = sorted({getattr(one, "strerror", None) or str(one) for one in error.errors.values()})
            what = f"{server} cannot be reached: {'; '.join(reasons)}"
            hint = "is it on, and in this network? does sshd run there, on that port? another: USER@HOST:PORT"
        elif isinstance(error, paramiko.ChannelException):
            what = f"{server} cannot be reached from {self._via[-1].connection.host}: {error.text}"
            hint = "is it on, and does that machine allow to go through it?"
        elif isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            what = f"{server} cannot be reached: {error.strerror}"
            hint = "is it on, and is this machine in its network?"
        elif isinstance(error, (OSError, EOFError, paramiko.SSHException)):
            what = f"{server} does not go on with SSH: {str(error) or 'the connection was closed'}"
            hint = "is that an SSH server's port?"
        else:
            return error
        return kind(what, board=self._board, hint=hint)

    def _proxy_failed(self, proxy: subprocess.Popen[bytes]) -> ProxyFailed | None:
        """The error for a ProxyCommand that ended by itself; None for one that runs."""
        try:
            code = proxy.wait(END_S)
        except subprocess.TimeoutExpired:
            return None
        command = self._host.proxy_command
        name = command.split()[0]
        # What a shell says of a program that is not there, and of one that it cannot run.
        known = {127: f"there is no program {name!r}", 126: f"{name!r} cannot be run"}
        why = known.get(code, f"it ended with code {code}")
        return ProxyFailed(
            f"the ProxyCommand to {self._address.host} failed: {why}",
            board=self._board,
            hint=f"the ssh config says `{command}`: try it by hand",
        )


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
