"""Check and use listening addresses of servers, and the protection that addresses require."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hil.core.loopback import is_loopback
from hil.errors import UsageError
from hil.protocol.certificates import TlsFiles, make_grpc_credentials

_LAST_PORT = (1 << 16) - 1
# File descriptors that a server needs. Each connection takes one descriptor, and many connections must not block new
# clients.
_FILES = 65_536
# Time to wait for a server that listens but does not accept.
_BUSY_SECONDS = 1.0
# Server option: disconnect clients that do not complete the handshake in time.
HANDSHAKE = ("grpc.server_handshake_timeout_ms", 10_000)


def check_listen(listen: str, *, protected: bool, needs: str, hint: str) -> None:
    """Reject an invalid address. Without protection, also reject an address that other machines can reach.

    Args:
        listen: ``unix:PATH`` or ``HOST:PORT``.
        protected: True if the server has the protection that access from other machines requires.
        needs: required protection, for the message.
        hint: hint of the error.

    Raises:
        UsageError: the address is rejected.
    """
    if listen == "unix:":
        raise UsageError("missing path after unix:")
    if not listen.startswith("unix:"):
        parse_host_port(listen)
    if not is_local(listen) and not protected:
        raise UsageError(
            f"{listen} is reachable from other machines and needs {needs}",
            hint=f"{hint}, or listen on 127.0.0.1 or a Unix socket",
        )


def is_local(address: str) -> bool:
    """Return True if only this machine can reach an address: a Unix socket or a loopback port.

    Raises:
        UsageError: the address is invalid.
    """
    if address.startswith("unix:"):
        return True
    host, _ = parse_host_port(address, what="address")
    return is_loopback(host)


def check_token_transport(address: str, *, encrypted: bool, hint: str) -> None:
    """Reject sending a token unencrypted to a different machine.

    Args:
        address: receiver, ``unix:PATH`` or ``HOST:PORT``.
        encrypted: whether the connection uses TLS.
        hint: hint of the error.

    Raises:
        UsageError: the address is invalid, or the token would leave this machine unencrypted.
    """
    if not encrypted and not is_local(address):
        raise UsageError(f"cannot send the token to {address} without TLS", hint=hint)


def check_tls_files(
    *, cert: object, key: object, ca: object = None, ca_needs_cert: bool = False, listens: Sequence[str] = ()
) -> None:
    """Reject an incomplete TLS configuration, which would silently disable TLS.

    Args:
        cert, key: certificate and key of this side.
        ca: authority of the peer's certificate.
        ca_needs_cert: True for a server: ``ca`` restricts clients, and requires ``cert``. False for a client: ``cert``
            requires ``ca``.
        listens: addresses of a server; Unix sockets do not support TLS.

    Raises:
        UsageError: a required file is missing, or TLS is set for Unix sockets.
    """
    if cert and key and listens and all(listen.startswith("unix:") for listen in listens):
        raise UsageError(
            "TLS is not supported on Unix sockets: only their owner can access them", hint="listen on HOST:PORT"
        )
    if bool(cert) != bool(key):
        given, lacking = ("certificate", "key") if cert else ("key", "certificate")
        raise UsageError(f"got a TLS {given} without a {lacking}", hint="pass both")
    if ca_needs_cert and ca and not cert:
        raise UsageError("a TLS client CA needs a server certificate and key")
    if not ca_needs_cert and cert and not ca:
        raise UsageError(
            "a TLS client certificate requires the CA of the server's certificate",
            hint="set ca to the PEM file of this CA",
        )


def escape_grpc_address(address: str) -> str:
    """Escape an address for gRPC, which decodes percent signs in a path."""
    return address.replace("%", "%25") if address.startswith("unix:") else address


def take_descriptors() -> None:
    """Raise this process's limit of file descriptors to the number that a server needs, if the system allows it."""
    import resource  # missing on Windows, where hil is only a client

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def parse_host_port(
    text: str, *, what: str = "listen address", hint: str = "unix:PATH or HOST:PORT"
) -> tuple[str, int]:
    """Parse ``HOST:PORT``. Brackets of an IPv6 address are removed.

    Raises:
        UsageError: the address or the port is invalid.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()):
        raise UsageError(f"invalid {what} {text!r}", hint=hint)
    if int(port) > _LAST_PORT:
        raise UsageError(f"invalid {what} {text!r}: the port must be at most {_LAST_PORT}", hint=hint)
    return host.removeprefix("[").removesuffix("]"), int(port)


def refuse_if_served(path: str) -> None:
    """Reject a Unix socket that a process serves. A stale socket of a killed server may be replaced.

    Raises:
        UsageError: a process serves the socket.
    """
    if is_served(path):
        raise UsageError(f"unix:{path} is already in use", hint="stop the other process, or use a different address")


def is_served(path: str) -> bool:
    """Return True if a process listens at a Unix socket, even if it is too busy to accept."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_BUSY_SECONDS)
        try:
            probe.connect(path)
        except (TimeoutError, BlockingIOError):
            return True
        except OSError:
            return False
    return True


def refuse_if_taken(listen: str) -> None:
    """Check that a port is free. gRPC itself reports a failure only in the log on stderr.

    Raises:
        UsageError: the port is in use or not permitted, or the host is a different machine.
    """
    host, port = parse_host_port(listen)
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        kind, _, _, _, place = found[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        hint = "stop the process that uses this port, or use a different port; port 0 selects a free port"
        raise UsageError(
            f"cannot listen on {listen}: {error.strerror or error}",
            hint=hint if error.errno == errno.EADDRINUSE else "",
        ) from error


@contextlib.contextmanager
def restrict_socket(path: Path) -> Iterator[None]:
    """Restrict a Unix socket to this user. The socket must be created at ``path`` inside the context.

    A stale socket of a killed server is removed first. The umask changes for the whole process.

    Raises:
        UsageError: the path exists and is not a socket.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UsageError(f"cannot listen on unix:{path}: the file is not a socket", hint="use a different path")
        path.unlink()
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def listen_on(
    server: Any, listen: str, *, cert: Path | None = None, key: Path | None = None, client_ca: Path | None = None
) -> str:
    """Make a server listen on a Unix socket that only its user can open, or on a port.

    Each new TLS connection uses the current files, so a renewed certificate needs no restart.

    Args:
        server: gRPC server.
        listen: ``unix:PATH`` or ``HOST:PORT`` (port 0 selects a free port).
        cert, key: PEM files that enable TLS on a port.
        client_ca: PEM file that requires clients to present a certificate of this authority.

    Returns:
        The actual listening address.

    Raises:
        UsageError: listening failed, TLS is incomplete, or a file is unreadable or invalid.
    """
    check_tls_files(cert=cert, key=key, ca=client_ca, ca_needs_cert=True)
    kind, _, path = listen.partition(":")
    if kind == "unix":
        refuse_if_served(path)
    else:
        refuse_if_taken(listen)
    try:
        with restrict_socket(Path(path)) if kind == "unix" else contextlib.nullcontext():
            if kind != "unix" and cert and key:
                port = server.add_secure_port(listen, make_grpc_credentials(TlsFiles(cert, key, client_ca)))
            else:
                port = server.add_insecure_port(escape_grpc_address(listen))
    except (RuntimeError, OSError) as error:
        raise UsageError(f"cannot listen on {listen}: {error}") from error
    if not port:
        raise UsageError(f"cannot listen on {listen}")
    return listen if kind == "unix" else f"{listen.rpartition(':')[0]}:{port}"
