"""Frames on a stream: send them, find them among damaged bytes, and count both."""

from __future__ import annotations

from dataclasses import dataclass

from hil.errors import BoardLost
from hil.mcu.frames import MAX_BYTES, SerialFrame, decode_frame, encode_frame
from hil.mcu.streams import SerialStream


@dataclass
class LineStatistics:
    """Counters of a line."""

    sent_bytes: int = 0
    received_bytes: int = 0
    received_frames: int = 0
    bad_frames: int = 0
    repeated: int = 0  # requests that were sent again


class FramedLine:
    """Frames on an open stream."""

    def __init__(self, stream: SerialStream) -> None:
        self._stream = stream
        self._received = bytearray()
        self.statistics = LineStatistics()

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()

    def send(self, frame: SerialFrame) -> None:
        """Send a frame. Raises BoardLost if the stream fails."""
        self._send_bytes(encode_frame(frame))

    def end_frame(self) -> None:
        """End a frame that an earlier client left incomplete."""
        self._send_bytes(b"\0")

    def _send_bytes(self, data: bytes) -> None:
        try:
            self._stream.write(data)
        except OSError as error:
            raise _lost(error) from error
        self.statistics.sent_bytes += len(data)

    def receive(self, timeout_s: float) -> SerialFrame | None:
        """Return the next valid frame, or None after the timeout or after a damaged frame.

        Raises:
            BoardLost: the stream fails.
        """
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
        self.statistics.received_frames += frame is not None
        return frame


def _lost(error: OSError) -> BoardLost:
    return BoardLost(f"the serial line failed: {error.strerror or error}", hint="check the cable and the power")
