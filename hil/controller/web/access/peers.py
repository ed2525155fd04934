"""Identify the client of a connection: a user on this machine, or a network address.

hil can identify users only on Linux.
"""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from starlette.types import Scope

# Scope key for the peer of a request's connection.
PEER = "hil.peer"
# An IPv6 socket that is connected to an IPv4 address is in the IPv6 table.
_TABLES = {4: Path("/proc/net/tcp"), 6: Path("/proc/net/tcp6")}
# State of a connection that neither side has closed.
_ESTABLISHED = 1
# Name of all local clients whose user is unknown.
_UNKNOWN = "unknown"
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_End = tuple[IpAddress, int]  # address and port
# Constants and structures of linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h.
_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ALL_STATES = 4, 20, 1, 0xFFFFFFFF
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
_HEADER = struct.Struct("=IHHII")
_SOCKET = struct.Struct("!HH16s16s4x8s")


@dataclass(frozen=True)
class Peer:
    """Client of a connection."""

    user: str  # user ID that a login is bound to; "" on another machine, random if the user is unknown
    name: str  # client that limits apply to: the user ID or the network address


def find_peer(
    connection: socket.socket | None, client: tuple[str, int] | None, server: tuple[str, int | None] | None
) -> Peer:
    """Return the peer of a new connection. Call this once per connection, because the lookup may take milliseconds.

    Args:
        connection: the server's socket.
        client: address of the client.
        server: address of the server.
    """
    name = _name_address(client)
    if sys.platform != "linux" or (client is not None and not _is_own_address(client[0])):
        return Peer("", name)
    user = find_peer_user(client, server) if _is_connected(connection) else None
    # Check the connection after the lookup: if the client disconnected before, another process may have its port now.
    if user is None or not _is_connected(connection):
        # Use a unique user, so that cookies are not valid for this connection. Do not use the address as the name,
        # since a local user has many addresses.
        return Peer(f"unknown {secrets.token_hex()}", _UNKNOWN)
    return Peer(user, user or name)


def find_peer_of(scope: Scope) -> Peer:
    """Return the peer of a request's connection."""
    peer: Peer | None = scope.get(PEER)
    return peer or Peer("", _name_address(scope.get("client")))


def find_peer_user(client: tuple[str, int] | None, server: tuple[str, int | None] | None) -> str | None:
    """Return the ID of the user whose process opened a connection.

    Args:
        client: address of the client.
        server: address of the server.

    Returns:
        The user ID, or "" if the kernel lists no such connection. None if the process has closed the connection,
        because the kernel then lists root as the user.
    """
    if client is None or server is None or server[1] is None:
        return None
    try:
        here, there = (_parse_address(client[0]), client[1]), (_parse_address(server[0]), server[1])
    except ValueError:
        return None
    found = _query_socket(here, there) or _find_row(here, there)
    if found is None:
        return ""
    state, user, inode = found
    return str(user) if state == _ESTABLISHED and inode else None


def _query_socket(here: _End, there: _End) -> tuple[int, int, int] | None:
    """Return a socket's state, user and inode from the kernel's sock_diag interface, see sock_diag(7).

    Return None if the socket does not exist, or if the kernel does not have the interface. The query takes
    microseconds.
    """
    version = here[0].version
    ends = _SOCKET.pack(here[1], there[1], here[0].packed, there[0].packed, b"\xff" * 8)
    query = struct.pack("=BBxxI", _FAMILIES[version], socket.IPPROTO_TCP, _ALL_STATES) + ends
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.sendto(_HEADER.pack(_HEADER.size + len(query), _BY_FAMILY, _REQUEST, 0, 0) + query, (0, 0))
            answer = kernel.recv(4096)
    except OSError:
        return None
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    user, inode = struct.unpack_from("=II", answer, _HEADER.size + 4 + _SOCKET.size + 12)
    return answer[_HEADER.size + 1], user, inode


def _find_row(here: _End, there: _End) -> tuple[int, int, int] | None:
    """Return a socket's state, user and inode from the kernel's tables. This takes milliseconds."""
    for version in (4, 6) if here[0].version == 4 else (6,):
        try:
            rows = _TABLES[version].read_text()
        except OSError:
            continue
        ends = [(_map_address(address) if version == 6 else address, port) for address, port in (here, there)]
        wanted = " ".join(_format_kernel_address(*end) for end in ends)
        if row := rows.partition(f" {wanted} ")[2]:
            state, _, _, _, user, _, inode = row.split(maxsplit=7)[:7]
            return int(state, 16), int(user), int(inode)
    return None


def _name_address(client: tuple[str, int] | None) -> str:
    try:
        address = _parse_address(client[0] if client else "")
    except ValueError:
        return ""
    # An IPv6 host usually has a whole /64 prefix.
    return str(ipaddress.ip_network((address, 64), strict=False) if address.version == 6 else address)


def _parse_address(host: str) -> IpAddress:
    """Return an IP address. A server on ``::`` gets IPv4 addresses in IPv6 format. Raises ValueError if invalid."""
    address = ipaddress.ip_address(host)
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def _map_address(address: IpAddress) -> IpAddress:
    """Return an IPv4 address in IPv6 format."""
    return ipaddress.IPv6Address(f"::ffff:{address}") if address.version == 4 else address


def _is_own_address(host: str) -> bool:
    """Return True if an address belongs to this machine, so that a socket can use it."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


def _is_connected(connection: socket.socket | None) -> bool:
    """Return True if neither side has closed a connection."""
    if connection is None:
        return False
    try:
        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:
        return False
    return state[0] == _ESTABLISHED


def _format_kernel_address(address: IpAddress, port: int) -> str:
    """Format an address like the kernel's table, as 32-bit words in native byte order."""
    packed = address.packed
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"
