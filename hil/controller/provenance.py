"""On what a result was measured, in the same words for every board."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hil.controller.ssh.shell import Shell


def provenance_of(
    board: str,
    info: Mapping[str, Any],
    shell: Shell | None,
    *,
    runtime: str,
    version: str,
    device: str,
    notes: Sequence[str],
) -> dict[str, Any]:
    """What run.json has under ``provenance`` for every board; what else one can tell is added by it.

    Args:
        board: what results call it.
        info: what it said of itself, in the words of an agent's Describe.
        shell: the way to it, where that is SSH: its host key belongs to the result.
        runtime, version, device: what ran the program.
        notes: what happened to the board meanwhile.
    """
    return {
        "board": board,
        "board_id": info.get("board_id", ""),
        "machine": info.get("machine", {}),
        "readings": info.get("readings", []),
        "simulated": info.get("simulated", []),
        "agent_version": info.get("agent_version", ""),
        "runtime": runtime,
        "runtime_version": version,
        "device": device,
        "notes": list(notes),
        "finished_at": time.time(),
        **({"host_key": shell.fingerprint} if shell is not None else {}),
    }
