"""Flag files of IREE's tools, iree-run-module and iree-benchmark-module: one ``--flag=value`` a line.

What hil writes they run, and hil runs what they do. Files are named relative to the flag file, so that a folder with
both can be moved. hil takes them so from anywhere, the tools relative to the folder that they are called in:
``cd FOLDER && iree-run-module --flagfile=flagfile``.
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

from hil.compare.tolerance import blindness, scale_of
from hil.compare.values import EXACT_DTYPES, largest
from hil.controller.backends.references.expected import expected_result
from hil.controller.storage.runs import storing
from hil.core.files import read_text
from hil.core.npy import load_npy
from hil.core.results import Model, RunResult, Tolerance
from hil.core.tensors import Array, TensorSpec, dtype_name, read_as, to_bytes
from hil.errors import UsageError, did_you_mean
from hil.formats.iree_command import PARAMETER_SCOPE, shows_sign

if TYPE_CHECKING:
    from hil.controller.pipeline.options import Job


_TYPED = re.compile(r"(?:\d+x)*([a-z]+\w*(?:<f\d+>)?)(?:=|$)")


def element_type(text: str) -> str:
    """The element type of a tensor in the tools' words: ``si64`` of ``2xsi64=1 2``; "" of what has none."""
    if text.startswith("@") and text.endswith(".npy"):
        dtype = load_npy(Path(text[1:]), mmap=True).dtype
        if dtype.kind in "bc":
            return "i1" if dtype.kind == "b" else f"complex<f{4 * dtype.itemsize}>"
        sign = {"i": "si", "u": "ui", "f": "f"}.get(dtype.kind)
        return f"{sign}{8 * dtype.itemsize}" if sign else ""
    typed = _TYPED.match(text)
    return typed[1] if typed else ""


def tool_differs(
    result: RunResult,
    reference: RunResult,
    wanted: Sequence[str],
    inputs: Mapping[str, Array],
    declared: Sequence[TensorSpec] = (),
) -> str:
    """Why iree-run-module would call a program's outputs different though their values agree; "" where it would not.

    Args:
        result: what the program gave, as it is :func:`comparable`.
        wanted: of each output what :func:`element_type` says of the expected tensor; none are none that is looked at.
        inputs: what the program was given: an output that is equal to one may be that one, with the sign it came with.
        declared: what the program declares of all its outputs.
    """
    ignored = reference.provenance.get("ignored", ())
    own_dtypes = [spec.dtype for spec in declared] or [""] * len(wanted)
    kinds = [both for place, both in enumerate(zip(wanted, own_dtypes, strict=False)) if place not in ignored]
    pairs = zip(result.outputs.items(), reference.outputs.values(), kinds, strict=False)
    for (name, array), other, (kind, own_dtype) in pairs:
        if array.dtype.kind not in "iub":
            if kind and dtype_name(array.dtype) not in ATOLS and to_bytes(array) != to_bytes(other):
                return (
                    f"output {name}: the values agree, but not the bits of a NaN or zero, as iree-run-module compares"
                )
            continue
        own = "i1" if array.dtype.kind == "b" else f"i{8 * array.dtype.itemsize}"
        own = f"u{own}" if shows_sign(own_dtype, dtype_name(array.dtype)) else own
        signed = array.dtype.kind in "iu" and kind.lstrip("su") == own.lstrip("u")
        same = (one for one in inputs.values() if array.dtype == one.dtype and np.array_equal(array, one))
        if kind not in ("", own) and not (signed and next(same, None) is not None):
            return (
                f"output {name}: the values agree, but the elements expected are {kind} and the program's are {own}, "
                f"which iree-run-module calls different: write --expected_output=SHAPEx{own}=..."
            )
    return ""


def comparable(result: RunResult, reference: RunResult, model: Model | None) -> RunResult:
    """A run's outputs as they are compared with a reference's.

    Those that the reference says to ignore are left out. Where nothing tells whether a program's integers have a sign,
    they have that of the reference's.
    """
    ignored = reference.provenance.get("ignored", ())
    specs = (model and model.outputs) or ()
    kept = [(name, array, place) for place, (name, array) in enumerate(result.outputs.items()) if place not in ignored]
    outputs = {name: array for name, array, _ in kept}
    if len(specs) == len(result.outputs) and len(kept) == len(reference.outputs):
        pairs = zip(kept, reference.outputs.values(), strict=True)
        outputs = {name: read_as(array, dtype_name(other.dtype), specs[n]) for (name, array, n), other in pairs}
    return replace(result, outputs=outputs)


# What the tools take where no flag says otherwise. They compare all other dtypes bit by bit.
RTOL = 1e-5
ATOLS: Mapping[str, float] = MappingProxyType({"float16": 1e-3, "float32": 1e-4, "float64": 1e-4, "bfloat16": 1e-2})
# Below 1 together, so that integers stay exact beside floats that are not.
_EXACT = 0.25


def tool_tolerance(
    rtol: float | None, atols: Mapping[str, float], expected: Sequence[Array]
) -> tuple[float | None, float | None]:
    """rtol and atol, from what flags say of them, with which hil calls different whatever the tools do.

    Of outputs of one dtype these are the tools' own. hil has one pair for all outputs: of several dtypes they are the
    strictest. Where the tools' own atol, which no flag gave, could not tell an output from a wrong one, it is None:
    hil's default.
    """
    dtypes = [dtype_name(array.dtype) for array in expected]
    if not set(dtypes) - EXACT_DTYPES:
        return None, None
    if set(dtypes) - EXACT_DTYPES - ATOLS.keys():
        return 0.0, 0.0
    given, rtol = rtol, RTOL if rtol is None else rtol
    floats = [(dtype, array) for dtype, array in zip(dtypes, expected, strict=True) if dtype in ATOLS]
    exact = [largest(array) for dtype, array in zip(dtypes, expected, strict=True) if dtype in EXACT_DTYPES]
    if any(dtype not in atols and _is_blind(Tolerance(rtol, ATOLS[dtype]), array) for dtype, array in floats):
        return (None if exact else given), None
    atol = min(atols.get(dtype, ATOLS[dtype]) for dtype, _ in floats)
    return (min(rtol, _EXACT / max(1.0, *exact)), min(atol, _EXACT)) if exact else (rtol, atol)


def _is_blind(tolerance: Tolerance, expected: Array) -> bool:
    return bool(blindness(tolerance, scale_of(expected), given=True))


# Flags of iree-run-module and iree-benchmark-module that say how, not what -> what says that here.
_HOW = {
    "device": "the board's config does: --board, --runtime-hw-type",
    "device_allocator": "the board's runtime does",
    "print_statistics": "hil always tells",
    "output": "hil keeps outputs with the run",
    "benchmark_min_time": "--min-time S, or --iterations N",
    "benchmark_repetitions": "--iterations N",
    "output_max_element_count": "hil keeps outputs with the run",
    "module_mode": "hil maps programs into memory",
    "parameter_mode": "hil maps parameters into memory",
    "trace_execution": "hil layers shows what lies between",
}
# Of such flags whole families.
_HOW_OF = {
    **dict.fromkeys(("task_", "cuda_", "hip_", "vulkan_"), "the board's runtime does"),
    "device_profiling_": "--profile DIR",
}
# The tools' name of a dtype, in the flags of their absolute tolerances.
_SHORT = {"float16": "f16", "float32": "f32", "float64": "f64", "bfloat16": "bf16"}
THRESHOLDS = {dtype: f"expected_{short}_threshold" for dtype, short in _SHORT.items()}


@dataclass(frozen=True)
class FlagFile:
    """What the flags of such a file say."""

    modules: tuple[Path, ...] = ()
    function: str = ""  # which function; "" is the only one
    # inputs, expected: tensors as the tools take them: ``@x.npy``, ``2x3xf32=@x.bin``, ``4xf32=1 2 3 4``.
    inputs: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    parameters: tuple[Path, ...] = ()
    device: str = ""  # what to run on; "" says nothing. Of a board hil's config says that.
    rtol: float | None = None  # what an output may be off by; None is the tools' default
    # dtype -> what an output may be off by; of those that are not here it is the tools' default.
    atols: Mapping[str, float] = field(default_factory=dict)

    def lines(self, folder: Path) -> list[str]:
        """The flags, one a line; paths are relative to a folder."""
        flags = [
            *(("module", _relative(path, folder)) for path in self.modules),
            *(("parameters", f"{PARAMETER_SCOPE}={_relative(path, folder)}") for path in self.parameters),
            ("function", self.function),
            ("device", self.device),
            *(("input", _moved(text, folder)) for text in self.inputs),
            *(("expected_output", _moved(text, folder)) for text in self.expected),
            ("expected_rtol", "" if self.rtol is None else repr(float(self.rtol))),
            *((THRESHOLDS[dtype], repr(float(atol))) for dtype, atol in self.atols.items()),
        ]
        return [f"--{name}={value}" for name, value in flags if value]


def write_flagfile(path: Path, flags: FlagFile) -> None:
    """Write a flag file (StorageError); UsageError where a value would be more than one line."""
    lines = flags.lines(path.parent)
    for line in lines:
        if len(line.splitlines()) != 1:
            raise UsageError(f"a flag file cannot hold {line[:60]!r}: it is more than one line")
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")


def parse_flagfile(path: Path) -> FlagFile:
    """Read a flag file; UsageError where it is missing, or a flag is none that hil can honour."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the flag file {path} cannot be read: {error}") from error
    stripped = ((number, line.strip()) for number, line in enumerate(lines, 1))
    flags = ((f"{path}:{number}: ", line) for number, line in stripped if line and not line.startswith(("#", "//")))
    return parse_flags(flags, path.parent)


def parse_flags(flags: Iterable[tuple[str, str]], folder: Path, *, strict: bool = False) -> FlagFile:
    """What flags of the tools say. Of one that is given twice the later counts; inputs and the like add up.

    Args:
        flags: where each stands, for messages, and its text ``--flag=value``.
        folder: files are relative to it.
        strict: refuse (UsageError) flags that only say how to run too.
    """
    found: dict[str, list[str]] = {}
    for where, text in flags:
        name, equals, value = (part.strip() for part in text.removeprefix("--").partition("="))
        how = _HOW.get(name) or next((hint for family, hint in _HOW_OF.items() if name.startswith(family)), "")
        if not text.startswith("--") or not (equals or how):
            raise UsageError(f"{where}{text[:60]!r} is not --flag=value")
        if strict and how:
            raise UsageError(f"--{name} is none of hil's flags", hint=how)
        if name not in _KNOWN and not how:
            raise UsageError(f"{where}hil does not know --{name}", hint=did_you_mean(name, _KNOWN))
        found.setdefault(name, []).append(value)

    def last(name: str) -> str:
        return found.get(name, [""])[-1]

    rtol = _number("expected_rtol", last("expected_rtol"))
    given = {dtype: _number(flag, last(flag)) for dtype, flag in THRESHOLDS.items()}
    atols = {dtype: atol for dtype, atol in given.items() if atol is not None}
    if (mode := last("equality_mode")) == "exact":
        rtol, atols = 0.0, dict.fromkeys(THRESHOLDS, 0.0)
    elif mode not in ("", "approximate"):
        raise UsageError(f"--equality_mode={mode} is none", hint="one of approximate, exact")
    return FlagFile(
        tuple(_seen_from(folder, value) for value in found.get("module", ())),
        last("function"),
        tuple(_located(value, folder) for value in found.get("input", ())),
        tuple(_located(value, folder) for value in found.get("expected_output", ())),
        tuple(_seen_from(folder, value.rpartition("=")[2]) for value in found.get("parameters", ())),
        last("device"),
        rtol,
        atols,
    )


def read_flagfile(job: Job, later: Sequence[str] = ()) -> Job:
    """The job with what its flag file says; what the command line says stands, and so do ``later`` flags of the tools.

    ``--module``, ``--function``, ``--input``, ``--expected_output`` and tolerances are taken (files relative to the
    flag file), flags that only say how to run are left to the board's config. Raises as :func:`parse_flagfile`.
    """
    assert job.flagfile is not None
    flags = parse_flagfile(job.flagfile)
    over = parse_flags((("", text) for text in later), Path(), strict=True)
    flags = replace(flags, **{name: value for name, value in vars(over).items() if value not in ((), "", None, {})})
    if flags.parameters:
        raise UsageError(
            f"{job.flagfile} names files of parameters, which hil keeps beside the program itself",
            hint="run the model instead of its program: hil bench MODEL.onnx",
        )
    if len(flags.modules) > 1:
        raise UsageError(
            f"{job.flagfile} names {len(flags.modules)} modules that are linked as one program",
            hint="hil runs programs of one module: compile them into one",
        )
    rtol, atol = flags.rtol, min(flags.atols.values(), default=None)
    types: tuple[str, ...] = ()
    if flags.expected and not job.expected:
        types = tuple(map(element_type, flags.expected))
        # Of a bare number only the program says what it is.
        tensors = [text for text, kind in zip(flags.expected, types, strict=True) if kind or text.startswith("@")]
        wanted = expected_result(tensors, None).outputs.values()
        rtol, atol = tool_tolerance(flags.rtol, flags.atols, list(wanted))
    return replace(
        job,
        models=job.models or flags.modules,
        function=job.function or flags.function,
        inputs=job.inputs or flags.inputs,
        expected=job.expected or flags.expected,
        element_types=types,
        rtol=rtol if job.rtol is None else job.rtol,
        atol=atol if job.atol is None else job.atol,
        flagfile=None,
    )


def _number(name: str, text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise UsageError(f"--{name}={text[:60]} is no number") from None


_KNOWN = (
    *("module", "function", "input", "expected_output", "parameters", "expected_rtol", "equality_mode"),
    *THRESHOLDS.values(),
)


def _located(value: str, folder: Path) -> str:
    """A tensor with its file, if it names one, seen from here."""
    before, at, name = value.partition("@")
    return f"{before}@{_seen_from(folder, name)}" if at else value


def _seen_from(folder: Path, name: str) -> Path:
    path = folder / name
    return path.resolve() if ".." in path.parts else path


def _moved(value: str, folder: Path) -> str:
    """A tensor with its file, if it names one, seen from a folder."""
    before, at, name = value.partition("@")
    return f"{before}@{_relative(Path(name), folder)}" if at else value


def _relative(path: Path, folder: Path) -> str:
    return os.path.relpath(path.absolute(), folder.absolute())
