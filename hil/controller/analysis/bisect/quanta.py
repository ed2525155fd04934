"""How far off the tensors inside a quantised model may be, each by its own quantisation step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hil.controller.models.flows import Flow, quanta
from hil.controller.pipeline.case import Workshop
from hil.controller.storage.isolated import IsolatedError
from hil.errors import ImportFailed

_TIMEOUT_S = 600.0


def quantum_atols(flow: Flow, path: Path, shop: Workshop, log: Path) -> dict[str, float]:
    """What a flow's ``quanta`` come to for each of a model's outputs: see
    :func:`hil.controller.models.flows.quantum_atol`.

    Args:
        flow: whose ``quanta``.
        path: the model, with its intermediates as outputs.
        shop: its isolated processes.
        log: for what is printed meanwhile.

    Returns:
        Output -> absolute tolerance; an output that nothing quantises has none.

    Raises:
        ImportFailed: the model cannot be read.
    """
    if flow.quanta is None:
        return {}
    arguments = {"path": str(path.absolute())}
    try:
        steps: list[dict[str, Any]] = shop.isolated.call(quanta.find, arguments, timeout=_TIMEOUT_S, log=log)
    except IsolatedError as error:
        raise ImportFailed(f"cannot read {path.name}: {error.message}", stage="import", detail=error.detail) from error
    return {one["name"]: one["step"] * min(flow.quanta, one["roundings"]) for one in steps}
