"""Requests and answers of the firmware: numbers, structures, and what they mean."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from hil.errors import HilError, ProtocolBroken

VERSION = 1
HELLO, WRITE, RUN, READ, RESET = 1, 2, 3, 4, 5
# Message with the number 0: the board received a damaged frame.
DAMAGED = 6
OUTPUTS, TICKS, FAULT = 0, 1, 2
OK, BAD_REQUEST, BAD_INPUTS, RUN_FAILED = 0, 1, 2, 3
WRITE_HEADER = struct.Struct("<I")
RUN_REQUEST = struct.Struct("<II")
READ_REQUEST = struct.Struct("<III")
STATUS = struct.Struct("<I")
HELLO_ANSWER = struct.Struct("<HH32sIIIII")
_RESULT = struct.Struct("<IIIIQ")
_FAULT = struct.Struct("<10I")
FAULT_BYTES = _FAULT.size


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


def parse_hello(body: bytes) -> Hello:
    """Return the state of a board. Raises ProtocolBroken for other firmware."""
    hello = Hello(*_unpack(HELLO_ANSWER, body))
    if hello.version != VERSION:
        raise ProtocolBroken(f"the firmware speaks version {hello.version}, expected {VERSION}")
    if not hello.tick_hz:
        raise ProtocolBroken("the firmware reports no tick frequency")
    return hello


def parse_result(body: bytes) -> BoardRunResult:
    """Return the result of a run. Raises ProtocolBroken for a body of another size."""
    return BoardRunResult(*_unpack(_RESULT, body))


def parse_fault(body: bytes) -> FaultRecord:
    """Return the registers of a fault."""
    _, kind, step, pc, lr, sp, *status = _unpack(_FAULT, body)
    return FaultRecord(kind, step, pc, lr, sp, tuple(status))


def parse_status(body: bytes) -> int:
    """Return the status at the start of an answer."""
    (status,) = _unpack(STATUS, body[: STATUS.size])
    return int(status & 0xFF)


def _unpack(form: struct.Struct, body: bytes) -> tuple[Any, ...]:
    if len(body) != form.size:
        raise ProtocolBroken(f"the board's answer has {len(body)} bytes, expected {form.size}")
    return form.unpack(body)
