"""Find IREE's command-line tools, and format tensors and flags for them.

Inputs are raw elements in a .bin file with an explicit type, or numbers as text. Complex inputs use .npy,
because the tools cannot parse their type.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hil.core.bounded_json import parse_json
from hil.core.npy import save_npy
from hil.core.tensors import NUMPY_DTYPES, SUB_BYTE_BITS, Array, TensorSpec, pack, to_bytes
from hil.errors import LoadFailed, UsageError
from hil.formats.iree_devices import CPU_DRIVERS, get_driver
from hil.formats.iree_values import SCALAR_PREFIX, format_mlir_type

RUN_TOOL = "iree-run-module"
PROFILE_TOOL = "iree-benchmark-module"
# Files that the profiling tool writes: a profile, and the time of each run.
PROFILE_FILE = "profile.ireeprof"
TIMES_FILE = "times.json"
PARAMETER_SCOPE = "model"
_LIBRARIES = "iree._runtime_libs"
_UNIT_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
# The profiler's event kinds. CPU devices report operations on the host's clock, GPUs report dispatches on their own.
_EVENTS = "queue-events,{operations},memory-events,executable-metadata"
_ON_HOST, _ON_DEVICE = "host-execution", "dispatch-events"
# The tools pass numbers of these types unchanged. For other types, their ABI changes the value.
NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")


def own_tool(name: str) -> Path | None:
    """Return a tool from the installed iree-base-runtime; None if missing, as on a board set up by hil."""
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
    """Input in a tool's format."""

    value: str  # value for ``--input=``: ``2x3xf32=@FILE``, ``@FILE.npy`` or a number
    type: str  # ``2x3xf32``
    file: str  # file name; "" for a number given as text


def is_number(spec: TensorSpec) -> bool:
    """Return True for a bare number rather than a tensor."""
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
    """Format a tensor for a tool, and write it to a file if needed.

    Args:
        stem: file name without extension.
        local: directory to write to.
        remote: path of the same directory on the tool's machine.
        tensors: file format: ``bin`` (raw elements), ``npy``, or ``auto``.
        as_text: True to pass numbers as text rather than files.
        signed: True to preserve unsigned types; see :func:`is_sign_shown`.

    Raises:
        LoadFailed: the file format does not support the tensor.
    """
    kind = format_tool_type(spec.dtype, array.shape, signed=signed)
    if is_number(spec) and as_text:
        return Given(_format_scalar(array), kind, "")
    npy = tensors == "npy" or (tensors == "auto" and array.dtype.kind == "c")
    file = f"{stem}.{'npy' if npy else 'bin'}"
    if npy:
        check_npy_support(spec)
        save_npy(local / file, array)
    else:
        (local / file).write_bytes(pack(array).data if spec.dtype in SUB_BYTE_BITS else to_bytes(array))
    return Given(f"@{remote}/{file}" if npy else f"{kind}=@{remote}/{file}", kind, file)


def check_npy_support(spec: TensorSpec) -> None:
    """Check that .npy supports the dtype. Raises LoadFailed otherwise."""
    if spec.dtype not in NUMPY_DTYPES:
        raise LoadFailed(
            f"{spec}: .npy files do not support {spec.dtype}", hint='set tensors = "auto" or "bin" in [runtime]'
        )


def is_sign_shown(declared: str, dtype: str) -> bool:
    """Return True if the tools report an output's integers as unsigned.

    The tools do so only for programs from sources with unsigned types (StableHLO's ``ui8``). IREE declares such an
    output as ``i8``, but returns an unsigned type. In all other programs, integers are signless.

    Args:
        declared: dtype that the program declares for the output.
        dtype: dtype that the program returned.
    """
    return bool(declared) and dtype == f"u{declared}"


def format_tool_type(dtype: str, shape: Sequence[int], *, signed: bool = False) -> str:
    """Return a tensor type in the tools' format: ``2x3xf32``. Integers are signless (``i8``) unless ``signed``.

    Raises:
        LoadFailed: MLIR has no type for the dtype.
    """
    try:
        plain = dtype.removeprefix("u") if dtype.startswith("uint") and not signed else dtype
        return format_mlir_type(TensorSpec("", plain, tuple(shape))).removeprefix("tensor<").removesuffix(">")
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
    """Return the command for a profiling pass.

    Args:
        tool: path of the :data:`PROFILE_TOOL`.
        device, function: device to run on, and function to run.
        inputs: values for ``--input=``.
        runs: number of runs. The tool makes no other runs, such as warm-ups.
    """
    operations = _ON_HOST if get_driver(device) in CPU_DRIVERS else _ON_DEVICE
    return [
        tool,
        f"--module={module}",
        f"--device={device}",
        f"--function={function}",
        *(f"--parameters={PARAMETER_SCOPE}={file}" for file in weights),
        *(f"--input={value}" for value in inputs),
        f"--benchmark_min_time={runs}x",
        f"--device_profiling_mode={_EVENTS.format(operations=operations)}",
        f"--device_profiling_output={output}",
    ]


def make_timing_flags(runs: int, output: str) -> list[str]:
    """Return the flags with which the :data:`PROFILE_TOOL` records the time of each run. The tool makes no other runs.

    Args:
        output: the file to write, for :func:`read_times_ns`.
    """
    flags = {"min_time": "1x", "repetitions": runs, "out": output, "out_format": "json"}
    return [f"--benchmark_{name}={value}" for name, value in flags.items()]


def read_times_ns(data: bytes) -> list[int]:
    """Return the time of each run in nanoseconds, in order, from a file written with :func:`make_timing_flags`.

    Raises:
        ValueError: the file is invalid.
    """
    try:
        rows = [row for row in parse_json(data)["benchmarks"] if row["run_type"] == "iteration"]
        times = [round(row["real_time"] * _UNIT_NS[row["time_unit"]]) for row in rows]
    except KeyError as error:
        raise ValueError(f"missing {error}") from error
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"invalid value: {error}") from error
    if any(time_ns not in range(1 << 63) for time_ns in times):
        raise ValueError("invalid time")
    return times


def _format_scalar(array: Array) -> str:
    value = array.item()
    if isinstance(value, bool):
        return str(int(value))
    return str(value) if isinstance(value, int) else f"{value:.17g}"
