"""What a program takes and gives, and its tensors as a command takes and gives them: an argument and a file for each.

The signature is read from the program's file on the host: loading it needs a device, reading it does not. Inputs are as
:mod:`hil.formats.iree_command` writes them; outputs are .npy, which keeps dtype and shape, where iree-run-module knows
the dtype, else .bin. Where nobody knows it beforehand they are .npy, which then has no name for some dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.storage.isolated import Isolated, IsolatedError
from hil.core import tensors
from hil.core.board_config import RuntimeCommand, fill
from hil.core.npy import load_npy
from hil.core.results import Artifact
from hil.core.tensors import SUB_BYTE_BITS, Array, TensorSpec, dtype_name, dtype_of, settled, type_text
from hil.errors import LoadFailed, RunFailed, UsageError
from hil.formats.iree_command import NUMBERS, give, is_number
from hil.formats.iree_values import choose_function, functions_in, read_functions

_READ_S = 60.0


@dataclass(frozen=True)
class Signature:
    """A function as a command calls it."""

    function: str
    # inputs, outputs: its tensors, in order; the name of a bare number begins with ``scalar:``.
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def signature_of(artifact: Artifact, isolated: Isolated, log: Path, *, needs_own: bool) -> Signature:
    """A program's signature: its own where it is an IREE module that this host can read, else what import said.

    It is read in an isolated process: a damaged file may cost that process its life. With ``needs_own`` a module that
    cannot be read is refused; else what is known from the import will do.

    Raises:
        LoadFailed: the module is damaged or has no such function, or nothing is known of its inputs and outputs.
    """
    path = str(artifact.files[artifact.main].absolute())
    try:
        described = isolated.call(read_functions, {"path": path}, timeout=_READ_S, log=log)
        chosen = choose_function(functions_in(described), artifact.function)
        return Signature(chosen.name, *chosen.signature())
    except (IsolatedError, LoadFailed) as error:
        if not needs_own and artifact.inputs is not None and artifact.outputs is not None:
            return Signature(artifact.function, tuple(artifact.inputs), tuple(artifact.outputs))
        if isinstance(error, LoadFailed):
            raise
        what = f"{artifact.main} is no program that IREE can read: {error.message}"
        raise LoadFailed(what, detail=error.detail) from error


def check_signature(signature: Signature, command: RuntimeCommand) -> None:
    """Refuse (LoadFailed), before anything is run, what could not come through the command unharmed."""
    tensors.check_names(signature.inputs, signature.outputs)
    for spec in (*signature.inputs, *signature.outputs):
        if is_number(spec) and spec.dtype not in NUMBERS:
            raise LoadFailed(f"{spec}: a command takes no {spec.dtype} numbers", hint=_AGENT)
        if spec.dtype == "string":
            raise LoadFailed(f"{spec}: a command takes no strings", hint=_AGENT)
    for spec in signature.outputs:
        if _extension(spec, command) != "bin":
            continue
        if not spec.dtype:
            raise LoadFailed(
                f"{spec}: the command writes the elements of an output but not its type",
                hint='set tensors = "auto" or "npy" in [runtime], or use a board with an agent',
            )
        if sum(not isinstance(dim, int) for dim in spec.shape) > 1:
            raise LoadFailed(
                f"{spec}: the command writes the elements of a {spec.dtype} output but not its shape",
                hint="fix the dimensions with --dim NAME=SIZE, or use a board with an agent",
            )


def check_inputs(function: str, specs: Sequence[TensorSpec], inputs: Mapping[str, Array]) -> None:
    """Refuse (UsageError) inputs that the function does not take, as an agent does."""
    if len(inputs) != len(specs):
        raise UsageError(f"{function} takes {len(specs)} inputs, got {len(inputs)}")
    for spec, array in zip(specs, inputs.values(), strict=True):
        found = dtype_name(array.dtype)
        if not spec.accepts(found, array.shape):
            raise UsageError(f"{spec} does not take a {type_text(found, array.shape)} tensor")


def fits(specs: Sequence[TensorSpec], inputs: Mapping[str, Array]) -> bool:
    """Whether inputs are what these specs take."""
    return len(specs) == len(inputs) and all(
        spec.accepts(dtype_name(array.dtype), array.shape) for spec, array in zip(specs, inputs.values(), strict=True)
    )


def write_inputs(
    signature: Signature, inputs: Mapping[str, Array], command: RuntimeCommand, local: Path, remote: str
) -> tuple[list[str], list[str]]:
    """Write inputs as files into a local folder; returns the command's arguments, one an input, and the names."""
    arguments: list[str] = []
    files: list[str] = []
    how: dict[str, Any] = {"tensors": command.tensors, "as_text": "{file}" not in command.input}
    for position, (spec, array) in enumerate(zip(signature.inputs, inputs.values(), strict=True)):
        given = give(settled(spec, array), array, f"i{position}", local, remote, **how)
        files += filter(None, [given.file])
        path = f"{remote}/{given.file}" if given.file else ""
        arguments.append(fill(command.input, {"value": given.value, "type": given.type, "file": path}))
    return arguments, files


def output_files(signature: Signature, command: RuntimeCommand) -> list[str]:
    """The names of the files that the outputs are written to, in order."""
    return [f"o{position}.{_extension(spec, command)}" for position, spec in enumerate(signature.outputs)]


def read_output(spec: TensorSpec, file: Path) -> Array:
    """An output from the file that the command wrote; raises RunFailed where it does not hold just that."""
    try:
        if file.suffix == ".npy":
            return _from_npy(spec, load_npy(file, spec.dtype))
        return _from_elements(spec, file.read_bytes())
    except UsageError as error:
        raise RunFailed(f"output {spec.name!r} cannot be read: {error.message}") from error
    except MemoryError as error:
        raise RunFailed(f"output {spec.name!r} cannot be read: it says that it is larger than memory") from error


def _from_npy(spec: TensorSpec, array: Array) -> Array:
    dtype_name(array.dtype)  # one that hil knows
    if not spec.dtype:
        return array
    wanted = dtype_of(spec.dtype)
    if is_number(spec) and array.size == 1 and (array.dtype.kind == "f") == (wanted.kind == "f"):
        # A number comes back in the type that the command's ABI gives it, which is as wide or wider.
        return np.asarray(array.reshape(()).astype(wanted))
    same_bits = array.dtype.itemsize == wanted.itemsize and {array.dtype.kind, wanted.kind} == {"i", "u"}
    # Elements without a sign are written as if they had one: the function says which they are.
    return array.view(wanted) if same_bits else array


def _from_elements(spec: TensorSpec, data: bytes) -> Array:
    known = math.prod(dim for dim in spec.shape if isinstance(dim, int))
    bits = SUB_BYTE_BITS.get(spec.dtype, dtype_of(spec.dtype).itemsize * 8)
    count = len(data) * 8 // bits
    unknown = count // known if known else 0
    shape = [dim if isinstance(dim, int) else unknown for dim in spec.shape]
    elements = math.prod(shape)
    if -(-elements * bits // 8) != len(data):
        raise RunFailed(f"output {spec.name!r} has {len(data)} bytes, which {spec} does not take")
    if spec.dtype in SUB_BYTE_BITS:
        return tensors.unpack(np.frombuffer(data, np.uint8), spec.dtype, shape)
    return tensors.from_bytes(data, spec.dtype, shape)


def _extension(spec: TensorSpec, command: RuntimeCommand) -> str:
    if command.tensors != "auto":
        return command.tensors
    return "npy" if is_number(spec) or spec.dtype in (*tensors.NUMPY_DTYPES, "") else "bin"


_AGENT = "only an agent on the board can pass it"
