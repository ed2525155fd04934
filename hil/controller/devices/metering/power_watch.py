"""Read a board's power during a profile, for the trace."""

from __future__ import annotations

from hil.controller.devices.board import Board
from hil.controller.devices.metering.meter_factory import make_meter, make_missing_error
from hil.controller.devices.metering.samples import Meter, list_watts
from hil.controller.devices.metering.simulated_meter import SimulatedMeter
from hil.core.clock import ClockFit
from hil.core.timeline import Sample
from hil.errors import HilError

# Name of the counter.
POWER = "power"
# More samples are averaged in groups, so that a trace stays small.
_MAX_SAMPLES = 100_000


class PowerWatch:
    """Read a board's power during the block. Errors never affect the run. Without a meter, do nothing."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._meter: Meter | None = None
        self.problem = ""  # why there are no samples; "" without an error

    def __enter__(self) -> PowerWatch:
        if self._board.config.connection.host_meter:
            self.problem = f"no power: {make_missing_error(self._board).message}"
        if self._board.meter.is_set:
            try:
                self._meter = make_meter(self._board)
                self._meter.start()
            except HilError as error:
                self._meter = None
                self.problem = f"no power: {error.message}"
        return self

    def __exit__(self, *_: object) -> None:
        if self._meter is not None:
            self._meter.stop()
            self.problem = self.problem or self._meter.read().problem

    def observe_run(self, host_ns: tuple[int, int]) -> None:
        """Tell a simulated meter when a program ran."""
        if isinstance(self._meter, SimulatedMeter):
            self._meter.observe_run(*host_ns)

    def list_samples(self, clock: ClockFit | None) -> list[Sample]:
        """Return the samples on the board's clock. Without a fit of the clock, return no samples of this machine."""
        if self._meter is None:
            return []
        found = self._meter.read()
        is_on_board = found.clock == "board"
        if clock is None and not is_on_board:
            return []
        watts, times = list_watts(found), found.times_ns
        stride = max(1, -(-times.size // _MAX_SAMPLES))
        values = [float(watts[at : at + stride].mean()) for at in range(0, watts.size, stride)]
        stamps = times[::stride].tolist()[: len(values)]
        return [
            Sample(at if is_on_board or clock is None else clock.to_board(at), POWER, value, "W")
            for at, value in zip(stamps, values, strict=True)
        ]
