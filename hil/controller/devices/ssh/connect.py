"""Log in to a board over SSH, with the user's ``ssh`` or with paramiko if ``ssh`` is not usable."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import tenacity

from hil.controller.devices.ssh.address import Address, parse_address
from hil.controller.devices.ssh.errors import LoginSlow, TurnedAway
from hil.controller.devices.ssh.openssh import client
from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.transport import (
    SLOW_LOGIN_ALIVE_COUNT,
    SLOW_LOGIN_CONNECT_SECONDS,
    SshDestination,
    Transport,
)
from hil.controller.storage.paths import locate
from hil.core.board_config import Connection
from hil.core.files import MAX_TEXT_BYTES, read_file
from hil.errors import UnreadableFile, UsageError

_TRIES = 3


def open_shell(address: str, connection: Connection, *, board: str, base: Path, timeout: float = 10.0) -> Shell:
    """Log in to a board, through jump hosts if the ssh config has any.

    Args:
        base: Directory for relative paths in the config.
        timeout: Connect timeout in seconds, unless the ssh config sets ConnectTimeout.

    Raises:
        UsageError: The address, or a file of the config or of ssh, is invalid.
        HostKeyRefused: The host key differs from the pinned key, or no key is pinned.
        BoardUnreachable: The board does not respond.
        BoardRefused: The board refuses the login.
    """
    place = parse_address(address)
    files = {name: getattr(connection, name) for name in ("identity", "known_hosts")}
    absolute: dict[str, Any] = {name: str(locate(file, base, board=board)) for name, file in files.items() if file}
    for name, file in absolute.items():
        _check_file(name, Path(file), board)
    settings = replace(connection, **absolute)
    # Retry, because a restarting or overloaded server refuses connections for a while.
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(TurnedAway),
        stop=tenacity.stop_after_attempt(_TRIES) | tenacity.stop_after_delay(timeout),
        wait=tenacity.wait_exponential(0.2, max=1),
        reraise=True,
    )
    return Shell(retrying(_log_in, place, settings, board, timeout), place, board)


def look_up(address: str) -> SshDestination:
    """Resolve an address with the ssh config, without connecting. Raises UsageError if the address is invalid."""
    place = parse_address(address)
    if client.is_usable():
        return client.look_up(place)
    from hil.controller.devices.ssh.paramiko.config import read_settings

    found = read_settings(place)
    proxy = ", ".join(map(str, found.jumps)) or found.proxy_command
    return SshDestination(found.address.host, found.address.port, proxy)


def _check_file(name: str, path: Path, board: str) -> None:
    """Raise UsageError for a device, a pipe or a large file, which ssh would read without a limit.

    A missing file is valid: ``--accept-new-host-key`` creates known_hosts, and an ssh agent may have the key.
    """
    if path == Path(os.devnull):
        return
    try:
        read_file(path, MAX_TEXT_BYTES)
    except UnreadableFile as error:
        raise UsageError(
            f"invalid {name}: {error.message}", board=board, hint=f"set a file with --{name.replace('_', '-')} FILE"
        ) from error
    except OSError:
        pass  # ssh reports the error, if it needs the file


def _log_in(address: Address, settings: Connection, board: str, timeout: float) -> Transport:
    if client.is_usable():
        try:
            return client.OpenSsh(address, settings, board, timeout)
        except LoginSlow:
            patience = max(timeout, SLOW_LOGIN_CONNECT_SECONDS)
            return client.OpenSsh(address, settings, board, patience, alive_count=SLOW_LOGIN_ALIVE_COUNT)
    # Avoid half a second of imports if ssh is usable.
    from hil.controller.devices.ssh.paramiko.connect import log_in

    return log_in(address, settings, board, timeout)
