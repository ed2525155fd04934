"""Sessions, a session and a case in Chromium, compared with the stored records."""

from __future__ import annotations

import json
import urllib.request
from urllib.parse import urlsplit

import pytest
from support.browser import NAMES, Page, find_browser
from support.waiting import eventually
from support.web import serving, write_record, write_run, write_suite

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(not BROWSER, reason=f"no browser on PATH: {', '.join(NAMES)}")

ROWS = "table[data-keys] tbody tr"
NAMES_SEEN = f"{ROWS} td:has(a)"


def outcome(number):
    return ("PASS", "PASS", "FAIL", "RUN_ERROR")[number % 4]


def case(number):
    error = number / 128
    output = {
        "name": "y",
        "shape": [1, 4],
        "dtype": "float32",
        "passed": number % 4 < 2,
        "elements": 4,
        "mismatches": 0,
    }
    return {
        "id": f"case {number:03}",
        "op": ("Conv", "Gemm", "Relu")[number % 3],
        "outcome": outcome(number),
        "message": f"reason {number}",
        "timings": {"compile_s": 0.5, "run_s": number / 1000},
        "device_p50_ns": 1_000_000 * (250 - number),
        "iterations": 20,
        "outputs": [{**output, "max_abs": error, "max_ulp": number, "sqnr_db": 100 - number / 4}],
        "repeat": f"hil suite run @models --filter '=case {number:03}'",
    }


CASES = [case(number) for number in range(250)]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    root = tmp_path_factory.mktemp("stored")
    write_suite(
        root, "nightly", CASES, started=1_700_000_000, origin={"labels": ["arm"], "branch": "main", "commit": "c0ffee"}
    )
    write_run(root, "run", [{"name": "digits", "verdicts": [{"outputs": CASES[3]["outputs"]}]}], created=1_700_000_100)
    layers = [{"name": "conv", "op": "Conv", "isolated": {"outcome": "FAIL", "max_abs": 0.5}, "cumulative": None}]
    write_record(root / "found" / "bisect.json", {"model": "net.onnx", "layers": layers, "created": 1_700_000_200})
    return root


@pytest.fixture(scope="module")
def address(stored):
    with serving(stored) as found:
        yield found


@pytest.fixture
def page():
    with Page(BROWSER) as opened:
        yield opened
        assert opened.troubles == []


def query(page):
    return page.run("location.pathname + location.search")


LISTED = "#sessions tbody tr"
NAMED = f"{LISTED} td.name a"


def test_session_list_filters_while_typing_and_from_url(page, address):
    page.open(address)
    assert page.texts(NAMED) == ["net.onnx", "digits", "models · iree"]
    # The directory distinguishes sessions with the same name.
    assert page.texts(f"{LISTED} td.name code")[2] == "nightly"
    failing = sum(one["outcome"] != "PASS" for one in CASES)
    assert page.texts(f"{LISTED}:nth-child(3) td.number") == [str(len(CASES)), str(failing)]
    page.click("#q")
    page.type("digi")
    page.wait(f"document.querySelectorAll('{LISTED}').length === 1")
    assert page.texts(NAMED) == ["digits"] and "q=digi" in query(page)
    page.open(f"{address}/?label=arm")
    assert page.texts(NAMED) == ["models · iree"]
    page.open(f"{address}/?commit=c0f&order=title")
    assert page.texts(f"{ROWS} td:nth-last-child(2)") == ["main c0ffee"]


@pytest.mark.slow
def test_keys_focus_search_and_select_rows(page, address):
    page.open(address)
    page.press("/")
    assert page.run("document.activeElement.id") == "search"
    page.type("nightly")
    page.press("Enter")
    page.wait("document.readyState === 'complete' && location.search.includes('q=nightly')")
    page.open(address)
    focused = "document.activeElement.innerText"
    for key, wanted in (("ArrowDown", "net.onnx"), ("ArrowDown", "digits"), ("ArrowUp", "net.onnx")):
        page.press(key)
        assert page.run(focused) == wanted
    page.press("Enter")
    page.wait("document.readyState === 'complete' && location.pathname === '/session'")


def test_session_page_sorts_filters_and_pages_cases(page, address):
    page.open(f"{address}/session?id=nightly")
    # Failing cases are first.
    ordered = [one["id"] for one in sorted(CASES, key=lambda one: one["outcome"] == "PASS")]
    assert page.texts(NAMES_SEEN) == ordered[:100]
    counts = {word: sum(one["outcome"] == word for one in CASES) for word in ("PASS", "FAIL", "RUN_ERROR")}
    assert set(page.texts(".outcomes a")) == {"250 cases", *(f"{count} {word}" for word, count in counts.items())}
    page.click("a[rel=next]")
    page.wait("document.readyState === 'complete' && location.search.includes('page=2')")
    assert page.texts(NAMES_SEEN)[0] == ordered[100]
    page.open(f"{address}/session?id=nightly&order=-abs")
    assert page.texts(NAMES_SEEN) == [f"case {number:03}" for number in range(249, 149, -1)]
    assert page.texts(f"{ROWS}:first-child td")[5:8] == [f"{249 / 128:.3g}", "249", f"{100 - 249 / 4:.3g}"]
    page.open(f"{address}/session?id=nightly&order=time&outcome=FAIL&op=Gemm")
    wanted = [one["id"] for one in reversed(CASES) if one["outcome"] == "FAIL" and one["op"] == "Gemm"]
    assert page.texts(NAMES_SEEN) == wanted
    page.click(f"{ROWS}:first-child a")
    page.wait("document.readyState === 'complete' && location.pathname === '/case'")
    assert page.texts("h1") == [f"{wanted[0]} FAIL"]


def test_case_page_shows_stored_record(page, address):
    page.open(f"{address}/case?id=nightly&case=case+002")
    assert page.texts(".reason")[0] == "reason 2"
    assert page.texts("table tbody tr:first-child > *")[:4] == ["y", "1x4 float32", "0 of 4", f"{2 / 128:.3g}"]
    assert page.texts(".command code")[0] == CASES[2]["repeat"]
    assert "248 ms of 20 iterations" in page.texts("dl.facts dd")
    page.click("details:not(.table-menu) summary")
    assert json.loads(page.texts("details pre")[0])["device_p50_ns"] == CASES[2]["device_p50_ns"]


def test_running_session_page_updates_without_losing_focus(page, stored, address):
    lines = (
        write_suite(stored, "live", CASES[:3], finished=None, ids=[one["id"] for one in CASES[:6]]) / "results.jsonl"
    )

    eventually(lambda: "id=live" in urllib.request.urlopen(address).read().decode())
    page.open(f"{address}/session?id=live")
    assert "3 cases have no result yet" in page.texts("main")[0]
    page.run("document.body.dataset.mark = 'same page'")
    page.press("ArrowDown")
    page.press("ArrowDown")
    assert page.run("document.activeElement.innerText") == "case 000"
    with lines.open("a") as file:
        file.write(json.dumps(CASES[3]) + "\n")
    page.wait(f"document.querySelectorAll('{ROWS}').length === 4")
    page.wait("document.activeElement.innerText === 'case 000'")
    # The page does not remove rows while the filter has the focus. It updates when the focus leaves.
    page.click("#cases input[type=search]")
    page.type("ca")
    with lines.open("a") as file:
        file.write(json.dumps(CASES[4]) + "\n")
    page.wait("late.size === 1")
    assert page.run("document.activeElement.value") == "ca" and len(page.texts(ROWS)) == 4
    page.run("document.activeElement.blur()")
    page.wait(f"document.querySelectorAll('{ROWS}').length === 5")
    assert page.run("document.body.dataset.mark") == "same page"


def test_page_reports_missing_session_and_server(page, tmp_path):
    shown = write_run(tmp_path, "shown", [{"name": "digits"}])
    told = "document.getElementById('away').innerText"
    with serving(tmp_path) as address:
        page.open(f"{address}/case?id=shown&case=digits")
        page.wait("document.body.dataset.generation !== ''")
        moved = shown.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
        page.wait(f"{told}.includes(\"session 'shown' not found\")")
        assert page.texts("h1") == ["digits PASS"]
        moved.rename(shown)
        page.wait(f"{told} === ''")
    page.wait(f"{told}.includes('is not responding')")
    with serving(tmp_path, port=urlsplit(address).port):
        page.wait(f"{told} === ''")


@pytest.mark.slow
def test_bisection_page_shows_bisection_columns(page, address):
    page.open(f"{address}/session?id=found")
    assert page.texts(f"{ROWS} td")[1:5] == ["conv", "Conv", "FAIL", "0.5"]
    page.click(f"{ROWS} a")
    page.wait("document.readyState === 'complete' && location.pathname === '/case'")
    assert page.texts("h1") == ["conv FAIL"]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/", "/session?id=nightly", "/session?id=found", "/case?id=nightly&case=case+002"])
def test_pages_fit_phone_screen(page, address, path):
    page.resize(390, 800)
    page.open(f"{address}{path}")
    assert page.run("document.documentElement.scrollWidth") <= 390
