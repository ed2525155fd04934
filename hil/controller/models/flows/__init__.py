"""Flows: a compiler, its options, a recipe for the model and a runtime under one name, such as ``iree-O3``."""

from __future__ import annotations

from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.named import flows, load_flow
from hil.controller.models.flows.quanta import quantum_atol
from hil.controller.models.flows.read import check_flow, read_flows
from hil.controller.models.flows.recipe import Recipe, apply_recipe, recipes

__all__ = [
    "Flow",
    "Recipe",
    "apply_recipe",
    "check_flow",
    "flows",
    "load_flow",
    "quantum_atol",
    "read_flows",
    "recipes",
]
