"""What selectors can ask of a board: what its config says, and what its agent tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hil.core.boards import BoardConfig


def labels_of(config: BoardConfig, info: Mapping[str, Any]) -> dict[str, Any]:
    """A board's labels; those of its config go before what was found out.

    ``arch``, ``cpu`` (its model), ``features`` (of the CPU), ``cores``, ``mem`` (bytes), ``system``, ``kernel``,
    ``libc``, ``runtimes``, the version of each runtime under its name, ``devices`` (of all of them), ``agent`` (its
    version), ``simulated``, and ``agentless`` where programs are run by command.

    Args:
        config: the board's.
        info: what Describe said; empty where nobody answers.
    """
    machine = info.get("machine", {})
    runtimes = {one["name"]: one for one in info.get("runtimes", ()) if not one.get("error")}
    found = {
        "arch": machine.get("arch"),
        "cpu": machine.get("cpu_model"),
        "features": machine.get("cpu_features"),
        "cores": machine.get("cores"),
        "mem": int(info.get("memory_limit_bytes", 0)) or int(machine.get("memory_bytes", 0)),
        "system": machine.get("system"),
        "kernel": machine.get("kernel"),
        "libc": machine.get("libc"),
        "runtimes": sorted(runtimes),
        "devices": sorted({device for one in runtimes.values() for device in one.get("devices", ())}),
        "agent": info.get("agent_version"),
        "simulated": bool(info.get("simulated")) or config.simulator is not None,
        "agentless": config.command.kind == "command",
        **{name: one.get("version") for name, one in runtimes.items()},
    }
    return {**{key: value for key, value in found.items() if value}, **config.labels}
