"""An agent that listens where the controller can reach it: a Unix socket, loopback, or a TLS port."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hil.boards import BoardConfig
from hil.controller.client import Target
from hil.controller.links import Link
from hil.errors import UsageError

TOKEN_VARIABLE = "HIL_AGENT_TOKEN"
_ADDRESS = re.compile(r"unix:.+|[^@/\s]+:\d{1,5}")


def is_address(text: str) -> bool:
    """Whether a text is an address and not a board's name."""
    return bool(_ADDRESS.fullmatch(text))


def connect(address: str, config: BoardConfig) -> Link:
    """The link to an address; token and TLS files come from the config, the token also from ``HIL_AGENT_TOKEN``.

    Raises:
        UsageError: it is no such address, or a file of the config cannot be read.
    """
    if not is_address(address):
        raise UsageError(f"{address!r} is no address of an agent", hint="unix:PATH or HOST:PORT")
    settings = config.connection
    folder = config.path.parent

    def file(name: str) -> Path | None:
        return folder / Path(name).expanduser() if name else None

    token = os.environ.get(TOKEN_VARIABLE, "")
    if path := file(settings.token_file):
        try:
            token = path.read_text().strip()
        except OSError as error:
            raise UsageError(f"the token file of board {config.name} cannot be read: {error}") from error
    return Link(Target(address, token, file(settings.ca), file(settings.cert), file(settings.key)))
