"""Read how much memory of GPUs this process uses, as far as the runtime or the kernel reports it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hil.core.files import read_text
from hil.errors import UnreadableFile

_PROCESS = Path("/proc/self")
_DEVICES = "/dev/dri/"
_MAX_BYTES = 1 << 16
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}
# Linux: Documentation/gpu/drm-usage-stats.rst. `drm-memory-REGION` is the older name of `drm-resident-REGION`.
_LINE = re.compile(r"^(drm-[\w-]+):[ \t]*(\S+)[ \t]*(KiB|MiB)?[ \t]*$", re.MULTILINE)
_RESIDENT, _MEMORY = "drm-resident-", "drm-memory-"


def read_device_memory(program: Any) -> int:
    """Return the device memory in bytes: the peak that the runtime reports, else the present use of this process.

    Returns 0 if neither the runtime nor the kernel reports it. Call this between runs, while the outputs exist.
    """
    reported = getattr(program, "get_peak_device_memory", None)
    found = reported() if reported is not None else None
    return int(found) if found is not None else read_drm_bytes()


def read_drm_bytes(process: Path = _PROCESS) -> int:
    """Return the memory of GPUs that the kernel's drivers account to a process, or 0 if they report none."""
    clients: dict[tuple[str, str], int] = {}
    try:
        opened = [entry.name for entry in os.scandir(process / "fd") if _is_gpu(entry.path)]
        texts = [read_text(process / "fdinfo" / name, _MAX_BYTES, errors="replace") for name in opened]
    except (OSError, UnreadableFile):
        return 0
    for text in texts:
        values = {key: (value, unit) for key, value, unit in _LINE.findall(text)}
        # Descriptors of the same client repeat its numbers.
        client = values.get("drm-pdev", ("", ""))[0], values.get("drm-client-id", ("", ""))[0]
        prefix = _RESIDENT if any(key.startswith(_RESIDENT) for key in values) else _MEMORY
        sizes = (pair for key, pair in values.items() if key.startswith(prefix))
        clients[client] = sum(int(value) * _UNITS[unit] for value, unit in sizes if value.isdecimal())
    return sum(clients.values())


def _is_gpu(path: str) -> bool:
    try:
        return str(Path(path).readlink()).startswith(_DEVICES)
    except OSError:  # closed since the listing
        return False
