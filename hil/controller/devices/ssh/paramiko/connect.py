"""SSH connections with paramiko and fabric, for machines without ``ssh``.

fabric accepts any host key, ignores known_hosts, and does not support ``ProxyJump none``. This module checks the key of
every machine on the route before sending data, and takes jump hosts from the ssh config.
"""

from __future__ import annotations

import errno
import getpass
import logging
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fabric
import paramiko
from paramiko.auth_strategy import AuthFailure

from hil.controller.devices.ssh.address import Address, name_of
from hil.controller.devices.ssh.errors import NoSuchHost, ProxyFailed, TurnedAway
from hil.controller.devices.ssh.paramiko import config
from hil.controller.devices.ssh.paramiko.hosts import KnownHosts, list_user_files
from hil.controller.devices.ssh.paramiko.login import PATIENCE_SECONDS, Login
from hil.controller.devices.ssh.paramiko.transport import (
    END_SECONDS,
    Hop,
    ParamikoLogin,
    TunedTransport,
    close_hops,
)
from hil.controller.devices.ssh.questions import PASSWORD_VARIABLE
from hil.controller.devices.ssh.transport import SLOW_LOGIN_CONNECT_SECONDS
from hil.core.board_config import Connection
from hil.core.processes import wait_or_kill
from hil.errors import BoardUnreachable, UsageError

# paramiko logs a traceback for every lost connection. Hide them from terminals and from pytest, which shows records of
# the root logger. To see them, add a handler to this logger.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False

# paramiko's messages for a timeout of a server, also behind a jump host.
_SILENT = ("No existing session", "Timeout opening channel")


def log_in(address: Address, settings: Connection, board: str, timeout: float) -> ParamikoLogin:
    """Log in to a board, through jump hosts if the ssh config has any.

    Args:
        settings: Connection settings with absolute paths.
        timeout: Seconds for every step: connecting, the server's greeting, opening a channel.

    Raises:
        UsageError: A file of the config or of ssh is invalid or uses unsupported settings.
        BoardError: The board is not reached or refuses the login.
    """
    _check_login()
    hops: list[Hop] = []
    try:
        for machine in config.route(address):
            login = _MachineLogin(machine, settings, board, timeout, hops, is_board=machine is address)
            hops.append(login.open())
        return ParamikoLogin(hops)
    except BaseException:
        close_hops(hops)
        raise


def _check_login() -> None:
    """Check that this user has a name and a home directory, which containers may lack.

    The login needs the name and the directory.
    """
    try:
        Path.home()
        getpass.getuser()
    except (RuntimeError, KeyError, OSError) as error:
        raise UsageError(
            "missing user name or home directory, which SSH requires for keys and settings",
            hint="set HOME and USER in the environment",
        ) from error


class _MachineLogin:
    """Login to one machine, through the hops in ``via``."""

    def __init__(
        self, address: Address, settings: Connection, board: str, timeout: float, via: Sequence[Hop], *, is_board: bool
    ) -> None:
        self._address = address
        self._board = board
        self._via = via
        self._host = host = config.read_settings(address)
        # The proxy command may connect through a machine that checks logins slowly.
        patience = max(timeout, SLOW_LOGIN_CONNECT_SECONDS) if host.proxy_command else timeout
        self._timeout = host.connect_timeout or patience
        # The user's settings apply only to the board. For jump hosts, also read keys from the default files.
        self._is_board = is_board
        self._identity = Path(settings.identity) if is_board and settings.identity else None
        given = [Path(settings.known_hosts)] if settings.known_hosts else []
        usual = list_user_files() if host.known_hosts is None else host.known_hosts
        usual = () if is_board and given else usual
        direct = not via and not host.proxy_command
        accept = settings.accept_new_host_key or host.accept_new_host_key
        expected = settings.host_key if is_board else ""
        self._known_hosts = KnownHosts(
            [*given, *usual], accept_new=accept, board=board, direct=direct, expected=expected
        )

    def open(self) -> Hop:
        """Log in and return the hop."""
        place = self._host.address
        connection = fabric.Connection(
            place.host,
            user=place.user or None,
            port=place.port,
            config=fabric.Config(ssh_config=paramiko.SSHConfig(), lazy=True),
            gateway=self._via[-1].connection if self._via else False,
            forward_agent=False,
            connect_timeout=max(1, round(self._timeout)),
        )
        login = Login(
            connection.user,
            str(Address(self._address.host, port=connection.port)),
            identity=self._identity,
            identities=self._host.identities,
            password=os.environ.get(PASSWORD_VARIABLE, "") if self._is_board else "",
            only_identities=self._host.only_identities,
            forbidden=self._host.forbidden,
        )
        connection.client.set_missing_host_key_policy(self._known_hosts)
        proxy = None
        connection.connect_kwargs = {
            "auth_strategy": login,
            "transport_factory": self._make_transport,
            **dict.fromkeys(("banner_timeout", "channel_timeout"), self._timeout),
            # Allow a long time, because the server may query a slow directory service.
            "auth_timeout": PATIENCE_SECONDS,
        }
        if self._host.proxy_command and not self._via:
            proxy, connection.connect_kwargs["sock"] = _start_proxy(self._host.proxy_command)
        try:
            connection.open()
        except BaseException as error:
            translated = self._translate_error(error, connection, login)
            connection.client.close()
            if proxy:
                if isinstance(translated, BoardUnreachable):
                    translated = self._make_proxy_error(proxy) or translated
                proxy.terminate()
                wait_or_kill(proxy, END_SECONDS)
            if translated is error:
                raise
            raise translated from error
        return Hop(connection, proxy)

    def _make_transport(self, sock: Any, **options: Any) -> TunedTransport:
        """Make a transport that prefers host key types with a pinned key."""
        transport = TunedTransport(sock, **options)
        place = self._host.address
        security = transport.get_security_options()
        kinds = tuple(security.key_types)
        pinned = self._known_hosts.list_preferred_kinds(name_of(place.host, place.port))
        security.key_types = tuple(dict.fromkeys([*(kind for kind in pinned if kind in kinds), *kinds]))
        return transport

    def _translate_error(self, error: BaseException, connection: fabric.Connection, login: Login) -> BaseException:
        place = Address(connection.host, connection.user, connection.port)
        server = name_of(connection.host, connection.port)
        kind: type[BoardUnreachable] = BoardUnreachable
        if isinstance(error, AuthFailure):
            transport = connection.client.get_transport()
            hung_up = transport is None or not transport.is_active()
            return login.make_refused_error(error.result, str(place), hung_up).locate(board=self._board)
        # Python raises UnicodeError for a host name with empty or overlong labels.
        if isinstance(error, (socket.gaierror, UnicodeError)):
            kind, what = NoSuchHost, f"host {connection.host!r} not found"
            hint = "check the name, and the Host entries of the ssh config"
        elif isinstance(error, TimeoutError) or str(error).startswith(_SILENT):
            what = f"{server} did not respond within {self._timeout:g} s"
            hint = "check with ping that the host is switched on and connected to this network"
        elif isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
            reasons = sorted({getattr(one, "strerror", None) or str(one) for one in error.errors.values()})
            what = f"cannot connect to {server}: {'; '.join(reasons)}"
            hint = (
                "check that the host is switched on, is connected to this network and runs sshd on this port; "
                "for a different port, use USER@HOST:PORT"
            )
        elif isinstance(error, paramiko.ChannelException):
            what = f"cannot connect to {server} through {self._via[-1].connection.host}: {error.text}"
            hint = "check that the host is switched on, and that the jump host allows forwarding"
        elif isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            what = f"cannot connect to {server}: {error.strerror}"
            hint = "check that the host is switched on, and that this machine is on the same network"
        elif isinstance(error, (OSError, EOFError, paramiko.SSHException)):
            what = f"SSH handshake with {server} failed: {str(error) or 'the connection was closed'}"
            hint = "check that this port belongs to an SSH server"
        else:
            return error
        # The server is restarting, or has too many pending connections.
        if isinstance(error, (paramiko.ssh_exception.NoValidConnectionsError, ConnectionError, EOFError)) or (
            type(error) is paramiko.SSHException
        ):
            kind = TurnedAway
        return kind(what, board=self._board, hint=hint)

    def _make_proxy_error(self, proxy: subprocess.Popen[bytes]) -> ProxyFailed | None:
        """Return the error for a ProxyCommand that has exited, or None if the command still runs."""
        try:
            code = proxy.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        command = self._host.proxy_command
        name = command.split()[0]
        # A shell's exit codes for a missing program and for a program that cannot be executed.
        known = {127: f"program {name!r} not found", 126: f"cannot execute {name!r}"}
        why = known.get(code, f"exited with code {code}")
        return ProxyFailed(
            f"the ProxyCommand to {self._address.host} failed: {why}",
            board=self._board,
            hint=f"run the ProxyCommand of the ssh config manually: `{command}`",
        )


def _start_proxy(command: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run a ProxyCommand on a socket pair. paramiko's ProxyCommand does not detect the end of the command."""
    ours, its = socket.socketpair()
    with its:
        end = its.fileno()
        process = subprocess.Popen(["/bin/sh", "-c", f"exec {command}"], stdin=end, stdout=end, start_new_session=True)
    return process, ours
