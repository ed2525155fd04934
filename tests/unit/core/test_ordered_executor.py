from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.core.digest import digest_of
from hil.core.ordered_executor import Behind, StreamHasher

LARGE = bytes(1 << 19)


@given(st.lists(st.sampled_from([b"", b"a", bytes(1000), LARGE, LARGE[:-1]]), max_size=20))
def test_a_digest_behind_is_the_digest(pieces):
    hasher = StreamHasher()
    for piece in pieces:
        hasher.update(piece)
    assert hasher.digest() == digest_of(b"".join(pieces))


def test_work_is_done_in_order_and_all_of_it():
    done: list[int] = []
    behind = Behind()
    for number in range(50):
        behind.do(lambda data: done.append(len(data)), LARGE[: len(LARGE) - number] if number % 3 else b"x" * number)
    behind.finish()
    assert done == [len(LARGE) - number if number % 3 else number for number in range(50)]


def test_the_caller_goes_on_meanwhile_but_not_without_end():
    gate = threading.Event()
    behind = Behind()
    done: list[int] = []

    def work(data: bytes) -> None:
        gate.wait(60)
        done.append(len(data))

    for _ in range(8):
        behind.do(work, LARGE)
    assert not done
    threading.Timer(0.3, gate.set).start()
    behind.do(lambda data: None, LARGE)
    assert gate.is_set()
    behind.finish()


def test_what_the_work_raised_is_raised_to_the_caller():
    def fail(data: bytes) -> None:
        raise OSError("full")

    behind = Behind()
    behind.do(fail, LARGE)
    with pytest.raises(OSError, match="full"):
        behind.finish()
