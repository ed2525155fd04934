"""The home page, causes and triage in Chromium: clicks, accessibility and screen sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import NAMES, Page, find_browser
from support.nights import write_nights
from support.pictures import draw
from support.web import serving

from hil.controller.workloads.triage.triage_file import NAME, read_triage

BROWSER = find_browser()
pytestmark = [
    pytest.mark.skipif(not BROWSER, reason=f"no browser on PATH: {', '.join(NAMES)}"),
    pytest.mark.timeout(600),
]
AXE = (Path(__file__).parents[1] / "support" / "axe" / "axe.min.js").read_text()
TOKEN = "of-whoever-started-it"
HOME = "/?since=night:2023-11-19"
CAUSES = """[...document.querySelectorAll('#nights a[href^="/cause"]')]"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("nights")
    write_nights(found)
    return found


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    with serving(root, token=TOKEN) as found:
        yield found


def click(page: Page, selector: str) -> None:
    """Click an element that opens another page, and wait for this page. The centre of a wrapped link may be empty."""
    page.run("window.left = false")
    page.run(f"document.querySelector({json.dumps(selector)}).click()")
    page.wait("window.left === undefined && document.readyState === 'complete'")


def test_cause_is_found_and_triaged_in_browser(root: Path, address: str) -> None:
    with Page(BROWSER, width=390, dark=True) as page:
        page.open(f"{address}/?token={TOKEN}")
        page.open(address + HOME)
        page.wait(f"{CAUSES}.length === 3")
        draw(page, "home")
        click(page, '#nights a[href^="/cause"]')
        assert "iree-base-compiler 3.13.0 -> 3.14.0" in page.texts("h1")[0]
        click(page, 'tbody a[href^="/case"]')
        page.click("#triage summary")
        page.run("document.querySelector('#triage [name=owner]').value = 'ada'")
        page.run("document.querySelector('#triage [name=all_boards]').checked = true")
        click(page, "#triage button")
        assert page.texts("#triage .triage") == ["known · ada"]
        draw(page, "triage-case")
        page.open(address + HOME)
        assert page.texts("#nights .triage") == ["known · ada"]
        assert page.troubles == []
    (entry,) = read_triage(root / NAME).entries
    assert (entry.state, entry.owner, entry.board, entry.outcomes) == ("known", "ada", "", ["COMPILE_ERROR"])


def test_outcomes_come_before_metadata_on_narrow_screen(address: str) -> None:
    with Page(BROWSER, width=390) as page:
        page.open(address + "/session?id=evk1-11")
        top = "document.querySelector('{}').getBoundingClientRect().top"
        assert page.run(f"{top.format('.outcomes')} < {top.format('table')}")
        assert page.run(f"{top.format('table')} < {top.format('.facts')}")
        assert page.texts("tbody .outcome")[0] in ("FAIL", "COMPILE_ERROR")
        # The newest night is visible without scrolling.
        page.open(address + HOME)
        assert page.run("document.querySelector('a.night').getBoundingClientRect().right < innerWidth")


def test_baseline_is_chosen_with_control(address: str) -> None:
    with Page(BROWSER) as page:
        page.open(address + HOME)
        page.run("document.querySelector('[name=since]').value = 'label:night-7'")
        click(page, "#nights .filter button")
        assert page.run("new URLSearchParams(location.search).get('since')") == "label:night-7"
        assert page.run(f"{CAUSES}.length") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True), (1280, True), (390, False)])
def test_home_pages_are_accessible_and_fit_screen(address: str, width: int, dark: bool) -> None:
    found = {}
    with Page(BROWSER, width=width, dark=dark) as page:
        page.open(f"{address}/?token={TOKEN}")
        page.open(address + HOME)
        cause = page.run(f"{CAUSES}[0].getAttribute('href')")
        for path in (HOME, cause, "/triage", "/case?id=evk1-11&case=digits_full_model", "/session?id=evk1-11"):
            page.open(address + path)
            page.run(AXE + "; true")
            told = json.loads(page.run("axe.run(document, {iframes: false}).then(JSON.stringify)"))
            barriers = [one["id"] for one in told["violations"] if one["impact"] in ("serious", "critical")]
            if page.run("document.documentElement.scrollWidth > innerWidth"):
                barriers.append("wider than the window")
            if barriers or page.troubles:
                found[path] = [*barriers, *page.troubles]
            page.troubles.clear()
    assert not found, json.dumps(found, indent=1)
