"""SSH addresses as a user writes them: ``USER@HOST``, ``USER@HOST:PORT``, ``ssh:HOST``, ``ssh://USER@[::1]:22``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hil.errors import UsageError

SSH_PORT = 22
# As OpenSSH does it, no user's name may hold what a shell reads: the ssh config may hand it to one.
_ADDRESS = re.compile(
    r"(?:ssh:(?://)?)?"
    r"(?:(?P<user>[^-\s:/\[\]'\"`;&<>|(){}\\][^\s:/\[\]'\"`;&<>|(){}]*)@)?"
    r"(?:\[(?P<bracketed>[0-9a-fA-F:.]+(?:%[\w.]+)?)\]|(?P<bare6>[0-9a-fA-F]*:[0-9a-fA-F.]*:[0-9a-fA-F:.]*(?:%[\w.]+)?)"
    r"|(?P<host>[\w][\w.-]*))"
    r"(?::(?P<port>\d{1,5}))?"
)


@dataclass(frozen=True)
class Address:
    """Where an SSH server is.

    Attributes:
        host: a name of the ssh config, a host's name, or an IP address.
        user: who logs in; "" leaves it to the ssh config.
        port: TCP port; 0 leaves it to the ssh config.
    """

    host: str
    user: str = ""
    port: int = 0

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        if self.port in (0, SSH_PORT):
            return user + self.host
        return f"{user}[{self.host}]:{self.port}" if ":" in self.host else f"{user}{self.host}:{self.port}"


def is_ssh_address(text: str) -> bool:
    """Whether a text of ``--board`` is an address for SSH: one with a user, or one that begins with ``ssh:``."""
    return text.startswith("ssh:") or ("@" in text and _ADDRESS.fullmatch(text) is not None)


def parse_address(text: str) -> Address:
    """The address in a text; the user, the port and ``ssh:`` may be left out.

    Raises:
        UsageError: it is none.
    """
    found = _ADDRESS.fullmatch(text)
    port = int(found["port"]) if found and found["port"] else 0
    if not found or not 0 <= port < 65536 or found["port"] == "0":
        raise UsageError(f"{text!r} is no address for SSH", hint="USER@HOST, USER@HOST:PORT or ssh:HOST")
    return Address(found["host"] or found["bracketed"] or found["bare6"], found["user"] or "", port)
