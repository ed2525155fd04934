"""Inputs with the outcome that every workload must give, and the code that runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hil.core.tensors import Array

Outcomes = str | tuple[str, ...]
EVERYWHERE = ("run", "suite", "pytest", "bundle")


@dataclass(frozen=True)
class VerdictCase:
    """A model, its inputs and the required outcome.

    Attributes:
        name: unique in the whole table; letters, digits and underscores.
        build: writes the model into a folder and returns its path.
        outcome: the outcome, or the outcomes that are allowed.
        inputs, expected: name -> tensor. hil generates inputs that are missing.
        options: options of `hil run`, such as ``("--runtime", "iree", "--iterations", "3")``.
        says: texts that the record of the case in `run` must contain.
        workloads: those that give this outcome.
    """

    name: str
    build: Callable[[Path], Path]
    outcome: Outcomes
    inputs: Mapping[str, Array] = field(default_factory=dict)
    expected: Mapping[str, Array] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    workloads: tuple[str, ...] = EVERYWHERE

    @property
    def outcomes(self) -> tuple[str, ...]:
        """Return the allowed outcomes."""
        return (self.outcome,) if isinstance(self.outcome, str) else self.outcome
