"""Check that test cases match their method, and that their tolerances can fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hil.bundles.cases import BundledCase, MethodTestCase, Signature, Values
from hil.bundles.controls import find_misfit
from hil.compare.criteria import check_outputs, parse_accept
from hil.compare.tolerance import check_tolerance, fit_tolerance, refuse_vacuous
from hil.core.results import NOISE_DTYPE
from hil.core.tensors import Array, TensorSpec, get_dtype_name, parse_dtype, type_text
from hil.errors import UsageError, VacuousTolerance, did_you_mean

# A Python number has no dtype. It is accepted for tensors whose dtype name has one of these prefixes.
_SUITS: dict[type, tuple[str, ...]] = {
    bool: ("bool",),
    int: ("int", "uint"),
    float: ("float", "bfloat"),
    complex: ("complex",),
    str: ("string",),
}


def check_cases(method: str, signature: Signature, cases: Sequence[MethodTestCase]) -> tuple[BundledCase, ...]:
    """Return validated cases with tensors as arrays by name, in the method's order.

    Raises:
        UsageError: a tensor's count, name, dtype or shape does not match the signature, or a dynamic dimension
            has two sizes in a case. Also if a tolerance cannot fail, or two cases have the same name.
    """
    found: dict[str, BundledCase] = {}
    for number, case in enumerate(cases):
        name = case.name or str(number)
        where = f"method {method!r}, case {number}" + (f" ({case.name!r})" if case.name else "")
        if name in found:
            raise UsageError(f"{where}: duplicate case name", hint="use a unique name for each case")
        found[name] = _check_case(where, name, signature, case)
    return tuple(found.values())


def check_inputs(where: str, signature: Signature, given: Values) -> dict[str, Array]:
    """Return a case's inputs by name, without expected outputs.

    Raises:
        UsageError: see :func:`check_cases`.
    """
    return _check_tensors(where, "input", signature.inputs, given, {})


def _check_case(where: str, name: str, signature: Signature, case: MethodTestCase) -> BundledCase:
    sizes: dict[str, tuple[int, str]] = {}
    inputs = _check_tensors(where, "input", signature.inputs, case.inputs, sizes)
    expected = _check_tensors(where, "output", signature.outputs, case.expected_outputs, sizes)
    if not expected:
        raise UsageError(f"{where}: the method has no outputs, so the case could not fail")
    try:
        rtol, atol = (None if value is None else float(value) for value in (case.rtol, case.atol))
        check_tolerance(rtol, atol)
        check_outputs(parse_accept(case.accept, option="criteria"), list(expected))
        for output, array in expected.items():
            tolerance, scale = fit_tolerance((get_dtype_name(array.dtype),) * 2, array, rtol, atol)
            refuse_vacuous(output, tolerance, scale, rtol=rtol, atol=atol)
    except VacuousTolerance as error:  # blind cases are not allowed in a bundle
        raise UsageError(f"{where}: {error.message}", hint="use a smaller tolerance for the case") from error
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from error
    except (OverflowError, TypeError, ValueError) as error:
        raise UsageError(
            f"{where}: the tolerance must be a number: {error}", hint="set rtol and atol to floats"
        ) from error
    for output, noise in case.noise.items():
        if output not in expected:
            raise UsageError(f"{where}: the noise is for the unknown output {output!r}")
        if get_dtype_name(noise.dtype) != NOISE_DTYPE or noise.shape != expected[output].shape:
            raise UsageError(f"{where}: the noise of {output!r} must have dtype {NOISE_DTYPE} and the output's shape")
        if noise.size and np.isnan(noise).any():
            raise UsageError(f"{where}: the noise of {output!r} contains NaN")
    if unknown := [output for output in case.control if output not in expected]:
        raise UsageError(f"{where}: the control is for the unknown output {unknown[0]!r}")
    for output, control in case.control.items():
        if misfit := find_misfit(control, expected[output]):
            raise UsageError(f"{where}: invalid control of output {output!r}: {misfit}", hint="create a new bundle")
    return BundledCase(
        name,
        inputs,
        expected,
        rtol,
        atol,
        case.source,
        dict(case.noise),
        case.accept,
        case.relation,
        dict(case.control),
    )


def _check_tensors(
    where: str, kind: str, specs: Sequence[TensorSpec], given: Values, sizes: dict[str, tuple[int, str]]
) -> dict[str, Array]:
    """Return all inputs or outputs by name. Store the size and first tensor of each symbolic dimension in ``sizes``."""
    wanted = ", ".join(map(str, specs)) or "none"
    if isinstance(given, Mapping):
        names = {spec.name: None for spec in specs}  # a dict keeps the order
        if unknown := [name for name in given if name not in names]:
            raise UsageError(
                f"{where}: the method has no {kind} {unknown[0]!r}",
                hint=f"{did_you_mean(unknown[0], names)}{kind}s: {wanted}",
            )
        if missing := [name for name in names if name not in given]:
            raise UsageError(f"{where}: {kind} {missing[0]!r} is missing", hint=f"{kind}s: {wanted}")
        values = [given[name] for name in names]
    else:
        values = list(given)
    if len(values) != len(specs):
        raise UsageError(
            f"{where}: got {len(values)} {kind}s, but the method has {len(specs)}", hint=f"{kind}s: {wanted}"
        )
    tensors = {}
    for spec, value in zip(specs, values, strict=True):
        what = f"{where}, {kind} {spec.name!r}"
        tensors[spec.name] = array = _convert_array(what, spec, value)
        found = get_dtype_name(array.dtype)
        if not spec.accepts(found, array.shape):
            raise UsageError(
                f"{what} is {type_text(found, array.shape)}, but the method "
                f"{'takes' if kind == 'input' else 'returns'} {type_text(spec.dtype, spec.shape)}",
                hint="hil does not convert values: use this dtype and shape",
            )
        for dim, size in zip(spec.shape, array.shape, strict=bool(spec.dtype)):
            if isinstance(dim, str):
                known, place = sizes.setdefault(dim, (size, f"{kind} {spec.name!r}"))
                if known != size:
                    raise UsageError(
                        f"{what} has size {size} in dimension {dim!r}, but {place} has size {known} in this dimension"
                    )
    return tensors


def _convert_array(what: str, spec: TensorSpec, value: Any) -> Array:
    try:
        if spec.dtype.startswith(_SUITS.get(type(value), ())):
            array = np.asarray(value, parse_dtype(spec.dtype))
            if isinstance(value, int) and int(array.item()) != value:
                raise OverflowError(f"{value} is out of range for {spec.dtype}")
            return array
        array = np.asarray(value)
        if array.dtype.kind == "U":
            array = array.astype(object)
        get_dtype_name(array.dtype)
    except UsageError as error:
        raise UsageError(f"{what}: {error.message}", hint=error.hint) from error
    except Exception as error:  # exception types differ: ragged list, number out of range, tensor on a GPU
        raise UsageError(f"{what} is not an array: {error}", hint="pass a numpy array") from error
    if array.dtype.kind == "O" and not all(isinstance(item, str) for item in array.ravel().tolist()):
        raise UsageError(f"{what} contains Python objects other than strings", hint="pass a numpy array")
    return array
