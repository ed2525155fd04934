"""Find the user at the other end of a loopback connection. Only Linux supports this."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path

_TABLES = {4: Path("/proc/net/tcp"), 6: Path("/proc/net/tcp6")}
# Columns of the table: local address, remote address, and the socket's user.
_LOCAL, _REMOTE, _USER = 1, 2, 7


def user_of_peer(client: tuple[str, int] | None, server: tuple[str, int | None] | None) -> str:
    """Return the ID of the user whose process opened a connection.

    Args:
        client: address of the client.
        server: address of the server.

    Returns:
        The user ID, or "" if unknown: on systems other than Linux, or for a client on another machine.
    """
    if client is None or server is None or server[1] is None:
        return ""
    try:
        wanted = [_format_kernel_address(client[0], client[1]), _format_kernel_address(server[0], server[1])]
        lines = _TABLES[ipaddress.ip_address(client[0]).version].read_text().splitlines()
    except (ValueError, OSError):
        return ""
    rows = (line.split() for line in lines)
    return next((row[_USER] for row in rows if row[_LOCAL : _REMOTE + 1] == wanted), "")


def _format_kernel_address(host: str, port: int) -> str:
    """Format an address like the kernel's table, as 32-bit words in native byte order.

    Raises ValueError if invalid.
    """
    packed = ipaddress.ip_address(host).packed
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"
