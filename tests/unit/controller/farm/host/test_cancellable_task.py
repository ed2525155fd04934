"""Test cancellable tasks in a separate process, which has its own signals and threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = """
import os, signal, sys, threading, time
from hil.controller.farm.host.cancellable_task import CancellableTask
gave_up = threading.Event()
work = CancellableTask(0.3, gave_up.set)
def after(seconds, call, *args):
    timer = threading.Timer(seconds, call, args); timer.daemon = True; timer.start()
"""


def told(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.mark.ci
@pytest.mark.parametrize(
    "wait",
    [
        "time.sleep(30)",
        "threading.Event().wait()",
        "threading.Lock().acquire() or threading.Lock()",
        "os.read(pipe, 1)",
    ],
)
def test_task_end_interrupts_any_blocking_call(wait):
    if "Lock" in wait:
        wait = "lock = threading.Lock(); lock.acquire(); lock.acquire()"
    said = told(f"""
pipe, _ = os.pipe()
work = CancellableTask(5, gave_up.set)
def job():
    try:
        after(0.2, work.end, 7, "the farm said so")
        {wait}
    finally:
        print("tidied")
begin = time.monotonic()
print(work.run(7, job), work.why, time.monotonic() - begin < 10)
work._give_up_if_running(7)
print(gave_up.is_set())
""")
    assert said == ["tidied", "None the farm said so True", "False"]


def test_task_end_ignores_finished_and_other_work():
    assert told("""
print(work.run(1, lambda: "done"), repr(work.why))
work.end(1, "too late")
work.end(2, "too early")
def job():
    time.sleep(0.3)
    return "also done"
after(0.1, work.end, 2, "another's")
print(work.run(3, job), repr(work.why))
""") == ["done ''", "also done ''"]


def test_task_gives_up_when_work_ignores_interrupt():
    assert told("""
def stubborn():
    try:
        after(0.1, work.end, 1, "enough")
        time.sleep(30)
    except KeyboardInterrupt:
        pass
    return gave_up.wait(30)
print(work.run(1, stubborn))
""") == ["True"]


def test_task_passes_keyboard_interrupt_through():
    assert told("""
signal.signal(signal.SIGINT, signal.default_int_handler)
def job():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
try:
    work.run(1, job)
except KeyboardInterrupt:
    print("interrupted", repr(work.why))
""") == ["interrupted ''"]


def test_task_ends_from_signal_handler():
    assert told("""
signal.signal(signal.SIGTERM, lambda *_: work.end_here("the host was stopped"))
def job():
    after(0.1, os.kill, os.getpid(), signal.SIGTERM)
    time.sleep(30)
print(work.run(1, job), work.why)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
print("nothing runs, nothing ends")
""") == ["None the host was stopped", "nothing runs, nothing ends"]


@pytest.mark.ci
def test_task_end_ignores_work_started_later():
    assert told("""
reached, go = threading.Event(), threading.Event()
class Slow(CancellableTask):
    @property
    def why(self):
        if threading.current_thread() is not threading.main_thread():
            reached.set()
            go.wait()
        return super().why
work = Slow(0.3, gave_up.set)
def first():
    threading.Thread(target=work.end, args=(1, "too slow"), daemon=True).start()
    return reached.wait(20)
def second():
    go.set()
    time.sleep(0.5)
    return "done"
print(work.run(1, first), repr(work.why))
print(work.run(2, second), repr(work.why), gave_up.is_set())
""") == ["True ''", "done '' False"]
