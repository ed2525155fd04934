from __future__ import annotations

import multiprocessing
import time

import pytest

from hil.sim.clock import SimClock
from hil.sim.faults import parse


def made(text: str, folder) -> SimClock:
    SimClock.start(folder)
    return SimClock(parse(text), folder)


def test_it_is_ahead_and_runs_too_fast(tmp_path):
    clock = made("clock:offset=3600,ppm=1000", tmp_path)
    start = time.monotonic_ns()
    ahead = clock.now_ns() - start
    assert ahead >= 3600 * 10**9
    time.sleep(0.5)
    before = clock.now_ns() - time.monotonic_ns()
    assert before - ahead == pytest.approx((time.monotonic_ns() - start) * 1e-3, rel=0.5)


def test_two_that_share_a_folder_show_the_same_and_jump_together(tmp_path):
    first = made("clock:ppm=-100,jump=-7", tmp_path)
    second = SimClock(parse("clock:ppm=-100,jump=-7"), tmp_path)
    before, between, after = first.now_ns(), second.now_ns(), first.now_ns()
    assert before <= between <= after
    second.jump()
    assert first.now_ns() - after == pytest.approx(-7e9, abs=1e9)
    second.jump()
    assert first.now_ns() - after == pytest.approx(-7e9, abs=1e9), "only once"


def jump(text: str, folder) -> None:
    SimClock(parse(text), folder).jump()


def test_a_jump_in_another_process_is_seen_here(tmp_path):
    clock = made("clock:jump=100", tmp_path)
    before = clock.now_ns()
    other = multiprocessing.get_context("spawn").Process(target=jump, args=("clock:jump=100", tmp_path))
    other.start()
    other.join()
    assert clock.now_ns() - before > 100 * 10**9
