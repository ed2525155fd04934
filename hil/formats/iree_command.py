"""IREE's command-line tools: where they are, and tensors and flags as they take them.

Inputs are elements in a .bin file with the type in front (complex ones as .npy, whose type the tools cannot read), and
numbers as text.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hil.core.npy import save_npy
from hil.core.tensors import NUMPY_DTYPES, SUB_BYTE_BITS, Array, TensorSpec, pack, to_bytes
from hil.errors import LoadFailed, UsageError
from hil.formats.iree_values import SCALAR_PREFIX, mlir_type

RUN_TOOL = "iree-run-module"
PROFILE_TOOL = "iree-benchmark-module"
# What the profiling tool writes: a profile, or what each run took.
PROFILE_FILE = "profile.ireeprof"
TIMES_FILE = "times.json"
PARAMETER_SCOPE = "model"
_LIBRARIES = "iree._runtime_libs"
_UNIT_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
# Of the profiler's kinds of event those that CPU devices have.
_EVENTS = "queue-events,host-execution,memory-events,executable-metadata"
# The tools pass these numbers as they are; what their ABI makes of others is not the number that was given.
NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")


def own_tool(name: str) -> Path | None:
    """A tool of the iree-base-runtime that is installed here; None where it has none, as on a board that hil set up."""
    try:
        found = importlib.util.find_spec(_LIBRARIES)
    except ModuleNotFoundError:
        return None
    for folder in found.submodule_search_locations or () if found else ():
        if (tool := Path(folder) / name).is_file():
            return tool
    return None


@dataclass(frozen=True)
class Given:
    """An input as a tool takes it."""

    value: str  # what ``--input=`` takes: ``2x3xf32=@FILE``, ``@FILE.npy`` or a number
    type: str  # ``2x3xf32``
    file: str  # the file's name; "" for a number that is given as text


def is_number(spec: TensorSpec) -> bool:
    """Whether it is a bare number and no tensor."""
    return spec.name.startswith(SCALAR_PREFIX)


def give(
    spec: TensorSpec,
    array: Array,
    stem: str,
    local: Path,
    remote: str,
    *,
    tensors: str = "auto",
    as_text: bool = True,
    signed: bool = False,
) -> Given:
    """Write a tensor as a file, where it needs one.

    Args:
        stem: the file's name without its extension.
        remote: the folder that it is going to lie in, as the tool sees it.
        tensors: how files hold tensors: ``bin`` (elements alone), ``npy``, or ``auto``.
        as_text: whether a number is given as text, not as a file.
        signed: whether unsigned integers are called that; see :func:`shows_sign`.

    Raises:
        LoadFailed: such a file holds no such tensor.
    """
    kind = tool_type(spec.dtype, array.shape, signed=signed)
    if is_number(spec) and as_text:
        return Given(_text(array), kind, "")
    npy = tensors == "npy" or (tensors == "auto" and array.dtype.kind == "c")
    file = f"{stem}.{'npy' if npy else 'bin'}"
    if npy:
        npy_can(spec)
        save_npy(local / file, array)
    else:
        (local / file).write_bytes(pack(array).data if spec.dtype in SUB_BYTE_BITS else to_bytes(array))
    return Given(f"@{remote}/{file}" if npy else f"{kind}=@{remote}/{file}", kind, file)


def npy_can(spec: TensorSpec) -> None:
    """Refuse a dtype that .npy files do not hold. Raises LoadFailed: it is one."""
    if spec.dtype not in NUMPY_DTYPES:
        raise LoadFailed(f"{spec}: .npy files hold no {spec.dtype}", hint='set tensors = "auto" or "bin" in [runtime]')


def shows_sign(declared: str, dtype: str) -> bool:
    """Whether the tools call an output's integers unsigned.

    They do of a program whose source did (StableHLO's ``ui8``): IREE declares such an output as ``i8`` and gives it
    back as what it was. The integers of all other programs have no sign.

    Args:
        declared: the dtype that the program declares for the output.
        dtype: what it gave.
    """
    return bool(declared) and dtype == f"u{declared}"


def tool_type(dtype: str, shape: Sequence[int], *, signed: bool = False) -> str:
    """A tensor's type as the tools write it: ``2x3xf32``. Integers have no sign (``i8``), unless it is asked for.

    Raises:
        LoadFailed: MLIR has no type for the dtype.
    """
    try:
        plain = dtype.removeprefix("u") if dtype.startswith("uint") and not signed else dtype
        return mlir_type(TensorSpec("", plain, tuple(shape))).removeprefix("tensor<").removesuffix(">")
    except UsageError as error:
        raise LoadFailed(error.message) from error


def profile_command(
    tool: str,
    module: str,
    *,
    device: str,
    function: str,
    inputs: Iterable[str],
    weights: Iterable[str],
    runs: int,
    output: str,
) -> list[str]:
    """The command of a profiling pass.

    Args:
        tool: the :data:`PROFILE_TOOL` to call.
        device, function: what to run it on, and which function.
        inputs: values for ``--input=``.
        runs: how many times to run it; the tool makes no others.
    """
    return [
        tool,
        f"--module={module}",
        f"--device={device}",
        f"--function={function}",
        *(f"--parameters={PARAMETER_SCOPE}={file}" for file in weights),
        *(f"--input={value}" for value in inputs),
        f"--benchmark_min_time={runs}x",
        f"--device_profiling_mode={_EVENTS}",
        f"--device_profiling_output={output}",
    ]


def timing_flags(runs: int, output: str) -> list[str]:
    """The flags that have the :data:`PROFILE_TOOL` write what each of so many runs took; it makes no others.

    Args:
        output: the file to write, for :func:`times_ns`.
    """
    flags = {"min_time": "1x", "repetitions": runs, "out": output, "out_format": "json"}
    return [f"--benchmark_{name}={value}" for name, value in flags.items()]


def times_ns(data: bytes) -> list[int]:
    """What each run took, in nanoseconds, in order: of a file that :func:`timing_flags` asked for.

    Raises:
        ValueError: it holds something else.
    """
    try:
        rows = [row for row in json.loads(data)["benchmarks"] if row["run_type"] == "iteration"]
        times = [round(row["real_time"] * _UNIT_NS[row["time_unit"]]) for row in rows]
    except (KeyError, TypeError) as error:
        raise ValueError(f"it has no {error}") from error
    except (OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if any(time_ns not in range(1 << 63) for time_ns in times):
        raise ValueError("it tells a time that nothing takes")
    return times


def _text(array: Array) -> str:
    value = array.item()
    if isinstance(value, bool):
        return str(int(value))
    return str(value) if isinstance(value, int) else f"{value:.17g}"
