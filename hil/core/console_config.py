"""Parse the tables ``[console]`` and ``[provision]`` of a board config.

``[console]`` defines how to read a board's console, with exactly one link::

    [console]
    serial = "/dev/ttyUSB0"                  # a serial port; also baud
    command = ["picocom", "/dev/ttyUSB0"]    # a program that prints the console, without a shell
    address = "telnet://lab:4001"            # or tcp://HOST:PORT, such as a port of ser2net
    labgrid = "console"                      # a NetworkSerialPort of the board's labgrid place

    boot = "login:"                          # the board has booted when a line matches
    boot_s = 60

    [[console.patterns]]
    name = "npu fault"
    pattern = "npu[0-9]: fault"
    meaning = "the accelerator stopped"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hil.core.config_keys import make_key
from hil.core.config_values import make_values, parse_program, parse_timeout
from hil.errors import UsageError, did_you_mean

LINKS = ("serial", "command", "address", "labgrid")
PROTOCOLS = ("tcp", "telnet")
# Patterns match at most this part of a line, so that a slow pattern cannot stop the reader.
MATCHED_CHARACTERS = 512
_MAX_PATTERN = 200
_MAX_PATTERNS = 50
# Further repetitions multiply the time for a line by its length.
_MAX_REPEATS = 3
# Further optional parts and groups with alternatives multiply the time by the number of their forms.
_MAX_CHOICES = 6
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
    boot: str = make_key("", "Regular expression for the line that ends the boot.", unset="unknown")
    boot_s: float = make_key(120.0, "Maximum seconds until this line appears.")
    patterns: tuple[ConsolePattern, ...] = make_key(
        (), "Tables with `name`, `pattern` and `meaning`, for lines that explain a failure.", unset="built-in patterns"
    )

    @property
    def is_set(self) -> bool:
        """Return True if the board has a console that hil can open."""
        return bool(self.serial or self.command or self.address)

    @property
    def place(self) -> str:
        """Name of the link for messages."""
        return self.serial or self.address or (self.command[0] if self.command else "")


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


def check_pattern(pattern: str, place: str) -> None:
    """Raise UsageError for an invalid regular expression, or one that may need exponential time.

    A group with a repetition, an optional part or an alternative inside may not be repeated, such as ``(a+)+``. The
    number of these parts is limited. Together with :data:`MATCHED_CHARACTERS`, this limits the time of a match.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{place}: invalid regular expression {pattern!r}: {error}") from error
    problem = f"more than {_MAX_PATTERN} characters" if len(pattern) > _MAX_PATTERN else _find_slow_part(pattern)
    if problem:
        raise UsageError(
            f"{place}: slow regular expression {pattern!r}: {problem}", hint="match a fixed part of the line instead"
        )


def _find_slow_part(pattern: str) -> str:
    """Return why a pattern may be slow; "" if it is fast. Scans the text of a valid regular expression."""
    # Characters of classes, escaped characters and the start of special groups have no effect here.
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", pattern, flags=re.DOTALL)
    plain = re.sub(r"\(\?", "(", plain)
    repeats = len(re.findall(r"[*+]|\{\d*,\d*\}", plain))
    if repeats > _MAX_REPEATS:
        return f"{repeats} repetitions, at most {_MAX_REPEATS} are allowed"
    # A question mark after a repetition only changes the order of attempts.
    plain = re.sub(r"([*+?}])\?", r"\1", plain)
    choices = plain.count("?")
    open_groups: list[str] = [""]
    for index, character in enumerate(plain):
        if character == "(":
            open_groups.append("")
        elif character in "*+{?|":
            open_groups[-1] += character
        elif character == ")" and len(open_groups) > 1:
            found = open_groups.pop()
            if found and plain[index + 1 : index + 2] in ("*", "+", "{"):
                return "a repeated group contains a repetition, an optional part or an alternative"
            choices += "|" in found
            open_groups[-1] += found.replace("|", "*")
    if choices > _MAX_CHOICES:
        return f"{choices} optional parts and groups with alternatives, at most {_MAX_CHOICES} are allowed"
    return ""


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
