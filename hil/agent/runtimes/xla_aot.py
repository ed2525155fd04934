"""Run shared libraries that XLA compiled ahead of time (tfcompile). The board needs no TensorFlow."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import Any

import numpy as np

from hil.agent.runtimes import Runtime
from hil.core.files import MAX_MODEL_BYTES, open_file, read_file
from hil.core.results import Part, Placement
from hil.core.tensors import Array, from_bytes
from hil.errors import LoadFailed, RunFailed
from hil.formats.xla_program import ABI, LibrarySignature, compute_size, find_values, read_signature, shape_of

DEFAULT_DEVICE = "cpu"
# Alignment that XLA's code requires for arguments, in bytes.
_ALIGNMENT = 64
# Machine number in an ELF header -> name of the machine in `uname -m`.
_MACHINES = {0x3E: "x86_64", 0xB7: "aarch64", 0xF3: "riscv64", 0x28: "arm", 0x03: "i386"}
_PLACED = (Part(DEFAULT_DEVICE),)
_CALLS: dict[str, tuple[list[Any], Any]] = {
    "hil_xla_signature": ([], ctypes.c_char_p),
    "hil_xla_new": ([], ctypes.c_void_p),
    "hil_xla_argument_size": ([ctypes.c_void_p, ctypes.c_int], ctypes.c_int64),
    "hil_xla_result_size": ([ctypes.c_void_p, ctypes.c_int], ctypes.c_int64),
    "hil_xla_set": ([ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p], None),
    "hil_xla_run": ([ctypes.c_void_p], ctypes.c_int),
    "hil_xla_result": ([ctypes.c_void_p, ctypes.c_int], ctypes.c_void_p),
}


class XlaAotRuntime(Runtime):
    """Runtime for shared libraries compiled for this machine. The libraries use one CPU thread."""

    def __init__(self, options: dict[str, Any]) -> None:
        pass

    @staticmethod
    def describe() -> dict[str, Any]:
        """Return the ABI version. Programs depend on nothing else."""
        return {"version": str(ABI), "devices": [DEFAULT_DEVICE]}

    def load(self, folder: Path, main: str, device: str, function: str) -> XlaAotProgram:
        """Load the library and, if present, the file with the initial values of the variables."""
        if device not in ("", DEFAULT_DEVICE):
            raise LoadFailed(f"unsupported xla-aot device {device!r}", hint=f"supported: {DEFAULT_DEVICE}")
        path = folder / main
        _check_machine(path)
        try:
            library = ctypes.CDLL(str(path.absolute()))
            for name, (arguments, result) in _CALLS.items():
                call = getattr(library, name)
                call.argtypes, call.restype = arguments, result
        except (OSError, AttributeError) as error:
            text = str(error).replace(f"{folder.absolute()}/", "")
            raise LoadFailed(f"cannot load the library {main}: {text}") from error
        try:
            signature = read_signature(library.hil_xla_signature().decode())
        except ValueError as error:
            raise LoadFailed(f"{main}: {error}", hint="recompile the program with this version of hil") from error
        if function and function != signature.function:
            raise LoadFailed(f"function {function!r} not found in {main}", hint=f"available: {signature.function!r}")
        return XlaAotProgram(library, signature, find_values(path))


class XlaAotProgram:
    """The only function of a library.

    The function assigns variables in place. Even so, every run starts from the same values: the values in the file next
    to the library, or the values passed as inputs.
    """

    def __init__(self, library: Any, signature: LibrarySignature, values: Path | None) -> None:
        self._library = library
        self._signature = signature
        outside = values is None
        self.function = signature.function
        self.inputs = signature.inputs(variables=outside)
        self.outputs = signature.list_results()
        self._handle = library.hil_xla_new()
        self._check_sizes()
        # Memory of the arguments, allocated here or by the caller.
        self._arguments: list[Array] = []
        # Buffers that a run changes, with their content before each run.
        self._restored: list[tuple[Array, Array]] = []
        try:
            self._values = list(signature.values(read_file(values, MAX_MODEL_BYTES)).values()) if values else []
        except ValueError as error:
            raise LoadFailed(str(error)) from error

    def _check_sizes(self) -> None:
        signature = self._signature
        for kind, specs, told_size in (
            ("argument", signature.inputs(variables=True), self._library.hil_xla_argument_size),
            ("result", signature.list_results(), self._library.hil_xla_result_size),
        ):
            for number, spec in enumerate(specs):
                size, expected = told_size(self._handle, number), compute_size(spec)
                if size != expected:
                    raise LoadFailed(f"{kind} {spec} of the program has {size} bytes, expected {expected}")

    def bind(self, inputs: list[Array]) -> None:
        """Set the arguments, without a copy if the array is aligned and read-only for the function."""
        given = [*inputs, *self._values]
        self._arguments, self._restored = [], []
        for number, (argument, array) in enumerate(zip(self._signature.arguments, given, strict=True)):
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            if argument.assigned or raw.ctypes.data % _ALIGNMENT:
                raw, source = _allocate_aligned(raw.nbytes), raw
                raw[:] = source
                if argument.assigned:
                    self._restored.append((raw, source))
            self._arguments.append(raw)
            self._library.hil_xla_set(self._handle, number, raw.ctypes.data)

    def renew(self) -> None:
        """Reset the variables to their initial values."""
        for buffer, source in self._restored:
            buffer[:] = source

    def run(self) -> None:
        """Call the function."""
        if not self._library.hil_xla_run(self._handle):
            raise RunFailed(f"{self.function} reported an error", hint="XLA does not report the cause")

    def placement(self) -> Placement:
        """Return the CPU as the only part."""
        return _PLACED

    def fetch(self) -> list[Array]:
        """Return the results as views of XLA's memory, valid until the next run."""
        arrays = []
        for number, spec in enumerate(self.outputs):
            size = compute_size(spec)
            where = self._library.hil_xla_result(self._handle, number)
            data = (ctypes.c_uint8 * size).from_address(where) if size else b""
            arrays.append(from_bytes(data, spec.dtype, shape_of(spec)))
        return arrays


def _check_machine(path: Path) -> None:
    with open_file(path) as file:
        head = file.read(20)
    if head[:4] != b"\x7fELF" or len(head) < 20:
        raise LoadFailed(f"{path.name} is not a Linux shared library")
    number = int.from_bytes(head[18:20], "little")
    machine, here = _MACHINES.get(number, f"machine {number}"), platform.machine()
    if machine != here:
        raise LoadFailed(
            f"the program was compiled for {machine}, but this board is {here}",
            hint=f"--compile-flag=--target-triple={here}-unknown-linux-gnu",
        )


def _allocate_aligned(size: int) -> Array:
    whole = np.empty(size + _ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % _ALIGNMENT
    return whole[start : start + size]
