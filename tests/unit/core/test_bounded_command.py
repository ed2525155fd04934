"""Commands of configs: limited output, timeouts, and background processes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from support.waiting import eventually

from hil.core import bounded_command
from hil.core.bounded_command import OutputParts, run_bounded


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def test_output_contains_stdout_and_stderr():
    done = run_bounded(shell("echo one; echo two >&2; exit 3"), 60)
    assert (done.code, done.text) == (3, "one\ntwo\n")


def test_parts_keep_start_and_end():
    parts = OutputParts(4)
    for data in (b"ab", b"cdef", b"ghij", b"kl"):
        parts.add(data)
    assert parts.join() == "abcd\n[4 bytes omitted]\nijkl"
    short = OutputParts(4)
    short.add(b"abcdefg\xff")
    assert short.join() == "abcdefg\ufffd"


def test_endless_output_is_limited_and_ends_at_timeout(monkeypatch: pytest.MonkeyPatch):
    found: list[OutputParts] = []

    class Parts(OutputParts):
        def __init__(self) -> None:
            super().__init__(1000)
            found.append(self)

    monkeypatch.setattr(bounded_command, "OutputParts", Parts)
    with pytest.raises(subprocess.TimeoutExpired):
        run_bounded(shell("echo first; exec yes"), 1.0)
    text = found[0].join()
    assert text.startswith("first\ny\n") and len(text) < 2100 and "bytes omitted" in text


def test_timeout_kills_children(tmp_path: Path):
    pid = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        run_bounded(shell(f"sleep 1000 & echo $! > {pid}; wait"), 1.0)
    eventually(lambda: not _is_running(int(pid.read_text())))


def test_command_ends_before_its_background_process():
    begin = time.monotonic()
    done = run_bounded(shell("echo done; sleep 1000 & echo $!"), 600)
    try:
        assert time.monotonic() - begin < 300
        assert (done.code, done.text.startswith("done\n")) == (0, True)
    finally:
        os.kill(int(done.text.split()[1]), 9)


def test_command_may_close_its_output_early():
    assert run_bounded(shell("echo x; exec >&- 2>&-; sleep 0.3; exit 4"), 60).code == 4


def test_missing_command_is_os_error():
    with pytest.raises(FileNotFoundError):
        run_bounded(["/no/such/program"], 60)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
