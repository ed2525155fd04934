"""Run a module's methods on one backend, for all kinds of modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hil.controller.workloads.traces.trace import CallProgram, convert_to_numpy
from hil.core.digest import digest_of
from hil.core.results import Artifact
from hil.core.tensors import Array, make_spec, to_bytes

_DIGITS = 24
# A call's arguments. Each is a structure of arrays.
Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class ProgramResult:
    """Result of a program on a board."""

    artifact: Artifact  # the program, with the stored files and the function that ran
    program: CallProgram  # the program's entry in the trace
    device: str  # the device; "" is the runtime's default
    given: tuple[Array, ...]  # input arrays, in the program's order
    # output arrays in the program's order and the model's dtypes: first the call's outputs, then new values of
    # variables.
    returned: tuple[Array, ...]
    dtypes: tuple[str, ...]  # dtypes of the outputs in the program, which may not support unsigned integers
    source: str  # name and version of the runtime
    # True for each output that iree-run-module reports with unsigned integers. Expected outputs must then be unsigned.
    unsigned: tuple[bool, ...]

    @property
    def captured(self) -> dict[str, Array]:
        """Inputs other than the call's arguments, by name."""
        names = self.program.captured
        arrays = map(np.asarray, self.given[len(self.given) - len(names) :])
        return dict(zip(names, arrays, strict=True))


@dataclass(frozen=True)
class CallResult:
    """Result of a call."""

    outputs: Any  # outputs in the method's nesting
    source: str  # name and version of the runtime
    answer: ProgramResult | None = None  # result of the program; None if no program ran
    # state, assigned: see :class:`hil.controller.workloads.traces.trace.ModuleCall`.
    state: Mapping[str, Array] = field(default_factory=dict)
    assigned: tuple[str, ...] = ()


class BackendRunner:
    """Runs methods of a module on one backend."""

    def begin(self) -> None:
        """Create the module in its initial state for a new trace. The caller has seeded the random numbers."""

    def inputs(self, method: str, args: Sequence[Any]) -> Inputs:
        """Convert a call's arguments to the recorded form: structures of arrays.

        Raises:
            UsageError: the method does not take these arguments, or an argument is not a tensor or a structure of
                tensors.
        """
        return tuple(convert_to_numpy(f"argument {number} of {method}", value) for number, value in enumerate(args))

    def call(self, method: str, inputs: Inputs) -> CallResult:
        """Call a method. Raises HilError if the method fails or is unavailable."""
        raise NotImplementedError

    def close(self) -> None:
        """Release resources, mainly the board. :meth:`begin` acquires them again."""


def make_content_name(array: Array) -> str:
    """Return a name for a tensor, derived from its content."""
    return digest_of(f"{make_spec('', array)}\0".encode() + bytes(to_bytes(array))).rpartition(":")[2][:_DIGITS]
