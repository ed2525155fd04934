"""Measure how long a reader waits in Chromium for a large graph and for the maps of a large tensor in `hil web`.

Each page is new: the model's graph has no layout yet, the part of the tensor was never drawn, and the browser has just
started. The time is from opening the address until the page shows the graph or the maps.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlencode

from benchmarks import common
from benchmarks.common import Row
from benchmarks.web_extras import CASE, TENSOR, write_graph
from benchmarks.web_server import Server

_DRAWN = "document.getElementById('graph')?.dataset.drawn === 'yes'"
_MAPS = ("value-0", "difference", "ulp")
_ALL = "!!(document.querySelector('#charts h2') && document.querySelector('#numbers table'))"


def sights(server: Server, root: Path, nodes: int, times: int, notes: list[str]) -> list[Row]:
    """Return the rows; [] without Chromium."""
    sys.path.append(str(common.HERE.parent / "tests"))
    from support.browser import Page, find_browser

    browser = find_browser()
    if browser is None:
        notes.append("graphs and tensors skipped: Chromium not found")
        return []

    def seen(address: str, conditions: dict[str, str]) -> dict[str, float]:
        with Page(browser) as page:
            begun = time.perf_counter()
            page.call("Page.navigate", url=server.address.rstrip("/") + address)
            found = {}
            for name, condition in conditions.items():
                page.wait(condition)
                found[name] = (time.perf_counter() - begun) * 1e3
            return found

    graphs = [seen(_new_graph(server, root, nodes, number), {"drawn": _DRAWN}) for number in range(times)]
    rows = [_row(f"a graph of {nodes} nodes that was never drawn, in Chromium", graphs, "drawn", "<= 2000")]
    rows.append(_again(server, root, nodes, times, seen))
    shutil.rmtree(root / "graphs")
    images = {name: f"document.querySelector('#map-{name} img')?.complete === true" for name in _MAPS}
    tensors = [seen(_tensor(number), {**images, "all": _ALL}) for number in range(times)]
    rows.append(_row("a tensor of 100 MB, its first picture, in Chromium", tensors, _MAPS[0], "<= 1000"))
    rows.append(_row("the same, the map of its errors", tensors, _MAPS[1], ""))
    rows.append(_row("the same, all of it", tensors, "all", ""))
    return rows


def _new_graph(server: Server, root: Path, nodes: int, number: int) -> str:
    """Return the address of a graph's page, after the index contains its session."""
    folder = root / "graphs" / f"{time.time_ns():x}-{number}"
    part = folder.with_name(f".{folder.name}")
    part.mkdir(parents=True)
    write_graph(part, nodes, folder.name)
    part.rename(folder)
    address = f"/session?id={quote(f'graphs/{folder.name}', safe='')}"
    for _ in range(600):
        if server.get(address)[1] == 200:
            break
        time.sleep(0.1)
    return address.replace("/session", "/graph")


def _again(
    server: Server, root: Path, nodes: int, times: int, seen: Callable[[str, dict[str, str]], dict[str, float]]
) -> Row:
    address = _new_graph(server, root, nodes, 0)
    server.get(address)
    found = [seen(address, {"drawn": _DRAWN}) for _ in range(times)]
    return _row("the same, when it was drawn before", found, "drawn", "<= 2000")


def _tensor(number: int) -> str:
    """Return the address of a tensor's page: almost all rows, with a different part and tolerance each time."""
    query: dict[str, object] = {"id": f"extra/{TENSOR}", "case": CASE, "top": number + 1000, "height": 48_000 - number}
    query["rtol"] = f"{1e-3 + 1e-6 * number:g}"
    return f"/tensors?{urlencode(query)}"


def _row(name: str, found: list[dict[str, float]], what: str, bar: str) -> Row:
    values = [one[what] for one in found]
    return Row(f"{name} ({min(values):.0f} to {max(values):.0f})", statistics.median(values), "ms", bar=bar)
