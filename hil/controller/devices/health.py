"""Board health: checks of the connection, and state changes between two descriptions."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hil.controller.records.commands.boards import BoardCheck
from hil.core.board_config import Connection
from hil.errors import BoardError

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

# States of a check. PASS: models can run. WARN: models can run, but times or free space are doubtful. FAIL: models
# cannot run. SKIP: not applicable.
PASS: Final = "pass"
WARN: Final = "warn"
FAIL: Final = "fail"
SKIP: Final = "skip"

_CONNECT_SECONDS = 10.0


def check_login(
    where: str, connection: Connection, *, board: str, base: Path
) -> Generator[BoardCheck, None, Shell | None]:
    """Check host name, port, host key and login. Return a shell, or None after a failed check."""
    from hil.controller.devices.ssh.connect import look_up, open_shell
    from hil.controller.devices.ssh.errors import HostKeyRefused

    place = look_up(where)
    if place.proxy:
        yield BoardCheck("name", SKIP, f"{place.host} is reached through {place.proxy}")
    else:
        reached = yield from _check_tcp(place.host, place.port)
        if not reached:
            return None
    try:
        shell: Shell = open_shell(where, connection, board=board, base=base)
    except HostKeyRefused as error:
        yield BoardCheck("host key", FAIL, error.message, error.hint)
        return None
    except BoardError as error:
        yield BoardCheck("login", FAIL, error.message, error.hint or error.detail)
        return None
    yield BoardCheck("host key", PASS, f"pinned: {shell.fingerprint}")
    yield BoardCheck("login", PASS, f"as {shell.user}")
    return shell


def _check_tcp(host: str, port: int) -> Generator[BoardCheck, None, bool]:
    """Check that the name resolves and that an SSH server listens on the port. Return whether both checks pass."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        fix = "check the spelling, /etc/hosts and DNS, or use the IP address"
        yield BoardCheck("name", FAIL, f"cannot resolve host name {host}: {error}", fix)
        return False
    yield BoardCheck("name", PASS, f"{host} is {', '.join(dict.fromkeys(str(one[4][0]) for one in found))}")
    start = time.monotonic()
    try:
        with socket.create_connection((host, port), _CONNECT_SECONDS) as link:
            took = time.monotonic() - start
            banner = link.recv(256).split(b"\r\n")[0].split(b"\n")[0]
    except OSError as error:
        fix = "check that the board is on, on this network and runs sshd on this port (USER@HOST:PORT)"
        yield BoardCheck("port", FAIL, f"no response from {host} port {port}: {error}", fix)
        return False
    if not banner.startswith(b"SSH-"):
        greeting = repr(banner.decode(errors="replace")) if banner else "nothing"
        found_there = f"the server at port {port} is not an SSH server: it sent {greeting}"
        yield BoardCheck("port", FAIL, found_there, "set sshd's port: USER@HOST:PORT")
        return False
    yield BoardCheck("port", PASS, f"{port} responds in {took * 1e3:.0f} ms: {banner.decode(errors='replace')}")
    return True


# Bits of a Raspberry Pi's get_throttled. Bits from 16 on mean "since boot", the lower bits "now".
_FIRMWARE_BITS = {
    0: "undervoltage",
    1: "the firmware limited the clock",
    2: "the firmware throttled the CPU",
    3: "soft temperature limit reached",
}
_JUMP_SECONDS = 1.0
# If a reading's name ends with one of these texts, the value is a text. All other readings that hil compares are
# numbers.
_IN_WORDS = ("firmware throttling", " governor")


def list_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the changes of a board between two Describes that make times or the run doubtful, one sentence each.

    Ignores fields that are missing in one of the two Describes.
    """
    boots = [info.get("machine", {}).get("boot_id", "") for info in (before, after)]
    if all(boots) and boots[0] != boots[1]:
        return ["the board rebooted"]
    return [*_find_clock_jump(before, after), *_find_throttling(_map_readings(before), _map_readings(after))]


def _find_clock_jump(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    names = ("wall_ns", "clock_ns")
    if all(name in info for info in (before, after) for name in names):
        wall, monotonic = (int(after[name]) - int(before[name]) for name in names)
        jump = (wall - monotonic) / 1e9
        if abs(jump) >= _JUMP_SECONDS:
            yield f"the board's wall clock was set {abs(jump):.0f} s {'forward' if jump > 0 else 'back'}"


def _find_throttling(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in (name for name in before if name in after):
        was, now = before[name], after[name]
        if isinstance(was, str) != isinstance(now, str) or isinstance(was, str) != name.endswith(_IN_WORDS):
            continue
        if name == "throttle events" and now > was:
            yield f"the board throttled: {now - was:.0f} CPU throttle events"
        elif name == "firmware throttling":
            yield from _find_firmware_throttling(was, now)
        elif name.startswith("cooling_device") and max(was, now) > 0:
            yield f"the board throttled: the CPU was slowed for cooling ({name} at step {max(was, now):.0f})"
        elif name.endswith(" highest frequency") and now < was:
            yield f"the board throttled: the {name} fell from {was:.0f} to {now:.0f} MHz"
        elif name.endswith(" governor") and now != was:
            yield f"the {name} was changed from {was} to {now}"


def _find_firmware_throttling(was: str, now: str) -> Iterator[str]:
    old, new = parse_firmware_bits(was), parse_firmware_bits(now)
    if old is None or new is None:
        return
    for bit, meaning in _FIRMWARE_BITS.items():
        if (old | new) >> bit & 1 or (new & ~old) >> (bit + 16) & 1:
            yield f"the board throttled: {meaning}"


def parse_firmware_bits(text: str) -> int | None:
    """Parse the throttling bits of a Raspberry Pi's firmware. Return None if the text is not hexadecimal."""
    try:
        return int(text, 16)
    except ValueError:
        return None


def _map_readings(info: Mapping[str, Any]) -> dict[str, Any]:
    """Map the names of readings to texts or numbers. A missing number is 0, because MessageToDict omits zeros."""
    return {one["name"]: one.get("text") or float(one.get("value", 0.0)) for one in info.get("readings", ())}
