"""What runs a module's methods on one backend, whatever kind of module that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hil.controller.workloads.traces.trace import CallProgram, as_numpy
from hil.core.digest import digest_of
from hil.core.results import Artifact
from hil.core.tensors import Array, spec_of, to_bytes

_DIGITS = 24
# A call's arguments, a structure of arrays each.
Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """What a program on a board answered."""

    artifact: Artifact  # the program; its files are those that are kept, its function is the one that ran
    program: CallProgram  # the same as a trace keeps it
    device: str  # what it ran on; "" is the runtime's own choice
    given: tuple[Array, ...]  # the arrays that it was given, in the program's order
    # those that it returned, in its order, in the model's dtypes: a call's own first, then new values of variables.
    returned: tuple[Array, ...]
    dtypes: tuple[str, ...]  # the program's own for what it returned: it may know no unsigned integers
    source: str  # who computed, with version
    # of each whether iree-run-module calls its integers unsigned, and what it expects has to be called so as well.
    unsigned: tuple[bool, ...]

    @property
    def captured(self) -> dict[str, Array]:
        """What it was given beside the call's own arguments, by name."""
        names = self.program.captured
        arrays = map(np.asarray, self.given[len(self.given) - len(names) :])
        return dict(zip(names, arrays, strict=True))


@dataclass(frozen=True)
class Called:
    """What a call came to."""

    outputs: Any  # as the method returns them
    source: str  # who computed, with version
    answer: Answer | None = None  # of the program that ran; None if it was none
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


def content_name(array: Array) -> str:
    """Return what a tensor is called by what it holds."""
    return digest_of(f"{spec_of('', array)}\0".encode() + bytes(to_bytes(array))).rpartition(":")[2][:_DIGITS]
