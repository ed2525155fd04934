from __future__ import annotations

import concurrent.futures
import signal
import threading

import pytest

from hil.core.futures import iterate_completed


def test_futures_are_yielded_as_they_end():
    first, second = concurrent.futures.Future(), concurrent.futures.Future()
    second.set_result(2)
    found = iterate_completed([first, second])
    assert next(found) is second
    threading.Timer(0.3, first.set_result, [1]).start()
    assert [one.result() for one in found] == [1]


def test_ctrl_c_interrupts_wait_for_futures():
    threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        list(iterate_completed([concurrent.futures.Future()]))
