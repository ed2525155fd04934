"""Fuzzers in processes of their own, watched from outside: an input that hangs or kills one is a finding too."""

from __future__ import annotations

import collections
import contextlib
import json
import mmap
import os
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fuzzing.engine import COVERAGE, ROOT, Counts, Failure, Fuzzer, confine, looping
from hil.errors import HilError

_HEAD = struct.Struct("<QdQ")
_BOARD = 64 << 20
_MOST_STARTS = 400
_ALL = 1 << 62
_STATE = "state.json"
REGRESSIONS = Path(__file__).with_name("regressions")
_MOST_KNOWN = 500


@dataclass
class Report:
    """How one fuzzer's run went."""

    name: str
    seed: int
    seconds: float = 0.0
    inputs: int = 0
    messages: int = 0
    starts: int = 0
    ended_alone: int = 0
    slowest_s: float = 0.0
    most_mib: int = 0
    corpus: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    skipped: str = ""

    def add(self, state: dict[str, object]) -> None:
        """What one of its processes did."""
        counts = Counts(**state)  # type: ignore[arg-type]
        self.inputs += counts.inputs
        self.messages += counts.messages
        self.slowest_s = max(self.slowest_s, counts.slowest_s)
        self.most_mib = max(self.most_mib, counts.most_mib)
        for name, count in counts.kinds.items():
            self.kinds[name] = self.kinds.get(name, 0) + count


class _Note:
    """What a fuzzer's process tries just now, in memory that outlives it."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(_BOARD)
            self._map = mmap.mmap(file.fileno(), _BOARD)

    def write(self, number: int, data: bytes) -> None:
        data = data[: _BOARD - _HEAD.size]
        self._map[_HEAD.size : _HEAD.size + len(data)] = data
        self._map[: _HEAD.size] = _HEAD.pack(number, time.monotonic(), len(data))

    def done(self, number: int) -> None:
        self._map[: _HEAD.size] = _HEAD.pack(number, 0.0, 0)

    def read(self) -> tuple[int, float, bytes]:
        """The number of the input, since when it is tried (0: not any more), and the input."""
        number, since, size = _HEAD.unpack(self._map[: _HEAD.size])
        return number, since, self._map[_HEAD.size : _HEAD.size + size]


def work(fuzzer: Fuzzer, folder: Path, *, seed: int, first: int, seconds: float, last: int, note: Path) -> None:
    """A fuzzer's process: try inputs from a number on until the time is over, or the last one is."""
    os.umask(0o077)
    corpus, failures = folder / "corpus", folder / "failures"
    kept = sorted(corpus.iterdir(), key=lambda one: one.stat().st_mtime)[-_MOST_KNOWN:]
    known = [one.read_bytes() for one in [*_regressions(fuzzer), *kept]]
    board = _Note(note)
    COVERAGE.start()
    scratch = tempfile.TemporaryDirectory(prefix="hil-fuzz-")
    with scratch as place, looping(fuzzer, Path(place), seed, corpus, known) as loop:
        confine(fuzzer)
        began = told = time.monotonic()
        number = first
        while time.monotonic() - began < seconds and number <= last:
            data = loop.input(number)
            board.write(number, data)
            failure = loop.step(number, data)
            board.done(number)
            if failure is not None:
                keep(failure, failures, fuzzer, seed)
            number += 1
            if time.monotonic() - told > 1.0:
                told = time.monotonic()
                _tell(note.with_name(_STATE), loop.counts, told - began)
        _tell(note.with_name(_STATE), loop.counts, time.monotonic() - began)


def _tell(path: Path, counts: Counts, seconds: float) -> None:
    counts.seconds = seconds
    path.with_suffix(".new").write_text(json.dumps(asdict(counts)))
    path.with_suffix(".new").replace(path)


def _regressions(fuzzer: Fuzzer) -> list[Path]:
    folder = REGRESSIONS / fuzzer.name
    return sorted(folder.iterdir()) if folder.is_dir() else []


def keep(failure: Failure, folder: Path, fuzzer: Fuzzer, seed: int) -> None:
    """Write a failure down: the input, and what it broke; of those that break the same the smallest one."""
    path = folder / failure.name
    if path.exists() and path.stat().st_size <= len(failure.data):
        return
    path.write_bytes(failure.data)
    command = shlex.join(["scripts/fuzz", fuzzer.name, "--replay", str(path)])
    version = ".".join(map(str, sys.version_info[:3]))
    path.with_suffix(".txt").write_text(
        f"{failure.kind}: {failure.signature}\nseed {seed}, Python {version}\n{command}\n\n{failure.text}\n",
        errors="backslashreplace",
    )


def drive(fuzzer: Fuzzer, folder: Path, *, seed: int, seconds: float, inputs: int = 0) -> Report:
    """Run a fuzzer for a time or a number of inputs (0: no limit), in processes that are watched."""
    report = Report(fuzzer.name, seed)
    if lacking := fuzzer.lacking():
        report.skipped = lacking
        return report
    for name in ("corpus", "failures"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    first, last = 0, inputs - 1 if inputs else _ALL
    while (left := seconds - (time.monotonic() - began)) > 0 and first <= last and report.starts < _MOST_STARTS:
        report.starts += 1
        with tempfile.TemporaryDirectory(prefix="hil-fuzz-") as place:
            first = _one_process(fuzzer, folder, report, (first, last), left, Path(place))
    report.seconds = time.monotonic() - began
    report.corpus = len(list((folder / "corpus").iterdir()))
    return report


def _one_process(
    fuzzer: Fuzzer, folder: Path, report: Report, numbers: tuple[int, int], left: float, place: Path
) -> int:
    """Watch one process to its end; returns the number of the next input."""
    note = place / "note"
    board = _Note(note)
    # Inputs are written to files thousands of times a second: in memory, where there is such a place.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="hil-fuzz-", dir=memory) as scratch:
        process, said, hung = _watched(fuzzer, folder, report, numbers, left, note, scratch)
    number, _, data = board.read()
    first = numbers[0]
    state = note.with_name(_STATE)
    if state.exists():
        told = json.loads(state.read_text())
        report.add(told)
        for name, count in told["failures"].items():
            report.failures[name] = report.failures.get(name, 0) + count
    if hung or process.returncode:
        if not data and number <= first:
            raise SystemExit(f"{fuzzer.name} cannot run: it ended with {process.returncode}\n{said}")
        _dead(fuzzer, folder, report, data, said, process.returncode, hung=hung)
        if not state.exists():
            report.inputs += number + 1 - first
            report.messages += number + 1 - first
    return number + 1


def _watched(
    fuzzer: Fuzzer, folder: Path, report: Report, numbers: tuple[int, int], left: float, note: Path, scratch: str
) -> tuple[subprocess.Popen[bytes], str, bool]:
    """Run one process to its end: the process, the end of what it printed, and whether an input hung."""
    board = _Note(note)
    arguments = ["--work", str(folder), str(note), *map(str, (*numbers, left)), "--seed", str(report.seed), fuzzer.name]
    process = subprocess.Popen(
        [sys.executable, "-m", "fuzzing", *arguments],
        cwd=scratch,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "TMPDIR": scratch},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    tail: collections.deque[bytes] = collections.deque(maxlen=60)
    reader = threading.Thread(target=_drain, args=(process, tail), daemon=True)
    reader.start()
    hung = False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
            break
        _, since, _ = board.read()
        if since and time.monotonic() - since > fuzzer.limit_s:
            hung = True
            process.send_signal(signal.SIGABRT)  # faulthandler says where it was
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            break
    # Its own processes too, whatever became of itself.
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join(5)
    return process, b"".join(tail).decode(errors="replace"), hung


def _drain(process: subprocess.Popen[bytes], tail: collections.deque[bytes]) -> None:
    assert process.stdout is not None
    while piece := process.stdout.read1(4096):  # type: ignore[attr-defined]
        tail.append(piece)
    process.stdout.close()


def _dead(fuzzer: Fuzzer, folder: Path, report: Report, data: bytes, said: str, code: int, *, hung: bool) -> None:
    """A process that an input ended: a failure, or what a process of its own is for."""
    if fuzzer.confirm is not None:
        try:
            with tempfile.TemporaryDirectory(prefix="hil-fuzz-") as place:
                fuzzer.confirm(Path(place), data)
            report.ended_alone += 1
            return
        except HilError:
            report.ended_alone += 1
            return
        except Exception as error:
            said += f"\nand once more, in a process of its own: {type(error).__name__}: {error}"
    frames = [line.strip() for line in said.splitlines() if 'File "' in line][:3]
    kind = "hang" if hung else "death"
    text = f"more than {fuzzer.limit_s} s" if hung else f"the process ended with {code}"
    failure = Failure(kind, f"{kind} {code} {frames}", f"{text}\n{said}", data)
    keep(failure, folder / "failures", fuzzer, report.seed)
    report.failures[failure.name] = report.failures.get(failure.name, 0) + 1


def replay(fuzzer: Fuzzer, file: Path) -> Failure | None:
    """Try one input again, in this process; returns what it breaks."""
    with tempfile.TemporaryDirectory(prefix="hil-fuzz-") as place, looping(fuzzer, Path(place), 0) as loop:
        return loop.step(0, file.read_bytes())
