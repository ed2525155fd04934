"""What a flow is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Flow:
    """How a suite's models are made into programs and judged."""

    name: str
    runtime: str
    compiler: str = ""  # makes it; "" is the runtime's own
    compile_flags: tuple[str, ...] = ()
    # what is done with a model first: a name of :func:`hil.controller.models.flows.recipes`; "" is nothing.
    recipe: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    # rtol, atol: tolerance beside the flow's own reference (that of the model as the recipe made it); None is the
    # case's own or the dtype's default.
    rtol: float | None = None
    atol: float | None = None
    # how many steps of its quantisation an output may be off beside that reference: see
    # :func:`hil.controller.models.flows.quantum_atol`; None where ``atol`` or the case's own is meant.
    quanta: float | None = None
    # what the answer must reach beside the model as it was before the recipe; None asks for nothing.
    min_sqnr_db: float | None = None
    description: str = ""
