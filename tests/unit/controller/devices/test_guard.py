from __future__ import annotations

import os
import threading
import time
import weakref

import pytest
from support.waiting import eventually

from hil.controller.devices import guard as guards
from hil.controller.devices.guard import Guard


@pytest.mark.ci
def test_guard_ends_overdue_call_once():
    ended = []
    guard = Guard(lambda: ended.append(time.monotonic()))
    began = time.monotonic()
    guard.set_timeout(0.3)
    time.sleep(1.5)
    assert len(ended) == 1
    assert guard.expired
    assert ended[0] - began >= 0.25


@pytest.mark.ci
def test_guard_spares_active_and_closed_calls():
    ended = []
    heard, closed, unlimited = (Guard(lambda: ended.append(1)) for _ in range(3))
    heard.set_timeout(0.8)
    closed.set_timeout(0.3)
    closed.close()
    for _ in range(5):
        time.sleep(0.3)
        heard.restart_timeout()
    assert not ended
    assert not heard.expired
    heard.close()
    unlimited.close()


def test_blocking_end_does_not_delay_other_guards():
    never, ended = threading.Event(), threading.Event()
    first, second = Guard(never.wait), Guard(ended.set)
    first.set_timeout(0.1)
    second.set_timeout(0.6)
    assert ended.wait(60)
    never.set()


def test_guard_works_after_failed_thread_start(monkeypatch):
    start, ended, refused = threading.Thread.start, threading.Event(), []

    def refuse(thread):
        if thread.name == "hil-guard" and len(refused) < 2:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    guard = Guard(ended.set)
    guard.set_timeout(0.1)
    assert ended.wait(60)
    assert len(refused) == 2 and guard.expired


def test_guard_restarts_after_idle_time(monkeypatch):
    watch = guards._Watch()
    monkeypatch.setattr(guards, "_WATCH", watch)
    Guard(lambda: None).close()
    eventually(lambda: not watch._some.is_set())
    ended = threading.Event()
    Guard(ended.set).set_timeout(0.1)
    assert ended.wait(60)


def test_guards_share_single_thread():
    first = Guard(lambda: None)
    before = threading.active_count()
    made = [first, *(Guard(lambda: None) for _ in range(50))]
    assert threading.active_count() == before
    for guard in made:
        guard.close()


@pytest.mark.ci
def test_forked_process_ignores_guards_of_parent():
    read, write = os.pipe()
    ended = threading.Event()
    kept = Guard(ended.set)
    kept.set_timeout(0.6)
    pid = os.fork()
    if pid == 0:
        try:
            own = threading.Event()
            guards.Guard(own.set).set_timeout(0.3)
            os.write(write, b"own " if own.wait(60) else b"none")
            time.sleep(0.8)
            os.write(write, b"parent's" if ended.is_set() else b"only")
        finally:
            os._exit(0)
    os.close(write)
    for _ in range(10):
        time.sleep(0.2)
        kept.restart_timeout()
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"own only"
    os.waitpid(pid, 0)
    kept.close()


def test_closed_guard_releases_owner():
    class Owner:
        def __init__(self) -> None:
            self.guard = Guard(self.end)

        def end(self) -> None: ...

    owner = Owner()
    owner.guard.close()
    gone = weakref.ref(owner)
    del owner
    assert gone() is None
