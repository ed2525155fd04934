"""Measure `hil web` with a million results: first index, pages during and after indexing, new sessions, memory.

- The benchmark first writes a year of sessions of a suite: 2,000 sessions of 500 cases, and one of 50,000
  (`web_store.py`). `--keep DIR` keeps them for the next run, which continues an interrupted write.
- Pages are requested in sequence over one connection to a server process, with a different address each time. The time
  is for the whole response. The limit applies to `p95`.
- In Chromium, if available: the first contentful paint of a page that was never open, and the time until a large graph
  and the maps of a large tensor are visible (`web_sights.py`).
- There are two rivals: datasette on the same index (`--datasette PYTHON`, the interpreter of an environment with
  datasette), for tables that both show; and a session as one JSON file that is read completely and rendered in this
  process.

Run it as `python -m benchmarks.web`. `--quick` uses a small size, to check that the benchmark works.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common
from benchmarks.common import Row
from benchmarks.web_extras import make_extras
from benchmarks.web_pages import Times, ask_rounds, ask_until, pages
from benchmarks.web_rivals import datasette, datasette_pages, datasette_python, one_json, reading_in_full
from benchmarks.web_server import READING, Server, hil_web
from benchmarks.web_sights import sights
from benchmarks.web_store import Case, make_store, write_session


@dataclass(frozen=True)
class Size:
    """Size of the measurement."""

    sessions: int = 2000
    cases: int = 500
    large: int = 50_000
    elements: int = 25_000_000
    nodes: int = 5000
    rounds: int = 20
    news: int = 5  # number of sessions that are added during the run
    idle_s: float = 20.0


QUICK = Size(sessions=12, cases=50, large=300, elements=250_000, nodes=50, rounds=2, news=1, idle_s=1.0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--quick", action="store_true", help="use a small size to test the benchmark itself")
    parser.add_argument("--keep", type=Path, help="directory for the sessions (default: a temporary directory)")
    parser.add_argument("--datasette", default="", help="Python of an environment with datasette")
    asked = parser.parse_args()
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="hil-bench-") as scratch:
        place = asked.keep or Path(scratch)
        rows = measure(QUICK if asked.quick else Size(), place, Path(scratch), asked.datasette, notes)
    common.show("web", rows, notes, as_json=asked.json)


def measure(size: Size, place: Path, scratch: Path, python: str, notes: list[str]) -> list[Row]:
    """Return all rows."""
    root, cache = place / "sessions", scratch / "cache"
    shutil.rmtree(root / "new", ignore_errors=True)
    folders = make_store(root, size.sessions, size.cases, size.large, lambda text: print(text, file=sys.stderr))
    make_extras(root, size.elements, size.nodes)
    with hil_web(root, cache) as server:
        rows = first_index(server, folders, size, notes)
        idle = ask_rounds(server, pages(folders), size.rounds)
        rows += idle.rows("idle")
        print(json.dumps([(row.case, round(row.value, 1)) for row in rows]), file=sys.stderr)
        notes += [f"{name}: {count} of {size.rounds} requests failed" for name, count in idle.refused.items()]
        rows += new_sessions(server, root, size, notes)
        rows.append(
            Row("judging the histories that they changed, and those left of the first index", judged(server), "s")
        )
        begun = server.cpu_s()
        time.sleep(size.idle_s)
        share = (server.cpu_s() - begun) / size.idle_s
        rows.append(Row("looking at the folders, of one core, when nothing changes", share * 100, "%", bar="<= 3"))
        rows += paints(server, pages(folders), size, notes)
        rows += sights(server, root, size.nodes, max(1, size.rounds // 4), notes)
        rows.append(Row("peak memory, all its processes", server.peak_bytes() / 1e6, "MB", bar="<= 500"))
        (index,) = (cache / "hil" / "web").glob("*.sqlite")
        rows += beside_datasette(server, index, folders, size, python, notes)
        rows += beside_one_json(idle, folders, scratch, size)
    return rows


def first_index(server: Server, folders: Sequence[Path], size: Size, notes: list[str]) -> list[Row]:
    """Return rows for pages during the first indexing. Pages of sessions that are not indexed yet do not count."""
    begun, shown = time.perf_counter(), set[bytes]()

    def over(body: bytes) -> bool:
        shown.add(body.partition(READING)[2][:60])
        # Only pages contain this text, not other responses such as a graph's data.
        return body.startswith(b"<!doctype") and READING not in body

    times = ask_until(server, pages(folders), over)
    seconds = time.perf_counter() - begun
    notes.append(f"pages reported {len(shown) - 1} different progress values during indexing")
    results = size.sessions * size.cases + size.large
    rows = [Row(f"first index of {results} results, pages being asked for all the while", seconds, "s", bar="<= 300")]
    rows.append(Row("peak memory until then", server.peak_bytes() / 1e6, "MB", bar="<= 500"))
    return rows + times.rows("first index")


def new_sessions(server: Server, root: Path, size: Size, notes: list[str]) -> list[Row]:
    """Return a row for the time from creating a session's directory until the page of sessions shows it."""
    cases = [Case(number) for number in range(size.cases)]
    waits = []
    for number in range(size.news):
        folder = root / "new" / f"{number:04x}"
        folder.parent.mkdir(exist_ok=True)
        write_session(folder, size.sessions + number, 1.0, cases, time.time())
        begun = time.perf_counter()
        while f"new%2F{number:04x}".encode() not in server.get("/")[2]:
            if time.perf_counter() - begun > 60:
                break  # the limit is missed; continue with the other measurements
            time.sleep(0.02)
        waits.append(time.perf_counter() - begun)
    notes.append("new sessions took " + ", ".join(f"{one:.2f}" for one in waits) + " s")
    return [Row("a new session on the page, the longest", max(waits), "s", bar="<= 2")]


def judged(server: Server) -> float:
    """Return the seconds until the page of regressions shows that all histories are analysed."""
    begun = time.perf_counter()
    while b"are not yet analysed" in server.get("/history/regressions")[2]:
        assert time.perf_counter() - begun < 600, "histories not analysed in time"
        time.sleep(0.2)
    return time.perf_counter() - begun


def paints(server: Server, addresses: dict[str, object], size: Size, notes: list[str]) -> list[Row]:
    """Return rows for the first contentful paint in Chromium, for pages that it never opened."""
    sys.path.append(str(common.HERE.parent / "tests"))
    from support.browser import Page, find_browser

    browser = find_browser()
    if browser is None:
        notes.append("first contentful paint skipped: Chromium not found")
        return []
    script = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
    rows = []
    for name in ("sessions", "session of 500 cases", "session of 50,000 cases", "history of a case"):
        found = []
        for number in range(max(1, size.rounds // 4)):
            address = addresses[name](number)
            if server.get(address)[1] != 200:
                break
            with Page(browser) as page:
                page.open(server.address.rstrip("/") + address)
                page.wait(f"{script} > 0")
                found.append(page.run(script))
        if found:
            spread = f"{min(found):.0f} to {max(found):.0f}"
            rows.append(
                Row(f"first contentful paint: {name} ({spread})", statistics.median(found), "ms", bar="<= 1000")
            )
    return rows


def beside_datasette(
    server: Server, index: Path, folders: Sequence[Path], size: Size, python: str, notes: list[str]
) -> list[Row]:
    """Return rows for pages with tables, relative to datasette with the same rows. Rounds are interleaved."""
    found = datasette_python(python, notes)
    if found is None:
        return []
    database = sqlite3.connect(index)
    keys = dict(database.execute("select id, key from sessions").fetchall())
    database.close()
    theirs = datasette_pages(index, [keys[folder.name] for folder in folders])
    mine = pages(folders)
    rows = []
    with datasette(found, index) as rival:
        for name, address in theirs.items():
            ours, others = Times(), Times()
            for number in range(size.rounds + 1):
                for times, one, path in ((ours, server, mine[name](number)), (others, rival, address(number))):
                    times.ask(one, name, path)
            if name not in others.seconds or name not in ours.seconds:
                notes.append(f"datasette failed to serve {name}: {others.refused}")
                continue
            rows.append(
                common.beside(name, ours.seconds[name][1:], "datasette", others.seconds[name][1:], 1e3, "ms", "")
            )
    return rows


def beside_one_json(idle: Times, folders: Sequence[Path], scratch: Path, size: Size) -> list[Row]:
    """Return rows for a session's page over HTTP, relative to reading and rendering one JSON file in this process."""
    read = reading_in_full()
    rows = []
    for name, folder in (("session of 500 cases", folders[0]), ("session of 50,000 cases", folders[-1])):
        path = one_json(folder, scratch / "session.json")
        theirs = [read(path) for _ in range(max(2, size.rounds // 4))]
        mine = statistics.median(idle.seconds[name])
        rival = statistics.median(theirs)
        rows.append(Row(name, mine * 1e3, "ms", "one JSON read in full", rival * 1e3, mine / rival))
    return rows


if __name__ == "__main__":
    main()
