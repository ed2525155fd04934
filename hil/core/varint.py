"""Encode protobuf varints for hand-coded messages."""

from __future__ import annotations

import functools


@functools.lru_cache(4096)
def encode_varint(number: int) -> bytes:
    """Encode a number as a varint: seven bits per byte, lowest first, with the top bit set in all but the last byte.

    Source: https://protobuf.dev/programming-guides/encoding/#varints
    """
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
