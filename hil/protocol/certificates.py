"""TLS files of a server, which may be replaced while the server runs: a new connection uses the new certificate."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.core.files import read_file
from hil.errors import UsageError

if TYPE_CHECKING:
    import ssl

_LOG = logging.getLogger("hil.tls")
# After an error, do not read the files for every new connection.
_RETRY_SECONDS = 1.0
# Modification time, inode and size of each file.
_Versions = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of a server."""

    cert: Path  # certificate, followed by its intermediate certificates
    key: Path
    client_ca: Path | None = None  # require clients to present a certificate of this authority


@dataclass(frozen=True)
class TlsContents:
    """Contents of TLS files that belong together."""

    cert: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext  # context with this certificate, for servers that use the module `ssl`


class CertificateReloader:
    """Reads TLS files again after they changed.

    A program that renews a certificate replaces one file after the other. While the certificate and the key do not
    belong together, the server keeps the earlier ones.

    Raises:
        UsageError: a file is missing or invalid, or the key does not belong to the certificate.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._retry_at, self._problem = 0.0, ""
        self._versions, self._contents = _read_files(files)

    def get_contents(self) -> TlsContents:
        """Return the current contents. Any thread may call this method, and it never raises."""
        with self._lock:
            if time.monotonic() >= self._retry_at:
                self._reload_if_changed()
            return self._contents

    def _reload_if_changed(self) -> None:
        try:
            if _read_versions(self._files) == self._versions:
                return
            self._versions, self._contents = _read_files(self._files)
        except (UsageError, OSError) as error:
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            problem = error.message if isinstance(error, UsageError) else str(error)
            if problem != self._problem:
                self._problem = problem
                _LOG.warning("the server keeps its old TLS certificate: %s", problem)
            return
        self._retry_at, self._problem = 0.0, ""
        _LOG.info("the server uses the new TLS certificate in %s", self._files.cert)


def make_reloading_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a server context that uses replaced files for new connections.

    Raises the errors of :class:`CertificateReloader`.
    """
    reloader = CertificateReloader(files)

    def choose_context(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = reloader.get_contents().context

    first = reloader.get_contents().context
    # OpenSSL calls this function for each handshake, also if the client sends no server name.
    first.sni_callback = choose_context
    return first


def make_grpc_credentials(files: TlsFiles) -> Any:
    """Return gRPC server credentials that use replaced files for new connections.

    Raises the errors of :class:`CertificateReloader`.
    """
    import grpc  # imported here, because clients do not need gRPC

    reloader = CertificateReloader(files)
    used = reloader.get_contents()

    def make_configuration(contents: TlsContents) -> Any:
        return grpc.ssl_server_certificate_configuration([(contents.key, contents.cert)], contents.client_ca)

    def find_new_configuration() -> Any:
        nonlocal used
        contents = reloader.get_contents()
        if contents is used:
            return None
        used = contents
        return make_configuration(contents)

    return grpc.dynamic_ssl_server_credentials(
        make_configuration(used), find_new_configuration, require_client_authentication=files.client_ca is not None
    )


def _read_files(files: TlsFiles) -> tuple[_Versions, TlsContents]:
    """Return the files' versions and contents. Raises UsageError unless they belong together."""
    try:
        versions = _read_versions(files)
        context = _make_context(files)
        authority = read_file(files.client_ca) if files.client_ca else None
        contents = TlsContents(read_file(files.cert), read_file(files.key), authority, context)
        if _read_versions(files) == versions:
            return versions, contents
    except OSError as error:
        raise UsageError(f"cannot read the TLS file {error.filename}: {error.strerror or error}") from error
    raise UsageError(f"{files.cert} or its key changed while hil read it", hint="retry")


def _read_versions(files: TlsFiles) -> _Versions:
    paths = [path for path in (files.cert, files.key, files.client_ca) if path is not None]
    found = [path.stat() for path in paths]
    return tuple((one.st_mtime_ns, one.st_ino, one.st_size) for one in found)


def _make_context(files: TlsFiles) -> ssl.SSLContext:
    import ssl  # imported here, because most agents do not use TLS

    for path in (files.cert, files.key):
        read_file(path)  # OpenSSL's errors do not name the file
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without this function, OpenSSL asks for the password of an encrypted key on the terminal.
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise UsageError(
            f"{files.cert} and {files.key} are not a TLS certificate and its key: {reason}",
            hint="both must be PEM files, and the key must not have a password",
        ) from error
    return context
