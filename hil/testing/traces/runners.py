"""What runs a module's methods on one backend, whatever kind of module that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hil.controller.workloads.traces.trace import as_numpy
from hil.core.results import Artifact
from hil.core.tensors import Array, dtype_of

# A call's arguments, a structure of arrays each.
Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """What a program on a board answered."""

    artifact: Artifact  # the program; its files are those that are kept, its function is the one that ran
    device: str  # what it ran on; "" is the runtime's own choice
    given: tuple[Array, ...]  # the arrays that it was given, in the program's order
    # those that it returned, in its order, in the model's dtypes: a call's own first, then new values of variables.
    returned: tuple[Array, ...]
    dtypes: tuple[str, ...]  # the program's own for what it returned: it may know no unsigned integers
    source: str  # who computed, with version
    assigned: tuple[str, ...] = ()  # the variables whose new values it returned after its outputs, in that order


@dataclass(frozen=True)
class Called:
    """What a call came to."""

    outputs: Any  # as the method returns them
    source: str  # who computed, with version
    answer: Answer | None = None  # of the program that ran; None if it was no program of IREE's
    # state, assigned: as :class:`hil.controller.workloads.traces.trace.ModuleCall` has them.
    state: Mapping[str, Array] = field(default_factory=dict)
    assigned: tuple[str, ...] = ()


class Runner:
    """Runs methods of a module on one backend."""

    def begin(self) -> None:
        """Make the module as it is at first, for a new trace; random numbers are seeded already."""

    def inputs(self, method: str, args: Sequence[Any]) -> Inputs:
        """Return a call's arguments as they are recorded: structures of arrays.

        Raises:
            UsageError: the method takes no such arguments, or one is neither a tensor nor a structure of tensors.
        """
        return tuple(as_numpy(f"argument {number} of {method}", value) for number, value in enumerate(args))

    def call(self, method: str, inputs: Inputs) -> Called:
        """Call a method. Raises HilError: it does not work, or not there."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what it holds, a board above all; :meth:`begin` starts again."""


def same_bits(dtype: str, array: Array) -> Array:
    """Return an array as ``dtype`` ("" is any): what a program calls int8 may be a uint8 of its model's."""
    wanted = dtype_of(dtype) if dtype else array.dtype
    both_integers = array.dtype.kind in "iu" and wanted.kind in "iu"
    return array.view(wanted) if both_integers and array.dtype.itemsize == wanted.itemsize else array
