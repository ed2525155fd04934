"""Numbers as protobuf writes them, for messages that are coded by hand."""

from __future__ import annotations

import functools


@functools.lru_cache(4096)
def varint(number: int) -> bytes:
    """A number's bytes: seven bits each, the lowest first, the top bit set in all but the last.

    Source: https://protobuf.dev/programming-guides/encoding/#varints
    """
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
