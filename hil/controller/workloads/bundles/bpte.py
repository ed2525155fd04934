"""Read and write ExecuTorch's bundled programs (``.bpte`` files)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hil.bundles import Bundle, MethodTestCase, MethodTestSuite, Signature
from hil.bundles import Method as BundleMethod
from hil.compare.values import EXACT_DTYPES, find_largest
from hil.controller.storage.isolation.isolated import IsolatedError
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.sources.packages import require_version
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.controller.workloads.bundles.methods import make_program
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import Array, get_dtype_name, shape_text
from hil.errors import UsageError
from hil.formats.executorch_file import (
    TENSORS_SUFFIX,
    BpteCase,
    Damaged,
    ExecuTorchMethod,
    Value,
    find_program,
    find_tensor_file,
    is_bundle,
    read_buffer,
    read_cases,
    read_methods,
)
from hil.formats.torch_values import to_torch

_RUNTIME = "executorch"
_WRITE_SECONDS = 600.0
# The default tolerance of ExecuTorch's verifier is |a-b| <= 1e-8 + 1e-5*|a|, where a is the program's output. hil's
# tolerance is relative to the expected value b. A value within the tolerance below is always within ExecuTorch's
# tolerance.
_RTOL = 1e-5 / (1 + 1e-5)
_ATOL = 1e-8 / (1 + 1e-5)


def read_bpte(path: Path, *, context: RunContext) -> Bundle:
    """Read a ``.bpte`` as a bundle: the program and all cases, with the tolerance of ExecuTorch's verifier.

    The function does not need ExecuTorch. Tensors are named ``input0``... and ``output0``... in order.

    Raises:
        UsageError: the file is not a bundled program or is damaged, or a case does not match the method's inputs and
            outputs.
    """
    try:
        data = read_buffer(path)
        if not is_bundle(data):
            raise Damaged("not a bundled program")
        methods, cases, program = read_methods(data), read_cases(data), bytes(find_program(data))
        signatures = {name: _make_signature(method) for name, method in methods.items()}
        tensors = find_tensor_file(path, methods)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except Damaged as error:
        raise UsageError(f"{path}: {error}", hint="expected a serialized ExecuTorch BundledProgram") from error
    suites = []
    for name, given in cases.items():
        if name not in methods:
            raise UsageError(
                f"{path} has cases for unknown method {name!r}", hint=f"methods of the program: {', '.join(methods)}"
            )
        suites.append(
            MethodTestSuite(name, [_read_case(path, methods[name], number, case) for number, case in enumerate(given)])
        )
    with make_temporary_folder("hil-bpte-") as folder:
        main = Path(folder) / f"{path.stem}.pte"
        main.write_bytes(program)
        files = {main.name: main} | ({tensors.name: tensors} if tensors else {})
        artifact = make_program(_RUNTIME, files, main.name, compiler="executorch")
        made = {
            "imported": path.name,
            "backends": sorted({one for method in methods.values() for one in method.backends}),
        }
        return Bundle.create(artifact, suites, signatures=signatures, made=made)


def write_bpte(bundle: Bundle, path: Path, *, context: RunContext) -> None:
    """Write a bundle as a ``.bpte`` that ExecuTorch's tools load and verify.

    The format has no names of cases and tensors, and no tolerances. Users choose a tolerance when they verify. External
    data of the program is written to a ``.ptd`` of the same name.

    Raises:
        UsageError: the program is not for ExecuTorch, the package is not installed, or ExecuTorch rejects a tensor.
    """
    if bundle.program.runtime != _RUNTIME:
        raise UsageError(
            f"a .bpte requires a program for executorch, but the bundle has a program for {bundle.program.runtime}",
            hint="create the bundle with --runtime executorch",
        )
    require_version("executorch", "executorch")
    with make_temporary_folder("hil-bpte-") as folder:
        place = Path(folder)
        try:
            program = find_program(bundle.program.files[bundle.program.main])
            methods = read_methods(program)
            for method in bundle.methods:
                _check_own(methods, method)
        except Damaged as error:
            raise UsageError(f"the bundle's program {bundle.program.main}: {error}") from error
        (place / "program.pte").write_bytes(program)
        suites = {
            method.name: list(_save_cases(methods[method.name], method.cases, place / str(number)))
            for number, method in enumerate(bundle.methods)
            if method.cases
        }
        arguments = {"program": str(place / "program.pte"), "suites": suites, "output": str(path.absolute())}
        try:
            context.isolated.call(write, arguments, timeout=_WRITE_SECONDS, log=place / "log")
        except IsolatedError as error:
            raise UsageError(f"ExecuTorch cannot write the bundle: {error.message}", detail=error.detail) from error
        for name, tensors in bundle.program.files.items():
            if name.endswith(TENSORS_SUFFIX):
                path.with_suffix(TENSORS_SUFFIX).write_bytes(tensors)


def _check_own(methods: Mapping[str, ExecuTorchMethod], given: BundleMethod) -> None:
    """Raise UsageError if the program lacks the method, or has other numbers of inputs or outputs than the bundle."""
    if given.name not in methods:
        raise UsageError(f"the bundle's program has no method {given.name!r}", hint=f"methods: {', '.join(methods)}")
    own = _make_signature(methods[given.name])
    counts = [(len(one.inputs), len(one.outputs)) for one in (own, given.signature)]
    if counts[0] != counts[1]:
        raise UsageError(
            f"method {given.name!r} of the program has {counts[0][0]} inputs and {counts[0][1]} outputs, "
            f"but the bundle has {counts[1][0]} and {counts[1][1]}"
        )


def _make_signature(method: ExecuTorchMethod) -> Signature:
    inputs, outputs = method.list_input_specs(), method.list_output_specs()
    return Signature(tuple(spec for _, spec in inputs), tuple(spec for _, spec in outputs))


def _read_case(path: Path, method: ExecuTorchMethod, number: int, case: BpteCase) -> MethodTestCase:
    where = f"{path}: method {method.name!r}, case {number}"
    inputs, outputs = (
        [place for place, _ in specs] for specs in (method.list_input_specs(), method.list_output_specs())
    )
    given = _select_tensors(where, "input", method.inputs, case.inputs, inputs)
    expected = _select_tensors(where, "output", method.outputs, case.expected_outputs, outputs)
    return MethodTestCase(given, expected, *_choose_tolerance(expected), source=path.name)


def _select_tensors(
    where: str, what: str, values: Sequence[Value], given: Sequence[Any], places: Sequence[int]
) -> list[Any]:
    """Return the tensors among a case's values. Constants must equal the constants of the exported program."""
    if len(given) != len(values):
        hint = f"add the {what}s to the case" if not given else ""
        raise UsageError(f"{where}: got {len(given)} {what}s, but the method has {len(values)}", hint=hint)
    for place, (value, found) in enumerate(zip(values, given, strict=True)):
        if value.constant is not None and (isinstance(found, np.ndarray) or found != value.constant):
            text = "a tensor" if isinstance(found, np.ndarray) else found
            raise UsageError(f"{where}: {what} {place} is {text}, expected the constant {value.constant}")
        # The bundle's checks cover tensors with fixed shapes.
        bounded = isinstance(found, np.ndarray) and value.dynamic and found.ndim == len(value.sizes)
        if bounded and any(size > most for size, most in zip(found.shape, value.sizes, strict=True)):
            sizes = f"{shape_text(found.shape)}, but the program accepts at most {shape_text(value.sizes)}"
            raise UsageError(f"{where}: {what} {place} is {sizes}")
    return [given[place] for place in places]


def _choose_tolerance(expected: Sequence[Any]) -> tuple[float | None, float | None]:
    """Return ExecuTorch's tolerance for floats. Integers stay exact, also in a case with floats."""
    arrays = [np.asarray(one) for one in expected]
    exact = [array for array in arrays if get_dtype_name(array.dtype) in EXACT_DTYPES]
    if len(exact) == len(arrays):
        return None, None
    sizes = [find_largest(array) for array in arrays]
    rtol = min(_RTOL, 0.5 / max(1.0, *map(find_largest, exact), 0.0))
    # Limit atol to the largest value, because a tolerance above all values could never fail.
    return rtol, min([_ATOL, *(size for size in sizes if size > 0)])


def _save_cases(method: ExecuTorchMethod, cases: Sequence[Any], folder: Path) -> Iterator[dict[str, Any]]:
    """Save cases for the isolated process: directories with tensors, and the kind and memory order of all values."""
    for number, case in enumerate(cases):
        sides = {
            "inputs": (method.inputs, method.list_input_specs(), case.inputs),
            "outputs": (method.outputs, method.list_output_specs(), case.expected_outputs),
        }
        for kind, (_, _, tensors) in sides.items():
            save_tensors(folder / str(number) / kind, tensors)
        yield {kind: [str(folder / str(number) / kind), _list_layout(*side)] for kind, side in sides.items()}


def _list_layout(values: Sequence[Value], specs: Sequence[tuple[int, Any]], tensors: Mapping[str, Array]) -> list[Any]:
    names = dict(zip((place for place, _ in specs), tensors, strict=True))
    return [
        {"tensor": names[place], "order": list(value.order)} if place in names else {"constant": value.constant}
        for place, value in enumerate(values)
    ]


def write(program: str, suites: Mapping[str, Sequence[Mapping[str, Any]]], output: str) -> None:
    """Bundle a program with cases.

    Args:
        suites: method -> cases. A case has ``inputs`` and ``outputs``. Each of them has a directory with tensors, and
            an entry per value of the method: the tensor's name and the dimension order in memory, or the constant.

    Raises:
        UsageError: the format rejects a value.
    """
    from executorch.devtools import BundledProgram
    from executorch.devtools.bundled_program.config import MethodTestCase, MethodTestSuite
    from executorch.devtools.bundled_program.serialize import serialize_from_bundled_program_to_flatbuffer

    bundled = [
        MethodTestSuite(
            method, [MethodTestCase(_load_values(*case["inputs"]), _load_values(*case["outputs"])) for case in cases]
        )
        for method, cases in suites.items()
    ]
    try:
        made = serialize_from_bundled_program_to_flatbuffer(BundledProgram(None, bundled, program))
    except (AssertionError, KeyError, TypeError) as error:
        raise UsageError(f"cannot write the bundle as .bpte: {error}") from error
    Path(output).write_bytes(made)


def _load_values(folder: str, places: Sequence[Mapping[str, Any]]) -> list[Any]:
    tensors = load_tensors(Path(folder))
    return [
        to_torch(tensors[place["tensor"]], place["order"]) if "tensor" in place else place["constant"]
        for place in places
    ]
