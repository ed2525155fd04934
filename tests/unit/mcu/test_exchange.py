"""Transfers adapt to the line: short pieces on a bad one, and the exchange ends only without any progress."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hil.errors import BoardLost
from hil.mcu import client as client_module
from hil.mcu import exchange as exchange_module
from hil.mcu.client import SerialClient
from hil.mcu.exchange import RequestExchange
from hil.mcu.frames import SerialFrame, decode_frame, encode_frame
from hil.mcu.line import FramedLine
from hil.mcu.messages import DAMAGED, READ
from tools.virtual_board.serial_bridge import LineDamage, LineFaults

BAUD = 921_600


class Echo:
    """Stream to a board that answers each request with its body. ``now`` is the time: only waiting takes time."""

    def __init__(self, to_board: Callable[[bytes], bytes] = bytes, to_host: Callable[[bytes], bytes] = bytes) -> None:
        self.now = 0.0
        self.sizes: list[int] = []
        self._spoil = to_board, to_host
        self._to_board, self._to_host = bytearray(), bytearray()

    def write(self, data: bytes) -> None:
        self._to_board += self._spoil[0](data)
        while b"\0" in self._to_board:
            part, _, self._to_board = self._to_board.partition(b"\0")
            frame = decode_frame(bytes(part)) if part else None
            if frame is None:
                frame = SerialFrame(DAMAGED, 0)
            else:
                self.sizes.append(len(frame.body))
            if part:
                self._to_host += self._spoil[1](encode_frame(frame))

    def read(self, timeout_s: float) -> bytes:
        data, self._to_host = bytes(self._to_host), bytearray()
        if not data:
            self.now += timeout_s + 1e-6
        return data

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[[Echo], RequestExchange]:
    """Return a function that connects an exchange to a board, whose time is that of the board."""

    def make(echo: Echo) -> RequestExchange:
        clock = SimpleNamespace(monotonic=lambda: echo.now, sleep=lambda seconds: setattr(echo, "now", echo.now + 1))
        for module in (client_module, exchange_module):
            monkeypatch.setattr(module, "time", clock)
        exchange = RequestExchange(FramedLine(echo), BAUD)
        exchange.window = 2
        return exchange

    return make


def transfer(exchange: RequestExchange, data: bytes) -> bytes:
    """Transfer data as requests, and return it from the answers."""
    pieces = exchange.transfer(READ, len(data), lambda start, size: data[start : start + size])
    return b"".join(piece.body for piece in pieces)


def test_good_line_transfers_the_longest_pieces(connect: Callable[[Echo], RequestExchange]) -> None:
    exchange = connect(echo := Echo())
    assert transfer(exchange, data := random.Random(1).randbytes(3000)) == data
    assert echo.sizes == [1024, 1024, 952]
    assert transfer(exchange, b"") == b""


@pytest.mark.parametrize("faults", ["repeat=0.5", "flip=0.5", "loss=0.2"])
def test_bad_line_transfers_shorter_pieces_which_grow_again(
    faults: str, connect: Callable[[Echo], RequestExchange]
) -> None:
    bad, none = LineFaults.parse(faults), LineFaults()
    ways = [LineDamage(way) for way in ("down", "up")]
    chosen = [bad]
    echo = Echo(*(lambda data, way=way: way.apply(data, chosen[0]) for way in ways))
    exchange = connect(echo)
    rng = random.Random(2)
    for _ in range(5):
        assert transfer(exchange, data := rng.randbytes(1500)) == data
    assert min(echo.sizes) <= 64
    chosen[0] = none
    for _ in range(20):
        assert transfer(exchange, data := rng.randbytes(4000)) == data
    assert echo.sizes[-3:-1] == [1024, 1024]


def test_silent_board_is_lost_after_seconds(connect: Callable[[Echo], RequestExchange]) -> None:
    exchange = connect(echo := Echo(to_board=lambda data: b""))
    with pytest.raises(BoardLost, match="does not answer"):
        transfer(exchange, bytes(2000))
    assert 10 < echo.now < 20


def test_line_that_damages_every_answer_is_given_up(connect: Callable[[Echo], RequestExchange]) -> None:
    exchange = connect(echo := Echo(to_host=lambda data: data[:-4] + b"\1\0"))
    with pytest.raises(BoardLost, match="damages frames: no valid answer for 30 s"):
        transfer(exchange, bytes(2000))
    assert 30 < echo.now < 40


def test_line_that_damages_every_request_is_given_up(connect: Callable[[Echo], RequestExchange]) -> None:
    exchange = connect(echo := Echo(to_board=lambda data: data[:-4] + b"\1\0"))
    with pytest.raises(BoardLost, match="damages frames"):
        transfer(exchange, bytes(2000))
    assert 30 < echo.now < 40


def test_damaged_request_is_repeated_at_once(connect: Callable[[Echo], RequestExchange]) -> None:
    count = iter(range(1_000_000))
    exchange = connect(echo := Echo(to_board=lambda data: data if next(count) else data[:-4] + b"\1\0"))
    assert transfer(exchange, b"12345678") == b"12345678"
    assert echo.now < 0.1


def test_line_is_not_given_up_while_frames_arrive(connect: Callable[[Echo], RequestExchange]) -> None:
    count = iter(range(1_000_000))
    exchange = connect(echo := Echo(to_host=lambda data: b"" if next(count) % 7 else data))
    assert transfer(exchange, bytes(range(256)) * 40) == bytes(range(256)) * 40
    assert echo.now > 30


def test_line_that_repeats_short_frames_does_not_wait_longer(connect: Callable[[Echo], RequestExchange]) -> None:
    exchange = connect(echo := Echo(to_host=lambda data: data + data))
    for _ in range(50):
        transfer(exchange, b"12345678")
    echo._spoil = (lambda data: b"", bytes)  # the next request is lost
    before = echo.now
    with pytest.raises(BoardLost):
        transfer(exchange, b"12345678")
    assert echo.now - before < 20


def test_greeting_names_the_baud_rate_if_only_damaged_bytes_arrive(
    connect: Callable[[Echo], RequestExchange],
) -> None:
    connect(echo := Echo(to_host=lambda data: b"\x80\xff\x00\xf8"))
    with pytest.raises(BoardLost, match="sends bytes, but no valid frame") as caught:
        SerialClient(echo, BAUD).greet(0.5)
    assert "[mcu] baud" in (caught.value.hint or "")
    assert echo.now > 5  # longer than for a silent board


def test_board_that_reports_another_number_is_ignored(connect: Callable[[Echo], RequestExchange]) -> None:
    def add_noise(data: bytes) -> bytes:
        return encode_frame(SerialFrame(READ, 5, b"other")) + data

    assert transfer(connect(Echo(to_host=add_noise)), b"123") == b"123"
