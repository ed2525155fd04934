"""Messages are parsed if they have few fields, regardless of their size."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from hil.core.varint import encode_varint
from hil.protocol import bounded_message
from hil.protocol.bounded_message import MAX_FIELDS, parse_message
from hil.protocol.v1 import agent_pb2 as pb
from hil.protocol.v1 import farm_pb2

# The size of a large message that agents may send.
LARGE = 16 << 20


def inside(*numbers: int, content: bytes) -> bytes:
    """Wrap content in nested messages, given the field numbers."""
    for number in reversed(numbers):
        content = encode_varint(number << 3 | 2) + encode_varint(len(content)) + content
    return content


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (pb.InvokeReply, inside(1, content=b"\x0a\x00" * (LARGE // 2))),
        (pb.InvokeReply, inside(1, 10, 1, content=b"\x1a\x00" * (LARGE // 2))),
        (pb.InvokeReply, inside(1, 11, content=b"\x20\x00" * (LARGE // 2))),
        (pb.InvokeReply, inside(3, content=b"\x0a\x00" * (LARGE // 2))),
        (pb.InvokeReply, inside(1, content=b"") * (LARGE // 2)),
        (pb.InvokeReply, b"\xf8\x07\x00" * (LARGE // 3)),
        (pb.MissingReply, b"\x0a\x00" * (LARGE // 2)),
        (pb.MissingReply, inside(1, content=b"\x10\x00" * (LARGE // 2))),
        (farm_pb2.SubmitReply, b"\x12\x00" * (LARGE // 2)),
    ],
)
def test_parse_message_limits_number_of_fields(kind: type, data: bytes) -> None:
    with pytest.raises(DecodeError, match="more than"):
        parse_message(kind, data)


def test_parse_message_counts_groups_as_fields() -> None:
    data = b"\x0b\x0c" * LARGE
    with pytest.raises(DecodeError, match="more than"):
        parse_message(pb.InvokeReply, data)


@pytest.mark.parametrize(
    "message",
    [
        pb.InvokeReply(done=pb.InvokeDone(start_ns=range(2_000_000), end_ns=range(2_000_000))),
        pb.InvokeReply(done=pb.InvokeDone(outputs=[pb.Tensor(name=str(n), inline=b"x" * 200) for n in range(10_000)])),
        pb.LoadReply(
            outputs=[pb.TensorSpec(name="x", dims=[pb.Dim(size=3) for _ in range(32)]) for _ in range(10_000)]
        ),
        pb.MissingReply(missing=[pb.MissingBlob(digest="x" * 71, have_bytes=5) for _ in range(100_000)]),
        pb.LogLine(text="x" * (4 << 20), clock_ns=-5),
        pb.CounterSample(readings=[pb.Reading(name="x" * 1000, value=1.5) for _ in range(1000)]),
    ],
)
def test_parse_message_accepts_large_message_with_few_fields(message: pb.InvokeReply) -> None:
    data = message.SerializeToString()
    assert len(data) > bounded_message._SMALL_BYTES
    assert parse_message(type(message), data) == message


@pytest.mark.parametrize("cut", [1, 7, 1 << 19])
def test_parse_message_rejects_truncated_message(cut: int) -> None:
    data = pb.MissingReply(missing=[pb.MissingBlob(digest="x" * 71) for _ in range(20_000)]).SerializeToString()
    with pytest.raises(DecodeError):
        parse_message(pb.MissingReply, data[:-cut])


def test_parse_message_rejects_endless_varint_quickly() -> None:
    with pytest.raises(DecodeError):
        parse_message(pb.MissingReply, b"\x08" + b"\xff" * (4 << 20))


def test_parse_message_accepts_any_fields_in_small_message() -> None:
    assert len(parse_message(pb.MissingReply, b"\x0a\x00" * 1000).missing) == 1000
    assert bounded_message._SMALL_BYTES // 2 < MAX_FIELDS
