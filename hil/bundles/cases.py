"""Types for the content of a bundle: a program, its methods and their test cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from hil.core.results import Control, Relation
from hil.core.tensors import Array, TensorSpec, type_text
from hil.errors import LoadFailed, UsageError, did_you_mean, format_expected

# By name, or in the method's order.
Values: TypeAlias = "Mapping[str, Any] | Sequence[Any]"


# Format of models that are bundles.
BUNDLE_FORMAT = "hilb"


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a method, in order. A dimension is a size, a symbol, or None.

    Equal symbols must have equal sizes.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class MethodTestCase:
    """Test case for a method: inputs and expected outputs."""

    # All inputs, by name or in order: arrays, or Python numbers for scalars. Values are never converted: dtype and
    # shape must match the method's.
    inputs: Values
    expected_outputs: Values  # all outputs, in the same form
    # rtol, atol: ``|a-b| <= atol + rtol*|b|``; None means the dtype's default.
    rtol: float | None = None
    atol: float | None = None
    name: str = ""  # name in reports; "" means the number of the case
    source: str = ""  # source of the expected outputs, with version: ``onnxruntime 1.31.1``
    # output name -> rounding noise of the expected output (see ``RunResult.noise``), if the verdict depends on noise.
    noise: Mapping[str, Array] = field(default_factory=dict)
    accept: tuple[str, ...] = ()  # criteria that replace the tolerance; Python functions are not allowed
    relation: Relation = Relation.INDEPENDENT  # relation of the expected outputs' source to the program
    # output name -> deviation that the board's declared arithmetic explains.
    control: Mapping[str, Control] = field(default_factory=dict)


@dataclass(frozen=True)
class MethodTestSuite:
    """Test cases of a method."""

    method_name: str
    test_cases: Sequence[MethodTestCase]


@dataclass(frozen=True)
class BundledCase:
    """Validated case of a bundle.

    Unlike in :class:`MethodTestCase`, all tensors are by name and in the method's order.
    """

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
class BundleProgram:
    """Files that a runtime loads, with the compiler and the flags."""

    runtime: str
    main: str  # name of the file that the runtime opens
    files: Mapping[str, memoryview]
    compiler: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Method:
    """Entry point of the program, with its cases."""

    name: str
    signature: Signature
    cases: tuple[BundledCase, ...]


def check_loaded(method: str, signature: Signature, inputs: Sequence[TensorSpec]) -> None:
    """Check that a loaded program has the inputs that its bundle declares.

    The check ignores names, because compiled programs may lack names. The check also ignores dimensions and types that
    are unknown on one side.

    Raises:
        LoadFailed: the inputs differ.
    """
    if len(signature.inputs) == len(inputs) and all(map(_are_compatible, signature.inputs, inputs)):
        return
    sides = (inputs, signature.inputs)
    texts = [", ".join(type_text(spec.dtype, spec.shape) for spec in side) or "no inputs" for side in sides]
    raise LoadFailed(
        f"method {method!r} of the program takes {texts[0]}, but the bundle lists {texts[1]}",
        hint="the bundle was created for a different program: recreate it for this program",
    )


def _are_compatible(one: TensorSpec, other: TensorSpec) -> bool:
    if not one.dtype or not other.dtype:
        return True
    if one.dtype != other.dtype or len(one.shape) != len(other.shape):
        return False
    sizes = zip(one.shape, other.shape, strict=True)
    return all(a == b for a, b in sizes if isinstance(a, int) and isinstance(b, int))


def select_methods(methods: Sequence[Method], wanted: Sequence[str]) -> list[Method]:
    """Return the methods that have wanted cases, with only these cases. If ``wanted`` is empty, return all methods.

    Args:
        wanted: case names, ``METHOD/NAME``, or case numbers within a method if no case has that name.

    Raises:
        UsageError: a case does not exist.
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
            hint = f"{did_you_mean(one, [*names, *(name.partition('/')[2] for name in names)])}{format_expected(names)}"
            raise UsageError(f"case {one!r} not found", hint=hint)
        for name, case in found:
            kept.setdefault(name, set()).add(case)
    return [
        replace(method, cases=tuple(case for case in method.cases if case.name in kept[method.name]))
        for method in methods
        if method.name in kept
    ]


def _is_called(name: str, method: Method, case: BundledCase) -> bool:
    return name in (case.name, f"{method.name}/{case.name}")


def describe_untested(methods: Sequence[Method]) -> str:
    """Describe methods without cases: ``1 of 2 methods has no case: twice``; "" if each has a case."""
    found = [method.name for method in methods if not method.cases]
    if not found:
        return ""
    count = f"{len(found)} of {len(methods)} method{'' if len(methods) == 1 else 's'}"
    return f"{count} {'has' if len(found) == 1 else 'have'} no case: {', '.join(found)}"
