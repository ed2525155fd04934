"""Measure a farm of simulated boards: the latency of jobs, and the throughput of many boards relative to one.

Latency is the time from the call that submits a job until its session on the board is open. It includes the gateway,
the database, the scheduling, the board's worker and the agent. There are two rivals with the same number of boards.
Procrastinate uses the same database: from deferring a job until its task starts in a worker process. labgrid's
coordinator has its queue only in memory: from reserving any place until it is acquired. Rounds are interleaved.

The start-up time of many boards is from the start of their host until all boards are checked. The idle cost is the CPU
time of all processes, including gateway and database, after the agents have stopped their spare workers.

Throughput is measured with jobs that take 100 ms per case, during which the simulated device sleeps: 20 boards relative
to one.

Run it as `python -m benchmarks.farm`. `--most 20` omits the farm of 200 boards, `--rounds 0` omits all latencies,
`--jobs 0` omits the throughput.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import common
from benchmarks.common import HERE, Peer, Row
from benchmarks.farm_lab import Lab, lab, make_bundle
from hil.controller.farm.messages import JobSpec

LABGRID = "labgrid==26.*"
BOARDS = (1, 20, 200)
EACH = 20
# Agents stop spare workers after a minute without a session.
_RESTING_S, _IDLE_S = 100.0, 30.0
PACE_S = 0.1


def main() -> None:
    given = common.options(__doc__, rounds=5, most=200, jobs=8)
    notes: list[str] = []
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        if given.rounds:
            bundle = make_bundle(Path(scratch), 1)
            for boards in (count for count in BOARDS if count <= given.most):
                with lab(boards) as farm:
                    if boards == max(BOARDS):
                        rows += idle(farm)
                    rows += latencies(farm, bundle, given.rounds, notes)
        if given.jobs:
            for cases in (1, 10):
                rows.append(throughput(make_bundle(Path(scratch), cases), cases, given.jobs, notes))
    common.show("farm", rows, notes, as_json=given.json)


def idle(farm: Lab) -> list[Row]:
    """Return rows for the start-up time and the idle cost of many boards."""
    boards = len(farm.boards)
    time.sleep(_RESTING_S)
    before = cpu_s()
    time.sleep(_IDLE_S)
    share = (cpu_s() - before) / _IDLE_S * 100
    return [
        Row(f"{boards} simulated boards come up", farm.up_s, "s", bar="<= 180"),
        Row(f"{boards} boards idle, of one core", share, "%", bar="<= 10"),
    ]


def latencies(farm: Lab, bundle: Path, rounds: int, notes: list[str]) -> list[Row]:
    """Return rows for the latency of a farm, with the rivals."""
    boards = len(farm.boards)
    with contextlib.ExitStack() as stack:
        spec = farm.upload(bundle)
        took: dict[str, list[float]] = {}

        def jobs() -> list[float]:
            waits = []
            for _ in range(EACH):
                begun = time.monotonic_ns()
                names = farm.order([spec])
                (result,) = farm.results(names)
                waits.append((result.board_ns[0] - begun) / 1e9)
                for step, seconds in result.timings.items():
                    took.setdefault(step, []).append(seconds)
            return waits

        command = [sys.executable, str(HERE / "farm_bare.py"), farm.url, str(boards)]
        bare = stack.enter_context(common.peer(command))
        cases = {"hil": jobs, "procrastinate": lambda: bare(op="latency", count=EACH)}
        if (rival := stack.enter_context(labgrid_peer(notes))) is not None:
            rival(op="places", count=boards)
            cases["labgrid"] = lambda: rival(op="acquire", count=EACH)
        p50, p95 = interleaved(cases, rounds)
    steps = ", ".join(f"{step} {statistics.median(seconds) * 1e3:.1f}" for step, seconds in took.items())
    notes.append(f"{boards} boards: steps of a job on the host, medians in ms: {steps}")
    rows = []
    for rival in [name for name in cases if name != "hil"]:
        bar = "<= 2" if rival == "procrastinate" else ""
        rows.append(
            common.beside(f"p50 with {boards} boards (bar < 30 ms)", p50["hil"], rival, p50[rival], 1e3, "ms", bar)
        )
        rows.append(common.beside(f"p95 with {boards} boards", p95["hil"], rival, p95[rival], 1e3, "ms", ""))
    return rows


def interleaved(cases: dict, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the median and the 95th percentile of each round of each case, after a warm-up round."""
    p50: dict[str, list[float]] = {name: [] for name in cases}
    p95: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, measure in cases.items():
            taken = measure()
            if turn:
                p50[name].append(statistics.median(taken))
                p95[name].append(statistics.quantiles(taken, n=20)[-1])
    return p50, p95


def throughput(bundle: Path, cases: int, jobs: int, notes: list[str]) -> Row:
    """Return a row for ``jobs`` jobs per board, on one board and on twenty boards."""
    with lab(20, f"pace:seconds={PACE_S}") as farm:
        spec = farm.upload(bundle)
        one, many, used = [], [], []
        for turn in range(3):
            first = rate(farm, spec, jobs, farm.boards[:1])
            before = cpu_s()
            all_of_them = rate(farm, spec, jobs, farm.boards)
            if turn:
                one.append(first * cases)
                many.append(all_of_them * cases)
                used.append((cpu_s() - before) / (jobs * len(farm.boards) * cases))
    cores = os.cpu_count() or 1
    notes.append(
        f"{cases} cases per job: a case costs {statistics.median(used) * 1e3:.0f} ms of CPU, including simulator and "
        f"database, so {cores} idle cores give at most {cores / statistics.median(used):.0f} per second; "
        f"the limit of the devices is {1 / PACE_S:.0f} and {20 / PACE_S:.0f}"
    )
    name = f"100 ms cases a second, {cases} a job: 20 boards, beside one"
    return common.beside(name, many, "one board", one, 1.0, "1/s", ">= 15" if cases == 1 else ">= 18")


def rate(farm: Lab, spec: JobSpec, jobs: int, boards: Sequence[str]) -> float:
    """Return jobs per second, from the first start on a board to the last end."""
    names = [farm.order([spec] * jobs, board) for board in boards]
    times = [result.board_ns for part in names for result in farm.results(part)]
    return len(times) / ((max(end for _, end in times) - min(begin for begin, _ in times)) / 1e9)


def cpu_s() -> float:
    """Return the CPU seconds of this process and all processes that it started, including ended processes."""
    ticks: dict[int, int] = {}
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def labgrid_peer(notes: list[str]) -> Iterator[Peer | None]:
    """Start labgrid's coordinator and a client in a separate environment. If that fails, add a note and yield None."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hil" / "benchmarks" / "labgrid-26"
    python = cache / "bin" / "python"
    if not (cache / "ready").exists():
        print(f"installing {LABGRID} ...", file=sys.stderr)
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(cache)], capture_output=True)
        install = [str(python), "-m", "pip", "install", "-q", LABGRID]
        if made.returncode or subprocess.run(install, stdout=sys.stderr).returncode:
            notes.append(f"labgrid skipped: cannot install {LABGRID}")
            yield None
            return
        (cache / "ready").touch()
    with common.peer([str(python), str(HERE / "labgrid_peer.py")]) as started:
        yield started


if __name__ == "__main__":
    main()
