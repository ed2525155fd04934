"""The wait helper of the tests."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from support.waiting import eventually


def test_eventually_returns_first_true_value():
    answers = iter([0, None, [], 7, 8])
    assert eventually(lambda: next(answers), every_s=0) == 7


def test_eventually_fails_in_time_with_last_value():
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r'after 0\.1 s, still not: .*"never" == "now".*last answer was False'):
        eventually(lambda: "never" == "now", within_s=0.1)
    assert 0.1 <= time.monotonic() - began < 5
    with pytest.raises(AssertionError, match="; 3 of 5; the last answer was 0"):
        eventually(lambda: 0, lambda: "3 of 5", 0)


def test_eventually_stops_when_process_ends(tmp_path):
    done = tmp_path / "done"
    command = [sys.executable, "-c", f"open({str(done)!r}, 'w').close()"]
    with subprocess.Popen(command) as process:
        assert eventually(done.exists, process=process)
    with subprocess.Popen(command) as process, pytest.raises(AssertionError, match="ended with 0, still not"):
        eventually(lambda: False, process=process)


def test_eventually_raises_error_of_condition():
    with pytest.raises(ZeroDivisionError):
        eventually(lambda: 1 / 0)
