"""The health of a board: checks of the connection to it, and what happened to it between two descriptions."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.core.board_config import Connection
from hil.errors import BoardError, UsageError

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

# What a check ends in: models can be run; but times or room are doubtful; cannot be run; it does not apply here.
PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"


@dataclass(frozen=True)
class Check:
    """What one check found."""

    name: str
    state: str
    found: str
    mend: str = ""  # what to do; "" where nothing is wrong


_CONNECT_S = 10.0


def check_login(where: str, connection: Connection, *, board: str, base: Path) -> Generator[Check, None, Shell | None]:
    """Check name, port, host key and login; gives a shell, or None after a check that failed."""
    from hil.controller.devices.ssh.address import parse_address, read_ssh_config, settings_for
    from hil.controller.devices.ssh.connect import open_shell
    from hil.controller.devices.ssh.known_hosts import HostKeyRefused

    address = parse_address(where)
    config = read_ssh_config()
    looked_up = config.lookup(address.host)
    host, port = str(looked_up["hostname"]), address.port or _port(str(looked_up.get("port", 22)), address.host)
    settings = settings_for(config, address.host)
    if settings.jumps or settings.proxy_command:
        by = ", ".join(map(str, settings.jumps)) or settings.proxy_command
        yield Check("name", SKIP, f"{host} is reached by way of {by}")
    else:
        reached = yield from _tcp(host, port)
        if not reached:
            return None
    try:
        shell: Shell = open_shell(where, connection, board=board, base=base)
    except HostKeyRefused as error:
        yield Check("host key", FAIL, error.message, error.hint)
        return None
    except BoardError as error:
        yield Check("login", FAIL, error.message, error.hint or error.detail)
        return None
    yield Check("host key", PASS, f"pinned: {shell.fingerprint}")
    yield Check("login", PASS, f"as {shell.user}")
    return shell


def _port(text: str, host: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise UsageError(f"the ssh config's port of {host} is {text!r}", hint="`ssh -G HOST` tells what is wrong")
    return int(text)


def _tcp(host: str, port: int) -> Generator[Check, None, bool]:
    """Whether the name is known, and an SSH server answers at the port; returns whether both."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        mend = "see its spelling, /etc/hosts, DNS; or use its IP address"
        yield Check("name", FAIL, f"{host} is no host's name: {error}", mend)
        return False
    yield Check("name", PASS, f"{host} is {', '.join(dict.fromkeys(str(one[4][0]) for one in found))}")
    start = time.monotonic()
    try:
        with socket.create_connection((host, port), _CONNECT_S) as link:
            took = time.monotonic() - start
            banner = link.recv(256).split(b"\r\n")[0].split(b"\n")[0]
    except OSError as error:
        mend = "is the board on and on this network? does sshd run on it? is the port right (USER@HOST:PORT)?"
        yield Check("port", FAIL, f"nothing answers at {host} port {port}: {error}", mend)
        return False
    if not banner.startswith(b"SSH-"):
        greeting = repr(banner.decode(errors="replace")) if banner else "nothing"
        found_there = f"what answers at port {port} is no SSH server; it said {greeting}"
        yield Check("port", FAIL, found_there, "name sshd's port: USER@HOST:PORT")
        return False
    yield Check("port", PASS, f"{port} answers in {took * 1e3:.0f} ms: {banner.decode(errors='replace')}")
    return True


# Bits of a Raspberry Pi's get_throttled: those from 16 on say "since the boot", the lower ones "now".
_FIRMWARE_BITS = {
    0: "its voltage was too low",
    1: "its firmware held the clock down",
    2: "its firmware throttled it",
    3: "it came to its soft temperature limit",
}
_JUMP_S = 1.0
# Readings with one of these names are texts, all others that are compared are numbers.
_IN_WORDS = ("firmware throttling", " governor")


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Say what happened to a board between two Describes that makes times or the run doubtful, a sentence each.

    What is absent in one of them says nothing.
    """
    boots = [info.get("machine", {}).get("boot_id", "") for info in (before, after)]
    if all(boots) and boots[0] != boots[1]:
        return ["the board rebooted"]
    return [*_jump(before, after), *_throttled(_readings(before), _readings(after))]


def _jump(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    names = ("wall_ns", "clock_ns")
    if all(name in info for info in (before, after) for name in names):
        wall, monotonic = (int(after[name]) - int(before[name]) for name in names)
        jump = (wall - monotonic) / 1e9
        if abs(jump) >= _JUMP_S:
            yield f"the board's wall clock was set {abs(jump):.0f} s {'forward' if jump > 0 else 'back'}"


def _throttled(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in (name for name in before if name in after):
        was, now = before[name], after[name]
        if isinstance(was, str) != isinstance(now, str) or isinstance(was, str) != name.endswith(_IN_WORDS):
            continue
        if name == "throttle events" and now > was:
            yield f"the board throttled: its CPU counted {now - was:.0f} throttle events"
        elif name == "firmware throttling":
            yield from _firmware(was, now)
        elif name.startswith("cooling_device") and max(was, now) > 0:
            yield f"the board throttled: its CPU was slowed to cool it ({name} at step {max(was, now):.0f})"
        elif name.endswith(" highest frequency") and now < was:
            yield f"the board throttled: the {name} fell from {was:.0f} to {now:.0f} MHz"
        elif name.endswith(" governor") and now != was:
            yield f"the {name} was changed from {was} to {now}"


def _firmware(was: str, now: str) -> Iterator[str]:
    old, new = firmware_bits(was), firmware_bits(now)
    if old is None or new is None:
        return
    for bit, meaning in _FIRMWARE_BITS.items():
        if (old | new) >> bit & 1 or (new & ~old) >> (bit + 16) & 1:
            yield f"the board throttled: {meaning}"


def firmware_bits(text: str) -> int | None:
    """What a Raspberry Pi's firmware says of throttling; None where it says nothing."""
    try:
        return int(text, 16)
    except ValueError:
        return None


def _readings(info: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> text or number; MessageToDict leaves out a number that is 0."""
    return {one["name"]: one.get("text") or float(one.get("value", 0.0)) for one in info.get("readings", ())}
