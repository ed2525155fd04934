"""Exchange requests and answers over a line that may lose, damage, repeat or delay bytes.

Every request has a sequence number, and the board answers with the same number. The exchange repeats a request without
an answer. If long frames do not arrive, it transfers shorter pieces: a line that damages one byte in a hundred
transfers no frame of 1,000 bytes, but most frames of 50 bytes. The exchange gives up if the board is silent, or if no
valid answer arrives for a long time, and not after a fixed number of attempts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hil.errors import BoardLost
from hil.mcu.frames import DATA_BYTES, SerialFrame
from hil.mcu.line import FramedLine
from hil.mcu.messages import DAMAGED, HELLO, BoardRestarted, parse_hello

# Bits of a byte on the line: start, eight, stop.
_BITS = 10
# Bytes of a frame in addition to its data, at most.
_FRAME_BYTES = 64
# Time for an answer in addition to the time on the line. It grows if answers are late, for example from an emulator on
# a busy machine, because repeated requests would make the board even slower.
_MARGIN_S, _MAX_MARGIN_S = 0.3, 3.0
_DECAY = 0.99
# An answer with a number this far below the current requests is a late one.
_RECENT = 8
# A board is lost after this time without a byte, and this number of requests. An emulator on a busy machine may need
# seconds for a frame, so the margin doubles with each request to a silent board, up to a factor.
_SILENT_S = 10.0
SILENT_TRIES = 8
_MAX_BACKOFF = 8
# A line is too bad after this time without a valid answer, although bytes arrive.
_DAMAGED_S = 30.0
# After this number of attempts, a piece is divided. After this number of answers to first attempts, pieces grow again.
_TRIES_TO_DIVIDE, _ANSWERS_TO_GROW = 2, 16
_MIN_PIECE = 32


@dataclass
class _SentPiece:
    """Piece without an answer."""

    start: int
    size: int
    body: bytes
    due: float = 0.0  # time of the next attempt
    line_s: float = 0.0  # time on the line
    tries: int = 0


@dataclass(frozen=True)
class AnsweredPiece:
    """Piece of a transfer, and the body of its answer."""

    start: int
    size: int
    body: bytes


@dataclass(frozen=True)
class RepeatRules:
    """When to repeat a request, and when to give up.

    Args:
        again_s: time before a request is repeated; 0: the time of the window on the line, and a margin.
        limit_s: the board may be silent for this time.
        silent_tries: attempts before a silent board is lost.
        max_tries: give up after this number of attempts; 0: no limit.
    """

    again_s: float = 0.0
    limit_s: float = 0.0
    silent_tries: int = SILENT_TRIES
    max_tries: int = 0


class RequestExchange:
    """Requests and answers on a line. ``window`` is the number of requests that the board accepts before it answers."""

    def __init__(self, line: FramedLine, baud: int) -> None:
        self._line = line
        self._byte_s = _BITS / baud
        # A random start: late responses to an earlier client have other numbers.
        self._sequence = random.randrange(1 << 16, 1 << 30)
        self.window = 1
        self._margin_s = _MARGIN_S
        self._piece = DATA_BYTES
        self._first_answers = 0  # answers to first attempts, one after the other
        self._unanswered: dict[int, int] = {}  # number -> how many sent requests have no answer
        self._silent_tries = 0
        self._arrived = (0, 0.0)  # received bytes, time of the last one
        self._answered = 0.0  # time of the last answer

    def ask(self, kind: int, body: bytes, rules: RepeatRules = RepeatRules()) -> bytes:
        """Send a request and return the body of its answer.

        Raises:
            BoardLost: the board does not answer.
            BoardRestarted: the board reports a restart.
        """
        (answer,) = self._exchange(kind, 1, lambda start, size: body, 1, rules)
        return answer.body

    def transfer(self, kind: int, length: int, make: Callable[[int, int], bytes]) -> Sequence[AnsweredPiece]:
        """Transfer a number of bytes in pieces, and return the answers in order.

        Args:
            make: returns the body of a request for a piece, from its start and size.

        Raises:
            BoardLost: the board does not answer.
            BoardRestarted: the board reports a restart.
        """
        return self._exchange(kind, length, make, _MIN_PIECE, RepeatRules())

    def tell(self, kind: int) -> None:
        """Send a request that has no answer."""
        self._sequence += 1
        self._line.send(SerialFrame(kind, self._sequence))

    def _exchange(
        self, kind: int, length: int, make: Callable[[int, int], bytes], smallest: int, rules: RepeatRules
    ) -> list[AnsweredPiece]:
        begin = time.monotonic()
        self._arrived, self._answered, self._silent_tries = (self._arrived[0], begin), begin, 0
        first = self._sequence + 1
        ranges = [(0, length)] if length else []  # not sent
        sent: dict[int, _SentPiece] = {}
        answers: list[AnsweredPiece] = []
        while ranges or sent:
            # The board ignores requests that are older than the window, so the oldest one must not fall behind.
            while ranges and self._sequence + 1 < min(sent, default=self._sequence + 1) + self.window:
                start, end = ranges.pop(0)
                size = min(end - start, self._piece)
                if start + size < end:
                    ranges.insert(0, (start + size, end))
                self._sequence += 1
                sent[self._sequence] = piece = _SentPiece(start, size, make(start, size))
                self._send(kind, self._sequence, piece, rules)
            frame = self._line.receive(max(0.0, min(one.due for one in sent.values()) - time.monotonic()))
            now = time.monotonic()
            if self._line.statistics.received_bytes != self._arrived[0]:
                self._arrived, self._silent_tries = (self._line.statistics.received_bytes, now), 0
            if frame is not None and frame.kind == DAMAGED:
                # Answers to the other requests of the window are still on the line.
                for piece in sent.values():
                    piece.due = min(piece.due, now + (piece.line_s if len(sent) > 1 else 0))
            elif frame is not None:
                self._answered = now
                if frame.kind == HELLO and frame.sequence == 0:
                    raise BoardRestarted(parse_hello(frame.body))
                is_expected = frame.sequence in sent and frame.kind == kind
                self._adapt_margin(frame.sequence, first, is_expected)
                if is_expected:
                    piece = sent.pop(frame.sequence)
                    answers.append(AnsweredPiece(piece.start, piece.size, frame.body))
                    self._grow(piece)
            for number, piece in list(sent.items()):
                if now < piece.due:
                    continue
                self._first_answers = 0
                self._silent_tries += 1
                self._check_lost(piece, now, begin + rules.limit_s, rules)
                if piece.tries >= _TRIES_TO_DIVIDE and piece.size > smallest:
                    del sent[number]
                    self._piece = max(smallest, piece.size // 2)
                    ranges.insert(0, (piece.start, piece.start + piece.size))
                else:
                    self._line.statistics.repeated += 1
                    self._send(kind, number, piece, rules)
        return sorted(answers, key=lambda one: one.start)

    def _send(self, kind: int, number: int, piece: _SentPiece, rules: RepeatRules) -> None:
        piece.line_s = 2 * self.window * (len(piece.body) + piece.size + _FRAME_BYTES) * self._byte_s
        backoff = min(1 << self._silent_tries // self.window, _MAX_BACKOFF)
        piece.due = time.monotonic() + (rules.again_s or piece.line_s + backoff * self._margin_s)
        piece.tries += 1
        self._unanswered[number] = piece.tries
        while len(self._unanswered) > 4 * _RECENT:
            del self._unanswered[next(iter(self._unanswered))]
        self._line.send(SerialFrame(kind, number, piece.body))

    def _adapt_margin(self, number: int, first: int, is_expected: bool) -> None:
        """Wait longer for answers if one was late, not lost: each attempt of a request got an answer."""
        if number not in self._unanswered:
            return
        left = self._unanswered[number] = self._unanswered[number] - 1
        if is_expected and left == 0:
            self._margin_s = max(_MARGIN_S, self._margin_s * _DECAY)
        elif not is_expected and left >= 0 and number >= first - _RECENT:
            self._margin_s = min(2 * self._margin_s, _MAX_MARGIN_S)

    def _grow(self, piece: _SentPiece) -> None:
        """Transfer longer pieces after many answers to first attempts."""
        if piece.tries > 1:
            return
        self._first_answers += 1
        if self._first_answers >= _ANSWERS_TO_GROW:
            self._first_answers, self._piece = 0, min(DATA_BYTES, 2 * self._piece)

    def _check_lost(self, piece: _SentPiece, now: float, until: float, rules: RepeatRules) -> None:
        """Raise BoardLost if the board is silent or no valid frame arrives, at the earliest at the time ``until``."""
        is_silent = self._silent_tries >= rules.silent_tries and now - self._arrived[1] > _SILENT_S
        if rules.max_tries:
            is_silent = piece.tries >= rules.max_tries
        if now > until and is_silent:
            raise BoardLost(
                "the microcontroller does not answer on the serial line",
                hint="check the cable, the baud rate and the power, or set [mcu] reset in the board's config",
            )
        if now > max(until, self._answered) + _DAMAGED_S:
            raise BoardLost(
                f"the serial line damages frames: no valid answer for {_DAMAGED_S:g} s",
                hint="check the baud rate, the ground wire and the cable",
            )
