"""Placement of buffers, and schedules of small HAL modules."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hil.controller.backends.compilers.firmware.schedule import Buffer, place_buffers


def _make_buffer(values: tuple[int, int, int | None]) -> Buffer:
    size, first, length = values
    return Buffer("transient", size, first=first, last=None if length is None else first + length)


BUFFERS = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 30), st.none() | st.integers(0, 10)).map(_make_buffer), max_size=20
)


def _list_steps(buffer: Buffer) -> set[int]:
    return set(range(buffer.first, 64 if buffer.last is None else buffer.last))


@given(BUFFERS)
def test_buffers_in_use_at_the_same_time_do_not_overlap(buffers: list[Buffer]) -> None:
    size = place_buffers(buffers)
    for buffer in buffers:
        assert buffer.offset % 64 == 0
        assert buffer.offset + buffer.size <= size
    for place, one in enumerate(buffers):
        for other in buffers[place + 1 :]:
            if _list_steps(one) & _list_steps(other) and one.size and other.size:
                assert one.offset + one.size <= other.offset or other.offset + other.size <= one.offset


def test_memory_of_a_freed_buffer_is_used_again() -> None:
    buffers = [Buffer("transient", 1024, first=0, last=2), Buffer("transient", 1024, first=2, last=None)]
    assert place_buffers(buffers) == 1024


@given(BUFFERS)
def test_the_arena_is_not_larger_than_all_buffers(buffers: list[Buffer]) -> None:
    assert place_buffers(buffers) <= sum(-(-one.size // 64) * 64 for one in buffers)
