"""What a flow is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Flow:
    """How a suite's models are made into programs and judged.

    Attributes:
        compiler: makes it; "" is the runtime's own.
        recipe: what is done with a model first: a name of :func:`hil.controller.models.flows.recipes`; "" is nothing.
        rtol, atol: tolerance beside the flow's own reference (that of the model as the recipe made it); None is the
            case's own or the dtype's default.
        quanta: how many steps of its quantisation an output may be off beside that reference: see
            :func:`hil.controller.models.flows.quantum_atol`; None where ``atol`` or the case's own is meant.
        min_sqnr_db: what the answer must reach beside the model as it was before the recipe; None asks for nothing.
    """

    name: str
    runtime: str
    compiler: str = ""
    compile_flags: tuple[str, ...] = ()
    recipe: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    rtol: float | None = None
    atol: float | None = None
    quanta: float | None = None
    min_sqnr_db: float | None = None
    description: str = ""
