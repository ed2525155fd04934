"""Checks of the way to a board: its name, its SSH port, its host key, the login."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from hil.controller.devices.board_resolver import BoardChoice
from hil.controller.devices.health.check import FAIL, PASS, SKIP, Check
from hil.errors import BoardError, UsageError

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

_CONNECT_S = 10.0


def way_to(where: str, choice: BoardChoice) -> Generator[Check, None, Shell | None]:
    """Check name, port, host key and login.

    Args:
        where: the address.
        choice: the board.

    Returns:
        A shell there, or None after a check that failed.

    Raises:
        UsageError: the address, or a file for SSH, is wrong.
    """
    from hil.controller.devices.ssh.address import parse_address
    from hil.controller.devices.ssh.host_keys import HostKeyRefused
    from hil.controller.devices.ssh.shell import open_shell
    from hil.controller.devices.ssh.ssh_config import read_ssh_config, settings_for

    address = parse_address(where)
    config = read_ssh_config()
    looked_up = config.lookup(address.host)
    host, port = str(looked_up["hostname"]), address.port or _port(str(looked_up.get("port", 22)), address.host)
    settings = settings_for(config, address.host)
    if settings.jumps or settings.proxy_command:
        by = ", ".join(map(str, settings.jumps)) or settings.proxy_command
        yield Check("name", SKIP, f"{host} is reached by way of {by}")
    else:
        reached = yield from _tcp(host, port)
        if not reached:
            return None
    try:
        shell: Shell = open_shell(where, choice.config.connection, board=choice.name, base=choice.config.path.parent)
    except HostKeyRefused as error:
        yield Check("host key", FAIL, error.message, error.hint)
        return None
    except BoardError as error:
        yield Check("login", FAIL, error.message, error.hint or error.detail)
        return None
    yield Check("host key", PASS, f"pinned: {shell.fingerprint}")
    yield Check("login", PASS, f"as {shell.user}")
    return shell


def _port(text: str, host: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise UsageError(f"the ssh config's port of {host} is {text!r}", hint="`ssh -G HOST` tells what is wrong")
    return int(text)


def _tcp(host: str, port: int) -> Generator[Check, None, bool]:
    """Whether the name is known, and an SSH server answers at the port; returns whether both."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        yield Check(
            "name",
            FAIL,
            f"{host} is no host's name: {error}",
            "see its spelling, /etc/hosts, DNS; or use its IP address",
        )
        return False
    yield Check("name", PASS, f"{host} is {', '.join(dict.fromkeys(str(one[4][0]) for one in found))}")
    start = time.monotonic()
    try:
        with socket.create_connection((host, port), _CONNECT_S) as link:
            took = time.monotonic() - start
            banner = link.recv(256).split(b"\r\n")[0].split(b"\n")[0]
    except OSError as error:
        mend = "is the board on and on this network? does sshd run on it? is the port right (USER@HOST:PORT)?"
        yield Check("port", FAIL, f"nothing answers at {host} port {port}: {error}", mend)
        return False
    if not banner.startswith(b"SSH-"):
        said = repr(banner.decode(errors="replace")) if banner else "nothing"
        yield Check(
            "port",
            FAIL,
            f"what answers at port {port} is no SSH server; it said {said}",
            "name sshd's port: USER@HOST:PORT",
        )
        return False
    yield Check("port", PASS, f"{port} answers in {took * 1e3:.0f} ms: {banner.decode(errors='replace')}")
    return True
