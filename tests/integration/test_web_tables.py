"""Test the view of tables in a browser: columns, groups, saved views, links, and pages saved as one file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.browser import Page, find_browser
from support.web import serving, write_suite

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="requires a Chromium")
MENU = "document.querySelector('.table-menu')"
CASES = "/session?id=night"
AXE = (Path(__file__).parents[1] / "support" / "axe" / "axe.min.js").read_text()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    cases = [
        {"id": f"{op}-{number}", "op": op, "outcome": "FAIL" if (op, number) == ("Gemm", 1) else "PASS"}
        for op in ("Conv", "Gemm", "Relu")
        for number in (0, 1)
    ]
    write_suite(root, "night", cases)
    write_suite(root, "long", [{"id": f"case-{number}", "op": f"op{number % 3}"} for number in range(250)])
    for number in range(8):
        # Shortly before midnight in UTC, which is another day in New York.
        write_suite(root, f"nightly-{number}", [{}], suite="nightly", started=1.7e9 + 86400 * number)
    return root


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    with serving(root) as url:
        yield url


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert BROWSER is not None
    with Page(BROWSER) as opened:
        yield opened


LOADED = "document.readyState === 'complete'"


def open_menu(page: Page) -> None:
    page.run(f"{MENU}.open = true")
    page.wait(f"!!{MENU}.querySelector('select')")


def choose_group(page: Page, column: str) -> None:
    page.run(
        f"(choice => {{ choice.value = '{column}'; choice.dispatchEvent(new Event('change')); }})"
        f"({MENU}.querySelector('select'))"
    )


def heads(page: Page) -> list[str]:
    return page.texts("#cases thead th:not([hidden])")


def test_menu_hides_columns_and_url_keeps_them(page: Page, address: str) -> None:
    page.open(address + CASES)
    every = heads(page)
    open_menu(page)
    for title in ("ULP", "Reason"):
        page.run(f"[...{MENU}.querySelectorAll('label')].find(one => one.innerText.trim() === '{title}').click()")
    left = [title for title in every if title not in ("ULP", "Reason")]
    assert heads(page) == left
    url = page.run("location.href")
    assert "columns=table-of-cases%7Eoutcome%7E" in url
    page.open(url)
    assert heads(page) == left
    page.click("#cases thead a")  # sorts by outcome
    page.wait(f"location.search.includes('order=') && {LOADED}")
    assert heads(page) == left
    assert page.troubles == []


def test_groups_show_counts_and_failures_first(page: Page, address: str) -> None:
    page.open(f"{address}{CASES}&group=table-of-cases~operator")
    assert page.texts("#cases tbody.group > tr:first-child") == ["Gemm 2 rows 1 failing", "Conv 2 rows", "Relu 2 rows"]
    assert page.texts("#cases tbody.group:nth-of-type(1) .name") == ["Gemm-1", "Gemm-0"]
    page.click("button.group")
    assert page.run("document.querySelector('button.group').getAttribute('aria-expanded')") == "false"
    assert page.run("document.querySelectorAll('#cases tbody tr:not([hidden])').length") == 3 + 4
    open_menu(page)
    choose_group(page, "")
    assert page.texts("#cases tbody .name") == ["Gemm-1", "Conv-0", "Conv-1", "Gemm-0", "Relu-0", "Relu-1"]
    assert "group=" not in page.run("location.search")


def test_group_of_several_pages_contains_all_rows(page: Page, address: str) -> None:
    page.open(f"{address}/session?id=long&page=2")
    open_menu(page)
    choose_group(page, "operator")
    page.wait("!!document.querySelector('tbody.group') && !document.querySelector('.pager')")
    assert page.texts("#cases tbody.group > tr:first-child") == ["op0 84 rows", "op1 83 rows", "op2 83 rows"]


def test_view_is_saved_under_a_name(page: Page, address: str) -> None:
    page.open(f"{address}{CASES}&order=-name&group=table-of-cases~operator&columns=table-of-cases~case~operator")
    open_menu(page)
    page.run(f"{MENU}.querySelector('input:not([type=checkbox])').focus()")
    page.type("By operator")
    page.press("Enter")
    page.wait(f"!!{MENU}.querySelector('.views a')")
    # The view applies to other sessions of the same page.
    page.open(f"{address}/session?id=long")
    open_menu(page)
    page.click(".table-menu .views a")
    page.wait(f"location.search.includes('id=long') && !!document.querySelector('tbody.group') && {LOADED}")
    assert heads(page) == ["Case", "Operator"]
    assert "order=-name" in page.run("location.search")
    page.open(f"{address}{CASES}&view=By+operator")
    page.wait(f"location.search.includes('group=') && {LOADED}")
    open_menu(page)
    page.click(".table-menu .views button")
    assert page.texts(".table-menu .views a") == []
    page.open(f"{address}{CASES}&view=By+operator")
    page.wait("!!document.querySelector('main > .hint')")
    assert page.texts("main > .hint") == ["This browser has no view By operator of this page."]


def test_unknown_column_of_a_link_is_reported(page: Page, address: str) -> None:
    page.open(f"{address}{CASES}&columns=table-of-cases~case~colour")
    assert heads(page) == ["Case"]
    (note,) = [text for text in page.texts("[role=status]") if "colour" in text]
    assert note.startswith("This table has no column colour. Its columns: outcome, case, operator, device-time")


def test_saved_page_keeps_the_view(page: Page, address: str, tmp_path: Path) -> None:
    page.open(f"{address}{CASES}&group=table-of-cases~operator&columns=table-of-cases~outcome~case~operator")
    text = page.run(
        "fetch('/share?' + new URLSearchParams({page: location.pathname + location.search})).then(one => one.text())"
    )
    (tmp_path / "saved.html").write_text(text)
    page.open((tmp_path / "saved.html").as_uri())
    assert heads(page) == ["Outcome", "Case", "Operator"]
    assert len(page.texts("tbody.group")) == 3
    open_menu(page)
    choose_group(page, "outcome")
    assert page.texts("#cases tbody.group > tr:first-child") == ["FAIL 1 row 1 failing", "PASS 5 rows"]
    assert page.troubles == []


@pytest.mark.parametrize("width", [1280, 390])
def test_open_menu_is_accessible_and_fits_screen(page: Page, address: str, width: int) -> None:
    page.resize(width, 800)
    try:
        page.open(f"{address}{CASES}&group=table-of-cases~operator&view=x")
        open_menu(page)
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        page.run(AXE + "; true")
        found = json.loads(page.run("axe.run(document).then(JSON.stringify)"))["violations"]
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
        page.run(f"{MENU}.querySelector('summary').focus()")
        page.press("Tab")
        assert page.run("document.activeElement.type") == "checkbox"
    finally:
        page.resize(1280, 900)


def test_chart_axis_has_days_in_utc(page: Page, address: str) -> None:
    page.call("Emulation.setTimezoneOverride", timezoneId="America/New_York")
    try:
        page.open(f"{address}/history?suite=nightly")
        page.run(
            "(labels => { window.seen = []; hil.timeTicks = (chart, ticks, ...others) => {"
            " const texts = labels(chart, ticks, ...others); window.seen = ticks.map((one, at) => [one, texts[at]]);"
            " return texts; }; drawAll(); })(hil.timeTicks)"
        )
        page.wait("window.seen.length > 2")
        for tick, text in page.run("window.seen"):
            assert tick % 86400 == 0 and text == str(np.datetime64(int(tick), "s"))[:10]
        # The labels of hours include the date at the first tick and at midnight.
        hours = page.run("hil.timeTicks(null, [1700172000, 1700179200, 1700186400], 0, 0, 7200)")
        assert hours[0] == "22:00\n2023-11-16" and hours[1] == "00:00\n2023-11-17" and hours[2] == "02:00"
    finally:
        page.call("Emulation.setTimezoneOverride", timezoneId="")


def test_groups_and_open_menu_remain_after_an_update(page: Page, address: str, root: Path) -> None:
    page.open(f"{address}/?q=models&group=table-of-sessions~board&columns=table-of-sessions~verdict~session~board")
    assert page.texts("#sessions tbody.group > tr:first-child") == ["sim 2 rows 1 failing"]
    page.run("document.querySelector('#sessions .table-menu').open = true")
    page.wait("!!document.querySelector('#sessions .table-menu select')")
    write_suite(root, "later", [{"outcome": "FAIL"}], boards=["rpi5"], started=1.8e9)
    page.wait("document.querySelectorAll('#sessions tbody.group').length === 2")
    assert page.texts("#sessions tbody.group > tr:first-child") == ["rpi5 1 row 1 failing", "sim 2 rows 1 failing"]
    assert page.texts("#sessions thead th:not([hidden])") == ["Verdict", "Session", "Board"]
    page.wait("!!document.querySelector('#sessions .table-menu[open] select')")
