"""Measure ordinary pages of `hil web` while other readers compute on large tensors.

Several clients request the maps, statistics and charts of two tensors of 2 GB, each time with other parameters, so
that the server computes each result. Another client requests ordinary pages in sequence. The limit of 100 ms applies to
`p95` of these pages.

Run it as `python -m benchmarks.web_readers`. `--quick` uses a small size, to check that the benchmark works.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from benchmarks import common
from benchmarks.common import Row
from benchmarks.web_extras import CASE, TENSOR, make_extras
from benchmarks.web_pages import BAR, P95, ask_rounds, pages, percentile
from benchmarks.web_server import hil_web
from benchmarks.web_store import make_store

# Pages that anybody opens. The names are those of `web_pages.pages`.
PAGES = ("sessions", "session of 500 cases", "case", "compare two sessions", "history of a case", "sessions, searched")
PARTS = ("numbers", "charts", "values", "errors")


@dataclass(frozen=True)
class Size:
    """Size of the measurement."""

    gigabytes: float = 2.0
    readers: int = 10
    rounds: int = 40
    sessions: int = 100
    cases: int = 200


QUICK = Size(gigabytes=0.02, readers=3, rounds=3, sessions=12, cases=50)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--quick", action="store_true", help="use a small size to test the benchmark itself")
    parser.add_argument("--readers", type=int, help="number of clients that read tensors")
    parser.add_argument("--gigabytes", type=float, help="size of each tensor")
    parser.add_argument("--keep", type=Path, help="directory for the sessions (default: a temporary directory)")
    asked = parser.parse_args()
    size = QUICK if asked.quick else Size()
    size = replace(size, readers=asked.readers or size.readers, gigabytes=asked.gigabytes or size.gigabytes)
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="hil-bench-") as scratch:
        rows = measure(size, asked.keep or Path(scratch), Path(scratch), notes)
    common.show("web_readers", rows, notes, as_json=asked.json)


def measure(size: Size, place: Path, scratch: Path, notes: list[str]) -> list[Row]:
    """Return the times of pages on an idle server, and of the same pages with readers."""
    root = place / "sessions"
    folders = make_store(root, size.sessions, size.cases, size.cases, lambda text: print(text, file=sys.stderr))
    make_extras(root, int(size.gigabytes * 1e9 / 4), 50)
    asked = {name: address for name, address in pages(folders).items() if name in PAGES}
    with hil_web(root, scratch / "cache") as server:
        server.wait_read()
        rows = ask_rounds(server, asked, size.rounds).rows("idle")
        with TensorReaders(server.address, size.readers) as readers:
            times = ask_rounds(server, asked, size.rounds)
        rows += times.rows(f"with {size.readers} readers")
        refused = sum(times.refused.values())
        notes.append(f"the readers got {readers.done} parts of tensors, {readers.failed} failed")
        notes.append(f"{refused} ordinary pages failed")
        every = [one for found in times.seconds.values() for one in found]
        rows.append(Row("all pages, with readers, p95", percentile(every, P95) * 1e3, "ms", bar=f"<= {BAR}"))
        rows.append(Row("all pages, with readers, maximum", max(every) * 1e3, "ms"))
    return rows


class TensorReaders:
    """Clients that request parts of tensors in sequence, each with other parameters."""

    def __init__(self, address: str, count: int) -> None:
        self.done = self.failed = 0
        self._address = urlsplit(address).netloc
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._read, args=(one,), daemon=True) for one in range(count)]

    def __enter__(self) -> TensorReaders:
        for one in self._threads:
            one.start()
        # Begin when all readers wait or compute.
        time.sleep(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _read(self, reader: int) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            query = {"id": f"extra/{TENSOR}", "case": CASE, "now": PARTS[(reader + number) % len(PARTS)]}
            # Other parameters give another result, which the server computes from the whole tensor.
            query |= {"rtol": f"1e-{number % 9 + 1}", "atol": f"{reader + 1}e-6", "top": number}
            connection = http.client.HTTPConnection(self._address, timeout=600)
            try:
                connection.request("GET", f"/tensors?{urlencode(query)}")
                response = connection.getresponse()
                response.read()
                is_ok = response.status == 200
            except (OSError, http.client.HTTPException):
                is_ok = False  # at the end, the server ends before the readers
            finally:
                connection.close()
            with self._lock:
                if not self._stop.is_set():
                    self.done += is_ok
                    self.failed += not is_ok


if __name__ == "__main__":
    main()
