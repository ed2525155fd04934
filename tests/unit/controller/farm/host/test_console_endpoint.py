"""Console of a board for users of the farm: invalid input, and users that follow each other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hil.controller.devices.console.lines import ConsoleLine
from hil.controller.devices.console.spool import encode_entry, make_entry
from hil.controller.farm.client.console import _parse_pieces
from hil.controller.farm.client.host_clock import HostClock
from hil.controller.farm.host import console_endpoint
from hil.controller.farm.host.console_endpoint import ConsoleEndpoint
from hil.controller.farm.paths import FarmAddress
from hil.core.board_parser import parse_board
from hil.errors import UsageError
from hil.protocol.v1 import farm_pb2 as pb

CONFIG = '[connection]\naddress = "unix:a.sock"\n[console]\ncommand = ["cat"]\n'


@pytest.fixture
def endpoint(tmp_path: Path) -> ConsoleEndpoint:
    config = parse_board(CONFIG, tmp_path / "a.toml")
    return ConsoleEndpoint(lambda: config, FarmAddress(("unix:a.sock",), "token"), print)


@pytest.mark.parametrize(
    "data", [b"[" * 50_000, b"{", b"[]", b"{}", b'{"since_s": "x"}', b'{"since_s": 1' + b"0" * 400 + b"}", b"\xff"]
)
def test_invalid_request_ends_connection(endpoint: ConsoleEndpoint, data: bytes) -> None:
    asked: queue.SimpleQueue[float | None] = queue.SimpleQueue()
    endpoint._read_input([pb.Piece(data=data + b"\n")], asked, lambda: True)
    assert asked.empty()


def test_next_user_waits_until_console_is_closed(endpoint: ConsoleEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    is_closing, may_close = threading.Event(), threading.Event()
    open_readers: list[FakeReader] = []

    class FakeReader:
        def __init__(self, config: object, sink: Callable[[list[ConsoleLine]], None]) -> None:
            assert not open_readers
            open_readers.append(self)

        def close(self) -> None:
            is_closing.set()
            assert may_close.wait(60)
            open_readers.remove(self)

    def use_console() -> None:
        with endpoint._open_lines():
            pass

    monkeypatch.setattr(console_endpoint, "ConsoleReader", FakeReader)
    first, errors = threading.Thread(target=use_console), []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    first.start()
    assert is_closing.wait(60)
    second = threading.Thread(target=use_console)
    second.start()
    second.join(0.3)
    may_close.set()
    first.join(60)
    second.join(60)
    assert not errors and not open_readers


@pytest.mark.parametrize(
    "data", [b"[" * 50_000, b'{"x": ' + b"[" * 50_000, b'{"error": ' + b"[" * 9000, b"[]", b"\xff"]
)
def test_user_ignores_invalid_lines_of_host(data: bytes) -> None:
    valid = encode_entry(make_entry(ConsoleLine(1, 2.0, "ready")))
    assert [line.text for line in _parse_pieces([pb.Piece(data=data + b"\n" + valid)], "bench")] == ["ready"]


def test_host_sends_its_clock_before_lines(endpoint: ConsoleEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeReader:
        def __init__(self, config: object, sink: Callable[[list[ConsoleLine]], None]) -> None:
            sink([ConsoleLine(7, 2.0, "ready")])

        def close(self) -> None:
            pass

    monkeypatch.setattr(console_endpoint, "ConsoleReader", FakeReader)
    asked: queue.SimpleQueue[console_endpoint._ConsoleRequest] = queue.SimpleQueue()
    endpoint._read_input([pb.Piece(data=b'{"since_s": null, "clock": true}\n')], asked, lambda: False)
    host_clock = HostClock()
    pieces = endpoint._iter_pieces(asked, threading.Event())
    (line,) = (next(_parse_pieces(pieces, "bench", host_clock)),)
    assert host_clock.is_known.is_set()
    assert (line.text, line.host_ns) == ("ready", 7)  # the same machine, so the same clock


def test_console_of_farm_is_not_served_again(tmp_path: Path) -> None:
    config = parse_board('[connection]\naddress = "unix:a"\n[console]\nfarm = "a"\n', tmp_path / "a.toml")
    endpoint = ConsoleEndpoint(lambda: config, FarmAddress(("unix:a.sock",), "token"), print)
    asked: queue.SimpleQueue[console_endpoint._ConsoleRequest] = queue.SimpleQueue()
    asked.put(console_endpoint._ConsoleRequest(None, follows=True))
    with pytest.raises(UsageError, match="a has no console on its host"):
        list(_parse_pieces(endpoint._iter_pieces(asked, threading.Event()), "a"))


def test_user_escapes_control_characters_of_host() -> None:
    sent = encode_entry(make_entry(ConsoleLine(1, 2.0, "a\x1b[31m\nb")))
    assert [line.text for line in _parse_pieces([pb.Piece(data=sent)], "bench")] == [r"a\x1b[31m b"]


def test_early_input_waits_for_console(endpoint: ConsoleEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []

    class FakeReader:
        def __init__(self, config: object, sink: object) -> None:
            pass

        def write(self, data: bytes) -> None:
            written.append(data)

        def close(self) -> None:
            pass

    monkeypatch.setattr(console_endpoint, "ConsoleReader", FakeReader)
    asked: queue.SimpleQueue[float | None] = queue.SimpleQueue()
    pieces = [pb.Piece(data=b'{"since_s": null}\n{"input": "help"}\n')]
    reading = threading.Thread(target=endpoint._read_input, args=(pieces, asked, lambda: True))
    reading.start()
    asked.get(timeout=60)
    with endpoint._open_lines():
        reading.join(60)
    assert written == [b"help\n"]
