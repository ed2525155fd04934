"""The client repeats lost requests, ignores late answers, and reports restarts."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import pytest

from hil.errors import BoardLost, ProtocolBroken
from hil.mcu.client import SerialClient
from hil.mcu.frames import SerialFrame, decode_frame, encode_frame
from hil.mcu.messages import HELLO, READ, RUN, WRITE, BoardRestarted

GREETING = struct.pack("<HH32sIIIII", 1, 1024, bytes(32), 1000, 0, 0, 2, 99)


class Board:
    """Stream to a board that answers requests from memory."""

    def __init__(self, spoil: Callable[[bytes], bytes] = bytes) -> None:
        self.inputs = bytearray(4096)
        self.frames: list[SerialFrame] = []
        self.runs: list[int] = []
        self._out = bytearray()
        self._spoil = spoil

    def write(self, data: bytes) -> None:
        for part in filter(None, data.split(b"\0")):
            frame = decode_frame(part)
            if frame is not None:
                self.frames.append(frame)
                self.answer(frame)

    def answer(self, frame: SerialFrame) -> None:
        """Answer a request."""
        body = {HELLO: GREETING, WRITE: bytes(4), RUN: b"", READ: bytes(4)}[frame.kind]
        if frame.kind == WRITE:
            (offset,) = struct.unpack_from("<I", frame.body)
            self.inputs[offset : offset + len(frame.body) - 4] = frame.body[4:]
        if frame.kind == RUN:
            if frame.sequence not in self.runs:
                self.runs.append(frame.sequence)
            crc, _ = struct.unpack("<II", frame.body)
            body = struct.pack("<IIIIQ", 0, 0, crc, 3, 1234)
        if frame.kind == READ:
            _, offset, length = struct.unpack("<III", frame.body)
            body += self.inputs[offset : offset + length]
        self.send(SerialFrame(frame.kind, frame.sequence, body))

    def send(self, frame: SerialFrame) -> None:
        """Send a frame to the client."""
        self._out += self._spoil(encode_frame(frame))

    def read(self, timeout_s: float) -> bytes:
        data, self._out = bytes(self._out), bytearray()
        return data

    def close(self) -> None:
        """Do nothing."""


def connect(board: Board) -> SerialClient:
    """Return a greeted client."""
    client = SerialClient(board, 10_000_000)
    assert client.greet(5.0).image_crc == 99
    return client


def test_data_is_written_and_read_in_pieces() -> None:
    board = Board()
    client = connect(board)
    data = bytes(range(256)) * 16
    client.write_inputs(data)
    assert bytes(board.inputs) == data
    assert client.read(0, 3000) == data[:3000]
    assert client.run(zlib.crc32(data), 1.0).ticks == 1234


def test_lost_answers_are_requested_again_and_a_run_happens_once() -> None:
    calls = iter(range(1_000_000))
    board = Board(spoil=lambda data: b"" if next(calls) % 3 == 1 else data)
    client = connect(board)
    client.write_inputs(bytes(4096))
    client.run(1, 5.0)
    client.run(1, 5.0)
    assert len(board.runs) == 2
    assert client.statistics.repeated > 0


def test_damaged_answers_are_counted_and_requested_again() -> None:
    calls = iter(range(1_000_000))

    def flip(data: bytes) -> bytes:
        return data if next(calls) % 2 else bytes([data[0], data[1] ^ 4]) + data[2:]

    client = SerialClient(board := Board(spoil=flip), 10_000_000)
    client.greet(10.0)
    client.write_inputs(b"abc")
    assert client.statistics.bad_frames >= 2
    assert bytes(board.inputs[:3]) == b"abc"


def test_a_late_answer_to_an_earlier_request_is_ignored() -> None:
    board = Board()
    client = connect(board)
    client.run(5, 1.0)
    old = board.frames[-1]
    board.send(SerialFrame(RUN, old.sequence, struct.pack("<IIIIQ", 3, 9, 9, 9, 9)))
    assert client.run(6, 1.0).status == 0


def test_a_silent_board_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hil.mcu.exchange._SILENT_S", 0.5)
    monkeypatch.setattr("hil.mcu.exchange._MARGIN_S", 0.1)
    client = connect(board := Board())
    board.answer = lambda frame: None  # type: ignore[method-assign]
    with pytest.raises(BoardLost, match="does not answer"):
        client.write_inputs(b"x")


def test_a_restart_during_a_run_is_reported() -> None:
    client = connect(board := Board())
    crashed = struct.pack("<HH32sIIIII", 1, 1024, bytes(32), 1000, 0, 2, 2, 99)
    board.answer = lambda frame: board.send(SerialFrame(HELLO, 0, crashed))  # type: ignore[method-assign]
    with pytest.raises(BoardRestarted) as caught:
        client.run(1, 1.0)
    assert caught.value.hello.fault_kind == 2


def test_a_board_that_restarts_forever_is_lost() -> None:
    board = Board()
    board.answer = lambda frame: board.send(SerialFrame(HELLO, 0, GREETING))  # type: ignore[method-assign]
    with pytest.raises(BoardLost, match="restarts again and again"):
        SerialClient(board, 10_000_000).greet(0.2)


@pytest.mark.parametrize(
    ("greeting", "message"),
    [
        (struct.pack("<HH32sIIIII", 9, 1024, bytes(32), 1000, 0, 0, 2, 99), "version 9"),
        (struct.pack("<HH32sIIIII", 1, 1024, bytes(32), 0, 0, 0, 2, 99), "no tick frequency"),
        (b"short", "5 bytes"),
    ],
)
def test_other_firmware_is_refused(greeting: bytes, message: str) -> None:
    board = Board()
    board.answer = lambda frame: board.send(SerialFrame(HELLO, frame.sequence, greeting))  # type: ignore[method-assign]
    with pytest.raises(ProtocolBroken, match=message):
        SerialClient(board, 10_000_000).greet(1.0)
