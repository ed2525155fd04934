"""What lowering a TensorFlow function makes: StableHLO, and what goes in and out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hil.controller.models.tensorflow.structure import Structure, restore
from hil.core.tensors import TensorSpec

# What the function is called in the MLIR module.
ENTRY = "main"


@dataclass(frozen=True)
class State:
    """A variable or a tensor that a function captured: a further argument of the lowered function.

    Attributes:
        spec: name, dtype and shape. Names are unique: the variable's, numbered where several have it.
        constant: whether it is a tensor rather than a variable, and never changes.
        result: number of the result (outputs included) that is the variable's new value; None where the function does
            not assign it.
    """

    spec: TensorSpec
    constant: bool = False
    result: int | None = None


@dataclass(frozen=True)
class LoweredFunction:
    """A function in StableHLO, for one set of shapes.

    ``main(*inputs, *state) -> (*outputs, *new values of assigned variables)``.

    Attributes:
        mlir: the module as text; its one public function is ``main``.
        inputs: the tensors among the arguments, flattened in order.
        outputs: the tensors among the results, flattened in order.
        state: what follows the inputs.
        structure: of what the function returns: the number of an output in the place of each; see :meth:`returned`.
    """

    mlir: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: tuple[State, ...]
    structure: Structure

    @property
    def assigned(self) -> tuple[State, ...]:
        """The variables that the function assigns, in the order of the further results."""
        found = [state for state in self.state if state.result is not None]
        return tuple(sorted(found, key=lambda state: state.result or 0))

    def returned(self, outputs: list[Any]) -> Structure:
        """Outputs as the function itself returns them: nested as it nests them."""
        return restore(self.structure, outputs)
