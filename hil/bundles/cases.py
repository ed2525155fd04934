"""What a bundle is made of: a program, its methods and their test cases; and the check that a case fits its method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from hil.compare.tolerance import check_tolerance, fitted, refuse_vacuous
from hil.core.results import Noise
from hil.core.tensors import Array, Dim, TensorSpec, dtype_name, dtype_of, type_text
from hil.errors import LoadFailed, UsageError, VacuousTolerance

# By name, or in the method's order.
Values: TypeAlias = "Mapping[str, Any] | Sequence[Any]"
# A bare number has no dtype of its own: it may be given for a tensor whose dtype's name begins so.
_SUITS: dict[type, tuple[str, ...]] = {
    bool: ("bool",),
    int: ("int", "uint"),
    float: ("float", "bfloat"),
    complex: ("complex",),
    str: ("string",),
}


@dataclass(frozen=True)
class Signature:
    """What a method takes and gives, in order; a dimension is a size, a symbol that is the same wherever it stands, or
    None."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class MethodTestCase:
    """One execution of a method: what goes in and what must come out.

    Attributes:
        inputs: every input, by name or in order: arrays, or Python numbers where the method takes a scalar. Nothing is
            ever converted: dtype and shape must be the method's.
        expected_outputs: every output, likewise.
        rtol, atol: ``|a-b| <= atol + rtol*|b|``; None is the dtype's default.
        name: what reports call it; "" is its number.
        source: who says what is expected, with version: ``onnxruntime 1.31.1``.
        noise: output name -> how far rounding alone moves what is expected, for outputs where that decides.
    """

    inputs: Values
    expected_outputs: Values
    rtol: float | None = None
    atol: float | None = None
    name: str = ""
    source: str = ""
    noise: Mapping[str, Noise] = field(default_factory=dict)


@dataclass(frozen=True)
class MethodTestSuite:
    """The test cases of one method."""

    method_name: str
    test_cases: Sequence[MethodTestCase]


@dataclass(frozen=True)
class BundledCase:
    """A case of a bundle, checked: as :class:`MethodTestCase`, with every tensor under its name, in order."""

    name: str
    inputs: Mapping[str, Array]
    expected_outputs: Mapping[str, Array]
    rtol: float | None
    atol: float | None
    source: str
    noise: Mapping[str, Noise] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """What a runtime loads and how it was made.

    Attributes:
        runtime: the runtime it is for.
        main: name of the file that the runtime opens.
        files: name -> content.
        compiler: name and version.
        flags: the compiler's, the target's included.
    """

    runtime: str
    main: str
    files: Mapping[str, memoryview]
    compiler: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Method:
    """An entry point of the program, with its cases."""

    name: str
    signature: Signature
    cases: tuple[BundledCase, ...]


def checked_cases(method: str, signature: Signature, cases: Sequence[MethodTestCase]) -> tuple[BundledCase, ...]:
    """Cases with their tensors as arrays by name, in the method's order.

    Raises:
        UsageError: count, name, dtype or shape of a tensor is not the signature's, a dynamic dimension has two sizes in
            one case, a tolerance cannot fail, or two cases have one name.
    """
    found: dict[str, BundledCase] = {}
    for number, case in enumerate(cases):
        name = case.name or str(number)
        where = f"method {method!r}, case {number}" + (f" ({case.name!r})" if case.name else "")
        if name in found:
            raise UsageError(f"{where}: another case has this name already", hint="give each a name of its own")
        found[name] = _checked(where, name, signature, case)
    return tuple(found.values())


def checked_inputs(where: str, signature: Signature, given: Values) -> dict[str, Array]:
    """A case's inputs by name, before anybody knows what is to come out.

    Args:
        where: how a message calls the case.
        signature: of its method.
        given: the inputs.

    Raises:
        UsageError: as :func:`checked_cases`.
    """
    return _tensors(where, "input", signature.inputs, given, {})


def _checked(where: str, name: str, signature: Signature, case: MethodTestCase) -> BundledCase:
    sizes: dict[str, tuple[int, str]] = {}
    inputs = _tensors(where, "input", signature.inputs, case.inputs, sizes)
    expected = _tensors(where, "output", signature.outputs, case.expected_outputs, sizes)
    if not expected:
        raise UsageError(f"{where}: nothing is expected of a method without outputs: it could not fail")
    try:
        rtol, atol = (None if value is None else float(value) for value in (case.rtol, case.atol))
        check_tolerance(rtol, atol)
        for output, array in expected.items():
            tolerance, scale = fitted((dtype_name(array.dtype),) * 2, array, rtol, atol)
            refuse_vacuous(output, tolerance, scale, rtol=rtol, atol=atol)
    except VacuousTolerance as error:  # a bundle has no case that is allowed to be blind
        raise UsageError(f"{where}: {error.message}", hint="give the case a smaller tolerance") from error
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from error
    except (OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"{where}: a tolerance is no number: {error}", hint="give rtol and atol as floats") from error
    if unknown := [output for output in case.noise if output not in expected]:
        raise UsageError(f"{where}: noise of {unknown[0]!r}, which is no output")
    return BundledCase(name, inputs, expected, rtol, atol, case.source, dict(case.noise))


def _tensors(
    where: str, kind: str, specs: Sequence[TensorSpec], given: Values, sizes: dict[str, tuple[int, str]]
) -> dict[str, Array]:
    """Every input or output by name; ``sizes`` learns what each symbolic dimension is and where that was seen first."""
    wanted = ", ".join(map(str, specs)) or "none"
    if isinstance(given, Mapping):
        names = [spec.name for spec in specs]
        if unknown := [name for name in given if name not in names]:
            raise UsageError(f"{where}: the method has no {kind} {unknown[0]!r}", hint=f"{kind}s: {wanted}")
        if missing := [name for name in names if name not in given]:
            raise UsageError(f"{where}: {kind} {missing[0]!r} is missing", hint=f"{kind}s: {wanted}")
        values = [given[name] for name in names]
    else:
        values = list(given)
    if len(values) != len(specs):
        raise UsageError(
            f"{where}: {len(values)} {kind}s are given, the method has {len(specs)}", hint=f"{kind}s: {wanted}"
        )
    tensors = {}
    for spec, value in zip(specs, values, strict=True):
        what = f"{where}, {kind} {spec.name!r}"
        tensors[spec.name] = array = _array(what, spec, value)
        found = dtype_name(array.dtype)
        if not spec.accepts(found, array.shape):
            raise UsageError(
                f"{what} is {type_text(found, array.shape)}, the method "
                f"{'takes' if kind == 'input' else 'gives'} {type_text(spec.dtype, spec.shape)}",
                hint="nothing is converted: give it with this dtype and shape",
            )
        for dim, size in zip(spec.shape, array.shape, strict=bool(spec.dtype)):
            if isinstance(dim, str):
                known, place = sizes.setdefault(dim, (size, f"{kind} {spec.name!r}"))
                if known != size:
                    raise UsageError(f"{what} has {size} where dimension {dim!r} is {known}, as {place} has it")
    return tensors


def _array(what: str, spec: TensorSpec, value: Any) -> Array:
    try:
        if spec.dtype.startswith(_SUITS.get(type(value), ())):
            array = np.asarray(value, dtype_of(spec.dtype))
            if isinstance(value, int) and int(array.item()) != value:
                raise OverflowError(f"{value} is out of range for {spec.dtype}")
            return array
        array = np.asarray(value)
        if array.dtype.kind == "U":
            array = array.astype(object)
        dtype_name(array.dtype)
    except UsageError as error:
        raise UsageError(f"{what}: {error.message}", hint=error.hint) from error
    except Exception as error:  # a ragged list, a number out of range, a tensor on a GPU: each says it in its own way
        raise UsageError(f"{what} is no array: {error}", hint="give a numpy array") from error
    if array.dtype.kind == "O" and not all(isinstance(item, str) for item in array.ravel().tolist()):
        raise UsageError(f"{what} holds Python objects that are no texts", hint="give a numpy array")
    return array


def check_loaded(method: str, signature: Signature, inputs: Sequence[TensorSpec]) -> None:
    """Refuse a program that, once loaded, turns out to take other inputs than its bundle says.

    Names do not count, a compiled program may know none, nor does a dimension or a type that either side leaves open.

    Raises:
        LoadFailed: it does.
    """
    said = [(spec.dtype, spec.shape) for spec in signature.inputs]
    found = [(spec.dtype, spec.shape) for spec in inputs]
    if len(said) == len(found) and all(_alike(one, other) for one, other in zip(said, found, strict=True)):
        return
    texts = [", ".join(type_text(*one) for one in side) or "nothing" for side in (found, said)]
    raise LoadFailed(
        f"method {method!r} of the program takes {texts[0]}, the bundle says {texts[1]}",
        hint="the bundle was made for another program: make it again",
    )


def _alike(one: tuple[str, Sequence[Dim]], other: tuple[str, Sequence[Dim]]) -> bool:
    if not one[0] or not other[0]:
        return True
    sizes = zip(one[1], other[1], strict=False)
    differ = any(a != b for a, b in sizes if isinstance(a, int) and isinstance(b, int))
    return one[0] == other[0] and len(one[1]) == len(other[1]) and not differ


def untested(methods: Sequence[Method]) -> str:
    """How many methods have no case, and which: ``1 of 2 methods has no case: twice``; "" where each has one."""
    found = [method.name for method in methods if not method.cases]
    if not found:
        return ""
    count = f"{len(found)} of {len(methods)} method{'' if len(methods) == 1 else 's'}"
    return f"{count} {'has' if len(found) == 1 else 'have'} no case: {', '.join(found)}"
