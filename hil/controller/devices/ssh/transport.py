"""Interface to a logged-in machine, implemented with OpenSSH and with paramiko.

Commands, file transfers and tunnels work with both. Transports raise Python's built-in errors: EOFError if the link or
the session ended, TimeoutError and OSError.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# A link is considered lost after 12 s without data. It survives an interruption of 5 s.
ALIVE_INTERVAL_SECONDS = 3
ALIVE_COUNT = 4
# ssh applies the same limit while it waits for a login. Use this higher count for servers that check logins slowly.
SLOW_LOGIN_ALIVE_COUNT = 40
# Connect timeout if a jump host or proxy checks logins slowly.
SLOW_LOGIN_CONNECT_SECONDS = 60.0
# Prefer ciphers with hardware support, and key exchanges that take few milliseconds on a small board.
FAST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
FAST_KEX = ("curve25519-sha256", "curve25519-sha256@libssh.org")


class TooMuch(OSError):
    """The board sent more data than the limit."""

    def __init__(self) -> None:
        super().__init__("output limit exceeded")


class SessionRefused(OSError):
    """The server refuses another session on this connection."""


class CommandReplaced(OSError):
    """The server did not run the requested shell, because of a forced command or an account without a shell.

    Attributes:
        text: Output of the command that ran.
        code: The exit code, or None if the command did not end.
    """

    def __init__(self, text: str, code: int | None) -> None:
        super().__init__(text)
        self.text, self.code = text, code


@dataclass(frozen=True)
class SshDestination:
    """Destination of an address in the ssh config: host, port, and jump hosts or proxy command ("" for none)."""

    host: str
    port: int
    proxy: str = ""


class CommandSession(Protocol):
    """Running command on the board: like a socket, but with an exit code at the end."""

    def settimeout(self, seconds: float | None) -> None:
        """Set the timeout of every :meth:`recv`; None waits forever."""

    def recv(self, size: int) -> bytes:
        """Read from stdout; b"" at the end. Raises TimeoutError."""

    def recv_stderr(self, size: int) -> bytes:
        """Read from stderr without a timeout; b"" at the end."""

    def sendall(self, data: bytes, /) -> None:
        """Write to stdin. Raises OSError if the command has closed stdin."""

    def shutdown_write(self) -> None:
        """Close stdin."""

    def wait(self, seconds: float) -> int:
        """Return the exit code. Raises EOFError without an exit code, and TimeoutError."""

    def close(self) -> None:
        """Disconnect from the command and wake waiting threads."""


class Forward(Protocol):
    """Forward from a local Unix socket to a socket on the board."""

    def alive(self) -> bool:
        """Return whether the forward works, as far as is known."""

    def log(self) -> str:
        """Return the errors of failed connections."""

    def close(self) -> None:
        """Remove the forward. Further calls do nothing."""


class Transport(Protocol):
    """Login on a board.

    Attributes:
        user: Login name on the board.
        port: Port of the board's SSH server; 0 if a proxy hides the port.
        fingerprint: Fingerprint of the board's host key, ``SHA256:...``.
    """

    user: str
    port: int
    fingerprint: str

    def start(self, command: str, timeout: float) -> CommandSession:
        """Run a command line in the login shell. Raises SessionRefused or TimeoutError."""

    def refusal(self, remote: str | int) -> str:
        """Connect to a socket on the board: a path, or a loopback port.

        Returns the server's reason for refusing the connection, or "" if the server accepts the connection.
        """

    def forward(self, local: Path, remote: str | int) -> Forward:
        """Forward a local Unix socket to a socket on the board, which may be created later."""

    def interactive(self, command: str) -> int:
        """Run a command line on the terminal; "" is the login shell. Return the exit code."""

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Return whether the connection has ended or ends within ``within_s`` seconds."""

    def close(self) -> None:
        """Log out."""
