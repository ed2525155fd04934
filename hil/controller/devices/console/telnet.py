"""Remove telnet commands from a console's stream, and refuse the server's options (RFC 854, RFC 855).

ser2net and labgrid's exporter use telnet with the options echo, suppress go ahead and binary. hil accepts these
options from the server, and refuses all others.
"""

from __future__ import annotations

IAC, DONT, DO, WONT, WILL, SB, SE = 255, 254, 253, 252, 251, 250, 240
BINARY, ECHO, SUPPRESS_GO_AHEAD = 0, 1, 3
_ACCEPTED = {BINARY, ECHO, SUPPRESS_GO_AHEAD}
# Maximum bytes of a subnegotiation. A longer one is invalid, and its end is not waited for.
_MAX_SUBNEGOTIATION = 1024
# Answers to a single chunk are limited, because the server chooses their number.
_MAX_ANSWERS = 256


class TelnetFilter:
    """State of a telnet connection.

    Bytes of a command may be spread over multiple chunks.
    """

    def __init__(self) -> None:
        self._state = "data"
        self._verb = 0
        self._skipped = 0
        # Options in use: those that the server performs, and those that hil performs.
        self._theirs: set[int] = set()
        self._ours: set[int] = set()

    def receive(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the data without commands, and the answer to send to the server."""
        if self._state == "data" and IAC not in data and b"\r\0" not in data and data[-1:] != b"\r":
            return data, b""
        text, answer = bytearray(), bytearray()
        for byte in data:
            self._step(byte, text, answer)
        return bytes(text), bytes(answer[: 3 * _MAX_ANSWERS])

    def _step(self, byte: int, text: bytearray, answer: bytearray) -> None:
        if self._state in ("data", "return"):
            is_padding = self._state == "return" and byte == 0  # NVT sends CR NUL for a carriage return
            self._state = "iac" if byte == IAC else "return" if byte == 0x0D else "data"
            if byte != IAC and not is_padding:
                text.append(byte)
        elif self._state == "iac":
            self._begin_command(byte, text)
        elif self._state == "verb":
            self._state = "data"
            self._answer_option(byte, answer)
        else:
            self._skip_subnegotiation(byte)

    def _begin_command(self, byte: int, text: bytearray) -> None:
        self._state = "data"
        if byte == IAC:
            text.append(IAC)
        elif byte in (DO, DONT, WILL, WONT):
            self._verb, self._state = byte, "verb"
        elif byte == SB:
            self._skipped, self._state = 0, "sub"
        # Other commands, such as NOP, have no argument and no effect.

    def _skip_subnegotiation(self, byte: int) -> None:
        self._skipped += 1
        if self._state == "sub iac":
            self._state = "data" if byte == SE else "sub"
        elif byte == IAC:
            self._state = "sub iac"
        if self._skipped > _MAX_SUBNEGOTIATION:
            self._state = "data"

    def _answer_option(self, option: int, answer: bytearray) -> None:
        """Answer only changes of an option, so that two programs never answer each other forever (RFC 854)."""
        if self._verb == WILL and option not in self._theirs:
            if option in _ACCEPTED:
                self._theirs.add(option)
            answer += bytes((IAC, DO if option in _ACCEPTED else DONT, option))
        elif self._verb == WONT and option in self._theirs:
            self._theirs.discard(option)
            answer += bytes((IAC, DONT, option))
        elif self._verb == DO and option not in self._ours:
            accepted = option in (BINARY, SUPPRESS_GO_AHEAD)
            if accepted:
                self._ours.add(option)
            answer += bytes((IAC, WILL if accepted else WONT, option))
        elif self._verb == DONT and option in self._ours:
            self._ours.discard(option)
            answer += bytes((IAC, WONT, option))

    @staticmethod
    def send(data: bytes) -> bytes:
        """Return the data to send for user input, with escaped command bytes."""
        return data.replace(bytes((IAC,)), bytes((IAC, IAC)))
