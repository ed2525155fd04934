"""List and open the devices of IREE's drivers on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import iree.runtime as rt

from hil.errors import LoadFailed
from hil.formats.iree_devices import CPU_DRIVERS, get_driver, match_devices, number_equal_ids, parse_device


@dataclass(frozen=True)
class OpenedDevice:
    """Opened HAL device, and the description of :func:`hil.formats.iree_devices.parse_device`."""

    device: Any
    details: dict[str, Any]


def list_devices() -> dict[str, list[dict[str, Any]]]:
    """Return the devices of each driver that has a device on this machine."""
    found = {}
    for name in rt.query_available_drivers():
        try:
            devices = [details for _, details in _query_devices(name)]
        except Exception:  # the driver does not work here
            continue
        if devices:
            found[name] = devices
    return found


def open_device(name: str) -> OpenedDevice:
    """Open the device that a name selects.

    IREE finds devices only by driver and path. hil opens a GPU by its number, because multiple GPUs may have the same
    path, and hil compares the program with the device's description.

    Raises:
        LoadFailed: the device is missing, or the name is ambiguous.
    """
    driver = get_driver(name)
    if driver in CPU_DRIVERS:
        return OpenedDevice(rt.get_device(name, cache=False), {"id": name, "name": "", "properties": {}})
    try:
        devices = _query_devices(driver)
    except Exception as error:
        raise LoadFailed(f"no {driver} device: {get_first_line(error)}", hint=_make_hint()) from error
    found = match_devices([details for _, details in devices], name)
    if len(found) != 1:
        names = ", ".join(one["id"] for one in found)
        what = f"the name {name!r} selects several devices: {names}" if found else f"device {name!r} not found"
        raise LoadFailed(what, hint=_make_hint())
    number = next(number for number, details in devices if details["id"] == found[0]["id"])
    return OpenedDevice(rt.get_driver(driver).create_device(number), dict(found[0]))


def get_first_line(error: Exception) -> str:
    """Return the first line of IREE's error text."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip()[:400] if lines else type(error).__name__


def _query_devices(driver: str) -> list[tuple[int, dict[str, Any]]]:
    """Return IREE's number and the description of each device of a driver. Raises IREE's errors."""
    opened = rt.get_driver(driver)
    found = opened.query_available_devices()
    parsed = [parse_device(driver, one, opened.dump_device_info(one["device_id"])) for one in found]
    return [(one["device_id"], details) for one, details in zip(found, number_equal_ids(parsed), strict=True)]


def _make_hint() -> str:
    names = [one["id"] for devices in list_devices().values() for one in devices]
    return f"devices found: {', '.join(names)}; check that the device's driver is installed"
