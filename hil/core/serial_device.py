"""Addresses of serial lines, and why a serial device cannot be opened."""

from __future__ import annotations

import grp
import hashlib
import os
import stat
from pathlib import Path

from hil.errors import BoardUnreachable, UsageError

PREFIX = "serial:"
SOCKET = "unix:"
_NAMES = ("serial/by-id/*", "ttyACM*", "ttyUSB*")
_MAX_SHOWN = 4


def parse_serial_address(address: str) -> str:
    """Return the device, or ``unix:PATH``, of an address ``serial:...``. Raises UsageError for a relative path."""
    place = address.removeprefix(PREFIX)
    if not Path(place.removeprefix(SOCKET)).is_absolute():
        raise UsageError(
            f"{place!r} is not a serial device", hint="use an absolute path: serial:/dev/ttyACM0 or serial:unix:PATH"
        )
    return place


def is_same_line(left: str, right: str) -> bool:
    """Return whether two addresses are the same device, by different paths or not."""
    if not (left.startswith(PREFIX) and right.startswith(PREFIX)):
        return False
    return os.path.realpath(left.removeprefix(PREFIX)) == os.path.realpath(right.removeprefix(PREFIX))


def make_claim_name(address: str) -> str:
    """Return a short name of a line for :class:`hil.agent.board_claim.BoardClaim`, the same for all its paths."""
    place = os.path.realpath(parse_serial_address(address).removeprefix(SOCKET))
    return f"line-{hashlib.sha256(os.fsencode(place)).hexdigest()}"


def check_serial_device(place: str) -> None:
    """Check that a device or socket exists and may be opened.

    Raises:
        BoardUnreachable: it does not exist, or the user may not open it.
        UsageError: the file is not a serial device.
    """
    path = Path(place.removeprefix(SOCKET))
    try:
        status = path.stat()
    except OSError as error:
        raise BoardUnreachable(
            f"serial device {path} not found: {error.strerror}",
            hint=f"check the cable and the power; {_list_devices()}",
        ) from error
    if place.startswith(SOCKET):
        if not stat.S_ISSOCK(status.st_mode):
            raise UsageError(f"{path} is not a socket", hint="serial:unix:PATH is the socket of an emulator")
    elif not stat.S_ISCHR(status.st_mode):
        raise UsageError(f"{path} is not a serial device", hint=_list_devices())
    if not os.access(path, os.R_OK | os.W_OK):
        raise BoardUnreachable(f"no permission to open {path}", hint=_explain_permission(path, status))


def list_holders(path: str) -> list[str]:
    """Return other processes that have a device open, as ``NAME (PID)``. Processes of other users are invisible."""
    real = os.path.realpath(path)
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_holder = any(os.path.realpath(one) == real for one in (process / "fd").iterdir())
            name = (process / "exe").readlink().name
        except OSError:
            continue
        if is_holder and process.name != str(os.getpid()):
            found.append(f"{name} ({process.name})")
    return found


def _list_devices() -> str:
    found = [str(path) for name in _NAMES for path in sorted(Path("/dev").glob(name))]
    more = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    return f"connected: {', '.join(found[:_MAX_SHOWN])}{more}" if found else "no serial device is connected"


def _explain_permission(path: Path, status: os.stat_result) -> str:
    try:
        group = grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        group = str(status.st_gid)
    if status.st_mode & 0o060 == 0o060 and status.st_gid:
        return f"add your user to the group {group}, and log in again: sudo usermod -aG {group} USER"
    return f"{path} has the mode {stat.filemode(status.st_mode)} and the group {group}: add a udev rule for the device"
