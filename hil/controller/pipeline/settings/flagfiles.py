"""Read and write flag files of iree-run-module and iree-benchmark-module, with one ``--flag=value`` per line.

hil and the tools can read each other's flag files. Paths are relative to the flag file, so that the directory can be
moved. hil reads the file from any working directory. The tools resolve paths from the working directory, so run them
there: ``cd FOLDER && iree-run-module --flagfile=flagfile``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from hil.compare.tolerance import find_blindness, scale_of
from hil.compare.values import EXACT_DTYPES, find_largest
from hil.controller.backends.references.expected import read_expected
from hil.controller.storage.runs import convert_write_errors
from hil.core.files import read_text
from hil.core.npy import load_npy
from hil.core.results import Model, RunResult, Tolerance
from hil.core.tensors import Array, TensorSpec, get_dtype_name, read_as, to_bytes
from hil.errors import UsageError, did_you_mean
from hil.formats.iree_command import PARAMETER_SCOPE, is_sign_shown
from hil.formats.iree_devices import GPU_DRIVERS, get_driver

if TYPE_CHECKING:
    from hil.controller.pipeline.settings.options import Job


_TYPED = re.compile(r"(?:\d+x)*([a-z]+\w*(?:<f\d+>)?)(?:=|$)")


def parse_element_type(text: str) -> str:
    """Return the element type in the tools' text for a tensor: ``si64`` for ``2xsi64=1 2``; "" if unspecified."""
    if text.startswith("@") and text.endswith(".npy"):
        dtype = load_npy(Path(text[1:]), mmap=True).dtype
        if dtype.kind in "bc":
            return "i1" if dtype.kind == "b" else f"complex<f{4 * dtype.itemsize}>"
        sign = {"i": "si", "u": "ui", "f": "f"}.get(dtype.kind)
        return f"{sign}{8 * dtype.itemsize}" if sign else ""
    typed = _TYPED.match(text)
    return typed[1] if typed else ""


def find_tool_difference(
    result: RunResult,
    reference: RunResult,
    wanted: Sequence[str],
    inputs: Mapping[str, Array],
    declared: Sequence[TensorSpec] = (),
) -> str:
    """Return a reason if iree-run-module would report a difference although the values agree; otherwise "".

    Args:
        result: The program's outputs, as returned by :func:`make_comparable`.
        wanted: For each output, the :func:`parse_element_type` of the expected tensor. Empty disables the check.
        inputs: The program's inputs. An output that equals an input may be the same tensor, and then has the input's
            signedness.
        declared: The specs that the program declares for all outputs.
    """
    ignored = reference.provenance.get("ignored", ())
    own_dtypes = [spec.dtype for spec in declared] or [""] * len(wanted)
    kinds = [both for place, both in enumerate(zip(wanted, own_dtypes, strict=False)) if place not in ignored]
    pairs = zip(result.outputs.items(), reference.outputs.values(), kinds, strict=False)
    for (name, array), other, (kind, own_dtype) in pairs:
        if array.dtype.kind not in "iub":
            if kind and get_dtype_name(array.dtype) not in ATOLS and to_bytes(array) != to_bytes(other):
                return (
                    f"output {name}: the values agree, but the bits of a NaN or zero differ, "
                    "which iree-run-module reports as different"
                )
            continue
        own = "i1" if array.dtype.kind == "b" else f"i{8 * array.dtype.itemsize}"
        own = f"u{own}" if is_sign_shown(own_dtype, get_dtype_name(array.dtype)) else own
        signed = array.dtype.kind in "iu" and kind.lstrip("su") == own.lstrip("u")
        same = (one for one in inputs.values() if array.dtype == one.dtype and np.array_equal(array, one))
        if kind not in ("", own) and not (signed and next(same, None) is not None):
            return (
                f"output {name}: the values agree, but iree-run-module reports a type mismatch: "
                f"expected {kind}, got {own}; use --expected_output=SHAPEx{own}=..."
            )
    return ""


def make_comparable(result: RunResult, reference: RunResult, model: Model | None) -> RunResult:
    """Return a run's outputs in the form that is compared with a reference.

    Outputs that the reference ignores are removed. Integers of unknown signedness get the signedness of the reference.
    """
    ignored = reference.provenance.get("ignored", ())
    specs = (model and model.outputs) or ()
    kept = [(name, array, place) for place, (name, array) in enumerate(result.outputs.items()) if place not in ignored]
    outputs = {name: array for name, array, _ in kept}
    if len(specs) == len(result.outputs) and len(kept) == len(reference.outputs):
        pairs = zip(kept, reference.outputs.values(), strict=True)
        outputs = {name: read_as(array, get_dtype_name(other.dtype), specs[n]) for (name, array, n), other in pairs}
    return replace(result, outputs=outputs)


# Default tolerances of the tools, which compare other dtypes bitwise.
RTOL = 1e-5
ATOLS: Mapping[str, float] = MappingProxyType({"float16": 1e-3, "float32": 1e-4, "float64": 1e-4, "bfloat16": 1e-2})
# If outputs include integers: maximum for atol, and for rtol times the largest integer, so that integers must be equal.
_EXACT = 0.25


def choose_tool_tolerance(
    rtol: float | None, atols: Mapping[str, float], expected: Sequence[Array]
) -> tuple[float | None, float | None]:
    """Return rtol and atol that are at least as strict as the tools' comparison.

    If all outputs have the same dtype, rtol and atol equal the tools' tolerances. hil has one pair of values for all
    outputs, so with multiple dtypes the strictest values apply. If the tools' default atol cannot distinguish right and
    wrong outputs, atol is None, which selects hil's default.

    Args:
        rtol, atols: Values of the flags.
    """
    dtypes = [get_dtype_name(array.dtype) for array in expected]
    if not set(dtypes) - EXACT_DTYPES:
        return None, None
    if set(dtypes) - EXACT_DTYPES - ATOLS.keys():
        return 0.0, 0.0
    given, rtol = rtol, RTOL if rtol is None else rtol
    floats = [(dtype, array) for dtype, array in zip(dtypes, expected, strict=True) if dtype in ATOLS]
    exact = [find_largest(array) for dtype, array in zip(dtypes, expected, strict=True) if dtype in EXACT_DTYPES]
    if any(dtype not in atols and _is_blind(Tolerance(rtol, ATOLS[dtype]), array) for dtype, array in floats):
        return (None if exact else given), None
    atol = min(atols.get(dtype, ATOLS[dtype]) for dtype, _ in floats)
    return (min(rtol, _EXACT / max(1.0, *exact)), min(atol, _EXACT)) if exact else (rtol, atol)


def _is_blind(tolerance: Tolerance, expected: Array) -> bool:
    return bool(find_blindness(tolerance, scale_of(expected), given=True))


# Flags of the tools for the execution -> hint about hil's equivalent.
_HOW = {
    "device": "use hil's --device NAME",
    "device_allocator": "the board's runtime sets this",
    "print_statistics": "hil always prints statistics",
    "output": "hil stores outputs with the run",
    "benchmark_min_time": "use --min-time S or --iterations N",
    "benchmark_repetitions": "use --iterations N",
    "output_max_element_count": "hil stores outputs with the run",
    "module_mode": "hil maps programs into memory",
    "parameter_mode": "hil maps parameters into memory",
    "trace_execution": "use hil layers to see intermediate values",
}
# Prefixes of further flags -> hint.
_HOW_OF = {
    **dict.fromkeys(("task_", "cuda_", "hip_", "vulkan_"), "the board's runtime sets this"),
    "device_profiling_": "use --profile DIR",
}
# dtype -> name of the dtype in the tools' flags for absolute tolerances.
_SHORT = {"float16": "f16", "float32": "f32", "float64": "f64", "bfloat16": "bf16"}
THRESHOLDS = {dtype: f"expected_{short}_threshold" for dtype, short in _SHORT.items()}


@dataclass(frozen=True)
class FlagFile:
    """Flags of a flag file."""

    modules: tuple[Path, ...] = ()
    function: str = ""  # the function to run; "" is the only function
    # inputs, expected: tensors in the tools' notation: ``@x.npy``, ``2x3xf32=@x.bin``, ``4xf32=1 2 3 4``.
    inputs: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    parameters: tuple[Path, ...] = ()
    device: str = ""  # the device; "" if unspecified
    rtol: float | None = None  # relative tolerance; None is the tools' default
    # dtype -> absolute tolerance; the tools' defaults apply to other dtypes.
    atols: Mapping[str, float] = field(default_factory=dict)

    def lines(self, folder: Path) -> list[str]:
        """Return the flags as lines, with paths relative to a directory."""
        flags = [
            *(("module", _relativize_path(path, folder)) for path in self.modules),
            *(("parameters", f"{PARAMETER_SCOPE}={_relativize_path(path, folder)}") for path in self.parameters),
            ("function", self.function),
            ("device", self.device),
            *(("input", _relativize_tensor_file(text, folder)) for text in self.inputs),
            *(("expected_output", _relativize_tensor_file(text, folder)) for text in self.expected),
            ("expected_rtol", "" if self.rtol is None else repr(float(self.rtol))),
            *((THRESHOLDS[dtype], repr(float(atol))) for dtype, atol in self.atols.items()),
        ]
        return [f"--{name}={value}" for name, value in flags if value]


def write_flagfile(path: Path, flags: FlagFile) -> None:
    """Write a flag file.

    Raises:
        UsageError: a value contains a line break.
        StorageError: the file cannot be written.
    """
    lines = flags.lines(path.parent)
    for line in lines:
        if len(line.splitlines()) != 1:
            raise UsageError(f"cannot write {line[:60]!r} to a flag file: expected a single line")
    with convert_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")


def parse_flagfile(path: Path) -> FlagFile:
    """Read a flag file. Raises UsageError if the file cannot be read or a flag is unsupported."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the flag file {path} cannot be read: {error}") from error
    stripped = ((number, line.strip()) for number, line in enumerate(lines, 1))
    flags = ((f"{path}:{number}: ", line) for number, line in stripped if line and not line.startswith(("#", "//")))
    return parse_flags(flags, path.parent)


def parse_flags(flags: Iterable[tuple[str, str]], folder: Path, *, strict: bool = False) -> FlagFile:
    """Parse flags of the tools.

    If a flag is repeated, the last value applies. Inputs, expected outputs and similar flags accumulate.

    Args:
        flags: Pairs of location (for messages) and text ``--flag=value``.
        folder: Base directory of relative file names.
        strict: Also raise UsageError for flags that only configure the execution.
    """
    found: dict[str, list[str]] = {}
    for where, text in flags:
        name, equals, value = (part.strip() for part in text.removeprefix("--").partition("="))
        how = _HOW.get(name) or next((hint for family, hint in _HOW_OF.items() if name.startswith(family)), "")
        if not text.startswith("--") or not (equals or how):
            raise UsageError(f"{where}invalid flag {text[:60]!r}: expected --flag=value")
        if strict and how:
            raise UsageError(f"unsupported flag --{name}", hint=how)
        if name not in _KNOWN and not how:
            raise UsageError(f"{where}unknown flag --{name}", hint=did_you_mean(name, _KNOWN))
        found.setdefault(name, []).append(value)

    def find_last(name: str) -> str:
        return found.get(name, [""])[-1]

    rtol = _parse_number("expected_rtol", find_last("expected_rtol"))
    given = {dtype: _parse_number(flag, find_last(flag)) for dtype, flag in THRESHOLDS.items()}
    atols = {dtype: atol for dtype, atol in given.items() if atol is not None}
    if (mode := find_last("equality_mode")) == "exact":
        rtol, atols = 0.0, dict.fromkeys(THRESHOLDS, 0.0)
    elif mode not in ("", "approximate"):
        raise UsageError(f"invalid --equality_mode={mode}", hint="expected one of approximate, exact")
    return FlagFile(
        tuple(_resolve_path(folder, value) for value in found.get("module", ())),
        find_last("function"),
        tuple(_resolve_tensor_file(value, folder) for value in found.get("input", ())),
        tuple(_resolve_tensor_file(value, folder) for value in found.get("expected_output", ())),
        tuple(_resolve_path(folder, value.rpartition("=")[2]) for value in found.get("parameters", ())),
        find_last("device"),
        rtol,
        atols,
    )


def read_flagfile(job: Job, later: Sequence[str] = ()) -> Job:
    """Return the job with the settings of its flag file.

    Options of the command line and ``later`` flags take precedence.

    hil uses the flags ``--module``, ``--function``, ``--input``, ``--expected_output`` and tolerances, with files
    relative to the flag file. The flag ``--device`` applies to GPUs. hil ignores other flags that only configure the
    execution, because the board's config defines the execution.

    Raises:
        UsageError: see :func:`parse_flagfile`; or the flags need multiple modules or parameter files.
    """
    assert job.flagfile is not None
    flags = parse_flagfile(job.flagfile)
    over = parse_flags((("", text) for text in later), Path(), strict=True)
    flags = replace(flags, **{name: value for name, value in vars(over).items() if value not in ((), "", None, {})})
    if flags.parameters:
        raise UsageError(
            f"unsupported --parameters in {job.flagfile}: hil stores parameters with the program",
            hint="run the model instead of the program: hil bench MODEL.onnx",
        )
    if len(flags.modules) > 1:
        raise UsageError(
            f"{job.flagfile} lists {len(flags.modules)} linked modules, expected a single module",
            hint="compile the modules into a single module",
        )
    rtol, atol = flags.rtol, min(flags.atols.values(), default=None)
    types: tuple[str, ...] = ()
    if flags.expected and not job.expected:
        types = tuple(map(parse_element_type, flags.expected))
        # Skip bare numbers: only the program knows their type.
        tensors = [text for text, kind in zip(flags.expected, types, strict=True) if kind or text.startswith("@")]
        wanted = read_expected(tensors, None).outputs.values()
        rtol, atol = choose_tool_tolerance(flags.rtol, flags.atols, list(wanted))
    return replace(
        job,
        models=job.models or flags.modules,
        function=job.function or flags.function,
        device=job.device or (flags.device if get_driver(flags.device) in GPU_DRIVERS else ""),
        inputs=job.inputs or flags.inputs,
        expected=job.expected or flags.expected,
        element_types=types,
        rtol=rtol if job.rtol is None else job.rtol,
        atol=atol if job.atol is None else job.atol,
        flagfile=None,
    )


def _parse_number(name: str, text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise UsageError(f"invalid --{name}={text[:60]}: expected a number") from None


_KNOWN = (
    *("module", "function", "input", "expected_output", "parameters", "expected_rtol", "equality_mode"),
    *THRESHOLDS.values(),
)


def _resolve_tensor_file(value: str, folder: Path) -> str:
    """Resolve the file in a tensor text against a directory. Texts without a file are unchanged."""
    before, at, name = value.partition("@")
    return f"{before}@{_resolve_path(folder, name)}" if at else value


def _resolve_path(folder: Path, name: str) -> Path:
    path = folder / name
    return path.resolve() if ".." in path.parts else path


def _relativize_tensor_file(value: str, folder: Path) -> str:
    """Make the file in a tensor text relative to a directory. Texts without a file are unchanged."""
    before, at, name = value.partition("@")
    return f"{before}@{_relativize_path(Path(name), folder)}" if at else value


def _relativize_path(path: Path, folder: Path) -> str:
    return os.path.relpath(path.absolute(), folder.absolute())
