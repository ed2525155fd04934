"""The meter on a board, with scripted messages of an agent."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from hil.controller.devices.agent_client.call import CallFailed
from hil.controller.devices.metering.board_meter import BoardMeter, is_on_board
from hil.controller.devices.metering.meter_factory import make_meter
from hil.controller.devices.metering.sysfs_meter import SysfsMeter
from hil.core.meter_config import MeterConfig
from hil.errors import BoardUnfit, ProtocolBroken
from hil.protocol.v1.agent_pb2 import PowerSamples

LIMIT_S = 60.0
OLD = {"agent_version": "0.0.9", "machine": {"system": "Linux"}}
NEW = {**OLD, "meters": ["hwmon", "rapl"]}


class Stream:
    """Messages of an agent, then an error or the end."""

    def __init__(self, *events: PowerSamples | Exception) -> None:
        self._events = iter(events)
        self.cancelled = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> PowerSamples:
        event = next(self._events)
        if isinstance(event, Exception):
            raise event
        return event

    def cancel(self) -> None:
        self.cancelled = True


def make_board(*events, info=NEW, is_simulator=False, mcu=None, **keys) -> SimpleNamespace:
    stream = Stream(*events)
    client = SimpleNamespace(open_power=lambda kind, path, channel, rate_hz: (stream, next(stream)), stream=stream)
    config = SimpleNamespace(is_simulator=is_simulator, mcu=mcu)
    meter = MeterConfig(**{"kind": "hwmon", "path": "/sys/x", **keys})
    return SimpleNamespace(name="pi", client=client, config=config, info=info, meter=meter)


def samples(*times: int, lost: int = 0, joules: bool = False) -> PowerSamples:
    return PowerSamples(clock_ns=times, values=[at / 10 for at in times], lost=lost, counts_energy=joules)


def wait_for_problem(meter: BoardMeter) -> str:
    end = time.monotonic() + LIMIT_S
    while not (found := meter.read().problem):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


@pytest.mark.parametrize(
    ("board", "expected"),
    [
        (make_board(), True),
        (make_board(where="host"), False),
        (make_board(is_simulator=True), False),
        (make_board(is_simulator=True, where="board"), True),
        (make_board(mcu=object()), False),
        (make_board(kind="simulated"), False),
    ],
)
def test_meter_of_a_board_is_on_the_board(board, expected):
    assert is_on_board(board) == expected
    assert isinstance(make_meter(board), BoardMeter) == expected


def test_meter_of_the_host_is_on_this_machine():
    assert isinstance(make_meter(make_board(where="host")), SysfsMeter)


def test_samples_have_the_clock_of_the_board():
    board = make_board(samples(1, 2), samples(), samples(3, lost=1), CallFailed("UNAVAILABLE", "gone"))
    meter = BoardMeter(board)
    meter.start()
    assert wait_for_problem(meter) == "the meter on the board stopped: gone"
    found = meter.read()
    assert found.clock == "board"
    assert found.times_ns.tolist() == [1, 2, 3]
    assert found.watts.tolist() == [0.1, 0.2, 0.3]
    assert found.lost == 1
    assert board.client.stream.cancelled


def test_counter_gives_joules():
    meter = BoardMeter(make_board(samples(1, 2, joules=True), samples(3, joules=True), kind="rapl"))
    meter.start()
    assert wait_for_problem(meter) == "the board stopped reporting samples of the meter"
    assert meter.read().joules.tolist() == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (samples(2, 3), "the times of the board's meter do not increase"),
        (samples(5, 4), "times do not increase"),
        (PowerSamples(clock_ns=[9], values=[]), "times and values do not match"),
        (PowerSamples(clock_ns=[9], values=[float("nan")]), "is not a number"),
    ],
)
def test_invalid_messages_end_the_meter(message, problem):
    meter = BoardMeter(make_board(samples(1, 2), message))
    meter.start()
    assert problem in wait_for_problem(meter)
    assert meter.read().times_ns.tolist() == [1, 2]
    with pytest.raises(ProtocolBroken):
        BoardMeter(make_board(PowerSamples(clock_ns=[2, 1], values=[1.0, 1.0]))).start()


@pytest.mark.parametrize(
    ("info", "message", "hint"),
    [
        (OLD, "the board's agent (hil 0.0.9) is too old to read meters", "deploy the agent again"),
        ({"machine": {}}, "has no agent that can read its sensors", 'where = "host"'),
        ({**OLD, "machine": {"system": "bare metal"}}, "has no agent that can read its sensors", 'where = "host"'),
    ],
)
def test_agent_without_meters_is_refused(info, message, hint):
    with pytest.raises(BoardUnfit) as caught:
        BoardMeter(make_board(info=info)).start()
    assert message in caught.value.message
    assert hint in caught.value.hint
