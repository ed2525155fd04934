from __future__ import annotations

import threading
import time

from hil.controller.devices import guard as guards
from hil.controller.devices.guard import Guard


def test_what_does_not_come_in_time_is_ended_once():
    ended = []
    guard = Guard(lambda: ended.append(time.monotonic()))
    began = time.monotonic()
    guard.within(0.3)
    time.sleep(1.5)
    assert len(ended) == 1
    assert guard.expired
    assert ended[0] - began >= 0.25


def test_what_is_heard_or_over_in_time_is_not_ended():
    ended = []
    heard, closed, unlimited = (Guard(lambda: ended.append(1)) for _ in range(3))
    heard.within(0.8)
    closed.within(0.3)
    closed.close()
    for _ in range(5):
        time.sleep(0.3)
        heard.heard()
    assert not ended
    assert not heard.expired
    heard.close()
    unlimited.close()


def test_an_end_that_blocks_keeps_no_other_guard_from_its_time():
    never, ended = threading.Event(), threading.Event()
    first, second = Guard(never.wait), Guard(ended.set)
    first.within(0.1)
    second.within(0.6)
    assert ended.wait(10)
    never.set()


def test_one_is_watched_that_comes_after_a_time_without_any():
    assert not guards._WATCH._guards
    time.sleep(1.0)
    ended = threading.Event()
    Guard(ended.set).within(0.1)
    assert ended.wait(10)


def test_all_are_watched_by_one_thread():
    made = [Guard(lambda: None) for _ in range(50)]
    assert sum(thread.name == "hil-guards" for thread in threading.enumerate()) == 1
    for guard in made:
        guard.close()
