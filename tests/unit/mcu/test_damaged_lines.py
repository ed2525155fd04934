"""A client on a line that damages frames: every answer is right, or the client reports a lost board."""

from __future__ import annotations

import random
import struct
import zlib
from types import SimpleNamespace

import pytest

from hil.errors import BoardLost
from hil.mcu import client as client_module
from hil.mcu import exchange as exchange_module
from hil.mcu.client import SerialClient
from hil.mcu.frames import SerialFrame, decode_frame, encode_frame
from hil.mcu.messages import HELLO, OK, OUTPUTS, READ, RUN, WRITE

_HELLO = struct.pack("<HH32sIIIII", 1, 1024, bytes(32), 1000, 0, 0, 2, 99)
_SIZE = 200


class Line:
    """Line to a board whose outputs are its inverted inputs. ``now`` is the time: only waiting takes time."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        self.rng, self.rate = rng, rate
        self.now = 0.0
        self.damaged = 0
        self.inputs = bytearray(_SIZE)
        self.outputs = bytes(_SIZE)
        self.result = b""
        self.last_run = 0
        self._to_board, self._to_host = bytearray(), bytearray()
        self._earlier = {"up": b"", "down": b""}

    def damage(self, data: bytes, way: str) -> bytes:
        """Return what arrives of a frame."""
        rng = self.rng
        if rng.random() >= self.rate:
            self._earlier[way] = data
            return data
        self.damaged += 1
        at = rng.randrange(len(data))
        changed = bytearray(data)
        kind = rng.randrange(7)
        if kind == 0:  # a changed bit
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:  # a burst of noise
            end = min(len(data), at + rng.randrange(1, 12))
            changed[at:end] = rng.randbytes(end - at)
        elif kind == 2:  # lost bytes
            del changed[at : at + rng.randrange(1, 64)]
        elif kind == 3:  # a repeated piece
            changed[at:at] = changed[at : at + 64]
        elif kind == 4:  # a false end of a frame
            changed[at:at] = b"\0"
        elif kind == 5:  # an earlier frame arrives again, this one does not
            return self._earlier[way]
        else:
            changed[at], changed[0] = changed[0], changed[at]
        return bytes(changed)

    def write(self, data: bytes) -> None:
        self._to_board += self.damage(data, "down")
        while b"\0" in self._to_board:
            part, _, self._to_board = self._to_board.partition(b"\0")
            frame = decode_frame(bytes(part)) if part else None
            if frame is not None:
                answer = SerialFrame(frame.kind, frame.sequence, self.answer(frame))
                self._to_host += self.damage(encode_frame(answer), "up")

    def answer(self, frame: SerialFrame) -> bytes:
        """Return the body of an answer, as the firmware makes it."""
        if frame.kind == HELLO:
            self.last_run = 0
            return _HELLO
        if frame.kind == WRITE:
            (offset,) = struct.unpack_from("<I", frame.body)
            self.inputs[offset : offset + len(frame.body) - 4] = frame.body[4:]
            return bytes(4)
        if frame.kind == RUN and frame.sequence != self.last_run:
            self.last_run = frame.sequence
            (crc, _) = struct.unpack("<II", frame.body)
            status = OK if zlib.crc32(self.inputs) == crc else 2
            if status == OK:
                self.outputs = bytes(byte ^ 0xFF for byte in self.inputs)
            self.result = struct.pack("<IIIIQ", status, 0, zlib.crc32(self.outputs), 0, 5)
        if frame.kind == READ:
            _, offset, length = struct.unpack("<III", frame.body)
            return bytes(4) + self.outputs[offset : offset + length]
        return self.result

    def read(self, timeout_s: float) -> bytes:
        data, self._to_host = bytes(self._to_host), bytearray()
        if not data:
            self.now += timeout_s + 1e-6
        return data

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("count", [5_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_damaged_frames_give_no_wrong_answer(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    damaged = right = lost = 0
    while damaged < count:
        line = Line(rng, rng.choice([0.02, 0.3, 0.6]))
        clock = SimpleNamespace(monotonic=lambda line=line: line.now, sleep=line.wait)
        for module in (client_module, exchange_module):
            monkeypatch.setattr(module, "time", clock)
        client = SerialClient(line, 1_000_000)
        try:
            client.greet(60.0)
            for _ in range(20):
                data = rng.randbytes(_SIZE)
                client.write_inputs(data)
                result = client.run(zlib.crc32(data), 5.0)
                outputs = client.read(OUTPUTS, _SIZE)
                assert result.status == OK
                assert zlib.crc32(outputs) == result.outputs_crc
                assert outputs == bytes(byte ^ 0xFF for byte in data)
                right += 1
        except BoardLost:
            lost += 1
        damaged += line.damaged
    assert right > count // 20
    assert lost
