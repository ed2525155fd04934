"""What a bundle is made of: a program, its methods and their test cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from hil.core.results import Control, Relation
from hil.core.tensors import Array, TensorSpec, type_text
from hil.errors import LoadFailed, UsageError, one_of

# By name, or in the method's order.
Values: TypeAlias = "Mapping[str, Any] | Sequence[Any]"


@dataclass(frozen=True)
class Signature:
    """What a method takes and gives, in order; a dimension is a size, a symbol that is the same wherever it stands, or
    None."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class MethodTestCase:
    """One execution of a method: what goes in and what must come out."""

    # every input, by name or in order: arrays, or Python numbers where the method takes a scalar. Nothing is ever
    # converted: dtype and shape must be the method's.
    inputs: Values
    expected_outputs: Values  # every output, likewise
    # rtol, atol: ``|a-b| <= atol + rtol*|b|``; None is the dtype's default.
    rtol: float | None = None
    atol: float | None = None
    name: str = ""  # what reports call it; "" is its number
    source: str = ""  # who says what is expected, with version: ``onnxruntime 1.31.1``
    # output name -> how far rounding alone moves what is expected, as ``RunResult.noise``, for those where it decides.
    noise: Mapping[str, Array] = field(default_factory=dict)
    accept: tuple[str, ...] = ()  # criteria that judge outputs instead of the tolerance; none is a Python function
    relation: Relation = Relation.INDEPENDENT  # of who computed what is expected to the program
    # output name -> how far the arithmetic that the board declares moves it.
    control: Mapping[str, Control] = field(default_factory=dict)


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
    noise: Mapping[str, Array] = field(default_factory=dict)
    accept: tuple[str, ...] = ()
    relation: Relation = Relation.INDEPENDENT
    control: Mapping[str, Control] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """What a runtime loads and how it was made."""

    runtime: str
    main: str  # name of the file that the runtime opens
    files: Mapping[str, memoryview]
    compiler: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Method:
    """An entry point of the program, with its cases."""

    name: str
    signature: Signature
    cases: tuple[BundledCase, ...]


def check_loaded(method: str, signature: Signature, inputs: Sequence[TensorSpec]) -> None:
    """Refuse a program that, once loaded, turns out to take other inputs than its bundle says.

    Names do not count, a compiled program may know none, nor does a dimension or a type that either side leaves open.

    Raises:
        LoadFailed: it does.
    """
    if len(signature.inputs) == len(inputs) and all(map(_alike, signature.inputs, inputs)):
        return
    sides = (inputs, signature.inputs)
    texts = [", ".join(type_text(spec.dtype, spec.shape) for spec in side) or "nothing" for side in sides]
    raise LoadFailed(
        f"method {method!r} of the program takes {texts[0]}, the bundle says {texts[1]}",
        hint="the bundle was made for another program: make it again",
    )


def _alike(one: TensorSpec, other: TensorSpec) -> bool:
    if not one.dtype or not other.dtype:
        return True
    if one.dtype != other.dtype or len(one.shape) != len(other.shape):
        return False
    sizes = zip(one.shape, other.shape, strict=True)
    return all(a == b for a, b in sizes if isinstance(a, int) and isinstance(b, int))


def with_cases(methods: Sequence[Method], wanted: Sequence[str]) -> list[Method]:
    """The methods that have one of these cases, each with those alone; of no cases, all methods as they are.

    Args:
        wanted: a case's name, or its number among its method's where none is called so, or ``METHOD/NAME``.

    Raises:
        UsageError: there is no such case.
    """
    if not wanted:
        return list(methods)
    kept: dict[str, set[str]] = {}
    for one in wanted:
        found = [
            (method.name, case.name) for method in methods for case in method.cases if _is_called(one, method, case)
        ]
        if not found and one.isdecimal():
            found = [(method.name, method.cases[int(one)].name) for method in methods if int(one) < len(method.cases)]
        if not found:
            names = [f"{method.name}/{case.name}" for method in methods for case in method.cases]
            raise UsageError(f"there is no case {one!r}", hint=one_of(names, "one of "))
        for name, case in found:
            kept.setdefault(name, set()).add(case)
    return [
        replace(method, cases=tuple(case for case in method.cases if case.name in kept[method.name]))
        for method in methods
        if method.name in kept
    ]


def _is_called(name: str, method: Method, case: BundledCase) -> bool:
    return name in (case.name, f"{method.name}/{case.name}")


def untested(methods: Sequence[Method]) -> str:
    """How many methods have no case, and which: ``1 of 2 methods has no case: twice``; "" where each has one."""
    found = [method.name for method in methods if not method.cases]
    if not found:
        return ""
    count = f"{len(found)} of {len(methods)} method{'' if len(methods) == 1 else 's'}"
    return f"{count} {'has' if len(found) == 1 else 'have'} no case: {', '.join(found)}"
