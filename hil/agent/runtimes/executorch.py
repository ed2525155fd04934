"""Run ``.pte`` and ``.bpte`` files with the ExecuTorch Python package, its portable kernels and XNNPACK.

The package needs PyTorch, which takes seconds to import. Both packages are imported only when a program is loaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from hil.agent.runtimes import Check, Runtime
from hil.core.clock import CLOCK_FILE, get_time_ns
from hil.core.files import MAX_MODEL_BYTES, read_file
from hil.core.results import PORTABLE, Part, Placement
from hil.core.tensors import Array, TensorSpec, parse_dtype
from hil.errors import ErrorCode, HilError, LoadFailed, PartMissing, RunFailed, did_you_mean
from hil.formats.etdump import EXECUTE, FILE, read_etdump
from hil.formats.executorch_file import (
    Damaged,
    ExecuTorchMethod,
    Value,
    find_program,
    is_bundle,
    list_tensor_files,
    map_program,
    pick_method,
    read_methods,
)
from hil.formats.torch_values import convert_from_torch, to_torch

DEVICE = "cpu"
# Error codes from ExecuTorch's error.h.
_ERRORS = {
    0x01: "Internal",
    0x02: "InvalidState",
    0x10: "NotSupported",
    0x11: "NotImplemented",
    0x12: "InvalidArgument",
    0x13: "InvalidType",
    0x14: "OperatorMissing",
    0x20: "NotFound",
    0x21: "MemoryAllocationFailed",
    0x22: "AccessFailed",
    0x23: "InvalidProgram",
    0x24: "InvalidExternalData",
    0x25: "OutOfResources",
    0x30: "DelegateInvalidCompatibility",
    0x31: "DelegateMemoryAllocationFailed",
    0x32: "DelegateInvalidHandle",
}
# ExecuTorch's backend reads the path of the OpenVINO library from this environment variable.
_OPENVINO = "OPENVINO_LIB_PATH"
_CODE = re.compile(r"(?:0x:?)([0-9a-f]+)\b", re.IGNORECASE)


class ExecuTorchRuntime(Runtime):
    """Runtime for ExecuTorch programs. The compiler decides which nodes a program delegates."""

    def __init__(self, options: dict[str, Any]) -> None:
        pass

    @staticmethod
    def describe() -> dict[str, Any]:
        """Return the package's version. The CPU is the only device."""
        return {"version": version("executorch"), "devices": [DEVICE]}

    @staticmethod
    def preload() -> None:
        """Import the library and PyTorch, which takes seconds, so that forked workers do not have to."""
        _import_library()

    def load(self, folder: Path, main: str, device: str, function: str) -> ExecuTorchProgram:
        """Load method ``function`` of a program. "" selects the only method, or ``forward``."""
        if device not in ("", DEVICE):
            raise LoadFailed(f"unsupported ExecuTorch device {device!r}", hint=f"supported: {DEVICE}")
        library = _import_library()
        try:
            data = map_program(folder / main)
            methods = read_methods(data)
            method = pick_method(methods, function)
            if method is None:
                raise LoadFailed(
                    f"method {function!r} not found in {main}" if function else f"{main} has {len(methods)} methods",
                    hint=f"{did_you_mean(function, methods)}use --function with one of: {', '.join(methods) or 'none'}",
                    option="--function",
                )
            _check_needs(library, main, method)
            checked: dict[str, Any] = {"program_verification": library.Verification.InternalConsistency}
            tensors = next(iter(list_tensor_files(folder)), None)
            if tensors is not None:
                checked["data_path"] = str(tensors)
            if is_bundle(data):
                held = bytes(find_program(data))
                program = library._load_program_from_buffer(held, **checked)
            else:
                held = b""
                program = library._load_program(str(folder / main), **checked)
            return ExecuTorchProgram((held, program), method, folder / main, tensors)
        except Damaged as error:
            raise LoadFailed(f"ExecuTorch cannot load {main}: {error}") from error
        except RuntimeError as error:
            raise LoadFailed(f"ExecuTorch cannot load {main}: {_format_error(error)}") from error


class ExecuTorchProgram:
    """Loaded method.

    Args:
        held: the program's bytes (empty if loaded from a file) and the program, which points into them. Both must
            outlive the method.
        method: description of the method.
        file: file of the program.
        tensors: file with external tensors, or None.
    """

    def __init__(self, held: tuple[bytes, Any], method: ExecuTorchMethod, file: Path, tensors: Path | None) -> None:
        self._held = held
        self._file = file
        self._tensors = tensors
        self._loaded = held[1].load_method(method.name)
        self._method = method
        self._has_run = False
        self.function = method.name
        self._taken, self.inputs = _split_places(method.list_input_specs())
        self._given, self.outputs = _split_places(method.list_output_specs())
        self._arguments: list[Any] = [value.constant for value in method.inputs]
        self._placed = _read_placement(method)

    def bind(self, inputs: list[Array]) -> None:
        """Create tensors with the memory layout that the program expects.

        The library does not check the layout. With a different layout, it would silently read wrong values.
        """
        for place, spec, array in zip(self._taken, self.inputs, inputs, strict=True):
            self._arguments[place] = _make_tensor(spec.name, array, self._method.inputs[place])

    def renew(self) -> None:
        """Reload a method that writes to its buffers, because ExecuTorch cannot reset them."""
        if self._has_run and self._method.writers:
            self._loaded = self._held[1].load_method(self._method.name)

    def run(self) -> None:
        """Run the method.

        The inputs are set before every run, because the method may reuse the memory of inputs that it has read.
        """
        self._has_run = True
        try:
            self._loaded.set_inputs(self._arguments)
            self._loaded.execute()
        except RuntimeError as error:
            raise RunFailed(f"ExecuTorch failed to run {self.function}: {_format_error(error)}") from error

    def profile(self, warmup: int, iterations: int, folder: Path, tool: Path | None, check: Check) -> list[Path]:
        """Profile a separate instance of the method, so that event tracing does not slow down normal runs."""
        program = bytes(find_program(map_program(self._file)))
        weights = [read_file(self._tensors, MAX_MODEL_BYTES)] if self._tensors else []
        written = folder / FILE
        try:
            module = _import_library()._load_for_executorch_from_buffer(program, *weights, enable_etdump=True)
            if not module.has_etdump():
                raise RunFailed("this build of ExecuTorch's runtime cannot write an ETDump")
            before = get_time_ns()
            for _ in range(warmup + iterations):
                outputs = module.run_method(self.function, self._arguments, clone_outputs=False)
                if not self._method.writers:  # this instance retains the state between runs
                    check(self._collect_arrays(outputs))
            after = get_time_ns()
            module.write_etdump_result_to_file(str(written))
            runs = [event for event in read_etdump(map_program(written)) if event.name == EXECUTE]
        except RuntimeError as error:
            raise RunFailed(f"ExecuTorch failed to profile {self.function}: {_format_error(error)}") from error
        except Damaged as error:
            raise RunFailed(f"ExecuTorch wrote an invalid profile: {error}") from error
        # The profiler's clock is not readable, so pair it with the start and end times of the runs.
        clock = folder / CLOCK_FILE
        clock.write_text(json.dumps({"pairs": [(runs[0].start, before), (runs[-1].end, after)] if runs else []}))
        return [written, clock]

    def placement(self) -> Placement:
        """Return the number of calls for every backend and for ExecuTorch's kernels. Each call counts as a node."""
        return self._placed

    def fetch(self) -> list[Array]:
        """Return copies of the last outputs: the next run writes to the same memory."""
        return self._collect_arrays(self._loaded.get_outputs(clone_outputs=True))

    def _collect_arrays(self, found: Any) -> list[Array]:
        return [
            np.asarray(found[place], parse_dtype(spec.dtype))
            if isinstance(found[place], int | float)
            else convert_from_torch(found[place])
            for place, spec in zip(self._given, self.outputs, strict=True)
        ]


def _read_placement(method: ExecuTorchMethod) -> Placement:
    """Return a part for every backend, and a part for ExecuTorch's kernels (``elsewhere`` if a backend exists)."""
    calls = Counter(backend for backend, _ in method.calls if backend)
    parts = [Part(name, count) for name, count in calls.items()]
    if own := [operator for backend, operator in method.calls if not backend]:
        parts.append(Part.of(PORTABLE, own, elsewhere=bool(calls)))
    return tuple(parts)


def _split_places(specs: list[tuple[int, TensorSpec]]) -> tuple[list[int], tuple[TensorSpec, ...]]:
    return [place for place, _ in specs], tuple(spec for _, spec in specs)


def _import_library() -> Any:
    """Import the package's library.

    ``executorch.extension.pybindings.portable_lib`` exports the library, but would also import the exporter.
    """
    _find_openvino()
    try:
        import torch  # noqa: F401 (it loads the libraries that the next one needs)
        from executorch.extension.pybindings import _C
    except (ImportError, OSError, RuntimeError) as error:
        raise LoadFailed(
            f"cannot import ExecuTorch on this board: {error}", hint="pip install torch executorch"
        ) from error
    return _C


def _find_openvino() -> None:
    """Set the path of the OpenVINO library for ExecuTorch's backend, if installed, as ``portable_lib`` does."""
    spec = None if os.environ.get(_OPENVINO) else importlib.util.find_spec("openvino")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for library in sorted(Path(folder, "libs").glob("libopenvino_c.so*")):
            os.environ[_OPENVINO] = str(library)


def _check_needs(library: Any, main: str, method: ExecuTorchMethod) -> None:
    """Raise PartMissing with the names of missing backends and operators.

    The library reports only an error code.
    """
    if lacking := [name for name in method.backends if not library._is_available(name)]:
        there = [name for name in library._get_registered_backend_names() if library._is_available(name)]
        raise PartMissing(
            f"{main} delegates to {' and '.join(lacking)}, which this board's ExecuTorch does not contain",
            code=ErrorCode.BACKEND_MISSING,
            hint=f"available backends: {', '.join(there) or 'none'}; compile the model for one of them, or with "
            "--backend=portable",
        )
    known = set(library._get_operator_names())
    if lacking := [name for name in method.operators if name not in known]:
        raise PartMissing(
            f"{main} calls {', '.join(lacking)}, which this board's ExecuTorch does not contain",
            hint="export the model with PyTorch's core operators only",
        )


def _make_tensor(name: str, array: Array, value: Value) -> Any:
    if value.dynamic and any(size > most for size, most in zip(array.shape, value.sizes, strict=True)):
        most = "x".join(map(str, value.sizes))
        raise RunFailed(f"{name} is {'x'.join(map(str, array.shape))}, but the program accepts at most {most}")
    try:
        return to_torch(array, value.order)
    except HilError as error:
        raise RunFailed(f"{name}: {error.message}") from error


def _format_error(error: RuntimeError) -> str:
    """Return the library's message, followed by the name of the error code."""
    code = _CODE.search(str(error))
    name = _ERRORS.get(int(code[1], 16), "") if code else ""
    return f"{error} {name}".rstrip()
