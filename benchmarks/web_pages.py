"""Define the measured pages. The addresses of a page differ, so that no response comes from a cache."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlencode

from benchmarks.common import Row
from benchmarks.web_extras import CASE, GRAPH, TENSOR
from benchmarks.web_server import Server
from benchmarks.web_store import TARGETS, Case

P95 = 0.95
# Default limit for pages in milliseconds, and the limits of pages that differ.
BAR = 100
BARS = {"the same, what is drawn": 2000, "the same, its maps": 1000, "the same, its errors": 1000}
Addresses = Callable[[int], str]


def pages(folders: Sequence[Path]) -> dict[str, Addresses]:
    """Return page -> function from the number of a request to the address."""
    *plain, large = folders

    def session(number: int) -> dict[str, str]:
        return {"id": plain[number * 37 % len(plain)].name}

    def at(path: str, **query: object) -> str:
        return f"{path}?{urlencode(query)}"

    def named(number: int) -> str:
        return Case(number * 13 % 50).name

    def tensor(number: int, **query: object) -> str:
        # A part with almost all rows, different each time.
        part = {"top": number % 1000, "height": 49_000 - number // 1000}
        return at("/tensors", id=f"extra/{TENSOR}", case=CASE, **part, **query)

    board = [one[2] for one in TARGETS]
    return {
        "sessions": lambda n: "/",
        "sessions, filtered": lambda n: at("/", board=board[n % 4], label="nightly", branch="main", page=1 + n % 3),
        "sessions, of a model that erred": lambda n: at("/", model=Case(n % 10).model, verdict="error", page=1 + n % 5),
        "sessions, searched": lambda n: at("/", q=f"team-{n % 7} {board[n % 4]}"),
        "sessions, ordered": lambda n: at("/", order=("-failing", "title", "cases", "-created")[n % 4], page=1 + n % 9),
        "sessions, deep page": lambda n: at("/", page=max(1, len(plain) // 100 - n % 3)),
        "session of 500 cases": lambda n: at("/session", **session(n)),
        "session, filtered": lambda n: at("/session", **session(n), outcome="failing", q="conv"),
        "session, ordered by time": lambda n: at("/session", **session(n), order="-time", page=1 + n % 5),
        "session of 50,000 cases": lambda n: at("/session", id=large.name, page=1 + n * 7 % 500),
        "the same, ordered": lambda n: at("/session", id=large.name, order=("-time", "name", "abs")[n % 3], page=1 + n),
        "the same, searched": lambda n: at("/session", id=large.name, q=f"conv_{n}"),
        "case": lambda n: at("/case", **session(n), case=named(n)),
        "case of 50,000": lambda n: at("/case", id=large.name, case=Case(n * 97 % 300).name),
        "compare two sessions": lambda n: at("/compare", a=plain[-5 - n % 4].name, b=plain[-1 - n % 4].name),
        "compare with the one before": lambda n: at("/compare", b=plain[-1 - n % 9].name),
        "compare with 50,000 cases": lambda n: at("/compare", a=plain[-1 - n % 9].name, b=large.name),
        "compare 50,000 cases with as many": lambda n: at(
            "/compare", a=large.name, b=large.name, show="device_p50_ns", all=1, page=1 + n
        ),
        "compare two boards, 10 sessions each": lambda n: at(
            "/compare", **{"a.board": board[n % 4], "b.board": board[(n + 1) % 4]}
        ),
        "history of a case": lambda n: at("/history", case=named(n), board=board[n % 4]),
        "history of a case, all boards": lambda n: at("/history", case=named(n)),
        "history of a suite": lambda n: at("/history", suite="models", flow=TARGETS[n % 4][0], board=board[n % 4]),
        "regressions of a year": lambda n: at("/history/regressions", what=("", "slower", "broke")[n % 3], page=1 + n),
        "traces": lambda n: "/traces",
        "graph of 5,000 nodes": lambda n: at("/graph", id=f"extra/{GRAPH}", page=1 + n),
        "the same, what is drawn": lambda n: at("/api/graph", id=f"extra/{GRAPH}", node=f"n{n}"),
        "tensor of 100 MB": lambda n: tensor(n),
        "the same, its maps": lambda n: tensor(n, now="values"),
        "the same, its errors": lambda n: tensor(n, now="errors"),
    }


class Times:
    """Times of each page."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.refused: dict[str, int] = {}

    def ask(self, server: Server, name: str, address: str) -> bytes:
        """Request a page and return the response. Errors do not count."""
        took, status, body = server.get(address)
        if status == 200:
            self.seconds.setdefault(name, []).append(took)
        else:
            self.refused[name] = self.refused.get(name, 0) + 1
        return body

    def rows(self, when: str) -> list[Row]:
        """Return rows with the median and the 95th percentile of each page."""
        rows = []
        for name, seconds in self.seconds.items():
            rows.append(Row(f"{name}, {when}, p50", statistics.median(seconds) * 1e3, "ms"))
            rows.append(
                Row(f"{name}, {when}, p95", percentile(seconds, P95) * 1e3, "ms", bar=f"<= {BARS.get(name, BAR)}")
            )
        return rows


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)]


def ask_until(server: Server, addresses: Mapping[str, Addresses], over: Callable[[bytes], bool]) -> Times:
    """Request all pages in sequence, repeatedly, until ``over`` returns True for a response."""
    times = Times()
    for number in itertools.count():
        for name, address in addresses.items():
            if over(times.ask(server, name, address(number))):
                return times
    raise AssertionError


def ask_rounds(server: Server, addresses: Mapping[str, Addresses], rounds: int) -> Times:
    """Request all pages in each round, after a warm-up round that does not count."""
    for address in addresses.values():
        server.get(address(rounds))
    times = Times()
    for number in range(rounds):
        for name, address in addresses.items():
            times.ask(server, name, address(number))
    return times
