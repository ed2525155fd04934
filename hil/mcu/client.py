"""Client of the firmware: requests with repetition, and the reasons of failures.

Every request has a sequence number, and the board answers with the same number. The client repeats requests without an
answer. The board runs a repeated RUN request only once.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hil.errors import BoardLost, HilError, ProtocolBroken
from hil.mcu.frames import DATA_BYTES, MAX_BYTES, SerialFrame, decode_frame, encode_frame
from hil.mcu.streams import SerialStream

VERSION = 1
HELLO, WRITE, RUN, READ, RESET = 1, 2, 3, 4, 5
OUTPUTS, TICKS, FAULT = 0, 1, 2
OK, BAD_REQUEST, BAD_INPUTS, RUN_FAILED = 0, 1, 2, 3
_HELLO = struct.Struct("<HH32sIIIII")
_WRITE = struct.Struct("<I")
_RUN = struct.Struct("<II")
_RESULT = struct.Struct("<IIIIQ")
_READ = struct.Struct("<III")
_FAULT = struct.Struct("<10I")
_STATUS = struct.Struct("<I")
# Bits of a byte on the line: start, eight, stop.
_BITS = 10
_TRIES = 8
_DECAY = 0.99
# An answer with a number this far below the current requests is a late one.
_RECENT = 8
# Time for an answer in addition to the time on the line. It grows if answers are late, for example from an emulator on
# a busy machine, because repeated requests would make the board even slower.
_MARGIN_S, _MAX_MARGIN_S = 0.3, 3.0
# After this time without a response to RUN, ask again: the response may be lost.
_RUN_AGAIN_S = 1.0
_PAUSE_S = 0.02


@dataclass(frozen=True)
class Hello:
    """State of a board."""

    version: int
    data_bytes: int
    digest: bytes  # of the firmware
    tick_hz: int
    bad_frames: int  # damaged frames that the board received since start
    fault_kind: int  # why the last run ended; 0: no fault
    window: int  # requests that the board accepts before it answers
    image_crc: int  # CRC-32 of the image in flash, computed at start


@dataclass(frozen=True)
class BoardRunResult:
    """Result of a run."""

    status: int
    code: int  # value that a dispatch function returned
    outputs_crc: int
    step: int
    ticks: int


@dataclass(frozen=True)
class FaultRecord:
    """Registers at a fault."""

    kind: int
    step: int
    pc: int
    lr: int
    sp: int
    status: tuple[int, ...]


class BoardRestarted(HilError):
    """The board started again while the client waited. ``hello`` is its greeting."""

    def __init__(self, hello: Hello) -> None:
        super().__init__("the board restarted")
        self.hello = hello


@dataclass
class LineStatistics:
    """Counters of the client."""

    sent_bytes: int = 0
    received_bytes: int = 0
    bad_frames: int = 0
    repeated: int = 0


class SerialClient:
    """Client on an open line."""

    def __init__(self, stream: SerialStream, baud: int) -> None:
        self._stream = stream
        self._received = bytearray()
        self._byte_s = _BITS / baud
        # A random start: late responses to an earlier client have other numbers.
        self._sequence = random.randrange(1 << 16, 1 << 30)
        self._window = 1
        self._margin_s = _MARGIN_S
        self.statistics = LineStatistics()

    def close(self) -> None:
        """Close the line."""
        self._stream.close()

    def greet(self, timeout_s: float) -> Hello:
        """Wait until the board answers. Raises BoardLost after the timeout, and ProtocolBroken for other firmware."""
        until = time.monotonic() + timeout_s
        self._send_bytes(b"\0")  # ends a frame that an earlier client left incomplete
        while True:
            try:
                (body,) = self._exchange([(HELLO, b"")], tries=1)
            except BoardRestarted as restarted:
                if time.monotonic() > until:
                    why = "the microcontroller restarts again and again"
                    raise BoardLost(why, hint="check the power supply and the reset line") from restarted
                continue
            except BoardLost:
                if time.monotonic() > until:
                    raise
                time.sleep(_PAUSE_S)  # a closed line fails at once
                continue
            hello = _parse_hello(body)
            self._window = max(1, min(hello.window, 8))
            return hello

    def write_inputs(self, data: bytes) -> None:
        """Write the inputs, one after the other without gaps."""
        requests = [
            (WRITE, _WRITE.pack(offset) + data[offset : offset + DATA_BYTES])
            for offset in range(0, len(data), DATA_BYTES)
        ]
        for body in self._exchange(requests):
            self._need_ok(body[:4])

    def run(self, inputs_crc: int, timeout_s: float) -> BoardRunResult:
        """Run the program once.

        Args:
            timeout_s: the board stops the run after this time.

        Raises:
            BoardRestarted: the run ended with a fault.
            BoardLost: the board does not answer.
        """
        body = _RUN.pack(inputs_crc, min(int(timeout_s * 1000), (1 << 32) - 1))
        (answer,) = self._exchange([(RUN, body)], again_s=_RUN_AGAIN_S, limit_s=timeout_s + 2 * _RUN_AGAIN_S)
        return BoardRunResult(*_unpack(_RESULT, answer))

    def read(self, area: int, length: int) -> bytes:
        """Read bytes of an area."""
        requests = [
            (READ, _READ.pack(area, offset, min(DATA_BYTES, length - offset)))
            for offset in range(0, length, DATA_BYTES)
        ]
        parts = []
        for (_, request), body in zip(requests, self._exchange(requests), strict=True):
            self._need_ok(body[:4])
            if len(body) - 4 != _READ.unpack(request)[2]:
                raise ProtocolBroken("the board sent a different number of bytes than requested")
            parts.append(body[4:])
        return b"".join(parts)

    def read_fault(self) -> FaultRecord:
        """Return the registers of the last fault."""
        _, kind, step, pc, lr, sp, *status = _FAULT.unpack(self.read(FAULT, _FAULT.size)[: _FAULT.size])
        return FaultRecord(kind, step, pc, lr, sp, tuple(status))

    def restart(self) -> None:
        """Ask the board to restart. It does not answer."""
        self._sequence += 1
        self._send_bytes(encode_frame(SerialFrame(RESET, self._sequence)))

    def _need_ok(self, body: bytes) -> None:
        (status,) = _unpack(_STATUS, body)
        if status & 0xFF != OK:
            raise ProtocolBroken("the board rejected a request", hint="flash the firmware again")

    def _exchange(
        self,
        requests: Sequence[tuple[int, bytes]],
        *,
        tries: int = _TRIES,
        again_s: float = 0.0,
        limit_s: float = 0.0,
    ) -> list[bytes]:
        """Send requests and return the bodies of their answers, in order.

        Args:
            tries: how often to send a request.
            again_s: time before a request is repeated; 0: the time of the window on the line, and a margin.
            limit_s: total time for a request; 0: no limit but the tries.
        """
        first = self._sequence + 1
        self._sequence += len(requests)
        answers: dict[int, bytes] = {}
        pending: dict[int, tuple[float, int]] = {}  # number -> time of the next repetition, tries
        following = 0
        longest = max((len(body) for _, body in requests), default=0) + DATA_BYTES
        line_s = 2 * self._window * longest * self._byte_s
        until = time.monotonic() + limit_s if limit_s else 0.0
        while len(answers) < len(requests):
            # The board ignores requests that are older than the window, so the oldest one must not fall behind.
            while following < len(requests) and following < min(pending, default=following) + self._window:
                self._send(requests[following], first + following)
                pending[following] = (time.monotonic() + (again_s or line_s + self._margin_s), 1)
                following += 1
            frame = self._receive(max(0.0, min(due for due, _ in pending.values()) - time.monotonic()))
            if frame is not None and frame.sequence == 0 and frame.kind == HELLO:
                raise BoardRestarted(_parse_hello(frame.body))
            place = frame.sequence - first if frame is not None else -1
            if frame is not None and place in pending and frame.kind == requests[place][0]:
                answers[place] = frame.body
                if pending.pop(place)[1] == 1:
                    self._margin_s = max(_MARGIN_S, self._margin_s * _DECAY)
            elif frame is not None and -_RECENT <= place < following:
                # The second answer to a repeated request: the first was late, not lost.
                self._margin_s = min(2 * self._margin_s, _MAX_MARGIN_S)
            now = time.monotonic()
            for number, (due, count) in list(pending.items()):
                if now < due:
                    continue
                if (until and now > until) or (not until and count >= tries):
                    raise BoardLost(
                        "the microcontroller does not answer on the serial line",
                        hint="check the cable, the baud rate and the power, or set [mcu] reset in the board's config",
                    )
                self.statistics.repeated += 1
                self._send(requests[number], first + number)
                pending[number] = (now + (again_s or line_s + self._margin_s), count + 1)
        return [answers[place] for place in range(len(requests))]

    def _send(self, request: tuple[int, bytes], sequence: int) -> None:
        self._send_bytes(encode_frame(SerialFrame(request[0], sequence, request[1])))

    def _send_bytes(self, data: bytes) -> None:
        try:
            self._stream.write(data)
        except OSError as error:
            raise _lost(error) from error
        self.statistics.sent_bytes += len(data)

    def _receive(self, timeout_s: float) -> SerialFrame | None:
        """Return the next valid frame, or None after the timeout or after a damaged frame."""
        if b"\0" not in self._received:
            try:
                data = self._stream.read(timeout_s)
            except OSError as error:
                raise _lost(error) from error
            self._received += data
            self.statistics.received_bytes += len(data)
        encoded, separator, rest = self._received.partition(b"\0")
        if not separator:
            if len(encoded) > MAX_BYTES:
                self._received.clear()
                self.statistics.bad_frames += 1
            return None
        self._received = rest
        frame = decode_frame(bytes(encoded)) if len(encoded) <= MAX_BYTES else None
        if frame is None and encoded:
            self.statistics.bad_frames += 1
        return frame


def _lost(error: OSError) -> BoardLost:
    return BoardLost(f"the serial line failed: {error.strerror or error}", hint="check the cable and the power")


def _parse_hello(body: bytes) -> Hello:
    hello = Hello(*_unpack(_HELLO, body))
    if hello.version != VERSION:
        raise ProtocolBroken(f"the firmware speaks version {hello.version}, expected {VERSION}")
    if not hello.tick_hz:
        raise ProtocolBroken("the firmware reports no tick frequency")
    return hello


def _unpack(form: struct.Struct, body: bytes) -> tuple[Any, ...]:
    if len(body) != form.size:
        raise ProtocolBroken(f"the board's answer has {len(body)} bytes, expected {form.size}")
    return form.unpack(body)
