"""Pass 64-bit integers to programs that were compiled for 32-bit integers.

With :data:`NARROW_FLAG`, iree-compile computes int64 values as int32. hil then compiles programs whose inputs and
outputs are int32 instead of the model's int64, and converts the values where it runs a program. A value that does not
fit is an error, because a wrapped value would test other inputs than the user requested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hil.core.results import Artifact
from hil.core.steps import INPUTS, OUTPUTS, StepsPlan
from hil.core.tensors import Array, TensorSpec
from hil.errors import UsageError

# Flag of iree-compile that computes int64 values as int32.
NARROW_FLAG = "--iree-input-demote-i64-to-i32"
_WIDE, _NARROW = "int64", "int32"
_LIMITS = np.iinfo(_NARROW)


def is_narrowed(flags: Sequence[str]) -> bool:
    """Return whether iree-compile with these flags computes int64 values as int32."""
    values = [flag.lstrip("-").partition("=")[2] for flag in flags if flag.lstrip("-").split("=")[0] == NARROW_FLAG[2:]]
    return bool(values) and values[-1].lower() in ("", "true", "1")


def narrow_specs(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the specs of the program for the specs of the model."""
    return tuple(replace(spec, dtype=_NARROW) if spec.dtype == _WIDE else spec for spec in specs)


def narrow_value(what: str, array: Array) -> Array:
    """Return an int64 array as int32. Raises UsageError if a value does not fit."""
    wrong = (array < _LIMITS.min) | (array > _LIMITS.max)
    if wrong.any():
        raise UsageError(
            f"{what}: the value {array[wrong].flat[0]} does not fit into int32, which the program was compiled for",
            hint=f"use values from {_LIMITS.min} to {_LIMITS.max}, or compile without {NARROW_FLAG}",
        )
    return array.astype(_NARROW)


@dataclass(frozen=True)
class Narrowing:
    """Inputs and outputs of a program that are int32, but int64 in the model."""

    inputs: tuple[bool, ...] = ()
    outputs: tuple[bool, ...] = ()

    @classmethod
    def of(cls, artifact: Artifact, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Narrowing:
        """Compare a loaded program's inputs and outputs with the model's. Without the flag, nothing is narrowed."""
        if not is_narrowed(artifact.flags):
            return cls()
        return cls(_find_narrowed(artifact.inputs or (), inputs), _find_narrowed(artifact.outputs or (), outputs))

    def widen_specs(
        self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Return the program's inputs and outputs with the dtypes of the model."""
        return _widen_specs(inputs, self.inputs), _widen_specs(outputs, self.outputs)

    def narrow_inputs(self, inputs: Mapping[str, Array], steps: StepsPlan | None = None) -> dict[str, Array]:
        """Return the inputs for the program, in the same order.

        Args:
            steps: the inputs are the inputs of the stepped program.

        Raises:
            UsageError: a value does not fit.
        """
        chosen = self.inputs
        if steps is not None and chosen:
            driven = {place for place, _ in (*steps.rules, *steps.feedback)}
            constant = (wide for place, wide in enumerate(chosen) if place not in driven)
            chosen = (*[False] * len(INPUTS), *constant)
        pairs = zip(inputs.items(), chosen or [False] * len(inputs), strict=True)
        return {
            name: narrow_value(f"input {name!r}", array) if is_wide and array.dtype == _WIDE else array
            for (name, array), is_wide in pairs
        }

    def widen_outputs(self, outputs: Mapping[str, Array], steps: StepsPlan | None = None) -> dict[str, Array]:
        """Return the program's outputs with the dtypes of the model, in the same order."""
        chosen = self.outputs
        if steps is not None and chosen:
            chosen = (*[False] * len(OUTPUTS), *(chosen[output] for _, output in steps.feedback))
        if len(chosen) != len(outputs):
            return dict(outputs)
        return {
            name: array.astype(_WIDE) if is_wide and array.dtype == _NARROW else array
            for (name, array), is_wide in zip(outputs.items(), chosen, strict=True)
        }

    def describe(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> list[str]:
        """Return the notes for a run's record."""
        sides = (("inputs", "passed", inputs, self.inputs), ("outputs", "computed", outputs, self.outputs))
        return [
            f"int64 {side} {', '.join(names)} were {how} as int32, which the program was compiled for"
            for side, how, specs, chosen in sides
            if (names := [spec.name for spec, is_wide in zip(specs, chosen, strict=False) if is_wide])
        ]


def _find_narrowed(wanted: Sequence[TensorSpec], own: Sequence[TensorSpec]) -> tuple[bool, ...]:
    if len(wanted) != len(own):
        return ()
    found = tuple((mine.dtype, theirs.dtype) == (_NARROW, _WIDE) for mine, theirs in zip(own, wanted, strict=True))
    return found if any(found) else ()


def _widen_specs(specs: Sequence[TensorSpec], chosen: Sequence[bool]) -> tuple[TensorSpec, ...]:
    if not chosen:
        return tuple(specs)
    return tuple(replace(one, dtype=_WIDE) if is_wide else one for one, is_wide in zip(specs, chosen, strict=True))
