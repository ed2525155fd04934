"""Frames survive the line, and damaged frames are never taken for others."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from hil.mcu.frames import SerialFrame, decode_cobs, decode_frame, encode_cobs, encode_frame

FRAMES = st.builds(SerialFrame, st.integers(0, 255), st.integers(0, (1 << 32) - 1), st.binary(max_size=1100))


@given(st.one_of(st.binary(max_size=1200), st.integers(250, 512).map(lambda size: b"\x01" * size)))
def test_cobs_returns_the_data_without_zero_bytes_between(data: bytes) -> None:
    encoded = encode_cobs(data)
    assert b"\0" not in encoded
    assert decode_cobs(encoded) == data
    assert len(encoded) <= len(data) + len(data) // 254 + 1


@given(FRAMES)
def test_a_frame_arrives_as_it_was_sent(frame: SerialFrame) -> None:
    encoded = encode_frame(frame)
    assert encoded[-1] == 0
    assert b"\0" not in encoded[:-1]
    assert decode_frame(encoded[:-1]) == frame


@given(st.binary(max_size=300))
def test_random_bytes_are_no_frame(data: bytes) -> None:
    assert decode_frame(data) is None


@given(FRAMES, st.integers(0, 1 << 30))
def test_a_frame_with_a_changed_bit_is_refused(frame: SerialFrame, place: int) -> None:
    damaged = bytearray(encode_frame(frame)[:-1])
    damaged[place % len(damaged)] ^= 1 << (place % 8)
    if 0 not in damaged:
        assert decode_frame(bytes(damaged)) is None


def test_a_frame_with_missing_bytes_is_refused() -> None:
    encoded = encode_frame(SerialFrame(4, 7, random.Random(0).randbytes(200)))[:-1]
    assert all(decode_frame(encoded[:size]) is None for size in range(len(encoded)))
