"""What a board without an agent shows of itself, in the words of the agent's Describe."""

from __future__ import annotations

import contextlib
import math
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hil.core.cpuinfo import cpu_info

_MEMORY = re.compile(r"^MemTotal:\s*([0-9]{1,15}) kB", re.M)
_CORE = re.compile(r"^processor\s*:", re.M)


def machine(parts: Mapping[str, str]) -> dict[str, Any]:
    """CPU, memory and system, from what the probe said (``scripts.parts``); no entry where it said nothing."""
    arch = parts.get("arch", "")
    cpuinfo = parts.get("cpuinfo", "")
    cpu = cpu_info(arch, cpuinfo, _bytes(parts.get("auxv", "")))
    memory = _MEMORY.search(parts.get("meminfo", ""))
    found: dict[str, Any] = {
        "hostname": parts.get("hostname", ""),
        "system": parts.get("system", ""),
        "kernel": parts.get("kernel", ""),
        "arch": arch,
        "libc": parts.get("libc", ""),
        "cpu_model": cpu.model,
        "cpu_features": list(cpu.features),
        "cpu_parts": list(cpu.parts),
        "cores": len(_CORE.findall(cpuinfo)),
        "memory_bytes": str(int(memory[1]) * 1024) if memory else "",
        "boot_id": parts.get("boot_id", ""),
    }
    return {key: value for key, value in found.items() if value}


def _bytes(dump: str) -> bytes:
    """The bytes that ``od -An -tx1`` wrote; none where the board has no such tool."""
    try:
        return bytes.fromhex("".join(dump.split()))
    except ValueError:
        return b""


def readings(text: str) -> list[dict[str, Any]]:
    """What may change while a program runs, named as the agent names it, from lines of ``FILE:VALUE``."""
    values = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return [
        {key: value for key, value in {"name": name, **found}.items() if value != ""}
        for name, found in _readings({file: values[file].strip() for file in sorted(values, key=_natural)})
    ]


def _readings(values: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    throttled: list[float] = []
    for file, text in values.items():
        folder, name = posixpath.split(file)
        device = posixpath.basename(folder)
        kind = values.get(f"{folder}/type", "")
        core = device.replace("policy", "cpu")
        with contextlib.suppress(ValueError, IndexError, OverflowError):  # a driver's "<unknown>"
            if name == "scaling_cur_freq":
                yield f"{core} frequency", {"value": _number(text) / 1000, "unit": "MHz"}
            elif name == "scaling_max_freq":
                yield f"{core} highest frequency", {"value": _number(text) / 1000, "unit": "MHz"}
            elif name == "scaling_governor":
                yield f"{core} governor", {"text": text}
            elif name == "temp":
                yield f"{device} ({kind})", {"value": _number(text) / 1000, "unit": "degC"}
            elif name == "get_throttled":
                yield "firmware throttling", {"text": text}
            elif name == "cur_state" and ("cpufreq" in kind or kind == "Processor"):
                yield f"{device} ({kind})", {"value": _number(text)}
            elif name.endswith("_throttle_count"):
                throttled.append(_number(text))
            elif name == "meminfo":
                yield "free memory", {"value": _number(text.split()[1]) / 1024, "unit": "MiB"}
    if throttled:
        yield "throttle events", {"value": sum(throttled)}


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no measurement")
    return number


def _natural(text: str) -> list[Any]:
    return [int(piece) if number % 2 else piece for number, piece in enumerate(re.split(r"([0-9]{1,15})", text))]
