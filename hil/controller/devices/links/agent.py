"""Links to agents that listen without a login: on a Unix socket, on loopback, or on a TLS port."""

from __future__ import annotations

import contextlib
import os
import re
import socket

from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.links.link import Link, LinkKind
from hil.controller.storage.paths import locate
from hil.core.board_config import BoardConfig
from hil.core.files import read_text
from hil.errors import BoardUnreachable, UsageError

_PROBE_SECONDS = 1.0
TOKEN_VARIABLE = "HIL_AGENT_TOKEN"
_PORTS = range(1, 1 << 16)
_ADDRESS = re.compile(r"unix:.+|[^@/\s]+:\d{1,5}")


def is_agent_address(text: str) -> bool:
    """Return whether a text is an agent address rather than a board's name."""
    return bool(_ADDRESS.fullmatch(text))


def connect(address: str, config: BoardConfig) -> Link:
    """Return the link to an address. Token and TLS files come from the config, or the token from ``HIL_AGENT_TOKEN``.

    Raises:
        UsageError: The address is invalid, or a file of the config cannot be read.
        BoardUnreachable: The socket does not exist, or no process listens on it.
    """
    if not is_agent_address(address) or (
        not address.startswith("unix:") and int(address.rpartition(":")[2]) not in _PORTS
    ):
        raise UsageError(f"invalid agent address {address!r}", hint="expected unix:PATH or HOST:PORT")
    settings = config.connection
    names = (settings.token_file, settings.ca, settings.cert, settings.key)
    token_file, ca, cert, key = (locate(name, config.path.parent, board=config.name) for name in names)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token_file:
        try:
            token = read_text(token_file).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the token file of board {config.name}: {error}") from error
    _check(address, config.name if address == settings.address else address)
    return Link(AgentEndpoint(address, token, ca, cert, key))


def _check(address: str, board: str) -> None:
    """Fail at once if the address is not in use. gRPC would retry until a timeout."""
    try:
        # Ignore a timeout of the probe, because a busy or remote server may need more time.
        with contextlib.suppress(TimeoutError, BlockingIOError):
            probe(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        if isinstance(error, FileNotFoundError):
            why = "socket not found"
        elif isinstance(error, (socket.gaierror, UnicodeError)):
            why = "host not found"
        raise BoardUnreachable(
            f"no agent responds at {address}: {why}",
            board=board,
            hint=f"start an agent on the board: python -m hil.agent --listen {address} --store DIR",
        ) from error


def probe(address: str) -> None:
    """Connect and disconnect. Raises OSError if no process listens."""
    if address.startswith("unix:"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_SECONDS)
            probe.connect(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()


AGENT_KIND = LinkKind("agent", lambda choice: connect(choice.target, choice.config), is_agent_address)
