"""Saved pages in Chromium, opened from disk: same content as the page, without requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import numpy as np
import pytest
from support.browser import NAMES, Page, find_browser
from support.fake_farm_client import busy_farm
from support.shown_profile import example
from support.web import serving, write_run, write_suite

from hil.controller.analysis.profile.store import write_profile

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(not BROWSER, reason=f"no browser on PATH: {', '.join(NAMES)}")
TEXT = "document.querySelector('main').innerText"
# Saved pages omit the page's selection controls.
CELLS = "[...document.querySelectorAll('main td')].filter(one => !one.querySelector('input')).map(one => one.innerText)"
HEADINGS = "[...document.querySelectorAll('h1, pre')].map(one => one.textContent)"
PICTURES = "[...document.images].map(one => one.naturalWidth)"
CHARTS = "document.querySelectorAll('.uplot').length"
SHOWN = (CELLS, HEADINGS, PICTURES, CHARTS)
# The token of a farm viewer.
TOKEN = "v"
HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shared")
    cases = [
        {"id": f"case-{number:03}", "op": HOSTILE, "device_p50_ns": 1000.0 * (number + 1), "message": HOSTILE}
        for number in range(150)
    ]
    write_suite(root, "nightly", cases)
    values = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
    tensors = {"outputs": values, "references": values + np.float32(0.01)}
    for kind, array in tensors.items():
        (root / "one" / "model" / kind).mkdir(parents=True)
        np.save(root / "one" / "model" / kind / "0-y.npy", array)
    files = {kind: [{"name": "y", "file": f"model/{kind}/0-y.npy", "dtype": "float32"}] for kind in tensors}
    case = {
        "name": "model",
        "outputs": files["outputs"],
        "references": [{"source": "cpu", "outputs": files["references"]}],
    }
    write_run(root, "one", [case])
    write_profile(example("monday"), root / "monday")
    return root


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    with busy_farm().link() as farm, serving(root, farm=farm) as address:
        yield address


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Page]:
    with Page(str(BROWSER)) as page:
        page.open(f"{address}/?token={TOKEN}")
        yield page


def saved(address: str, path: str, folder: Path) -> Path:
    """Save the file that the page's link returns."""
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    with urlopen(Request(f"{address}/share?{urlencode({'page': path})}", headers=bearer)) as answer:
        (folder / "saved.html").write_bytes(answer.read())
    return folder / "saved.html"


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/?q=nightly",
        "/session?id=nightly&q=case-00",
        "/case?id=nightly&case=case-007",
        "/case?id=one&case=model",
        "/tensors?id=one&case=model&kind=outputs&output=y",
        "/traces",
        "/trace?profile=0/monday&by=type&order=-calls",
        "/boards?hours=1",
        "/board?name=pi",
        "/queue",
        "/job?name=1",
        "/job?name=3",
    ],
)
def test_saved_page_shows_same_content_without_requests(address, page, tmp_path, path):
    page.open(address + path)
    # Job output arrives after the page.
    page.wait("(document.querySelector('#log')?.textContent ?? 'two').includes('two')")
    shown = [page.run(what) for what in SHOWN]
    assert shown[1]
    file = saved(address, path, tmp_path)
    # Requests of the live page do not count for the saved page.
    page.call("Page.navigate", url="about:blank")
    page.wait("location.href === 'about:blank'")
    page.requests.clear()
    page.troubles.clear()
    page.open(file.as_uri())
    assert [page.run(what) for what in SHOWN] == shown
    assert page.run("getComputedStyle(document.querySelector('main')).paddingLeft") == "16px", "its style is in it"
    # Requests started by the previous page are reported late.
    asked = {one for one in page.requests if not one.startswith(("data:", "about:", f"{address}/perfetto/"))}
    assert asked == {file.as_uri()}
    assert page.troubles == []
    assert page.run("document.querySelectorAll('a[href^=\"/\"], form[action], iframe').length") == 0


def test_saved_page_contains_every_table_row(root, address, page, tmp_path):
    page.open(saved(address, "/session?id=nightly", tmp_path).as_uri())
    stored = [json.loads(line) for line in (root / "nightly" / "results.jsonl").read_text().splitlines()]
    rows = page.run(
        "[...document.querySelectorAll('table.rows tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    )
    assert [row[1] for row in rows] == [one["id"] for one in stored]
    # Columns with a single value are omitted, so find the column by its heading.
    time = page.texts("table.rows thead th").index("Device time")
    assert [row[time] for row in rows] == [f"{one['device_p50_ns'] / 1000:.3g} us" for one in stored]
    assert {row[2] for row in rows} == {HOSTILE}


def test_save_link_uses_current_view(address, page):
    page.open(f"{address}/")
    page.run("hil.address('/?q=nightly')")
    page.run("document.querySelector('a.save').addEventListener('click', event => event.preventDefault())")
    page.click("a.save")
    assert page.run("document.querySelector('a.save').getAttribute('href')") == "/share?page=%2F%3Fq%3Dnightly"


def test_saved_page_serves_embedded_data_only(address, page, tmp_path):
    # The page script fetches what `data-src` names. This page has no such element, so the test calls it.
    text = saved(address, "/", tmp_path).read_text()
    held = '<script type="application/json" data-url="/api/x">{"a": [1, "\\u003c/script>"]}</script>'
    raw = '<script type="text/plain" data-type="image/png" data-url="/api/y">AAEC</script>'
    (tmp_path / "saved.html").write_text(text.replace("</main>", f"</main>{held}{raw}"))
    page.open((tmp_path / "saved.html").as_uri())
    assert page.run("hil.saved") is True
    assert page.run("hil.data('/api/x')") == {"a": [1, "</script>"]}
    assert page.run("hil.bytes('/api/y').then(found => [...new Uint8Array(found)])") == [0, 1, 2]
    assert page.run("hil.picture('/api/y')") == "data:image/png;base64,AAEC"
    assert page.run("hil.picture('/api/z')") == ""
    assert "open it in hil web" in page.run("hil.data('/api/z').catch(error => error.message)")


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_saved_page_fits_narrow_window(address, tmp_path, dark):
    with Page(str(BROWSER), width=390, dark=dark) as narrow:
        narrow.open(saved(address, "/tensors?id=one&case=model&kind=outputs&output=y", tmp_path).as_uri())
        assert narrow.run("document.documentElement.scrollWidth") == 390
