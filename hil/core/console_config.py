"""Parse the tables ``[console]`` and ``[provision]`` of a board config.

``[console]`` defines how to read a board's console, with exactly one link::

    [console]
    serial = "/dev/ttyUSB0"                  # a serial port; also baud
    command = ["picocom", "/dev/ttyUSB0"]    # a program that prints the console, without a shell
    address = "telnet://lab:4001"            # or tcp://HOST:PORT, such as a port of ser2net
    labgrid = "console"                      # a NetworkSerialPort of the board's labgrid place
    farm = "rpi5-3"                          # a board of the farm, whose host reads the console

    boot = "login:"                          # the board has booted when a line matches
    boot_s = 60

    [[console.patterns]]
    name = "npu fault"
    pattern = "npu[0-9]: fault"
    meaning = "the accelerator stopped"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hil.core.config_keys import make_key
from hil.core.config_values import make_values, parse_program, parse_timeout
from hil.core.line_pattern import check_pattern
from hil.errors import UsageError, did_you_mean

LINKS = ("serial", "command", "address", "labgrid", "farm")
PROTOCOLS = ("tcp", "telnet")
_MAX_PATTERNS = 50
_MAX_BAUD = 20_000_000
# Placeholder for the image file in ``[provision] command``.
IMAGE = "{image}"


@dataclass(frozen=True)
class ConsolePattern:
    """Regular expression for lines that explain a failure."""

    name: str
    pattern: str
    meaning: str = ""


# Messages of Linux, firmware and microcontrollers that explain why a board or program stopped.
BUILT_IN_PATTERNS = (
    ConsolePattern("kernel panic", r"Kernel panic - not syncing", "the kernel stopped"),
    ConsolePattern(
        "watchdog",
        r"(?i)(watchdog: BUG: |watchdog.{0,40}(reset|timed out|timeout|expired|did not stop)|soft lockup|hard lockup)",
        "a watchdog found a hang, and may have reset the board",
    ),
    ConsolePattern(
        "kernel oops",
        r"(Internal error: |Oops[: ]|BUG: |Unable to handle kernel |general protection fault)",
        "the kernel failed: a driver or the memory is faulty",
    ),
    ConsolePattern(
        "out of memory",
        r"(Out of memory: |oom-kill:|invoked oom-killer|oom_reaper: )",
        "Linux killed a process to free memory",
    ),
    ConsolePattern(
        "undervoltage",
        r"(?i)(under-?voltage detected|brown-?out (detector|reset|detected))",
        "the power supply is too weak",
    ),
    ConsolePattern(
        "hard fault",
        r"(?i)(\bhard ?fault|\b(bus|usage|mem ?manage) ?fault)",
        "the firmware stopped with a processor fault",
    ),
    ConsolePattern("segmentation fault", r"(segfault at |\bSegmentation fault\b)", "a program accessed invalid memory"),
    ConsolePattern(
        "storage error",
        r"(?i)(I/O error, dev |EXT4-fs error|mmc[0-9]+: .{0,60}(error|timeout)|UBIFS error)",
        "the board's storage fails",
    ),
    ConsolePattern(
        "overheating",
        r"(?i)(critical temperature reached|thermal.{0,40}shutting down|temperature above threshold)",
        "the board is too hot",
    ),
)


@dataclass(frozen=True)
class ConsoleConfig:
    """The ``[console]`` table. Without a link, the board has no console."""

    serial: str = make_key("", "Device of a serial port.")
    baud: int = make_key(115200, "Speed of the serial port.", bounds=(50, _MAX_BAUD))
    command: tuple[str, ...] = make_key((), "Program that prints the console on stdout, and reads input from stdin.")
    address: str = make_key("", "`tcp://HOST:PORT` or `telnet://HOST:PORT`, such as a port of ser2net.")
    labgrid: str = make_key("", "`NetworkSerialPort` of the board's labgrid place.")
    farm: str = make_key(
        "", "Board of the [farm](console.md#consoles-of-a-farm) whose host reads the console. Leases set this key."
    )
    boot: str = make_key("", "Regular expression for the line that ends the boot.", unset="unknown")
    boot_s: float = make_key(120.0, "Maximum seconds until this line appears.")
    patterns: tuple[ConsolePattern, ...] = make_key(
        (), "Tables with `name`, `pattern` and `meaning`, for lines that explain a failure.", unset="built-in patterns"
    )

    @property
    def is_set(self) -> bool:
        """Return True if the board has a console that hil can open."""
        return self.is_local or bool(self.farm)

    @property
    def is_local(self) -> bool:
        """Return True if this machine connects to the console without a farm."""
        return bool(self.serial or self.command or self.address)

    @property
    def place(self) -> str:
        """Name of the link for messages."""
        link = self.serial or self.address or (self.command[0] if self.command else "")
        return link or (f"{self.farm} of the farm" if self.farm else "")


@dataclass(frozen=True)
class Provision:
    """The ``[provision]`` table: command that writes an image to the board."""

    command: tuple[str, ...] = make_key((), "Program and arguments; `{image}` is the path of the image.")
    timeout_s: float = make_key(1800.0, "Timeout of the command, in seconds.")
    boot_s: float = make_key(300.0, "Maximum seconds until the board responds after the command.")


def parse_console(table: Mapping[str, Any], where: Path) -> ConsoleConfig:
    """Parse the ``[console]`` table.

    Args:
        where: the config file. A relative program path starts at its directory.

    Raises:
        UsageError: a key is unknown, a value is invalid, or there is more than one link.
    """
    place = f"{where}: [console]"
    values = {key: value for key, value in table.items() if key not in ("command", "patterns", "boot_s")}
    console: ConsoleConfig = make_values(ConsoleConfig, values, place)
    links = [name for name in LINKS if name in table]
    if table and len(links) != 1:
        what = f"defines {' and '.join(links)}" if links else "has no link"
        raise UsageError(f"{place} {what}", hint=f"set exactly one of {', '.join(LINKS)}")
    command = parse_program(table["command"], f"{place} command", where) if "command" in table else ()
    if console.address:
        split_console_address(console.address, place)
    if not 50 <= console.baud <= _MAX_BAUD:
        raise UsageError(f"{place} baud must be a number from 50 to {_MAX_BAUD}, got {console.baud}")
    if console.boot:
        check_pattern(console.boot, f"{place} boot")
    boot_s = parse_timeout(table.get("boot_s", ConsoleConfig.boot_s), f"{place} boot_s")
    return ConsoleConfig(
        **{one.name: getattr(console, one.name) for one in fields(ConsoleConfig)}
        | {"command": command, "boot_s": boot_s, "patterns": _parse_patterns(table.get("patterns", []), place)}
    )


def split_console_address(address: str, place: str) -> tuple[str, str, int]:
    """Return protocol, host and port of ``tcp://HOST:PORT`` or ``telnet://HOST:PORT``. Raises UsageError."""
    protocol, separator, rest = address.partition("://")
    host, colon, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_valid = separator and colon and host and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16
    if protocol not in PROTOCOLS or not is_valid:
        raise UsageError(
            f"{place} address is {address!r}", hint="expected tcp://HOST:PORT or telnet://HOST:PORT, as for ser2net"
        )
    return protocol, host, int(port)


def _parse_patterns(values: Any, place: str) -> tuple[ConsolePattern, ...]:
    if not isinstance(values, list) or not all(isinstance(one, dict) for one in values):
        raise UsageError(f"{place} patterns must be a list of tables", hint="write [[console.patterns]] for each")
    if len(values) > _MAX_PATTERNS:
        raise UsageError(f"{place} patterns: {len(values)} tables, at most {_MAX_PATTERNS} are allowed")
    found = []
    for value in values:
        if missing := [name for name in ("name", "pattern") if not value.get(name)]:
            raise UsageError(f"{place} patterns: missing key {missing[0]}", hint="set name, pattern and meaning")
        one: ConsolePattern = make_values(ConsolePattern, value, f"{place} patterns")
        check_pattern(one.pattern, f"{place} pattern {one.name!r}")
        found.append(one)
    return tuple(found)


def parse_provision(table: Mapping[str, Any], where: Path) -> Provision:
    """Parse the ``[provision]`` table. Raises UsageError for an unknown key or an invalid value."""
    place = f"{where}: [provision]"
    known = [one.name for one in fields(Provision)]
    for key in table.keys() - set(known):
        raise UsageError(
            f"{place}: unknown key {key!r}", hint=f"{did_you_mean(key, known)}known keys: {', '.join(known)}"
        )
    if not table:
        return Provision()
    if "command" not in table:
        raise UsageError(f"{place} has no command", hint=f'for example command = ["flash", "{IMAGE}"]')
    command = parse_program(table["command"], f"{place} command", where)
    if not any(IMAGE in word for word in command[1:]):
        raise UsageError(f"{place} command does not contain {IMAGE}", hint=f"add the argument {IMAGE}")
    seconds = {
        key: parse_timeout(table.get(key, getattr(Provision, key)), f"{place} {key}") for key in ("timeout_s", "boot_s")
    }
    return Provision(command, **seconds)
