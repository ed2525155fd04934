"""Provide functions for all benchmarks: agents and rivals as processes, interleaved rounds, and output."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint, Invocation, ProgramHandle
from hil.core.boards import load_board
from hil.core.files import digest_file

HERE = Path(__file__).parent
TVM = "apache-tvm==0.27.*"
_TVM_NEEDS = ("tornado", "cloudpickle", "psutil")


@dataclass(frozen=True)
class Row:
    """Result and the result of a rival in the same run. ``bar`` is the limit of ``ratio``: "<= 1.5", ">= 0.8" or ""."""

    case: str
    value: float
    unit: str
    rival: str = ""
    rival_value: float | None = None
    ratio: float | None = None
    bar: str = ""


def options(doc: str | None, **numbers: int) -> argparse.Namespace:
    """Parse the command line of a benchmark: ``--json``, and an option with a default for each number."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    return parser.parse_args()


def show(benchmark: str, rows: Sequence[Row], notes: Sequence[str], *, as_json: bool) -> None:
    """Print the table with its notes, or one JSON document."""
    machine = {"cpu": _cpu(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
    if as_json:
        said = {"benchmark": benchmark, **machine, "notes": list(notes), "rows": [asdict(row) for row in rows]}
        print(json.dumps(said, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{benchmark} ({machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f})")
    for name in ("case", "hil", "unit", "rival", "rival's", "ratio", "bar"):
        table.add_column(name, justify="left" if name in ("case", "unit", "rival") else "right")
    for row in rows:
        numbers = ["" if x is None else f"{x:.2f}" for x in (row.value, row.rival_value, row.ratio)]
        table.add_row(row.case, numbers[0], row.unit, row.rival, numbers[1], numbers[2], row.bar)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for note in notes:
        console.print(f"- {note}", markup=False)


def timed(call: Callable[[], object], count: int) -> list[float]:
    """Return the seconds of each of ``count`` calls."""
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return taken


def interleave(cases: Mapping[str, Callable[[], Sequence[float]]], rounds: int) -> dict[str, list[float]]:
    """Measure the cases alternately, after a warm-up round. Return case -> median of each round."""
    medians: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, measure in cases.items():
            median = statistics.median(measure())
            if turn:
                medians[name].append(median)
    return medians


def beside(
    case: str, mine: Sequence[float], rival: str, theirs: Sequence[float], scale: float, unit: str, bar: str
) -> Row:
    """Return a row for the rounds of two cases. The ratio is the median of the rounds' ratios."""
    ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
    return Row(case, statistics.median(mine) * scale, unit, rival, statistics.median(theirs) * scale, ratio, bar)


class Peer:
    """Process that reads one JSON order per line from stdin, and prints a line of JSON as the reply to each order."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hello = self._answer()

    def __call__(self, **order: Any) -> Any:
        """Send an order and return the reply."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended")
        return json.loads(line)


@contextlib.contextmanager
def peer(command: Sequence[str]) -> Iterator[Peer]:
    """Start a peer, and close it at the end of the context."""
    started = Peer(command)
    try:
        yield started
    finally:
        started.close()


def python_with(name: str, packages: Sequence[str], notes: list[str]) -> Path | None:
    """Return the interpreter of a separate environment for a rival, created once.

    If that fails, add a note and return None.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hil" / "benchmarks"
    python, ready = cache / name / "bin" / "python", cache / name / "ready"
    if not ready.exists():
        print(f"installing {packages[0]} ...", file=sys.stderr)
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(ready.parent)], capture_output=True)
        install = [str(python), "-m", "pip", "install", "-q", *packages]
        if made.returncode or subprocess.run(install, stdout=sys.stderr).returncode:
            notes.append(f"skipped: cannot install {packages[0]}")
            return None
        ready.touch()
    return python


def tvm_peer(notes: list[str]) -> contextlib.AbstractContextManager[Peer | None]:
    """Start a client and a server of TVM RPC in a separate environment. If that fails, add a note and yield None."""
    return rival_peer("TVM RPC", "tvm-0.27", [TVM, *_TVM_NEEDS], ["tvm_peer.py"], notes)


@contextlib.contextmanager
def rival_peer(
    rival: str, environment: str, needs: Sequence[str], argv: Sequence[str], notes: list[str]
) -> Iterator[Peer | None]:
    """Start a program of this directory in a separate environment. If that fails, add a note and yield None."""
    python = python_with(environment, needs, notes)
    if python is None:
        yield None
        return
    try:
        started = Peer([str(python), str(HERE / argv[0]), *argv[1:]])
    except RuntimeError as error:
        notes.append(f"{rival} skipped: {error}")
        yield None
        return
    try:
        yield started
    finally:
        started.close()


@contextlib.contextmanager
def session(module: str = "hil.agent", arguments: Sequence[str] = ()) -> Iterator[tuple[AgentClient, Peer, Path]]:
    """Yield a client with a session on an agent in another process, this process, and a temporary directory.

    The agent listens on a Unix socket, like agents of simulators and boards.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        command = [sys.executable, "-m", module, "--listen", f"unix:{folder}/agent", "--store", str(folder / "store")]
        with peer([*command, "--lifeline", *arguments]) as agent:
            client = AgentClient(AgentEndpoint(agent.hello["address"]), "benchmark")
            try:
                client.describe()
                client.open_session("benchmark", on_wait=lambda said: None)
                yield client, agent, folder
            finally:
                client.close()


def load(client: AgentClient, path: Path, runtime: str = "iree", device: str = "") -> ProgramHandle:
    """Push and load a program with one file."""
    name = digest_file(path)
    client.put({one: (path, have) for one, have in client.missing([name]).items()})
    return client.load({path.name: name}, path.name, runtime=runtime, device=device, function="", timeout=60)


def busy_ns(done: Invocation) -> int:
    """Return the time of a call on the board in nanoseconds.

    The rest of the wall time is the cost of moving tensors.
    """
    assert done.board_ns is not None
    return done.board_ns[1] - done.board_ns[0]


def compile_mlir(source: Path) -> Path:
    """Compile with the flags of the simulated board. Return the path of the .vmfb next to the source."""
    target = source.with_suffix(".vmfb")
    command = [sys.executable, "-m", "iree.compiler.tools.scripts.iree_compile", str(source), "-o", str(target)]
    subprocess.run([*command, *load_board("sim").config.compile_flags["iree"]], check=True)
    return target


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
