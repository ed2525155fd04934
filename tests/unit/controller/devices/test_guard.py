from __future__ import annotations

import os
import threading
import time
import weakref

from support.waiting import eventually

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


def test_one_is_watched_that_comes_after_a_time_without_any(monkeypatch):
    watch = guards._Watch()
    monkeypatch.setattr(guards, "_WATCH", watch)
    Guard(lambda: None).close()
    eventually(lambda: not watch._some.is_set())
    ended = threading.Event()
    Guard(ended.set).within(0.1)
    assert ended.wait(10)


def test_all_are_watched_by_one_thread():
    first = Guard(lambda: None)
    before = threading.active_count()
    made = [first, *(Guard(lambda: None) for _ in range(50))]
    assert threading.active_count() == before
    for guard in made:
        guard.close()


def test_a_forked_process_ends_nothing_of_its_parents_and_watches_its_own():
    read, write = os.pipe()
    ended = threading.Event()
    kept = Guard(ended.set)
    kept.within(0.6)
    pid = os.fork()
    if pid == 0:
        try:
            own = threading.Event()
            guards.Guard(own.set).within(0.3)
            os.write(write, b"own " if own.wait(10) else b"none")
            time.sleep(0.8)
            os.write(write, b"parent's" if ended.is_set() else b"only")
        finally:
            os._exit(0)
    os.close(write)
    for _ in range(10):
        time.sleep(0.2)
        kept.heard()
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"own only"
    os.waitpid(pid, 0)
    kept.close()


def test_one_that_is_closed_holds_on_to_nobody():
    class Owner:
        def __init__(self) -> None:
            self.guard = Guard(self.end)

        def end(self) -> None: ...

    owner = Owner()
    owner.guard.close()
    gone = weakref.ref(owner)
    del owner
    assert gone() is None
