"""Checks of a program's inputs against its specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hil.core.tensors import Array, TensorSpec, get_dtype_name, type_text
from hil.errors import UsageError


def check_inputs(function: str, specs: Sequence[TensorSpec], inputs: Mapping[str, Array]) -> None:
    """Check that the inputs match the function's specs, with the same rules as an agent.

    Raises UsageError otherwise.
    """
    if len(inputs) != len(specs):
        raise UsageError(f"{function} takes {len(specs)} inputs, got {len(inputs)}")
    for spec, array in zip(specs, inputs.values(), strict=True):
        found = get_dtype_name(array.dtype)
        if not spec.accepts(found, array.shape):
            raise UsageError(f"{spec} does not accept a {type_text(found, array.shape)} tensor")


def fits(specs: Sequence[TensorSpec], inputs: Mapping[str, Array]) -> bool:
    """Return whether the inputs match these specs."""
    return len(specs) == len(inputs) and all(
        spec.accepts(get_dtype_name(array.dtype), array.shape)
        for spec, array in zip(specs, inputs.values(), strict=True)
    )
