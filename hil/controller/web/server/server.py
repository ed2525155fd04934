"""Run the web server and the indexer until Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import gc
import ipaddress
import socket
import ssl
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import platformdirs
import uvicorn
from fastapi import FastAPI

from hil.controller.farm.paths import FarmAddress
from hil.controller.storage.history.place import HistoryPlace
from hil.controller.web.access.connections import MAX_CONNECTIONS, MAX_HEAD, HttpConnection, HttpServer
from hil.controller.web.access.security import AccessRules
from hil.controller.web.farm.link import FarmLink
from hil.controller.web.farm.mirror import FarmMirror
from hil.controller.web.index.folders import index_path
from hil.controller.web.index.index import IndexWriter
from hil.controller.web.index.index_process import IndexProcess
from hil.controller.web.index.indexer import Indexer
from hil.controller.web.publish.published import PublishedStore
from hil.controller.web.server.app import create_app
from hil.controller.web.tensors.subjects import check_pair
from hil.core.digest import digest_of
from hil.errors import UsageError
from hil.protocol.certificates import TlsFiles, make_reloading_context

_LOOPBACK = "127.0.0.1"
# Seconds to wait for active responses during shutdown.
GRACE_SECONDS = 1


def make_farm_folder(name: str) -> Path:
    """Return the directory for the results of a farm's jobs."""
    return Path(platformdirs.user_cache_dir("hil")) / "web" / "farms" / digest_of(name.encode()).partition(":")[2][:16]


def serve(
    roots: Sequence[Path],
    access: AccessRules,
    port: int,
    *,
    listening: Callable[[str], None],
    farm: Callable[[], FarmAddress] | None = None,
    farm_name: str = "",
    published: PublishedStore | None = None,
    history: HistoryPlace | None = None,
    triage: Path | None = None,
    tls: TlsFiles | None = None,
) -> None:
    """Serve pages for runs directories until Ctrl-C.

    Args:
        published: store for sessions sent by `hil publish`, also shown. Default: see :func:`create_app`.
        port: port to listen on; 0 selects a free port.
        listening: called with the URL after the socket is bound.
        farm: returns the address of a farm with boards, queue and results to show.
        farm_name: name of the farm.
        history: place of the history, which may not exist yet; None shows no series.
        triage: triage of failures. Default: see :func:`create_app`.
        tls: certificate and key for HTTPS, which may be replaced while the server runs. None serves plain HTTP.

    Raises:
        UsageError: the address is not available, or a TLS file is invalid.
        StorageError: the index cannot be created.
    """
    context = make_reloading_context(tls) if tls else None  # report invalid files before anything starts
    folders = [root.resolve() for root in roots]
    if published and not any(published.folder.is_relative_to(folder) for folder in folders):
        folders.append(published.folder)
    with contextlib.ExitStack() as stack:
        link = FarmLink(farm) if farm else None
        if link:
            mirror = stack.enter_context(FarmMirror(link, make_farm_folder(farm_name)))
            folders.append(mirror.runs)
            access = replace(access, farm=link.make_visitors())
            stack.enter_context(link)
        path = index_path(folders)
        bound = stack.enter_context(open_listener(access.host, port))
        indexer = stack.enter_context(IndexProcess(path, folders))
        app = create_app(folders, path, indexer.progress, access, link, published, history, triage)
        server = make_server(app, owns_process=True, tls=context)
        # Exclude existing objects from garbage collection, which would delay requests.
        gc.freeze()
        host = choose_url_host(access.host)
        scheme = "https" if tls else "http"
        listening(f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}/")
        server.run(sockets=[bound])


def serve_pair(a: Path, b: Path, port: int, *, listening: Callable[[str], None]) -> None:
    """Serve the page for two .npy files on loopback until Ctrl-C.

    Args:
        b: the reference.
        port: port to listen on; 0 selects a free port.
        listening: called with the page's URL after the socket is bound.

    Raises:
        UsageError: a file is not a tensor, or the port is in use.
    """
    check_pair(a, b)
    with (
        tempfile.TemporaryDirectory(prefix="hil-web-") as folder,
        open_listener(_LOOPBACK, port) as bound,
        IndexWriter(Path(folder) / "index.sqlite") as writer,
    ):
        nothing = Path(folder) / "runs"
        nothing.mkdir()
        indexer = Indexer(writer, [nothing])
        indexer.scan()
        app = create_app([nothing], Path(folder) / "index.sqlite", indexer.progress, AccessRules(_LOOPBACK))
        app.state.pair = (a.absolute(), b.absolute())
        listening(f"http://{_LOOPBACK}:{bound.getsockname()[1]}/tensors")
        make_server(app, owns_process=True).run(sockets=[bound])


def make_server(app: FastAPI, *, owns_process: bool = False, tls: ssl.SSLContext | None = None) -> uvicorn.Server:
    """Return a server with the limits of :class:`hil.controller.web.access.connections.HttpServer`.

    Args:
        tls: context for HTTPS; None for plain HTTP.
    """
    config = uvicorn.Config(
        app,
        http=HttpConnection,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD,
        limit_concurrency=MAX_CONNECTIONS,
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        lifespan="off",
    )
    if tls:
        config.load()  # sets `ssl`, without TLS
        config.ssl = tls
    return HttpServer(config, owns_process=owns_process)


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UsageError if the address is not available."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen()  # clients may connect before the server runs
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        hint = "--port 0 selects a free port"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            hint = "--host must be an address of this machine: 127.0.0.1, or 0.0.0.0 for all addresses"
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror or error}", hint=hint) from error
    return bound


def choose_url_host(host: str) -> str:
    """Return the host for URLs. For a wildcard address, this is the outgoing address or the host name."""
    kind, far = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    try:
        if not ipaddress.ip_address(host).is_unspecified:
            return host
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))  # sends no packet
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
    except ValueError:
        return host
