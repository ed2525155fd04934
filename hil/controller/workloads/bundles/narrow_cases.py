"""Convert the cases of a bundle to int32, for a program that was compiled for 32-bit integers.

A bundle contains the inputs of the program, because boards without hil run them unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hil.bundles import MethodTestCase, MethodTestSuite, Signature
from hil.bundles.cases import Values
from hil.core.narrow_integers import narrow_specs, narrow_value
from hil.core.tensors import TensorSpec


def narrow_cases(
    signatures: Mapping[str, Signature], suites: Sequence[MethodTestSuite]
) -> tuple[dict[str, Signature], list[MethodTestSuite]]:
    """Return signatures and cases with int32 instead of int64. Raises UsageError if a value does not fit."""

    def narrow_case(method: str, case: MethodTestCase) -> MethodTestCase:
        signature, where = signatures[method], f"method {method!r}, case {case.name!r}"
        return replace(
            case,
            inputs=_narrow_values(f"{where}, input", signature.inputs, case.inputs),
            expected_outputs=_narrow_values(f"{where}, output", signature.outputs, case.expected_outputs),
        )

    return (
        {name: Signature(narrow_specs(one.inputs), narrow_specs(one.outputs)) for name, one in signatures.items()},
        [
            MethodTestSuite(suite.method_name, [narrow_case(suite.method_name, case) for case in suite.test_cases])
            for suite in suites
        ],
    )


def _narrow_values(where: str, specs: Sequence[TensorSpec], given: Values) -> Values:
    """Convert the arrays. Other values, such as numbers, have no dtype: the check of the bundle converts them."""
    named = given if isinstance(given, Mapping) else dict(zip((spec.name for spec in specs), given, strict=False))
    if len(named) < len(given):
        return given  # the check of the bundle reports too many values
    return {
        name: narrow_value(f"{where} {name!r}", value) if getattr(value, "dtype", None) == "int64" else value
        for name, value in named.items()
    }
