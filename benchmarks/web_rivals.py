"""Run the rivals of `hil web`: datasette on its index, and a session that is read from one JSON file and rendered."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlencode

from jinja2 import Environment

from benchmarks.web_pages import Addresses
from benchmarks.web_server import Server, serving
from benchmarks.web_store import TARGETS
from hil.controller.workloads.suites.store import HEAD, LINES

_SERVE = """
import socket, sys
from datasette.cli import cli
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    port = one.getsockname()[1]
print(f"http://127.0.0.1:{port}/", flush=True)
cli(["serve", sys.argv[1], "--port", str(port), "--setting", "sql_time_limit_ms", "10000"])
"""


def datasette_python(named: str, notes: list[str]) -> str | None:
    """Return an interpreter with datasette: the given interpreter, or the interpreter of the command on the PATH."""
    command = shutil.which("datasette")
    if not named and command:
        first = Path(command).read_text(errors="replace").partition("\n")[0]
        named = first.removeprefix("#!").strip()
    for python in filter(None, (named, sys.executable)):
        if subprocess.run([python, "-c", "import datasette"], capture_output=True).returncode == 0:
            return python
    notes.append("datasette skipped: not installed; set --datasette to the Python of an environment with datasette")
    return None


@contextlib.contextmanager
def datasette(python: str, index: Path) -> Iterator[Server]:
    """Start datasette on an index, and wait until it responds."""
    with serving([python, "-c", _SERVE, str(index)], quiet=True) as server:
        for _ in range(200):
            with contextlib.suppress(ConnectionRefusedError):
                server.get("/")
                break
            time.sleep(0.1)
        yield server


def datasette_pages(index: Path, keys: Sequence[int]) -> dict[str, Addresses]:
    """Return datasette's pages for the tables on hil's pages with the same names, with a hundred rows each."""
    base = f"/{index.stem}"

    def table(name: str, **query: object) -> str:
        return f"{base}/{name}?{urlencode({'_size': 100, **query})}"

    def board(number: int) -> str:
        return TARGETS[number % len(TARGETS)][2]

    return {
        "sessions": lambda n: table("sessions", _sort_desc="created"),
        "sessions, filtered": lambda n: table(
            "sessions", boards__contains=board(n), labels__contains="nightly", branch="main", _sort_desc="created"
        ),
        "session of 500 cases": lambda n: table("cases", session=keys[n * 37 % (len(keys) - 1)], _sort="number"),
        "session of 50,000 cases": lambda n: table("cases", session=keys[-1], _sort="number"),
    }


_TABLE = """<!doctype html><title>{{ head.id }}</title><h1>{{ head.suite }} {{ head.flow }}</h1>
<table>{% for one in cases %}<tr><td>{{ one.outcome }}</td><td>{{ one.id }}</td><td>{{ one.op }}</td>
<td>{{ one.board }}</td><td>{{ one.device_p50_ns }}</td><td>{{ one.timings.run_s }}</td>
<td>{% for out in one.outputs %}{{ out.max_abs }} {{ out.max_ulp }} {{ out.sqnr_db }}{% endfor %}</td>
<td>{{ one.message }}</td></tr>{% endfor %}</table>"""


def one_json(folder: Path, place: Path) -> Path:
    """Write a session as one JSON file."""
    cases = [json.loads(line) for line in (folder / LINES).read_text().splitlines()]
    place.write_text(json.dumps({"head": json.loads((folder / HEAD).read_text()), "cases": cases}))
    return place


def reading_in_full() -> Callable[[Path], float]:
    """Return a function that reads such a file and renders all cases in this process.

    The function returns the seconds.
    """
    template = Environment(autoescape=True).from_string(_TABLE)

    def seconds(path: Path) -> float:
        start = time.perf_counter()
        template.render(**json.loads(path.read_text())).encode()
        return time.perf_counter() - start

    return seconds
