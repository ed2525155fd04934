"""Signatures of programs, and conversion of tensors to command arguments and files.

hil reads the signature on the host from the program's file, since loading the program would need a device. For the
format of inputs see :mod:`hil.formats.iree_command`. Outputs are .npy files, which contain dtype and shape, if
iree-run-module can write the dtype as .npy. Otherwise outputs are .bin files. If the dtype is unknown, hil requests
.npy files, and the run fails for other dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.storage.isolation.isolated import Isolated, IsolatedError
from hil.core import tensors
from hil.core.board_config import RuntimeCommand, fill
from hil.core.files import MAX_MODEL_BYTES, read_file
from hil.core.narrow_integers import is_narrowed, narrow_specs
from hil.core.npy import load_npy
from hil.core.results import Artifact
from hil.core.tensors import SUB_BYTE_BITS, Array, TensorSpec, get_dtype_name, parse_dtype, settle_spec
from hil.errors import LoadFailed, RunFailed, UsageError
from hil.formats.iree_command import NUMBERS, give, is_number
from hil.formats.iree_values import choose_function, decode_functions, read_functions

_READ_SECONDS = 60.0


@dataclass(frozen=True)
class CommandSignature:
    """Signature of a function for a command."""

    function: str
    # Tensor specs in order. The name of a scalar number begins with ``scalar:``.
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def read_signature(artifact: Artifact, isolated: Isolated, log: Path, *, needs_own: bool) -> CommandSignature:
    """Return a program's signature: from the IREE module if this host can read it, else from the import.

    Reads the module in an isolated process, because a damaged file may crash that process. With ``needs_own``, an
    unreadable module is an error instead of a fallback to the import.

    Raises:
        LoadFailed: The module is damaged or lacks the function, or inputs and outputs are unknown.
    """
    path = str(artifact.files[artifact.main].absolute())
    try:
        described = isolated.call(read_functions, {"path": path}, timeout=_READ_SECONDS, log=log)
        chosen = choose_function(decode_functions(described), artifact.function)
        return CommandSignature(chosen.name, *chosen.make_signature())
    except (IsolatedError, LoadFailed) as error:
        if not needs_own and artifact.inputs is not None and artifact.outputs is not None:
            narrow = narrow_specs if is_narrowed(artifact.flags) else tuple
            return CommandSignature(artifact.function, narrow(artifact.inputs), narrow(artifact.outputs))
        if isinstance(error, LoadFailed):
            raise
        what = f"IREE cannot read the program {artifact.main}: {error.message}"
        raise LoadFailed(what, detail=error.detail) from error


def check_signature(signature: CommandSignature, command: RuntimeCommand) -> None:
    """Check before the run that the command supports all tensors. Raises LoadFailed otherwise."""
    tensors.check_names(signature.inputs, signature.outputs)
    for spec in (*signature.inputs, *signature.outputs):
        if is_number(spec) and spec.dtype not in NUMBERS:
            raise LoadFailed(f"{spec}: {spec.dtype} numbers are unsupported for commands", hint=_AGENT)
        if spec.dtype == "string":
            raise LoadFailed(f"{spec}: strings are unsupported for commands", hint=_AGENT)
    for spec in signature.outputs:
        if _choose_extension(spec, command) != "bin":
            continue
        if not spec.dtype:
            raise LoadFailed(
                f"{spec}: the command writes the elements of this output but not the dtype",
                hint='set tensors = "auto" or "npy" in [runtime], or use a board with an agent',
            )
        if sum(not isinstance(dim, int) for dim in spec.shape) > 1:
            raise LoadFailed(
                f"{spec}: the command writes the elements of this {spec.dtype} output but not the shape",
                hint="fix the dimensions with --dim NAME=SIZE, or use a board with an agent",
            )


def write_inputs(
    signature: CommandSignature, inputs: Mapping[str, Array], command: RuntimeCommand, local: Path, remote: str
) -> tuple[list[str], list[str]]:
    """Write inputs as files into a local directory. Return an argument per input, and the file names."""
    arguments: list[str] = []
    files: list[str] = []
    how: dict[str, Any] = {"tensors": command.tensors, "as_text": "{file}" not in command.input}
    for position, (spec, array) in enumerate(zip(signature.inputs, inputs.values(), strict=True)):
        given = give(settle_spec(spec, array), array, f"i{position}", local, remote, **how)
        files += filter(None, [given.file])
        path = f"{remote}/{given.file}" if given.file else ""
        arguments.append(fill(command.input, {"value": given.value, "type": given.type, "file": path}))
    return arguments, files


def name_output_files(signature: CommandSignature, command: RuntimeCommand) -> list[str]:
    """Return the file names of the outputs, in order."""
    return [f"o{position}.{_choose_extension(spec, command)}" for position, spec in enumerate(signature.outputs)]


def read_output(spec: TensorSpec, file: Path) -> Array:
    """Read an output from the command's file. Raises RunFailed if the content does not match the spec."""
    try:
        if file.suffix == ".npy":
            return _convert_npy(spec, load_npy(file, spec.dtype))
        return _convert_elements(spec, read_file(file, MAX_MODEL_BYTES))
    except UsageError as error:
        raise RunFailed(f"cannot read output {spec.name!r}: {error.message}") from error
    except MemoryError as error:
        raise RunFailed(f"cannot read output {spec.name!r}: the stated size exceeds memory") from error


def _convert_npy(spec: TensorSpec, array: Array) -> Array:
    get_dtype_name(array.dtype)  # raises for a dtype that hil does not support
    if not spec.dtype:
        return array
    wanted = parse_dtype(spec.dtype)
    if is_number(spec) and array.size == 1 and (array.dtype.kind == "f") == (wanted.kind == "f"):
        # The command returns a scalar in the type of its ABI, which is at least as wide as the wanted type.
        return np.asarray(array.reshape(()).astype(wanted))
    same_bits = array.dtype.itemsize == wanted.itemsize and {array.dtype.kind, wanted.kind} == {"i", "u"}
    # The command writes types without a sign as signed types. The spec contains the actual type.
    return array.view(wanted) if same_bits else array


def _convert_elements(spec: TensorSpec, data: bytes) -> Array:
    known = math.prod(dim for dim in spec.shape if isinstance(dim, int))
    bits = SUB_BYTE_BITS.get(spec.dtype, parse_dtype(spec.dtype).itemsize * 8)
    count = len(data) * 8 // bits
    unknown = count // known if known else 0
    shape = [dim if isinstance(dim, int) else unknown for dim in spec.shape]
    elements = math.prod(shape)
    if -(-elements * bits // 8) != len(data):
        raise RunFailed(f"output {spec.name!r} has {len(data)} bytes, which does not match {spec}")
    if spec.dtype in SUB_BYTE_BITS:
        return tensors.unpack(np.frombuffer(data, np.uint8), spec.dtype, shape)
    return tensors.from_bytes(data, spec.dtype, shape)


def _choose_extension(spec: TensorSpec, command: RuntimeCommand) -> str:
    if command.tensors != "auto":
        return command.tensors
    return "npy" if is_number(spec) or spec.dtype in (*tensors.NUMPY_DTYPES, "") else "bin"


_AGENT = "use a board with an agent"
