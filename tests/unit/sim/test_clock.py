from __future__ import annotations

import multiprocessing
import time

import pytest

from hil.sim.faults import SimClock, parse


def made(text: str, folder) -> SimClock:
    SimClock.start(folder)
    return SimClock(parse(text), folder)


def test_sim_clock_applies_offset_and_drift(tmp_path):
    earliest = time.monotonic_ns()
    clock = made("clock:offset=3600,ppm=1000", tmp_path)
    start = time.monotonic_ns()
    assert clock.now_ns() - start >= 3600 * 10**9
    time.sleep(0.5)
    least = time.monotonic_ns()
    ahead_now = clock.now_ns()
    most = time.monotonic_ns()
    # The value was read between the two reads of the true clock.
    assert ahead_now - most <= 3600 * 10**9 + (most - earliest) * 1.1e-3
    assert ahead_now - least >= 3600 * 10**9 + (least - start) * 0.9e-3


def test_sim_clocks_sharing_a_directory_agree_and_jump_together(tmp_path):
    first = made("clock:ppm=-100,jump=-7000", tmp_path)
    second = SimClock(parse("clock:ppm=-100,jump=-7000"), tmp_path)
    before, between, after = first.now_ns(), second.now_ns(), first.now_ns()
    assert before <= between <= after
    second.jump()
    assert first.now_ns() - after == pytest.approx(-7e12, abs=1e11)
    second.jump()
    assert first.now_ns() - after == pytest.approx(-7e12, abs=1e11), "only once"


def jump(text: str, folder) -> None:
    SimClock(parse(text), folder).jump()


def test_sim_clock_sees_jump_of_other_process(tmp_path):
    clock = made("clock:jump=100", tmp_path)
    before = clock.now_ns()
    other = multiprocessing.get_context("spawn").Process(target=jump, args=("clock:jump=100", tmp_path))
    other.start()
    other.join()
    assert clock.now_ns() - before > 100 * 10**9
