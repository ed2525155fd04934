"""Make the meter of a board."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hil.controller.devices.board import Board
from hil.controller.devices.metering.board_meter import BoardMeter, is_on_board
from hil.controller.devices.metering.package_meter import PackageMeter
from hil.controller.devices.metering.samples import Meter
from hil.controller.devices.metering.simulated_meter import SimulatedMeter
from hil.controller.devices.metering.stream_meter import CommandMeter, FileMeter
from hil.controller.devices.metering.sysfs_meter import SysfsMeter
from hil.controller.storage.sources.packages import describe_entry_point, load
from hil.core.guarded import guard_plugin
from hil.core.installed import list_entry_points
from hil.core.meter_config import METER_GROUP, MeterConfig
from hil.errors import BoardUnfit, UsageError

_MAKERS: Mapping[str, Callable[[MeterConfig], Meter]] = {
    "simulated": lambda config: SimulatedMeter(config.simulated, config.rate_hz),
    "command": CommandMeter,
    "file": FileMeter,
    "hwmon": SysfsMeter,
    "rapl": SysfsMeter,
}


def make_missing_error(board: Board) -> UsageError:
    """Return the error for a board without a meter, or for a leased board with a meter that only jobs can use."""
    if kind := board.config.connection.host_meter:
        return UsageError(
            f"the {kind} meter of board {board.name} is on the board's host, so only jobs can use it",
            board=board.name,
            hint=f"use hil farm submit MODEL --board {board.name} --energy, or hil farm submit --board {board.name} -- "
            "hil bench MODEL",
        )
    return UsageError(
        f"the config of board {board.name} has no [meter]",
        board=board.name,
        hint="add the table [meter] to the board's config: docs/meters.md",
    )


def make_meter(board: Board) -> Meter:
    """Return the meter of a board, not started.

    Raises:
        UsageError: a package's meter cannot be loaded, or rejects its options.
        BoardUnfit: a package's meter fails.
    """
    config = board.meter
    if is_on_board(board):
        return BoardMeter(board)
    if config.kind in _MAKERS:
        return _MAKERS[config.kind](config)
    for point in list_entry_points(METER_GROUP):
        if point.name == config.kind:
            who = describe_entry_point(point)
            make = load(point)
            with guard_plugin(who, BoardUnfit, UsageError, BoardUnfit):
                meter = make(config.options)
                if not all(callable(getattr(meter, name, None)) for name in ("start", "read", "stop")):
                    raise TypeError("not a hil.plugins.Meter: start, read or stop is missing")
            return PackageMeter(meter, who)
    raise UsageError(f"meter {config.kind!r} not found", hint="install the package of the meter")
