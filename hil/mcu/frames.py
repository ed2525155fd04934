"""Frames on the serial line: COBS(kind u8, sequence u32, body, CRC-32 of these), then a zero byte.

COBS: Cheshire and Baker, "Consistent Overhead Byte Stuffing", 1999. Numbers are little endian.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

DATA_BYTES = 1024  # maximum data of a request or response
MAX_BYTES = 2 * DATA_BYTES  # an encoded frame is always shorter
_HEADER = struct.Struct("<BI")
_CRC = struct.Struct("<I")


@dataclass(frozen=True)
class SerialFrame:
    """Request or response."""

    kind: int
    sequence: int
    body: bytes = b""


def encode_frame(frame: SerialFrame) -> bytes:
    """Return the bytes of a frame, including the final zero byte."""
    content = _HEADER.pack(frame.kind, frame.sequence) + frame.body
    return encode_cobs(content + _CRC.pack(zlib.crc32(content))) + b"\0"


def decode_frame(data: bytes) -> SerialFrame | None:
    """Return the frame of the bytes between two zero bytes, or None if they are damaged."""
    content = decode_cobs(data)
    if content is None or len(content) < _HEADER.size + _CRC.size:
        return None
    content, crc = content[: -_CRC.size], content[-_CRC.size :]
    if _CRC.unpack(crc)[0] != zlib.crc32(content):
        return None
    kind, sequence = _HEADER.unpack_from(content)
    return SerialFrame(kind, sequence, content[_HEADER.size :])


def encode_cobs(data: bytes) -> bytes:
    """Return the data without zero bytes. The overhead is one byte, and one more for every 254 bytes."""
    parts = []
    for run in data.split(b"\0"):
        # A block of 254 bytes has the code 255 and no zero after it.
        while len(run) >= 254:
            parts += [b"\xff", run[:254]]
            run = run[254:]
        parts += [bytes([len(run) + 1]), run]
    return b"".join(parts)


def decode_cobs(data: bytes) -> bytes | None:
    """Return the original data, or None if the encoding is invalid."""
    out = bytearray()
    place = 0
    while place < len(data):
        code = data[place]
        end = place + code
        if code == 0 or end > len(data):
            return None
        out += data[place + 1 : end]
        # A full block is not followed by a zero, nor is the last block.
        if code != 255 and end < len(data):
            out.append(0)
        place = end
    return bytes(out)
