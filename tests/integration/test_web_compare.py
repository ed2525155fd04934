"""Comparison and history pages in a browser."""

import json
import random
import re
import statistics

import pytest
from support.browser import Page, find_browser
from support.suite_runs import case, suite_run
from support.waiting import eventually
from support.web import serving

from hil.controller.storage.screen.texts import format_seconds

pytestmark = pytest.mark.ci

DAY, NIGHTS, SLOW, BROKEN = 86400.0, 20, 12, 16


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Nights of a 30-case suite: one case becomes 8 % slower, one fails."""
    root, rolled = tmp_path_factory.mktemp("runs"), random.Random(4)
    for night in range(NIGHTS):
        records = []
        for number in range(30):
            time = 1e5 * (1 + number) * rolled.gauss(1, 0.01) * (1.08 if number == 7 and night >= SLOW else 1)
            outcome = "FAIL" if number == 3 and night >= BROKEN else "PASS"
            times = {"device_p50_ns": time, "device_p90_ns": time * 1.05, "iterations": 20}
            records.append(case(f"case_{number:02d}", outcome, program=f"blake3:{number:060x}", **times))
        suite_run(root / f"night-{night:02d}", records, started=1.7e9 + night * DAY)
    return root


@pytest.fixture(scope="module")
def address(runs):
    with serving(runs, token="secret") as found:
        yield found


@pytest.fixture
def page():
    with Page(find_browser() or pytest.fail("no browser")) as found:
        yield found
        assert not found.troubles


def stored(runs, night, name):
    lines = (runs / f"night-{night:02d}" / "results.jsonl").read_text().splitlines()
    return next(one for one in map(json.loads, lines) if one["id"] == name)


def test_compare_page_shows_difference_of_marked_sessions(address, runs, page):
    page.open(address)
    for night in (BROKEN - 1, BROKEN):
        page.run(f"document.querySelector('input[name=s][value=night-{night:02d}]').click()")
    page.click("button[form=compare]")
    page.wait("location.pathname === '/compare' && document.readyState === 'complete'")
    assert page.run("location.search") == f"?a=night-{BROKEN - 1}&b=night-{BROKEN}"
    assert page.texts("table.broke tbody td:nth-child(2)") == ["case_03"]
    before, after = (stored(runs, night, "case_03")["ended"] for night in (BROKEN - 1, BROKEN))
    assert page.texts("table.broke tbody td:nth-child(1)") == [after]
    assert page.texts("table.broke tbody td:nth-child(3)") == [before]


@pytest.mark.slow
def test_compare_page_shows_time_ratio_of_session_sets(address, runs, page):
    named = [("a", range(4, SLOW)), ("b", range(SLOW, NIGHTS))]
    sides = "&".join(f"{side}=night-{night:02d}" for side, nights in named for night in nights)
    page.open(f"{address}/compare?{sides}&show=device_p50_ns")
    assert page.texts("table.device_p50_ns tbody td:nth-child(2)") == ["case_07"]
    before, after = ([stored(runs, night, "case_07")["device_p50_ns"] for night in nights] for _, nights in named)
    cells = page.texts("table.device_p50_ns tbody td")
    assert cells[0] == "slower"
    assert cells[2].startswith(format_seconds(statistics.median(before) / 1e9))
    assert cells[3].startswith(format_seconds(statistics.median(after) / 1e9))
    ratio = statistics.geometric_mean(after) / statistics.geometric_mean(before)
    assert cells[4] == f"{ratio:.3f}x"
    low, high = (float(one) for one in re.findall(r"\d\.\d{3}", cells[5]))
    assert low < ratio < high
    page.click("input[name=all]")
    page.click("form.filter button")
    page.wait(
        "document.querySelectorAll('table.device_p50_ns tbody tr').length === 30 && document.readyState === 'complete'"
    )
    page.click("thead th:nth-child(5) a")
    page.wait("new URLSearchParams(location.search).get('order') === '-change' && document.readyState === 'complete'")
    assert page.texts("table.device_p50_ns tbody td:nth-child(2)")[0] == "case_07"


def test_history_page_shows_samples_and_change(address, runs, page):
    page.open(f"{address}/history?case=case_07")
    page.wait("!!document.querySelector('.plot canvas')")
    times = [stored(runs, night, "case_07")["device_p50_ns"] for night in range(NIGHTS)]
    shown = page.texts("table.samples tbody td:nth-child(3)")
    assert [one.removesuffix(" changed") for one in shown] == [format_seconds(one / 1e9) for one in reversed(times)]
    assert [one.endswith("changed") for one in reversed(shown)].index(True) == SLOW
    (told,) = page.texts(".changes li")
    before, after = statistics.median(times[:SLOW]), statistics.median(times[SLOW:])
    told_before, told_after = format_seconds(before / 1e9, 4), format_seconds(after / 1e9, 4)
    assert told.startswith(f"{told_before} to {told_after} ({after / before:.3f}x)")
    pixels = "(c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(Boolean))"
    assert page.run(f"{pixels}(document.querySelector('.plot canvas'))")


@pytest.mark.parametrize(("what", "name"), [("broke", "case_03"), ("slower", "case_07")])
def test_regression_links_to_case_and_sessions(address, runs, page, what, name):
    eventually(
        lambda: (
            page.open(f"{address}/history/regressions?since=2020-01-01&what={what}")
            or name in page.texts("#regressed tbody td.name:nth-child(2) a")
        ),
        "the histories are judged",
    )
    page.click("#regressed tbody td:nth-child(2) a")
    page.wait("location.pathname === '/history' && document.readyState === 'complete'")
    assert page.texts("h1") == [name]
    since = BROKEN if what == "broke" else SLOW
    page.click(".changes li a:last-child")
    page.wait("location.pathname === '/compare' && document.readyState === 'complete'")
    sides = page.run("location.search")
    if what == "broke":
        assert sides == f"?a=night-{since - 1}&b=night-{since}"
    else:
        assert f"&a=night-{since - 1}&b=night-{since}&b=night-{since + 1}" in sides
        assert any(row.startswith("slower") and name in row for row in page.texts("table.device_p50_ns tbody tr"))


def test_user_with_token_can_write_annotation(address, runs, page):
    page.open(f"{address}/history?suite=models&token=secret")
    page.wait("location.search === '?suite=models' && document.readyState === 'complete'")
    page.click("details.remark summary")
    page.run("document.querySelector('.remark input[name=text]').focus()")
    page.type("a new <b>compiler</b>")
    page.press("Enter")
    page.wait("!!document.querySelector('p.told')")
    assert "a new <b>compiler</b>" in page.texts("p.told")
    (line,) = (runs / "hil-annotations.jsonl").read_text().splitlines()
    assert json.loads(line)["text"] == "a new <b>compiler</b>"


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        "compare?b=night-16",
        "compare",
        "history?case=case_07",
        "history?suite=models",
        "history/regressions?since=2020-01-01",
    ],
)
def test_pages_fit_narrow_screen_without_external_requests(address, page, path):
    page.resize(390, 800)
    page.open(f"{address}/{path}")
    assert page.run("document.documentElement.scrollWidth") <= 390
    assert all(one.startswith((address, "data:", "about:")) for one in page.requests)
