"""Pages with hostile content in a browser: scripts never run and pages have no errors. Memory use is limited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.browser import Page, find_browser
from support.web import serving, write_run
from support.web_hostile import PAYLOADS, hostile_root
from support.web_pages import STREAMS

BROWSER = find_browser()
_LINKS = "[...document.querySelectorAll('a[href]')].map(one => one.getAttribute('href'))"


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
@pytest.mark.parametrize(
    "name", ["script", *(pytest.param(one, marks=pytest.mark.slow) for one in ("attribute", "ends"))]
)
def test_pages_do_not_run_scripts_from_records(tmp_path: Path, name: str) -> None:
    assert BROWSER is not None
    hostile_root(tmp_path, PAYLOADS[name])
    with serving(tmp_path) as address, Page(BROWSER) as page:
        waiting, seen = ["/", "/compare?a=run&b=bench", "/compare?a=suite&b=suite"], set[tuple[str, str]]()
        while waiting and len(seen) < 40:
            path = waiting.pop(0)
            parts = urlsplit(path)
            kind = (parts.path, parts.query.split("&case=")[0][:60])
            if (
                kind in seen
                or not path.startswith("/")
                or parts.path.startswith((*STREAMS, "/share", "/log", "/static"))
            ):
                continue
            if "csv" in parts.path or "node-data" in parts.path or "file" in parts.path:
                continue
            seen.add(kind)
            page.open(address + path)
            assert page.run("window.hacked === undefined"), path
            waiting += page.run(_LINKS)
        assert page.run("document.scripts.length") == page.run(
            "document.querySelectorAll('script[src^=\"/static/\"]').length"
        )
        assert {parts for parts, _ in seen} >= {"/", "/session", "/case", "/compare"}
        # A rejected request (such as a missing file) is a response, not a script error.
        assert [one for one in page.troubles if "Failed to load resource" not in one] == []
        assert [one for one in page.requests if not one.startswith((address, "about:", "data:", "blob:"))] == []


# A separate process measures memory. Records change after indexing, so that the page's memory use is not hidden by the
# index.
_MEMORY = """
import json, resource, sys
from pathlib import Path
from support.web import asking
from support.web_pages import Crawl, routes
run = Path(sys.argv[1]) / "run" / "run.json"
with asking(Path(sys.argv[1])) as client:
    for page in ("/", "/case?id=run&case=model"):
        assert client.get(page).status_code == 200
    text = run.read_text()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = {}
    for name, more in json.loads(sys.argv[2]).items():
        run.write_text(text[:-1] + ', "more": [' + more * ((31 << 20) // len(more)) + "0]}")
        found = Crawl(client, most=40)
        found.start(*(f"/{page}?id=run&case=model" for page in ("case", "session", "graph", "tensors")), *routes())
        for _ in found.pages(): pass
        assert not found.failures, found.failures
        taken[name] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    print(json.dumps(taken))
"""
# The documented memory limit of one `hil web` request, in megabytes.
MOST_MB = 400


def test_requests_for_huge_files_stay_within_memory_limit(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    folder = write_run(root, "run", [{"name": "model"}])
    for name in ("model/logs/a.log", "logs/b.log"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            file.truncate(8 << 30)
    dense = {"lists": "[],", "objects": '{"a":{}},', "numbers": "1.5,", "texts": '"' + "x" * (1 << 16) + '",'}
    script = [sys.executable, "-c", _MEMORY, str(root), json.dumps(dense)]
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}"}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    taken = json.loads(done.stdout)
    assert set(taken) == set(dense) and max(taken.values()) < MOST_MB, taken
