"""SSH addresses: ``USER@HOST``, ``USER@HOST:PORT``, ``ssh:HOST`` or ``ssh://USER@[::1]:22``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hil.errors import UsageError

SSH_PORT = 22
# Like OpenSSH, reject user names with shell metacharacters: the ssh config may pass the name to a shell.
_ADDRESS = re.compile(
    r"(?:ssh:(?://)?)?"
    r"(?:(?P<user>[^-\s:/\[\]'\"`;&<>|(){}\\][^\s:/\[\]'\"`;&<>|(){}]*)@)?"
    r"(?:\[(?P<bracketed>[0-9a-fA-F:.]+(?:%[\w.]+)?)\]|(?P<bare6>[0-9a-fA-F]*:[0-9a-fA-F.]*:[0-9a-fA-F:.]*(?:%[\w.]+)?)"
    r"|(?P<host>[\w][\w.-]*))"
    r"(?::(?P<port>\d{1,5}))?"
)


@dataclass(frozen=True)
class Address:
    """Address of an SSH server."""

    host: str  # a name from the ssh config, a host name, or an IP address
    user: str = ""  # login name; "" to use the ssh config
    port: int = 0  # TCP port; 0 to use the ssh config

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        if self.port in (0, SSH_PORT):
            return user + self.host
        return f"{user}[{self.host}]:{self.port}" if ":" in self.host else f"{user}{self.host}:{self.port}"


def is_ssh_address(text: str) -> bool:
    """Return whether a ``--board`` value is an SSH address: it has a user or begins with ``ssh:``."""
    return text.startswith("ssh:") or ("@" in text and _ADDRESS.fullmatch(text) is not None)


def parse_address(text: str) -> Address:
    """Parse an SSH address. User, port and ``ssh:`` are optional. Raises UsageError if the address is invalid."""
    found = _ADDRESS.fullmatch(text)
    port = int(found["port"]) if found and found["port"] else 0
    if not found or not 0 <= port < 65536 or found["port"] == "0":
        raise UsageError(f"invalid SSH address {text!r}", hint="expected USER@HOST, USER@HOST:PORT or ssh:HOST")
    return Address(found["host"] or found["bracketed"] or found["bare6"], found["user"] or "", port)


def name_of(host: str, port: int) -> str:
    """Return the name of a server in known_hosts files."""
    return host if port == SSH_PORT else f"[{host}]:{port}"
