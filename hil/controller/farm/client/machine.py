"""Identify this machine: processes with the same identity can use the same sockets and clock."""

from __future__ import annotations

import uuid
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def get_machine_id() -> str:
    """Return the boot id of this machine, or the MAC address if unavailable."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"{uuid.getnode():012x}"
