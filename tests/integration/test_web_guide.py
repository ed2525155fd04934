"""The `hil web` guide in Chromium: each step matches the page."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from support.browser import NAMES, Page, find_browser
from support.pictures import draw
from support.waiting import eventually
from support.web import serving

from hil.core.npy import load_npy
from tests.integration.test_docs import WEB, Place, follow

BROWSER = find_browser()
pytestmark = [
    pytest.mark.skipif(not BROWSER, reason=f"no browser on PATH: {', '.join(NAMES)}"),
    pytest.mark.timeout(600),
]
CASE, WHOLE = "digits_cnn_layer_Conv_conv2", "digits_cnn_full_model"


@pytest.fixture(scope="module")
def stored(tmp_path_factory, shared_cache):
    """The directory after following the guide."""
    place = Place(tmp_path_factory.mktemp("guide"), shared_cache)
    try:
        follow(WEB, place)
    finally:
        place.close()
    return place.folder / "hil-suites"


@pytest.fixture(scope="module")
def address(stored):
    with serving(stored, stored.parent / "nets") as found:
        yield found


def follow_link(page: Page, text: str, within: str = "main") -> None:
    """Click the first link that begins with this text, and wait for its page."""
    page.run("window.left = false")
    index = next(number for number, one in enumerate(page.texts(f"{within} a")) if one.startswith(text))
    page.run(f"document.querySelectorAll('{within} a')[{index}].setAttribute('data-next', '')")
    page.click("[data-next]")
    page.wait("window.left === undefined && document.readyState === 'complete'")


def a_wrong_layer_is_found_in_four_clicks(stored, page):
    draw(page, "sessions")
    assert page.texts("#sessions tbody tr .outcome")[:5] == ["fail"] * 4 + ["pass"]
    assert page.texts("#sessions tbody .name code")[3] == "tuesday-1"
    page.run("document.querySelectorAll('#sessions tbody tr')[3].setAttribute('id', 'first-night')")
    follow_link(page, "nets", "#first-night")
    draw(page, "session")
    assert page.texts("main tbody .outcome").count("FAIL") == 1
    follow_link(page, "Compare with the previous")
    draw(page, "compare")
    assert page.texts("h2")[2].startswith("Newly failing")
    follow_link(page, CASE)
    follow_link(page, "conv2.out")
    page.wait("[...document.images].every(one => one.complete)")
    draw(page, "tensors")
    folder = stored / "tuesday-1" / "cases" / CASE
    board, reference = (load_npy(next((folder / kind).glob("*.npy")), "float32") for kind in ("outputs", "references"))
    worst = np.unravel_index(np.argmax(np.abs(board - reference)), board.shape)
    assert f"worst at [{', '.join(map(str, worst))}]" in page.run("document.body.innerText")


def what_takes_longer_is_found_in_three_clicks(stored, page):
    # Slowdown detection runs after all records are read.
    eventually(lambda: slower(page), WHOLE)
    draw(page, "regressions")
    page.open(page.run("location.origin") + "/")
    cause = next(text for text in page.texts("#nights a") if "slower on lab: the board" in text)
    follow_link(page, cause, "#nights")
    draw(page, "cause")
    rows = page.texts("main tbody tr")
    number = next(number for number, text in enumerate(rows) if WHOLE in text)
    shown = rows[number]
    before, after = (
        statistics.median(time_of(stored / f"{day}-{night}") for night in range(1, 5)) for day in ("monday", "tuesday")
    )
    ratio = float(re.search(r"([\d.]+)x", shown)[1])
    assert abs(ratio - after / before) < 0.02
    assert 1.06 < ratio < 1.1
    page.run(f"document.querySelectorAll('main tbody tr')[{number}].setAttribute('id', 'whole')")
    follow_link(page, "history", "#whole")
    page.wait("document.querySelector('.u-over') !== null")
    assert page.texts(".samples .step"), "the change is marked in the table, too"
    draw(page, "history")


def slower(page: Page) -> list[str]:
    """Return the slower cases that the page shows."""
    page.open(page.run("location.origin") + "/history/regressions")
    rows = page.texts("#regressed tbody tr")
    return [text for text in rows if "slower" in text] if any(WHOLE in text for text in rows) else []


def time_of(night: Path) -> float:
    """Return the full model's median device time of a stored night, in ns."""
    records = map(json.loads, (night / "results.jsonl").read_text().splitlines())
    return next(one["device_p50_ns"] for one in records if one["id"] == WHOLE)


def the_graph_of_the_bisection_and_the_timeline_are_there(stored, page):
    page.open(page.run("location.origin") + "/graph?id=bisect")
    page.wait("document.querySelectorAll('main tbody tr').length > 0")
    layers = json.loads((stored / "bisect" / "bisect.json").read_text())["layers"]
    rows = page.run("[...document.querySelectorAll('main tbody tr')].map(one => one.innerText)")
    assert {name for name in (one["nodes"][0] for one in layers) if any(name in row for row in rows)} == {
        one["nodes"][0] for one in layers
    }
    draw(page, "graph")
    page.open(page.run("location.origin") + "/traces")
    page.click("tbody a")
    page.wait("document.querySelector('iframe.timeline')?.contentDocument?.body?.dataset.look === 'done'")
    draw(page, "trace")


@pytest.mark.slow
def test_guide_steps_match_pages(stored, address):
    # One test for all steps: the setup takes longer than the checks.
    with Page(BROWSER) as page:
        page.open(address + "/")
        a_wrong_layer_is_found_in_four_clicks(stored, page)
        what_takes_longer_is_found_in_three_clicks(stored, page)
        the_graph_of_the_bisection_and_the_timeline_are_there(stored, page)
