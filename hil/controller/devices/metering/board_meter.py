"""Meter that is a power sensor or energy counter of the board, which the agent samples on the board's clock."""

from __future__ import annotations

import threading
from array import array
from typing import Any

import numpy as np

from hil.controller.devices.agent_client.answers import check_power_samples
from hil.controller.devices.agent_client.call import CallFailed
from hil.controller.devices.board import Board
from hil.controller.devices.metering.samples import MAX_SAMPLES, PowerSamples, make_sensor_samples
from hil.errors import BoardUnfit, HilError, ProtocolBroken

_END_SECONDS = 2.0
# Time to receive the samples that the agent has not sent yet: it sends every 0.1 s.
_LAST_SECONDS = 0.3


def is_on_board(board: Board) -> bool:
    """Return whether the agent reads the meter of a board."""
    return board.meter.is_agent_sensor(is_emulated=board.config.is_simulator or board.config.mcu is not None)


class BoardMeter:
    """Meter on the board. A thread receives the samples of the agent."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._config = board.meter
        self._stream: Any = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._times_ns = array("q")
        self._values = array("d")
        self._counts_energy = False
        self._lost = 0
        self._problem = ""
        self._leaving = False
        self._arrived = threading.Event()

    def start(self) -> None:
        """Let the agent open the sensor, and start to receive samples.

        Raises:
            BoardUnfit: the agent cannot read meters, or the sensor is missing or unreadable.
            BoardError: the board is lost.
        """
        board, config = self._board, self._config
        if config.kind not in board.info.get("meters", ()):
            raise _make_unsupported_error(board)
        self._stream, first = board.client.open_power(config.kind, config.path, config.channel, config.rate_hz)
        try:
            self._add(first)
        except ProtocolBroken:
            self._stream.cancel()
            raise
        self._thread = threading.Thread(target=self._collect, daemon=True, name="hil-meter")
        self._thread.start()

    def stop(self) -> None:
        """Receive the last samples, and stop."""
        if self._thread is not None and not self._problem:
            self._arrived.clear()
            self._arrived.wait(_LAST_SECONDS)
        self._leaving = True
        if self._stream is not None:
            self._stream.cancel()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def read(self) -> PowerSamples:
        """Return the samples so far, on the board's clock."""
        with self._lock:
            times, values = np.array(self._times_ns, np.int64), np.array(self._values, np.float64)
            lost = self._lost
        return make_sensor_samples(
            times, values, counts_energy=self._counts_energy, lost=lost, problem=self._problem, clock="board"
        )

    def _collect(self) -> None:
        try:
            for message in self._stream:
                self._add(message)
                self._arrived.set()
        except (CallFailed, HilError) as error:
            self._stream.cancel()
            if not self._leaving:
                text = error.message if isinstance(error, HilError) else error.text
                self._problem = f"the meter on the board stopped: {text}"
        else:
            if not self._leaving:
                self._problem = "the board stopped reporting samples of the meter"

    def _add(self, message: Any) -> None:
        check_power_samples(message)
        with self._lock:
            if message.clock_ns and self._times_ns and message.clock_ns[0] <= self._times_ns[-1]:
                raise ProtocolBroken("the times of the board's meter do not increase", board=self._board.name)
            room = MAX_SAMPLES - len(self._times_ns)
            self._times_ns.extend(message.clock_ns[:room])
            self._values.extend(message.values[:room])
            self._lost = message.lost + max(len(message.clock_ns) - room, 0)
            self._counts_energy = message.counts_energy


def _make_unsupported_error(board: Board) -> BoardUnfit:
    """Return the error for a board whose agent does not read the meter."""
    release, machine = board.info.get("agent_version", ""), board.info.get("machine", {})
    host = (
        'set where = "host" in [meter] of the board\'s config to read a sensor of this machine, or use kind "command"'
    )
    if not release or machine.get("system") == "bare metal" or "agent" in board.info.get("not_measured", ()):
        return BoardUnfit("the board has no agent that can read its sensors", board=board.name, hint=host)
    return BoardUnfit(
        f"the board's agent (hil {release}) is too old to read meters",
        board=board.name,
        hint=f"deploy the agent again (hil board deploy ADDRESS), or restart it with this release of hil; {host}",
    )
