"""Meter of a leased board, for the config that hil writes on the user's machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hil.controller.farm.messages import BoardCard
from hil.core.meter_config import parse_meter
from hil.core.power_sensor import SENSOR_KINDS
from hil.errors import FarmError, UsageError


def add_meter(config: dict[str, Any], card: BoardCard) -> None:
    """Add the meter of a leased board to the config.

    The board's agent reads a sensor, so it works through the farm. Other meters need a program or a file of the
    board's host, so only jobs use them: the config contains only their kind.

    Raises:
        FarmError: the settings of the sensor are invalid.
    """
    meter = card.meter
    if meter is None:
        return
    # Another kind could run a program or read a file on this machine.
    if not meter.on_board or meter.kind not in SENSOR_KINDS:
        config["connection"]["host_meter"] = meter.kind
        return
    table = {"kind": meter.kind, "path": meter.path, "where": "board", "rate_hz": meter.rate_hz, "idle_s": meter.idle_s}
    if meter.kind == "hwmon":
        table["channel"] = meter.channel
    try:
        parse_meter(table, Path(f"{card.name}.toml"))
    except UsageError as error:
        raise FarmError(f"cannot read the farm's meter of {card.name}: {error.message}", hint=error.hint) from error
    config["meter"] = table
