"""What runs a module's methods on one backend, whatever kind of module that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hil.controller.storage.run_context import RunContext
from hil.core.tensors import Array, dtype_of
from hil.testing.traces.backends import Backend
from hil.testing.traces.trace import as_numpy

# A call's arguments, a structure of arrays each.
Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """What a program answered."""

    given: tuple[Array, ...]  # the arrays that it was given, in the program's order
    # those that it returned, in its order, in the model's dtypes: a call's own first, then new values of variables.
    returned: tuple[Array, ...]
    dtypes: tuple[str, ...]  # the program's own for what it returned: it may know no unsigned integers
    source: str  # who computed, with version


@dataclass(frozen=True)
class Program:
    """The program that a call ran, as a flag file names it."""

    path: Path  # its file among the artifacts
    function: str
    device: str  # what it ran on; "" is the runtime's own choice
    answer: Answer  # what it was given and returned
    rest: tuple[Path, ...] = ()  # files beside it that belong to it
    assigned: tuple[str, ...] = ()  # the variables whose new values it returned after its outputs, in that order


@dataclass(frozen=True)
class Called:
    """What a call came to."""

    outputs: Any  # as the method returns them
    source: str  # who computed, with version
    program: Program | None = None  # what ran; None if it was no program of IREE's
    # state, assigned: as :class:`hil.testing.traces.trace.ModuleCall` has them.
    state: Mapping[str, Array] = field(default_factory=dict)
    assigned: tuple[str, ...] = ()


class Runner(Protocol):
    """Runs methods of a module on one backend."""

    def begin(self) -> None:
        """A new trace: the module is as it is when it was just made. Random numbers are seeded already."""

    def inputs(self, method: str, args: Sequence[Any]) -> Inputs:
        """Return a call's arguments as they are recorded: structures of arrays.

        Raises:
            UsageError: the method takes no such arguments.
        """

    def call(self, method: str, inputs: Inputs) -> Called:
        """Call a method.

        Raises:
            HilError: it does not work, or not there.
        """

    def close(self) -> None:
        """Give back what it holds, a board above all; :meth:`begin` starts again."""


class Subject(Protocol):
    """A module class under test."""

    name: str
    reference: str  # name of the backend that the others are compared with where nobody names one
    references: tuple[str, ...]  # names of hil's references that can run it

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods that can be called."""

    @property
    def unseen(self) -> str:
        """What comparing its calls says nothing about, for people; known once they were made."""

    def runner(self, backend: Backend, context: RunContext, folder: Path) -> Runner:
        """Return what runs it on a backend.

        Raises:
            UsageError: it cannot run there.
        """


def recorded(method: str, args: Sequence[Any]) -> Inputs:
    """Arguments as they are recorded.

    Raises:
        UsageError: an argument is neither a tensor nor a structure of tensors.
    """
    return tuple(as_numpy(f"argument {number} of {method}", value) for number, value in enumerate(args))


def same_bits(dtype: str, array: Array) -> Array:
    """Return an array as a program or its model has it: what the one calls int8 may be a uint8 of the other's.

    Args:
        dtype: what it should be; "" says nothing.
    """
    wanted = dtype_of(dtype) if dtype else array.dtype
    both_integers = array.dtype.kind in "iu" and wanted.kind in "iu"
    return array.view(wanted) if both_integers and array.dtype.itemsize == wanted.itemsize else array
