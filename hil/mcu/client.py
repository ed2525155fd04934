"""Client of the firmware: greet the board, write inputs, run, and read outputs."""

from __future__ import annotations

import time
from dataclasses import replace

from hil.errors import BoardLost, ProtocolBroken
from hil.mcu.exchange import RepeatRules, RequestExchange
from hil.mcu.line import FramedLine, LineStatistics
from hil.mcu.messages import (
    FAULT,
    FAULT_BYTES,
    HELLO,
    OK,
    READ,
    READ_REQUEST,
    RESET,
    RUN,
    RUN_REQUEST,
    STATUS,
    WRITE,
    WRITE_HEADER,
    BoardRestarted,
    BoardRunResult,
    FaultRecord,
    Hello,
    parse_fault,
    parse_hello,
    parse_result,
    parse_status,
)
from hil.mcu.streams import SerialStream

_MAX_WINDOW = 8
# After this time without a response to RUN, ask again: the response may be lost.
_RUN_AGAIN_S = 1.0
_RUN_TRIES = 3
_PAUSE_S = 0.02
# Time for a greeting on a line that damages frames.
_DAMAGED_GREET_S = 5.0


class SerialClient:
    """Client on an open line."""

    def __init__(self, stream: SerialStream, baud: int) -> None:
        self._line = FramedLine(stream)
        self._exchange = RequestExchange(self._line, baud)

    @property
    def statistics(self) -> LineStatistics:
        """Counters of the line."""
        return self._line.statistics

    def close(self) -> None:
        """Close the line."""
        self._line.close()

    def greet(self, timeout_s: float) -> Hello:
        """Wait until the board answers. If damaged bytes arrive, wait longer.

        Raises:
            BoardLost: the board does not answer.
            ProtocolBroken: the board has other firmware.
        """
        begin = time.monotonic()
        before = replace(self.statistics)
        self._line.end_frame()
        while True:
            until = begin + (max(timeout_s, _DAMAGED_GREET_S) if self._count_damaged(before) else timeout_s)
            try:
                hello = parse_hello(self._exchange.ask(HELLO, b"", RepeatRules(max_tries=1)))
            except BoardRestarted as restarted:
                if time.monotonic() > until:
                    why = "the microcontroller restarts again and again"
                    raise BoardLost(why, hint="check the power supply and the reset line") from restarted
                continue
            except BoardLost as error:
                if time.monotonic() > until:
                    raise _explain_silence(error, self._count_damaged(before)) from error
                time.sleep(_PAUSE_S)  # a closed line fails at once
                continue
            self._exchange.window = max(1, min(hello.window, _MAX_WINDOW))
            return hello

    def _count_damaged(self, before: LineStatistics) -> int:
        """Return the number of bytes that arrived since the earlier counters, or 0 if a valid frame arrived."""
        if self.statistics.received_frames > before.received_frames:
            return 0
        return self.statistics.received_bytes - before.received_bytes

    def write_inputs(self, data: bytes) -> None:
        """Write the inputs, one after the other without gaps."""
        for piece in self._exchange.transfer(
            WRITE, len(data), lambda start, size: WRITE_HEADER.pack(start) + data[start : start + size]
        ):
            _need_ok(piece.body)

    def run(self, inputs_crc: int, timeout_s: float) -> BoardRunResult:
        """Run the program once.

        Args:
            timeout_s: the board stops the run after this time.

        Raises:
            BoardRestarted: the run ended with a fault.
            BoardLost: the board does not answer.
        """
        body = RUN_REQUEST.pack(inputs_crc, min(int(timeout_s * 1000), (1 << 32) - 1))
        rules = RepeatRules(_RUN_AGAIN_S, limit_s=timeout_s + 2 * _RUN_AGAIN_S, silent_tries=_RUN_TRIES)
        return parse_result(self._exchange.ask(RUN, body, rules))

    def read(self, area: int, length: int) -> bytes:
        """Read bytes of an area."""
        pieces = self._exchange.transfer(READ, length, lambda start, size: READ_REQUEST.pack(area, start, size))
        for piece in pieces:
            _need_ok(piece.body)
            if len(piece.body) - STATUS.size != piece.size:
                raise ProtocolBroken("the board sent a different number of bytes than requested")
        return b"".join(piece.body[STATUS.size :] for piece in pieces)

    def read_fault(self) -> FaultRecord:
        """Return the registers of the last fault."""
        return parse_fault(self.read(FAULT, FAULT_BYTES))

    def restart(self) -> None:
        """Ask the board to restart. It does not answer."""
        self._exchange.tell(RESET)


def _need_ok(body: bytes) -> None:
    if parse_status(body) != OK:
        raise ProtocolBroken("the board rejected a request", hint="flash the firmware again")


def _explain_silence(error: BoardLost, damaged_bytes: int) -> BoardLost:
    """Return a more exact error if bytes arrived, but no valid frame."""
    if not damaged_bytes:
        return error
    return BoardLost(
        f"the microcontroller sends bytes, but no valid frame ({damaged_bytes} bytes)",
        hint="the baud rate of the config ([mcu] baud) may differ from the board's, or the board has other firmware",
    )
