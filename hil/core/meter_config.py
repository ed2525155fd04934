"""Parse the table ``[meter]`` of a board config, which defines how to measure the board's power.

The table needs a ``kind``::

    [meter]
    kind = "command"                         # a program that prints CSV lines
    command = ["joulescope-stream"]          # without a shell

    [meter]
    kind = "hwmon"                           # a power sensor of the board's kernel
    path = "/sys/class/hwmon/hwmon3"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.core.config_keys import list_keys, make_key
from hil.core.config_values import check_type, make_values, parse_timeout, parse_words, reject_key
from hil.core.installed import list_entry_points
from hil.core.power_sensor import MAX_RATE_HZ, MIN_RATE_HZ, RAPL_FOLDER, SENSOR_KINDS
from hil.errors import UsageError, did_you_mean

METER_GROUP = "hil.meters"
METER_KINDS = ("simulated", "command", "file", "hwmon", "rapl")
METER_CLOCKS = ("meter", "monotonic", "epoch")
METER_WINDOWS = ("clock", "gpio")
METER_PLACES = ("board", "host")
# Unit of a column with times or electrical values -> factor to seconds, watts, volts or amperes.
COLUMN_UNITS = {
    "time": 1.0,
    "time_ms": 1e-3,
    "time_us": 1e-6,
    "time_ns": 1e-9,
    "watts": 1.0,
    "milliwatts": 1e-3,
    "microwatts": 1e-6,
    "volts": 1.0,
    "millivolts": 1e-3,
    "amps": 1.0,
    "milliamps": 1e-3,
    "microamps": 1e-6,
    "gpio": 1.0,
}
# Name of a column that hil ignores.
IGNORED_COLUMN = "-"
_MAX_COLUMNS = 32
# Keys that only some kinds use.
_USED_BY: Mapping[str, tuple[str, ...]] = {
    "command": ("command",),
    "path": ("file", "hwmon", "rapl"),
    "columns": ("command", "file"),
    "clock": ("command", "file"),
    "where": ("hwmon", "rapl"),
    "channel": ("hwmon",),
    "rate_hz": ("simulated", "hwmon", "rapl"),
    "start_s": ("command", "file"),
}


@dataclass(frozen=True)
class SimulatedPower:
    """The ``[meter.options]`` table of a simulated meter."""

    idle_w: float = 2.0
    active_w: float = 5.0  # while a program runs
    prompt_w: float = 0.0  # while a generation computes the prompt; 0: active_w
    noise_w: float = 0.0  # standard deviation of a sample
    drift_w: float = 0.0  # change of the idle power per second
    lost: float = 0.0  # share of the samples that the meter loses
    seed: int = 0


@dataclass(frozen=True)
class MeterConfig:
    """The ``[meter]`` table. Without a kind, the board has no meter."""

    kind: str = make_key(
        "",
        "[Meter](meters.md): `command`, `file`, `hwmon`, `rapl`, `simulated`, or the name of a meter from a package.",
        unset="no meter",
    )
    command: tuple[str, ...] = make_key((), "`command`: program and arguments. It prints CSV lines on stdout.")
    path: str = make_key(
        "",
        "`file`: CSV file that another program writes; `hwmon`: directory of the sensor; `rapl`: directory of the "
        "energy counter. It may contain wildcards.",
        unset=f"for `rapl`, `{RAPL_FOLDER}`",
    )
    where: str = make_key(
        "",
        "`hwmon`, `rapl`: machine with the sensor: `board` (the board's agent reads it) or `host` (this machine reads "
        "it).",
        values=METER_PLACES,
        unset="`host` for simulated boards and microcontrollers, otherwise `board`",
    )
    columns: tuple[str, ...] = make_key(
        (), "Names of the CSV columns, for output without a header line.", unset="`time`, `watts`"
    )
    clock: str = make_key(
        "meter",
        "Clock of the CSV column `time`: `meter` (hil aligns it with the arrival of the lines), `monotonic` or `epoch` "
        "(clocks of this machine).",
        values=METER_CLOCKS,
    )
    channel: int = make_key(1, "`hwmon`: number of the sensor's channel.", bounds=(0, 99))
    rate_hz: float = make_key(100.0, "`hwmon`, `rapl`, `simulated`: samples a second.")
    windows: str = make_key(
        "clock",
        "Windows of a measurement: `clock` (times of the iterations on the board's clock) or `gpio` (the CSV column "
        "`gpio` is 1 while the program computes).",
        values=METER_WINDOWS,
    )
    idle_s: float = make_key(1.0, "Seconds of idle power before and after the measurement.")
    start_s: float = make_key(10.0, "Maximum seconds until the first sample.")
    options: Mapping[str, Any] = make_key(dict, "Settings of a simulated meter, or of a meter from a package.")

    @property
    def is_set(self) -> bool:
        """True if the board has a meter."""
        return bool(self.kind)

    def is_agent_sensor(self, *, is_emulated: bool) -> bool:
        """Return whether the board's agent reads the meter.

        Args:
            is_emulated: True for a simulator or a microcontroller. This machine reads their sensors by default.
        """
        if self.kind not in SENSOR_KINDS:
            return False
        return self.where == "board" if self.where else not is_emulated

    @property
    def simulated(self) -> SimulatedPower:
        """Settings of a simulated meter."""
        return SimulatedPower(**self.options)


def make_meter_table(config: MeterConfig) -> dict[str, Any]:
    """Return the table ``[meter]`` for a config in another directory. Without a meter, it is empty."""
    values = {name: getattr(config, name) for name in list_keys(MeterConfig)}
    table = {name: value for name, value in values.items() if value != getattr(MeterConfig(), name)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in table.items()}


def parse_meter(table: Mapping[str, Any], where: Path) -> MeterConfig:
    """Parse the ``[meter]`` table.

    Args:
        where: the config file. Relative paths start at its directory.

    Raises:
        UsageError: the kind is unknown, a key is unknown or missing, or a value is invalid.
    """
    place = f"{where}: [meter]"
    if not table:
        return MeterConfig()
    for key in table.keys() - list_keys(MeterConfig).keys():
        reject_key(place, key, list_keys(MeterConfig))
    kind = str(table.get("kind", ""))
    known = (*METER_KINDS, *(point.name for point in list_entry_points(METER_GROUP)))
    if kind not in known:
        raise UsageError(
            f"{place} kind is {kind!r}",
            hint=f"{did_you_mean(kind, known)}expected one of {', '.join(known)}; "
            f"for another kind, install a package with an entry point in {METER_GROUP}",
        )
    for key in table:
        users = _USED_BY.get(key)
        if users and kind in METER_KINDS and kind not in users:
            raise UsageError(f"{place} {key} has no effect with kind {kind!r}", hint=f"remove {key}")
    idle_s, start_s = (
        parse_timeout(table.get(key, getattr(MeterConfig, key)), f"{place} {key}") for key in ("idle_s", "start_s")
    )
    rate = table.get("rate_hz", MeterConfig.rate_hz)
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not MIN_RATE_HZ <= rate <= MAX_RATE_HZ:
        raise UsageError(f"{place} rate_hz must be a number from {MIN_RATE_HZ:g} to {MAX_RATE_HZ:g}, got {rate!r}")
    special = {"command", "rate_hz", "options", "idle_s", "start_s"}
    plain = {key: value for key, value in table.items() if key not in special}
    found: MeterConfig = make_values(MeterConfig, plain, place)
    for key, allowed in (("clock", METER_CLOCKS), ("windows", METER_WINDOWS), ("where", METER_PLACES)):
        if key in table and getattr(found, key) not in allowed:
            raise UsageError(f"{place} {key} is {getattr(found, key)!r}", hint=f"expected one of {', '.join(allowed)}")
    if found.windows == "gpio" and kind in ("hwmon", "rapl", "simulated"):
        raise UsageError(f"{place} windows = 'gpio' needs a meter with a column gpio", hint="use kind command or file")
    if not 0 <= found.channel <= 99:
        raise UsageError(f"{place} channel must be a whole number from 0 to 99, got {found.channel}")
    if found.where == "board" and found.path and not Path(found.path).is_absolute():
        raise UsageError(
            f"{place} path {found.path!r} is not absolute",
            hint='a path on the board, such as "/sys/class/hwmon/hwmon3"',
        )
    check_columns(found.columns, f"{place} columns")
    command = _parse_program(table["command"], place, where) if "command" in table else ()
    if kind == "command" and not command:
        raise UsageError(f"{place} has no command", hint='for example command = ["joulescope-stream", "--csv"]')
    return replace(
        found,
        idle_s=idle_s,
        start_s=start_s,
        rate_hz=float(rate),
        command=command,
        path=_resolve_path(found, place, where),
        options=_parse_options(kind, table.get("options", {}), f"{place} options"),
    )


def check_columns(columns: tuple[str, ...], place: str) -> None:
    """Raise UsageError unless the columns contain a power, or voltage and current. An empty tuple is valid."""
    if not columns:
        return
    for name in columns:
        if name != IGNORED_COLUMN and name not in COLUMN_UNITS:
            raise UsageError(
                f"{place}: unknown column {name!r}",
                hint=f"{did_you_mean(name, COLUMN_UNITS)}known: {', '.join(COLUMN_UNITS)}; "
                f"{IGNORED_COLUMN!r} ignores a column",
            )
    kinds = [get_quantity(name) for name in columns if name != IGNORED_COLUMN]
    if len(columns) > _MAX_COLUMNS or len(set(kinds)) != len(kinds):
        raise UsageError(f"{place}: more than {_MAX_COLUMNS} columns, or two columns of the same quantity")
    if "power" not in kinds and not {"voltage", "current"} <= set(kinds):
        raise UsageError(f"{place}: no power", hint="add the column watts, or the columns volts and amps")


def get_quantity(column: str) -> str:
    """Return the quantity of a known column: ``time``, ``power``, ``voltage``, ``current`` or ``gpio``."""
    for ending, quantity in (("watts", "power"), ("volts", "voltage"), ("amps", "current")):
        if column.endswith(ending):
            return quantity
    return column.partition("_")[0]


def _parse_program(value: Any, place: str, where: Path) -> tuple[str, ...]:
    program, *arguments = parse_words(value, f"{place} command")
    return (str(where.absolute().parent / program) if "/" in program else program, *arguments)


def _resolve_path(found: MeterConfig, place: str, where: Path) -> str:
    if found.path:
        return str(where.absolute().parent / Path(found.path))
    if found.kind in ("file", "hwmon"):
        example = "power.csv" if found.kind == "file" else "/sys/class/hwmon/hwmon3"
        raise UsageError(f"{place} has no path", hint=f'for example path = "{example}"')
    return RAPL_FOLDER if found.kind == "rapl" else ""


def _parse_options(kind: str, table: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(table, dict):
        raise UsageError(f"{place} must be a table")
    if kind != "simulated":
        if table and kind in METER_KINDS:
            raise UsageError(f"{place} has no effect with kind {kind!r}", hint="remove the table")
        return table
    make_values(SimulatedPower, table, place)
    for key, value in table.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"{place} {key} must be a number, got {value!r}")
        if key != "drift_w" and not 0 <= value < 1e6:
            raise UsageError(f"{place} {key} must be a number of at least 0, got {value!r}")
    check_type(table.get("seed", 0), "int", f"{place} seed")
    if table.get("lost", 0) >= 1:
        raise UsageError(f"{place} lost must be below 1")
    return table
