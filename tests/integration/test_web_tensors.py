"""Tensor pages in a browser, compared with numpy on the stored files."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.browser import Page, find_browser
from support.web import serving
from support.web_tensors import write_tensors

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

SIDE, CELLS = 5000, 320
WRONG = (3141, 2718)
EQUAL = [0xD9, 0xD9, 0xD9]
# The pixels of a map whose color differs from that of equal elements: [[row, column], ...].
DIFFERENT = """(() => {
  const image = document.querySelector("#map-difference img"), canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data, found = [];
  for (let at = 0; at < pixels.length; at += 4)
    if (EQUAL.some((part, channel) => pixels[at + channel] !== part))
      found.push([Math.floor(at / 4 / canvas.width), (at / 4) % canvas.width]);
  return found;
})()""".replace("EQUAL", str(EQUAL))
DRAWN = "document.querySelector('#map-difference img')?.complete"
SETTLED = (
    "document.readyState === 'complete' && document.querySelector('#slice.scripted')"
    " && !document.querySelector('.htmx-request, .htmx-settling, .htmx-added')"
)
ALL = f"{SETTLED} && {DRAWN} && !document.querySelector('.later')"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two 100 MB tensors that differ in one element, as a stored run."""
    root = tmp_path_factory.mktemp("large")
    wanted = np.random.default_rng(0).standard_normal((SIDE, SIDE), dtype=np.float32)
    got = wanted.copy()
    got[WRONG] += 1.5
    write_tensors(root, {"logits": got}, {"logits": wanted})
    return root


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A four-axis tensor that is wrong in a block, and its input."""
    root = tmp_path_factory.mktemp("small")
    wanted = np.random.default_rng(1).standard_normal((2, 3, 20, 30)).astype(np.float32) + 4
    got = wanted.copy()
    got[1, 2, 4:9, 10:20] *= np.float32(1.01)
    write_tensors(root, {"conv": got}, {"conv": wanted}, {"image": wanted})
    return root


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert BROWSER is not None
    with Page(BROWSER) as found:
        yield found


@pytest.fixture(autouse=True)
def quiet(page: Page) -> Iterator[None]:
    """Assert that the page has no console errors and no external requests."""
    page.troubles.clear()
    page.requests.clear()
    yield
    assert page.troubles == []
    assert all(re.match(r"http://127\.0\.0\.1:|about:|data:", one) for one in page.requests), page.requests


def stored(root: Path, kind: str) -> np.ndarray:
    """Load a stored tensor of the run."""
    return np.load(root / "run" / "model" / kind / "0.npy")


def cell_of(place: int, total: int) -> int:
    """Return the cell of a row or column. Cells divide the axis evenly."""
    cells = min(total, CELLS)
    return next(cell for cell in range(cells) if total * cell // cells <= place < total * (cell + 1) // cells)


@pytest.mark.slow
def test_tensor_page_shows_single_wrong_element_of_100_mb(large: Path, page: Page, capsys: Any) -> None:
    with serving(large) as address:
        start = time.monotonic()
        page.open(f"{address}/tensors?id=run&case=model&kind=outputs&output=logits")
        page.wait(DRAWN)
        with capsys.disabled():
            print(f"\n  first picture of 2 x 100 MB: {time.monotonic() - start:.2f} s")
        assert page.run(DIFFERENT) == [[cell_of(WRONG[0], SIDE), cell_of(WRONG[1], SIDE)]]
        page.wait(ALL)
        got, wanted = stored(large, "outputs"), stored(large, "reference-0")
        (row,) = page.texts("#worst tbody tr")
        texts = row.split("\t")
        assert texts[0] == str(list(WRONG))
        assert [np.float32(text) for text in texts[1:3]] == [got[WRONG], wanted[WRONG]]
        assert float(texts[3]) == pytest.approx(float(abs(got[WRONG] - wanted[WRONG])), rel=1e-2)
        assert page.texts("#mismatches") == [f"1 of {SIDE * SIDE}"]
        counted = page.texts("#charts tbody tr")[0].split("\t")
        assert counted[1] == str(SIDE * SIDE) and float(counted[6]) == pytest.approx(float(got.max()), rel=1e-2)
        # The page transferred less than a hundredth of the tensors.
        sizes = "performance.getEntriesByType('%s').reduce((sum, one) => sum + one.transferSize, 0)"
        assert page.run(f"{sizes % 'resource'} + {sizes % 'navigation'}") < 2 * got.nbytes / 100

        page.click("#worst a")
        page.wait(f"{ALL} && location.search.includes('mark')")
        top, left = (int(page.run(f"new URLSearchParams(location.search).get('{name}')")) for name in ("top", "left"))
        assert page.run(DIFFERENT) == [[WRONG[0] - top, WRONG[1] - left]]
        wide = page.run("document.querySelector('#map-difference img').width") / 33
        page.point("#map-difference img", (WRONG[1] - left + 0.5) * wide, (WRONG[0] - top + 0.5) * wide)
        page.wait(f"document.getElementById('cell').textContent.startsWith('{list(WRONG)}')")
        (told,) = page.texts("#cell")
        values = re.findall(r"(?:Board|Reference) (\S+),", told)
        assert [np.float32(value) for value in values] == [got[WRONG], wanted[WRONG]]


def test_slice_selection_updates_url(small: Path, page: Page) -> None:
    got, wanted = stored(small, "outputs"), stored(small, "reference-0")
    with serving(small) as address:
        page.open(f"{address}/tensors?id=run&case=model&output=conv")
        page.wait(ALL)
        for name, value in (("columns", "3"), ("rows", "2"), ("i0", "1"), ("i1", "2")):
            choose(page, name, value)
            page.wait(f"new URLSearchParams(location.search).get('{name}') === '{value}' && {ALL}")
        apart = np.argwhere(got[1, 2] != wanted[1, 2]).tolist()
        assert page.run(DIFFERENT) == apart and len(apart) == 50
        choose(page, "rows", "")
        page.wait("!new URLSearchParams(location.search).has('rows') && " + ALL)
        choose(page, "rows", "1")
        page.wait("new URLSearchParams(location.search).get('rows') === '1'")
        page.wait("document.querySelector('#map-difference img').naturalHeight === 3")
        assert page.run(DIFFERENT) == np.argwhere(got[1, :, 0] != wanted[1, :, 0]).tolist()
        there = page.run("location.href")
        page.open(there)
        page.wait(ALL)
        assert page.run("document.querySelector('#map-difference img').naturalHeight") == 3


def choose(page: Page, name: str, value: str) -> None:
    """Set a form field as a user does."""
    field = f"document.getElementById('{name}')"
    page.run(f"{field}.value = '{value}'; {field}.dispatchEvent(new Event('change', {{bubbles: true}}))")


def test_tolerance_slider_updates_verdict(small: Path, page: Page) -> None:
    got, wanted = (stored(small, kind).astype(np.float64) for kind in ("outputs", "reference-0"))
    with serving(small) as address:
        page.open(f"{address}/tensors?id=run&case=model&output=conv")
        page.wait(ALL)
        assert page.texts("#mismatches") == ["50 of 3600"] and "FAIL" in page.texts("#judged")[0]
        page.run("document.getElementById('rtol-slider').focus()")
        slide = "(one => { one.value = %s; for (const kind of ['input', 'change'])"
        slide += " one.dispatchEvent(new Event(kind, {bubbles: true})); })(document.getElementById('%s'))"
        page.run(slide % (-5, "rtol-slider"))
        page.wait("new URLSearchParams(location.search).get('rtol') === '0.00001' && " + ALL)
        page.run(slide % (np.log10(0.045), "atol-slider"))
        page.wait("new URLSearchParams(location.search).has('atol') && " + ALL)
        rtol, atol = (float(page.run(f"document.getElementById('{name}').value")) for name in ("rtol", "atol"))
        left = int(np.count_nonzero(np.abs(got - wanted) > atol + rtol * np.abs(wanted)))
        assert 0 < left < 50
        page.wait(f"document.getElementById('mismatches').textContent === '{left} of 3600'")
        page.run(slide % (np.log10(0.02), "rtol-slider"))
        page.wait("document.getElementById('mismatches').textContent === '0 of 3600'")
        assert "PASS" in page.texts("#judged")[0]
        # The verdict of the record is also shown.
        assert page.texts(".statistics tr:last-child td") == ["PASS", "FAIL"]


def test_keys_read_values_and_zoom(small: Path, page: Page) -> None:
    got, wanted = stored(small, "outputs"), stored(small, "reference-0")
    with serving(small) as address:
        page.open(f"{address}/tensors?id=run&case=model&output=conv&rows=2&columns=3&i0=1&i1=2")
        page.wait(ALL)
        page.run("document.querySelector('#map-difference .plot').focus()")
        for key in ["ArrowDown"] * 4 + ["ArrowRight"] * 11:
            page.press(key)
        page.wait("document.getElementById('cell').textContent.startsWith('[1, 2, 4, 11]')")
        (told,) = page.texts("#cell")
        values = [np.float32(value) for value in re.findall(r"(?:Board|Reference) (\S+),", told)]
        assert values == [got[1, 2, 4, 11], wanted[1, 2, 4, 11]]
        page.press("Enter")
        page.wait("new URLSearchParams(location.search).get('mark') === '1,2,4,11'")
        # After zooming, the focus stays in the same map, at that element.
        page.wait(f"{ALL} && document.activeElement.closest('figure')?.id === 'map-difference'")
        page.press("ArrowRight")
        page.wait("document.getElementById('cell').textContent.startsWith('[1, 2, 4, 12]')")
        assert page.troubles == []


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_tensor_page_fits_window(small: Path, width: int, dark: bool) -> None:
    assert BROWSER is not None
    with serving(small) as address, Page(BROWSER, width=width, dark=dark) as page:
        for query in ("output=conv", "kind=inputs&output=image", "output=conv&rows=2&columns=3"):
            page.open(f"{address}/tensors?id=run&case=model&{query}")
            page.wait("document.querySelector('#map-value-0 img')?.complete")
            assert page.run("document.documentElement.scrollWidth") <= width
            for image in page.run("[...document.images].map(one => [one.alt, one.getAttribute('alt') !== null])"):
                assert image[1], image
            sides = page.run("[...document.querySelectorAll('.map img[alt*=\"rows\"]')].map(one => one.alt)")
            assert sides and all(re.search(r"rows \d+ to \d+", side) for side in sides)
        assert page.troubles == []


def test_scale_and_tiles_switch_and_export(small: Path, page: Page) -> None:
    with serving(small) as address:
        page.open(f"{address}/tensors?id=run&case=model&output=conv")
        page.wait(ALL)
        for scale, words in (("symlog", "Scale: symlog"), ("tolerance", "1 is the limit"), ("linear", "Scale: linear")):
            choose(page, "scale", scale)
            page.wait(f"new URLSearchParams(location.search).get('scale') === '{scale}' && {ALL}")
            assert words in page.texts("#map-difference .scale-text")[0]
        page.click("a.button[href*='layout=NCHW']")
        page.wait(f"new URLSearchParams(location.search).get('layout') === 'NCHW' && {ALL}")
        tiles = page.texts(".tiles a")
        assert [text.partition(":")[0] for text in tiles] == ["0", "1", "2"]
        assert page.texts("#map-difference p.axis") == ["axis 2 (H) ↓"]
        # The script draws the PNG file from the SVG file: wider than the map, with a title.
        page.run("window.blobs = []; URL.createObjectURL = (blob) => { blobs.push(blob); return '#'; }; undefined")
        page.click("#map-difference a[data-png]")
        page.wait("blobs.length === 1")
        size = page.run("createImageBitmap(blobs[0]).then(one => [one.width, one.height, blobs[0].type])")
        svg = page.run("fetch(document.querySelector('#map-difference a[download$=svg]').href).then(one => one.text())")
        wide, high = map(int, re.findall(r'width="(\d+)" height="(\d+)"', svg)[0])
        assert size == [2 * wide, 2 * high, "image/png"] and "axis 2 (H)" in svg
        assert page.run("document.querySelector('#map-difference a[data-png]').download") == (
            "model-conv-difference-linear.png"
        )


def test_keys_follow_failing_outputs(tmp_path: Path, page: Page) -> None:
    right, wrong = np.ones((4, 5), np.float32), np.full((4, 5), 2, np.float32)
    write_tensors(tmp_path, {"a": wrong, "b": right, "c": wrong}, {"a": right, "b": right, "c": right})
    with serving(tmp_path) as address:
        page.open(f"{address}/tensors?id=run&case=model&output=b&kind=outputs&scale=robust")
        page.wait(ALL)
        chosen = []
        for key in "nnp":
            before = page.run("location.href")
            for kind in ("keyDown", "keyUp"):
                page.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if kind == "keyDown" else "")
            page.wait(f"location.href !== {before!r} && {ALL}")
            chosen.append(page.run("new URLSearchParams(location.search).get('output')"))
        assert chosen == ["a", "c", "a"]
        assert page.run("new URLSearchParams(location.search).get('scale')") == "robust"
        assert "failing output 1 of 2" in page.texts(".failing")[0]


def test_web_diff_opens_tensor_page_for_two_files(small: Path, page: Page) -> None:
    files = [str(small / "run" / "model" / kind / "0.npy") for kind in ("outputs", "reference-0")]
    command = [sys.executable, "-m", "hil", "web", "diff", *files, "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address.endswith("/tensors")
            page.open(address)
            page.wait(ALL)
            assert page.texts("#mismatches") == ["50 of 3600"]
            assert page.texts("#worst tbody tr") and page.texts("h1")[0].startswith("0.npy")
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_web_diff_rejects_invalid_tensor_file(tmp_path: Path) -> None:
    file = tmp_path / "a.npy"
    file.write_text("no tensor")
    command = [sys.executable, "-m", "hil", "web", "diff", str(file), str(file), "--no-browser"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and "is not a readable .npy file" in ended.stderr
