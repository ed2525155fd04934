"""Bundles as directories for IREE's tools: a module, and a flag file with tensors per case.

::

    main.vmfb               the program's files
    CASE.flagfile           --module=main.vmfb, --function=..., --input=@CASE/input_0.npy, --expected_output=...
    CASE/                   input_0.npy, ..., output_0.npy, ...; .bin if .npy does not support the dtype

Paths are relative, so that the directory can be moved: ``cd FOLDER && iree-run-module --flagfile=CASE.flagfile``.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hil.bundles import Bundle, Method, MethodTestCase, MethodTestSuite
from hil.bundles.cases import BundledCase
from hil.compare.allowance import measure_allowance
from hil.compare.judging import widen_tolerance
from hil.compare.tolerance import fit_tolerance
from hil.compare.values import EXACT_DTYPES, find_largest
from hil.controller.backends.references import read_expected
from hil.controller.models.inputs import make_inputs
from hil.controller.pipeline.settings.flagfiles import THRESHOLDS, FlagFile, choose_tool_tolerance, parse_flagfile
from hil.controller.storage.paths import is_file
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import make_safe_name
from hil.controller.workloads.bundles.methods import (
    LEFT_OUT,
    import_methods,
    make_program,
    own_signature,
    read_signatures,
    refuse_without_board,
    settle_signatures,
)
from hil.core.tensors import NUMPY_DTYPES, Array, TensorSpec, get_dtype_name, make_spec, settle_spec
from hil.core.text import make_names_unique
from hil.errors import LoadFailed, UsageError
from hil.formats.iree_command import PARAMETER_SCOPE, give, is_number, is_sign_shown

_SUFFIX = ".flagfile"
_PLAIN = "flagfile"
_OF_CALL = re.compile(rf"{_PLAIN}_call_\d+")
# Index file for a trace. The directory contains call_0, call_1, ... with the calls' values.
_TRACE = "trace.json"


def write_flagfiles(bundle: Bundle, path: Path, *, context: RunContext) -> None:
    """Write the directory.

    Raises UsageError for programs of other runtimes, and for comparisons that the tools do not support.
    """
    program = bundle.program
    if program.runtime != "iree":
        raise UsageError(f"flag files require a program for iree, but the bundle has a program for {program.runtime}")
    tolerances = {
        (method.name, case.name): _make_tolerance_flags(method, case)
        for method in bundle.methods
        for case in method.cases
    }
    path.mkdir(exist_ok=True)
    artifact = bundle.extract(path)
    parameters = [name for name in program.files if name.endswith(".irpa")]
    prefix = "" if len(bundle.methods) == 1 else "{}-"
    wanted = [
        make_safe_name(prefix.format(method.name) + case.name) for method in bundle.methods for case in method.cases
    ]
    taken = sorted({name.partition("/")[0].casefold() for name in program.files})
    names = iter(make_names_unique([*taken, *wanted], alike=str.casefold)[len(taken) :])
    for method in bundle.methods:
        try:
            own = own_signature(replace(artifact, function=method.name), context)
        except LoadFailed as error:
            raise UsageError(f"the bundle's program cannot be read: {error.message}", hint=error.hint) from error
        for case, name in zip(method.cases, names, strict=False):
            (path / name).mkdir()
            try:
                inputs = list(_write_tensors(path, name, "input", own.inputs, case.inputs))
                outputs = list(_write_tensors(path, name, "output", own.outputs, case.expected_outputs))
            except LoadFailed as error:
                raise UsageError(f"case {case.name!r}: {error.message}", hint=error.hint) from error
            lines = [
                f"--module={program.main}",
                *(f"--parameters={PARAMETER_SCOPE}={file}" for file in parameters),
                f"--function={method.name}",
                *(f"--input={text}" for text in inputs),
                *(f"--expected_output={text}" for text in outputs),
                *tolerances[method.name, case.name],
            ]
            (path / f"{name}{_SUFFIX}").write_text("\n".join(lines) + "\n")


def _write_tensors(
    path: Path, name: str, kind: str, specs: Sequence[TensorSpec], tensors: Mapping[str, Array]
) -> Iterator[str]:
    for number, (own, array) in enumerate(zip(specs, tensors.values(), strict=True)):
        spec = settle_spec(own, array)
        if kind == "output" and is_number(spec):
            raise LoadFailed("iree-run-module compares tensors only, but the method returns a scalar")
        # Write integers as .bin. A .npy file specifies a sign, but most IREE types do not. The tool would then report
        # equal tensors as different. Also write dtypes that numpy lacks as .bin.
        plain = spec.dtype in NUMPY_DTYPES and "int" not in spec.dtype
        signed = kind == "output" and is_sign_shown(own.dtype, get_dtype_name(array.dtype))
        spec = make_spec(own.name, array) if signed else spec
        file = f"{kind}_{number}"
        given = give(spec, array, file, path / name, name, tensors="npy" if plain else "bin", signed=signed)
        yield given.value


def _make_tolerance_flags(method: Method, case: BundledCase) -> list[str]:
    """Return the tools' flags for a case: an absolute tolerance per dtype, and a common relative tolerance.

    The tools' tolerances are never stricter than hil's tolerances, so a mismatch in the tools is also a mismatch in
    hil.
    """
    flags: dict[str, float] = {}
    if case.accept:
        raise UsageError(
            f"method {method.name!r}, case {case.name!r}: iree-run-module supports tolerances only",
            hint=f"the case has criteria: {'; '.join(case.accept)}",
        )
    for name, array in case.expected_outputs.items():
        dtype = get_dtype_name(array.dtype)
        where = f"method {method.name!r}, case {case.name!r}, output {name!r}"
        tolerance, scale = fit_tolerance((dtype, dtype), array, case.rtol, case.atol)
        if tolerance is not None and case.atol is None and name in case.noise:
            tolerance = widen_tolerance(tolerance, measure_allowance(case.noise[name], array, scale))
        if dtype in THRESHOLDS and tolerance is not None:
            atol = THRESHOLDS[dtype]
            flags[atol] = max(flags.get(atol, 0.0), tolerance.atol)
            flags["expected_rtol"] = max(flags.get("expected_rtol", 0.0), tolerance.rtol)
        elif dtype not in EXACT_DTYPES:
            raise UsageError(f"{where}: iree-run-module cannot compare {dtype}")
        elif tolerance is not None and tolerance.atol + tolerance.rtol * find_largest(array) >= 1:
            raise UsageError(f"{where}: iree-run-module compares integers exactly, but the case has a tolerance")
    return [f"--{name}={value!r}" for name, value in sorted(flags.items())]


def list_flagfiles(files: Iterable[Path]) -> list[Path]:
    """Return the flag files among ``files``, by path and number.

    A trace has a flag file per call, ``flagfile_call_N``. hil skips the plain ``flagfile``, which repeats the flag file
    of the first call.
    """
    found = [path for path in files if is_flagfile(path.name) and path.is_file()]
    calls = {path.parent for path in found if _OF_CALL.fullmatch(path.name)}
    return sorted((path for path in found if path.name != _PLAIN or path.parent not in calls), key=_make_sort_key)


def is_flagfile(name: str) -> bool:
    """Return whether a name is a flag file's name: ``NAME.flagfile``, ``flagfile``, or a call's name in a trace."""
    return name.endswith(_SUFFIX) or name == _PLAIN or bool(_OF_CALL.fullmatch(name))


def make_case_name(file: Path, folder: Path) -> str:
    """Return the name of a flag file's case, from the relative path: ``simple_mul.call_0``."""
    parts = [part for part in Path(os.path.relpath(file, folder)).parts if part != os.pardir]
    return ".".join((*parts[:-1], parts[-1].removesuffix(_SUFFIX).removeprefix(f"{_PLAIN}_")))


def list_omitted_calls(files: Iterable[Path]) -> list[str]:
    """Return a line per trace with the number of calls without a flag file. IREE did not run these calls."""
    notes = []
    for place in sorted(path.parent for path in files if path.name == _TRACE):
        calls = [path for path in place.glob("call_*") if path.is_dir()]
        if lacking := sum(not (place / f"{_PLAIN}_{path.name}").is_file() for path in calls):
            notes.append(f"{place}: {lacking} of {len(calls)} calls have no flag file")
    return notes


def _make_sort_key(path: Path) -> list[tuple[str, int]]:
    """Return a sort key that compares numbers in the path by value, so that call 10 follows call 9."""
    pieces = re.split(r"(\d+)", str(path))
    return [(text, int(number)) for text, number in itertools.zip_longest(pieces[::2], pieces[1::2], fillvalue="0")]


def read_flagfiles(path: Path, *, context: RunContext) -> Bundle:
    """Read a bundle from a flag file or a directory tree of flag files.

    All flag files must use the same module. Every flag file is a case.
    """
    folder = path if path.is_dir() else path.parent
    there = sorted(path.rglob("*")) if path.is_dir() else [path]
    files, left_out = list_flagfiles(there) if path.is_dir() else there, list_omitted_calls(there)
    if not files:
        hint = f"expected files named NAME{_SUFFIX}, {_PLAIN}, or {_PLAIN}_call_N"
        raise UsageError("; ".join([f"no flag file found in {path}", *left_out]), hint=hint)
    found = {file: parse_flagfile(file) for file in files}
    module, weights = _find_module(found)
    functions = list(dict.fromkeys(flags.function for flags in found.values()))
    models, _ = import_methods(module, [] if functions == [""] else functions, context)
    program = {module.name: module, **{weight.name: weight for weight in weights}}
    artifact = make_program("iree", program, module.name, function=models[0].function)
    signatures = read_signatures(artifact, models, context, ask=refuse_without_board)
    suites = []
    for file, flags in found.items():
        method = flags.function or next(iter(signatures))
        if not flags.expected:
            raise UsageError(f"{file}: missing --expected_output", hint="add the expected outputs")
        signature = signatures[method]
        outputs = dict(read_expected(flags.expected, signature.outputs).outputs)
        case = MethodTestCase(
            make_inputs(signature.inputs, flags.inputs),
            outputs,
            *choose_tool_tolerance(flags.rtol, flags.atols, list(outputs.values())),
            make_case_name(file, folder),
            file.name,
        )
        if len(flags.inputs) < len(signature.inputs):
            raise UsageError(f"{file}: got {len(flags.inputs)} inputs, but the method has {len(signature.inputs)}")
        suites.append(MethodTestSuite(method, [case]))
    made = {"model": {"name": module.name}, **({LEFT_OUT: left_out} if left_out else {})}
    return Bundle.create(artifact, suites, signatures=settle_signatures(signatures, suites), made=made)


def _find_module(found: Mapping[Path, FlagFile]) -> tuple[Path, tuple[Path, ...]]:
    """Return the module that all flag files use, and the weights."""
    (first, flags), *others = found.items()
    if len(flags.modules) != 1:
        raise UsageError(
            f"{first}: expected one --module, got {len(flags.modules)}", hint="a bundle contains one program"
        )
    for file, other in others:
        if other.modules != flags.modules or other.parameters != flags.parameters:
            raise UsageError(
                f"{file} and {first} use different modules or parameters", hint="a bundle contains one program"
            )
    if missing := [file for file in (*flags.modules, *flags.parameters) if not is_file(file)]:
        raise UsageError(f"no such file: {missing[0]}")
    return flags.modules[0], flags.parameters
