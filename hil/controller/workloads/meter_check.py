"""Check of a board's power meter, for `hil board check`."""

from __future__ import annotations

from collections.abc import Iterator

from hil.controller.devices.board import Board
from hil.controller.devices.health import PASS, SKIP, WARN
from hil.controller.devices.metering.board_meter import is_on_board
from hil.controller.devices.metering.meter_factory import make_meter, make_missing_error
from hil.controller.devices.metering.samples import list_watts
from hil.controller.pipeline.energy import wait_for_samples
from hil.controller.records.commands.boards import BoardCheck
from hil.errors import BoardBusy, HilError


def check_meter(board: Board) -> Iterator[BoardCheck]:
    """Read the power once. Yield no check for a board without a meter."""
    config = board.meter
    if kind := board.config.connection.host_meter:
        yield BoardCheck("meter", SKIP, f"{kind}: only jobs can use this meter", make_missing_error(board).hint)
    if not config.is_set:
        return
    name = f"{config.kind} on the board" if is_on_board(board) else config.kind
    fix = "correct [meter] in the board's config: docs/meters.md"
    try:
        if is_on_board(board):
            board.take()  # the agent reads sensors only for the session's holder
        meter = make_meter(board)
        meter.start()
        try:
            is_ready = wait_for_samples(meter, config.start_s)
        finally:
            meter.stop()
        found = meter.read()
    except BoardBusy as error:
        yield BoardCheck("meter", SKIP, f"{name}: {error.message}", "retry when the board is free")
        return
    except HilError as error:
        yield BoardCheck("meter", WARN, f"{name}: {error.message}", error.hint or fix)
        return
    watts = list_watts(found)
    if found.problem or not is_ready or not watts.size:
        problem = found.problem or f"no sample within {config.start_s:g} s"
        yield BoardCheck("meter", WARN, f"{name}: {problem}", fix)
        return
    yield BoardCheck("meter", PASS, f"{name}: {float(watts.mean()):.3g} W")
