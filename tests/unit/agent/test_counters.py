from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest

from hil.agent.machine import Counters

CPUFREQ = "sys/devices/system/cpu/cpufreq/policy0/scaling_cur_freq"
ZONE = "sys/class/thermal/thermal_zone3"


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def stat(busy: int, idle: int) -> str:
    return f"cpu  9 9 9 9\ncpu0 {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu1 0 0 0 {busy + idle} 0 0 0 0 0 0\nintr 5\n"


def values(counters: Counters) -> dict[str, tuple[float, str]]:
    return {reading.name: (reading.value, reading.unit) for reading in counters.read_counters().readings}


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """Return the root of a machine with every counter file; tests change the files."""
    write(tmp_path, proc__stat=stat(100, 900), proc__meminfo="MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    write(tmp_path, **{f"proc__{os.getpid()}__statm": "100 25 5 1 0 9 0\n", "proc__7__statm": "90 50 5 1 0 9 0\n"})
    for kind in ("cpu", "memory", "io"):
        write(tmp_path, **{f"proc__pressure__{kind}": "some avg10=0.00 avg60=0.00 avg300=0.00 total=1000\n"})
    for name, text in ((CPUFREQ, "1400000\n"), (f"{ZONE}/temp", "48500\n"), (f"{ZONE}/type", "soc\n")):
        write(tmp_path, **{name: text})
    return tmp_path


def test_counters_read_all_available_values(board):
    page = os.sysconf("SC_PAGE_SIZE")
    with Counters(lambda: [7], board) as counters:
        assert values(counters) == {
            "cpu0 frequency": (1400.0, "MHz"),
            "thermal_zone3 (soc)": (48.5, "degC"),
            "memory available": (2048 * 1024, "bytes"),
            "agent memory": (25 * page, "bytes"),
            "worker 7 memory": (50 * page, "bytes"),
        }, "what is told since the look before is not in the first"
        write(board, proc__stat=stat(175, 925))
        found = values(counters)
    assert found["cpu0 busy"] == (75.0, "%")
    assert found["cpu1 busy"] == (0.0, "%")
    assert {kind: found[f"{kind} pressure"] for kind in ("cpu", "memory", "io")} == dict.fromkeys(
        ("cpu", "memory", "io"), (0.0, "%")
    )


def test_counters_report_pressure_as_percentage_of_time(board):
    with Counters(list, board) as counters:
        counters.read_counters()
        write(board, proc__pressure__io="some avg10=0.00 avg60=0.00 avg300=0.00 total=3600001000\n")
        assert values(counters)["io pressure"] == (100.0, "%"), "an hour of stalling since a moment ago is all the time"


def test_counters_omit_missing_files(tmp_path):
    with Counters(lambda: [7], tmp_path) as counters:
        assert values(counters) == {}


def test_counters_omit_unreadable_value_while_unreadable(board):
    with Counters(list, board) as counters:
        write(board, **{CPUFREQ: "<unknown>\n"})
        assert "cpu0 frequency" not in values(counters)
        write(board, **{CPUFREQ: "600000\n"})
        assert values(counters)["cpu0 frequency"] == (600.0, "MHz")


def test_counters_report_sensor_after_transient_error(board, monkeypatch):
    real = os.pread

    def asleep(*_):
        raise OSError(errno.EAGAIN, "asleep")

    with Counters(list, board) as counters:
        assert "thermal_zone3 (soc)" in values(counters)
        monkeypatch.setattr(os, "pread", asleep)
        assert values(counters) == {}
        monkeypatch.setattr(os, "pread", real)
        assert "thermal_zone3 (soc)" in values(counters)


def test_counters_drop_exited_workers(board):
    pids = [7]
    with Counters(lambda: pids, board) as counters:
        assert "worker 7 memory" in values(counters)
        pids.clear()
        assert not [name for name in values(counters) if name.startswith("worker")]


def test_counters_reuse_open_files_and_close_them_at_exit(board):
    def opened() -> int:
        found = 0
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # another thread may have closed it
                found += str(board) in str(fd.readlink())
        return found

    before = opened()
    with Counters(lambda: [7], board) as counters:
        counters.read_counters()
        while_open = opened()
        assert while_open > before
        counters.read_counters()
        assert opened() == while_open
    assert opened() == before


def test_counters_report_cpu_load_of_this_machine():
    with Counters(lambda: []) as counters:
        counters.read_counters()
        stop = threading.Event()
        busy = threading.Thread(target=lambda: any(stop.is_set() for _ in iter(int, 1)))
        busy.start()
        try:
            while not (
                told := [value for name, (value, _) in values(counters).items() if name.endswith("busy")]
            ) or not any(told):
                pass
        finally:
            stop.set()
            busy.join()
    assert all(0 <= value <= 100 for value in told)
