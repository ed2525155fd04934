"""On what a result was measured, in the same words for every board."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hil.core.placement import Placement, Told
from hil.core.results import RunResult
from hil.errors import RanElsewhere

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell


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


def placed(result: RunResult, placement: Placement | None, told: Told, *, no_fallback: bool) -> RunResult:
    """The result with where the program ran in its provenance: ``placement``, and a note on what ran ``elsewhere``.

    Args:
        result: of :func:`provenance_of` has its provenance.
        placement: where the program ran; None where the board does not tell.
        told: where it was told to run.
        no_fallback: whether any node elsewhere is an error.

    Raises:
        RanElsewhere: it ran elsewhere. The error has the result, without times: they are another device's.
    """
    marked = None if placement is None else told.mark(placement)
    parts = None if marked is None else [part.to_json() for part in marked]
    provenance = {**result.provenance, "placement": parts, "elsewhere": ""}
    try:
        note = told.check(marked, no_fallback=no_fallback)
    except RanElsewhere as error:
        error.result = replace(result, provenance=provenance, iterations_ns=())
        raise
    return replace(result, provenance={**provenance, "elsewhere": note})
