"""Every `hil web` page over stored results: accessibility and screen sizes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import urlencode

import pytest
from support.browser import NAMES, Page, find_browser
from support.commands import run_hil
from support.fake_farm_client import busy_farm
from support.web import serving

BROWSER = find_browser()
pytestmark = [
    pytest.mark.skipif(not BROWSER, reason=f"no browser on PATH: {', '.join(NAMES)}"),
    pytest.mark.timeout(600),
]
ROOT = Path(__file__).parents[2]
AXE = (ROOT / "tests" / "support" / "axe" / "axe.min.js").read_text()
DIGITS = str(ROOT / "examples" / "digits" / "digits_cnn.onnx")
TOKEN = "of-whoever-started-it"
PAGES = {
    "sessions": "/",
    "session of a suite": "/session?" + urlencode({"id": "suite"}),
    "session of a run": "/session?" + urlencode({"id": "bisect"}),
    "case": "/case?" + urlencode({"id": "wrong", "case": "digits_cnn"}),
    "compare": "/compare?" + urlencode({"a": "suite", "b": "later"}),
    "history of a case": "/history?" + urlencode({"case": "digits_cnn_full_model"}),
    "regressions": "/history/regressions",
    "tensors": "/tensors?" + urlencode({"id": "wrong", "case": "digits_cnn", "output": "logits"}),
    "graph": "/graph?" + urlencode({"id": "bisect"}),
    "traces": "/traces",
    "boards of a farm": "/boards",
    "board of a farm": "/board?name=pi",
    "queue of a farm": "/queue",
    "job that runs": "/job?name=1",
    "jobs that wait": "/job?name=2",
    "job that ended": "/job?name=3",
    # Messages of Perfetto's page may arrive after it closes: the next page is also a noisy one.
    "trace": "/trace?" + urlencode({"id": "profiled", "case": "digits_cnn"}),
    "what cannot be shown": "/session?id=nothing",
}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A server over a failing run, a profiled run, a bisection, two suite runs, and a farm."""
    root = tmp_path_factory.mktemp("stored")
    (root / "nets").mkdir()
    (root / "nets" / "digits_cnn.onnx").write_bytes(Path(DIGITS).read_bytes())
    commands = {
        "run": ["run", DIGITS, "--runtime-hw-type", "sim-undeclared", "--out", "runs"],
        "profile": ["run", DIGITS, "--profile", "profile", "--out", "profiled-runs"],
        "bisect": ["bisect", DIGITS, "--runtime-hw-type", "sim-undeclared", "--out", "bisect"],
        "suite": ["suite", "run", "nets", "--flow", "iree", "--runtime-hw-type", "sim", "--out", "suite"],
        "later": ["suite", "run", "nets", "--flow", "iree", "--runtime-hw-type", "sim-undeclared", "--out", "later"],
    }
    for name, command in commands.items():
        done = run_hil(command, {**os.environ, "HIL_CACHE_DIR": str(root.parent / "cache")}, root)
        assert done.code in (0, 1), (name, done.out, done.err)
    for folder, name in (("runs", "wrong"), ("profiled-runs", "profiled")):
        next((root / folder).glob("*/run.json")).parent.rename(root / name)
    with busy_farm().link() as farm, serving(root, token=TOKEN, farm=farm) as found:
        yield found


# Perfetto's page requests blocked resources, and missing content gives a 404.
NOISY = ("trace", "what cannot be shown")
SERIOUS = ("serious", "critical")
OUTSIDE = """[...document.querySelectorAll('main *, header *')].filter(one => !one.closest('.scroll')
    && one.getBoundingClientRect().right > innerWidth + 1).slice(0, 3).map(one => one.outerHTML.slice(0, 150))"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "screens",
    [
        pytest.param([(1280, False), (390, True)], id="wide and light, narrow and dark"),
        pytest.param([(1280, True), (390, False)], id="wide and dark, narrow and light"),
    ],
)
def test_pages_are_accessible_and_fit_screen(address, screens):
    # Several screens per test: the setup takes longer than the checks.
    found = {}
    for width, dark in screens:
        with Page(BROWSER, width=width, dark=dark) as page:
            # A user with write access sees the most.
            page.open(f"{address}/?token={TOKEN}")
            for name, path in PAGES.items():
                page.open(address + path)
                page.run(AXE + "; true")
                told = json.loads(page.run("axe.run(document, {iframes: false}).then(JSON.stringify)"))
                barriers = {
                    one["id"]: [node["html"][:150] for node in one["nodes"][:3]]
                    for one in told["violations"]
                    if one["impact"] in SERIOUS
                }
                if page.run("document.documentElement.scrollWidth > innerWidth"):
                    barriers["it is wider than the window"] = page.run(OUTSIDE)
                if page.troubles and name not in NOISY:
                    barriers["its console"] = page.troubles[:]
                page.troubles.clear()
                if barriers:
                    found[f"{name}, {width} px, {'dark' if dark else 'light'}"] = barriers
    assert not found, json.dumps(found, indent=1)
