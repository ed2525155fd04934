"""Addresses of gRPC servers: where one listens, and what neither side may do without protection."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hil.errors import UsageError

_LAST_PORT = (1 << 16) - 1
# Each connection takes a descriptor, and who opens many must not keep the next one out.
_FILES = 65_536
# So long is somebody waited for who listens and accepts nobody.
_BUSY_S = 1.0
# Of a server: who connects and says nothing is sent away after so long.
HANDSHAKE = ("grpc.server_handshake_timeout_ms", 10_000)


def check_listen(listen: str, *, protected: bool, needs: str, hint: str) -> None:
    """Refuse what is no address, and to be reachable from other machines without protection.

    Args:
        listen: ``unix:PATH`` or ``HOST:PORT``.
        protected: whether the server has what it needs to be reachable from other machines.
        needs: that, in words.

    Raises:
        UsageError: it may not listen there.
    """
    if listen == "unix:":
        raise UsageError("unix: needs a path")
    if not listen.startswith("unix:"):
        host_port(listen)
    if not is_local(listen) and not protected:
        raise UsageError(
            f"{listen} can be reached from other machines: that needs {needs}",
            hint=f"{hint}, or listen on 127.0.0.1 or a Unix socket",
        )


def is_local(address: str) -> bool:
    """Whether an address is this machine's alone: a Unix socket, or a port of loopback.

    Raises:
        UsageError: it is neither.
    """
    if address.startswith("unix:"):
        return True
    host, _ = host_port(address, what="address")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_token_way(address: str, *, encrypted: bool, hint: str) -> None:
    """Refuse to send a token where others can read it on its way.

    Args:
        address: whom it is sent to: ``unix:PATH`` or ``HOST:PORT``.
        encrypted: whether the connection is TLS.

    Raises:
        UsageError: the address is no address, or the token would leave this machine in the clear.
    """
    if not encrypted and not is_local(address):
        raise UsageError(f"the token would be sent to {address} in the clear: that needs TLS", hint=hint)


def check_tls_files(
    *, cert: object, key: object, ca: object = None, ca_needs_cert: bool = False, listens: Sequence[str] = ()
) -> None:
    """Refuse half of a TLS configuration: without the other half it would be none, in silence.

    Args:
        ca: the authority of the other side's certificate.
        ca_needs_cert: whether it is a server's: there ``ca`` says whose clients are let in, and means nothing without
            a certificate; a client's certificate means nothing without ``ca``.
        listens: where a server listens: on Unix sockets alone there is no TLS.

    Raises:
        UsageError: something is given without what it needs.
    """
    if cert and key and listens and all(listen.startswith("unix:") for listen in listens):
        raise UsageError("TLS is for ports, and a Unix socket is its user's alone", hint="listen on HOST:PORT")
    if bool(cert) != bool(key):
        given, lacking = ("certificate", "key") if cert else ("key", "certificate")
        raise UsageError(f"a {given} for TLS was given without its {lacking}", hint="they go together")
    if ca_needs_cert and ca and not cert:
        raise UsageError("an authority of clients was given, but no certificate of the server's own: that is no TLS")
    if not ca_needs_cert and cert and not ca:
        raise UsageError(
            "a certificate for TLS was given, but no authority of the other side's: that is no TLS",
            hint="ca names the PEM file of the authority",
        )


def grpc_address(address: str) -> str:
    """An address as gRPC takes it, which reads a percent sign in a path as the beginning of a character's number."""
    return address.replace("%", "%25") if address.startswith("unix:") else address


def take_descriptors() -> None:
    """Let this process, a server, have as many descriptors as the system lets it."""
    import resource  # there is none on Windows, where hil only calls servers

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def host_port(
    text: str, *, what: str = "address to listen on", hint: str = "unix:PATH or HOST:PORT"
) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; an IPv6 address is without its brackets.

    Raises:
        UsageError: it is no such address, or the port is none.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()):
        raise UsageError(f"{text!r} is no {what}", hint=hint)
    if int(port) > _LAST_PORT:
        raise UsageError(f"{text!r} is no {what}: ports end at {_LAST_PORT}", hint=hint)
    return host.removeprefix("[").removesuffix("]"), int(port)


def refuse_if_served(path: str) -> None:
    """A socket that somebody serves is theirs; one that a killed server left behind may be replaced.

    Raises:
        UsageError: somebody serves it.
    """
    if is_served(path):
        raise UsageError(f"another process serves unix:{path} already", hint="stop it, or listen elsewhere")


def is_served(path: str) -> bool:
    """Whether somebody listens at a Unix socket; one that is too busy to accept anybody does."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_BUSY_S)
        try:
            probe.connect(path)
        except (TimeoutError, BlockingIOError):
            return True
        except OSError:
            return False
    return True


def refuse_if_taken(listen: str) -> None:
    """Find out what gRPC tells in words of its own, and to stderr: that a port cannot be had.

    Raises:
        UsageError: another process has it, it is not ours to have, or the host is not this machine.
    """
    host, port = host_port(listen)
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        kind, _, _, _, place = found[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        hint = "another process listens there: stop it, or take another port; port 0 is any free one"
        raise UsageError(
            f"cannot listen on {listen}: {error.strerror or error}",
            hint=hint if error.errno == errno.EADDRINUSE else "",
        ) from error


@contextlib.contextmanager
def private_socket(path: Path) -> Iterator[None]:
    """Have the Unix socket that is made at a path meanwhile open to this process's user alone; one that a killed server
    left there goes first.

    Raises:
        UsageError: something else lies there.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UsageError(f"cannot listen on unix:{path}: what lies there is no socket", hint="listen elsewhere")
        path.unlink()
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def listen_on(
    server: Any, listen: str, *, cert: Path | None = None, key: Path | None = None, client_ca: Path | None = None
) -> str:
    """Have a server listen: on a Unix socket that only its user can open, or on a port.

    Args:
        listen: ``unix:PATH`` or ``HOST:PORT`` (port 0: any free one).
        cert, key: PEM files; with both a port is TLS.
        client_ca: PEM file; with it, clients must show a certificate of this authority.

    Returns:
        Where it really listens.

    Raises:
        UsageError: it cannot listen there, half of TLS was given, or a file cannot be read.
    """
    check_tls_files(cert=cert, key=key, ca=client_ca, ca_needs_cert=True)
    kind, _, path = listen.partition(":")
    if kind == "unix":
        refuse_if_served(path)
    else:
        refuse_if_taken(listen)
    try:
        with private_socket(Path(path)) if kind == "unix" else contextlib.nullcontext():
            if kind != "unix" and cert and key:
                pairs = [(key.read_bytes(), cert.read_bytes())]
                authority = client_ca.read_bytes() if client_ca else None
                import grpc  # whoever only calls an agent may do without

                credentials = grpc.ssl_server_credentials(pairs, authority, require_client_auth=bool(authority))
                port = server.add_secure_port(listen, credentials)
            else:
                port = server.add_insecure_port(grpc_address(listen))
    except (RuntimeError, OSError) as error:
        raise UsageError(f"cannot listen on {listen}: {error}") from error
    if not port:
        raise UsageError(f"cannot listen on {listen}")
    return listen if kind == "unix" else f"{listen.rpartition(':')[0]}:{port}"
