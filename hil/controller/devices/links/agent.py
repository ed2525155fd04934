"""Agents that listen and need no login: on a Unix socket, on loopback, on a TLS port."""

from __future__ import annotations

import contextlib
import os
import re
import socket

from hil.controller.devices.board_client import Target
from hil.controller.devices.links.link import Link, LinkKind
from hil.controller.storage.paths import located
from hil.core.board_config import BoardConfig
from hil.errors import BoardUnreachable, UsageError

_PROBE_S = 1.0
TOKEN_VARIABLE = "HIL_AGENT_TOKEN"
_PORTS = range(1, 1 << 16)
_ADDRESS = re.compile(r"unix:.+|[^@/\s]+:\d{1,5}")


def is_agent_address(text: str) -> bool:
    """Whether a text is an address and not a board's name."""
    return bool(_ADDRESS.fullmatch(text))


def connect(address: str, config: BoardConfig) -> Link:
    """The link to an address; token and TLS files come from the config, the token also from ``HIL_AGENT_TOKEN``.

    Raises:
        UsageError: it is no such address, or a file of the config cannot be read.
        BoardUnreachable: there is no such socket, or nobody listens on it.
    """
    if not is_agent_address(address) or (
        not address.startswith("unix:") and int(address.rpartition(":")[2]) not in _PORTS
    ):
        raise UsageError(f"{address!r} is no address of an agent", hint="unix:PATH or HOST:PORT")
    settings = config.connection
    names = (settings.token_file, settings.ca, settings.cert, settings.key)
    token_file, ca, cert, key = (located(name, config.path.parent, board=config.name) for name in names)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token_file:
        try:
            token = token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the token file of board {config.name} cannot be read: {error}") from error
    _check(address, config.name if address == settings.address else address)
    return Link(Target(address, token, ca, cert, key))


def _check(address: str, board: str) -> None:
    """Say at once what gRPC would find out by trying for as long as it may: somebody listens there, or nobody does."""
    try:
        # A server that is busy, or far away, may take longer, and is there all the same.
        with contextlib.suppress(TimeoutError, BlockingIOError):
            probe(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        if isinstance(error, FileNotFoundError):
            why = "there is no such socket"
        elif isinstance(error, (socket.gaierror, UnicodeError)):
            why = "there is no such host"
        raise BoardUnreachable(
            f"no agent answers at {address}: {why}",
            board=board,
            hint=f"is it running there? start one with: python -m hil.agent --listen {address} --store DIR",
        ) from error


def probe(address: str) -> None:
    """Connect and hang up; OSError where nobody listens."""
    if address.startswith("unix:"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_S)
            probe.connect(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()


AGENT_KIND = LinkKind("agent", lambda choice: connect(choice.target, choice.config), is_agent_address)
