"""Parse untrusted protobuf messages with a limit on the number of fields.

A parsed field needs many times the memory of its bytes.
"""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

M = TypeVar("M", bound=Message)

# Maximum number of fields, including nested messages. An empty nested message takes two bytes, and 90 bytes in memory.
# A program's outputs, 10,000 tensors of 32 dimensions, stay below the limit; a packed array counts as one field.
MAX_FIELDS = 800_000
# Limit for messages to a farm: a submission has up to 100,000 jobs.
MAX_FARM_FIELDS = 2_000_000
# Smaller messages take little memory in any case and are not checked.
_SMALL_BYTES = 256 << 10
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def parse_message(kind: type[M], data: bytes, most: int = MAX_FIELDS) -> M:
    """Parse a message.

    Args:
        kind: message class.
        data: serialized message.
        most: maximum number of fields.

    Raises:
        DecodeError: the message is invalid or has too many fields.
    """
    if len(data) > _SMALL_BYTES and _has_more_fields(data, kind.DESCRIPTOR, most):
        raise DecodeError(f"the message has more than {most} fields")
    return kind.FromString(data)


def _has_more_fields(data: bytes, descriptor: Any, most: int) -> bool:
    """Return True if a message has more than ``most`` fields. A truncated message counts up to its end.

    Source: https://protobuf.dev/programming-guides/encoding/
    """
    count = 0
    waiting: list[tuple[int, int, Any]] = [(0, len(data), descriptor.fields_by_number)]
    try:
        while waiting:
            at, end, fields = waiting.pop()
            while at < end:
                count += 1
                if count > most:
                    return True
                tag, at = _read_varint(data, at)
                wire_type = tag & 7
                if wire_type == _VARINT:
                    at = _read_varint(data, at)[1]
                elif wire_type == _LENGTH:
                    size, at = _read_varint(data, at)
                    field = fields.get(tag >> 3)
                    if size and field is not None and field.message_type is not None:
                        waiting.append((at, min(at + size, end), field.message_type.fields_by_number))
                    at += size
                else:  # group start and end tags have no content
                    at += {_FIXED64: 8, _FIXED32: 4}.get(wire_type, 0)
    except (IndexError, ValueError):  # protobuf rejects the message
        pass
    return False


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a varint and the position after it.

    Raises:
        IndexError: the data is truncated.
        ValueError: the number exceeds 64 bits.
    """
    number = shift = 0
    while (byte := data[at]) > 0x7F:
        if shift > 63:
            raise ValueError("integer of more than 64 bits")
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return number | byte << shift, at + 1
