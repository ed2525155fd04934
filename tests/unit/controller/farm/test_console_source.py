"""Console of a leased board: times of the host, errors of the host, and lost connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from support.waiting import eventually

from hil.controller.devices.console import sources
from hil.controller.devices.console.board_console import use_console
from hil.controller.devices.console.lines import ConsoleLine
from hil.controller.devices.console.reader import ConsoleReader
from hil.controller.devices.links import package_links
from hil.controller.farm.client import console_source
from hil.controller.farm.client.console_source import FarmLineSource
from hil.controller.farm.client.host_clock import HostClock
from hil.core import clock
from hil.core.board_config import BoardConfig
from hil.core.console_config import ConsoleConfig, ConsolePattern
from hil.errors import BoardUnreachable, FarmError, RunCrashed, UsageError

CONFIG = BoardConfig("b", "b", console=ConsoleConfig(farm="b", patterns=(ConsolePattern("npu", "npu: fault"),)))


def line(text: str, at: int = 1) -> ConsoleLine:
    return ConsoleLine(at, at / 1e9, text)


class FakeFarm:
    closed = False

    def close(self) -> None:
        self.closed = True


class FakeConsole:
    """Connection that yields lines, and then fails or waits for :meth:`stop`."""

    def __init__(self, lines: list[ConsoleLine], error: Exception | None = None, *, is_open: bool = True) -> None:
        self._lines, self._error, self._is_open = lines, error, is_open
        self._stopped = threading.Event()

    def connect(self, *words: object, host_clock: HostClock) -> FakeConsole:
        self.words, self._clock = words, host_clock
        return self

    def iter_lines(self) -> Iterator[ConsoleLine]:
        if self._is_open:
            self._clock.start(1)
        yield from self._lines
        if self._error is not None:
            raise self._error
        self._stopped.wait(60)

    def stop(self) -> None:
        self._stopped.set()


@pytest.fixture
def open_source(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeConsole], FarmLineSource]:
    def open_one(console: FakeConsole) -> FarmLineSource:
        monkeypatch.setattr(console_source, "FarmConsole", console.connect)
        return FarmLineSource(FakeFarm(), "b", 5.0)

    return open_one


def test_clock_uses_fastest_message_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000_000]
    monkeypatch.setattr(clock, "_read", lambda: now[0])
    host = HostClock()
    host.start(300_000)  # 700 us behind, including the delay
    now[0] = 2_000_000
    assert host.convert(1_500_000) == 2_000_000  # this message was faster: the clock is 500 us behind
    now[0] = 3_000_000
    assert host.convert(1_000_000) == pytest.approx(1_500_000, abs=200)  # an old line, which arrives late
    assert host.convert(9_000_000) == 3_000_000


def test_clock_of_same_machine_is_exact() -> None:
    host = HostClock()
    host.start(5, is_same_machine=True)
    assert host.convert(77) == 77


def test_source_returns_lines_until_connection_ends(open_source: Callable[[FakeConsole], FarmLineSource]) -> None:
    console = FakeConsole([line("one"), line("two")])
    source = open_source(console)
    assert (console.words[1:3], source.is_complete) == (("b", 5.0), False)
    found: list[ConsoleLine] = []
    eventually(lambda: found.extend(source.read_lines(0.01) or []) or len(found) == 2)
    assert [one.text for one in found] == ["one", "two"]
    console.stop()
    eventually(lambda: source.read_lines(0.01) is None)
    with pytest.raises(OSError, match="hil farm console --write"):
        source.write(b"x")
    source.close()
    assert source._farm.closed


def test_error_of_host_is_reported_at_opening(open_source: Callable[[FakeConsole], FarmLineSource]) -> None:
    with pytest.raises(BoardUnreachable, match=r"^16 users already read the console"):
        open_source(FakeConsole([], UsageError("16 users already read the console"), is_open=False))


def test_silent_host_is_reported_at_opening(
    open_source: Callable[[FakeConsole], FarmLineSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_source, "_OPEN_SECONDS", 0.1)
    with pytest.raises(BoardUnreachable, match=r"did not respond within 0.1 s"):
        open_source(FakeConsole([], is_open=False))


class FakeProvider:
    """Board provider whose connections yield the given lines, in the order of the connections."""

    def __init__(self, *connections: list[ConsoleLine] | Exception) -> None:
        self._connections = list(connections)
        self.since: list[float] = []

    def open_console(self, board: str, since_s: float) -> FakeLines:
        assert board == "b"
        self.since.append(since_s)
        lines = self._connections.pop(0)
        if isinstance(lines, Exception):
            raise lines
        return FakeLines(lines, is_last=not self._connections)


class FakeLines:
    is_complete = False

    def __init__(self, lines: list[ConsoleLine], *, is_last: bool) -> None:
        self._lines, self._is_last = [lines], is_last

    def read_lines(self, timeout_s: float) -> list[ConsoleLine] | None:
        if self._lines:
            return self._lines.pop()
        threading.Event().wait(timeout_s)
        return [] if self._is_last else None

    def write(self, data: bytes) -> None:
        raise OSError("read-only")

    def close(self) -> None:
        pass


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeProvider]:
    def set_provider(*connections: list[ConsoleLine] | Exception) -> FakeProvider:
        provider = FakeProvider(*connections)
        monkeypatch.setattr(package_links, "find_provider", lambda address: (provider, address.partition(":")[2]))
        return provider

    return set_provider


def test_reader_continues_after_last_line(provide: Callable[..., FakeProvider]) -> None:
    late = 9_000_000_000_000_000_000
    provider = provide([line("one", late)], [line("two", late + 5000)])
    reader = ConsoleReader(CONFIG)
    eventually(lambda: [one.text for one in reader.get_lines() if one.kind == "output"] == ["one", "two"])
    notes = [one.text for one in reader.get_lines() if one.kind == "note"]
    assert notes[0] == "connection to console b of the farm lost; reconnecting"
    assert provider.since[1] > late / 1e9 > provider.since[0]
    with pytest.raises(BoardUnreachable, match="read-only"):
        reader.write(b"x")
    reader.close()


def test_crash_on_leased_board_quotes_line_of_host(provide: Callable[..., FakeProvider]) -> None:
    provide([line("npu: fault 7", clock.get_time_ns())])
    with use_console(CONFIG, pytest.fail) as console:
        assert console._reader.wait_for("npu", 0, 60)
        error = RunCrashed("it stopped")
        console.explain(error)
        assert error.message == 'it stopped; console: "npu: fault 7" (npu)'


def test_run_continues_without_console_of_farm(provide: Callable[..., FakeProvider]) -> None:
    provide(FarmError("no farm is running"), [])
    notes: list[str] = []
    with use_console(CONFIG, notes.append):
        pass
    assert notes == ["cannot open the console of b of the farm: no farm is running; continuing without the console"]


def test_unknown_provider_is_board_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_links, "list_entry_points", lambda group: ())
    with pytest.raises(BoardUnreachable, match="cannot open the console of b of the farm"):
        sources.open_source(CONFIG)
