"""The IREE runtime: .vmfb programs, on the CPU (local-task, local-sync) or any driver that has a device here."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import iree.runtime as rt
import numpy as np

from hil.agent.runtimes import profiling
from hil.errors import LoadFailed, RunFailed, one_of
from hil.iree_command import (
    NUMBERS,
    PARAMETER_SCOPE,
    PROFILE_FILE,
    PROFILE_TOOL,
    give,
    is_number,
    own_tool,
    profile_command,
)
from hil.iree_values import dtype_of_element, element_of, parse_declaration
from hil.packing import SUB_BYTE_BITS, pack, unpack
from hil.tensors import Array, TensorSpec, dtype_of

DEFAULT_DEVICE = "local-task"
# Below this size a copy is quicker than setting up shared memory as a device buffer.
_IMPORT_FROM = 1 << 16
_ALIGNMENT = 64


class IreeRuntime:
    """Loads .vmfb files with iree-base-runtime; parameters lie beside the program as .irpa files."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._instance = rt.VmInstance()
        self._devices: dict[str, Any] = {}

    @staticmethod
    def describe() -> dict[str, Any]:
        """Version, and the drivers that have a device here."""
        drivers = [name for name in rt.query_available_drivers() if _has_device(name)]
        ordered = sorted(drivers, key=lambda name: (name != DEFAULT_DEVICE, name))
        lacking = "" if own_tool(PROFILE_TOOL) else PROFILE_TOOL
        return {"version": version("iree-base-runtime"), "devices": ordered, "profile_tool": lacking}

    def prepare(self, device: str) -> None:
        """Open a device."""
        name = device or DEFAULT_DEVICE
        if name not in self._devices and name.split("://")[0] in rt.query_available_drivers():
            self._devices[name] = rt.get_device(name, cache=False)

    def load(self, folder: Path, main: str, device: str, function: str) -> IreeProgram:
        """Load a module and look its function up."""
        name = device or DEFAULT_DEVICE
        try:
            self.prepare(name)
        except Exception as error:
            raise LoadFailed(f"IREE cannot open device {name!r}: {error}") from error
        if name not in self._devices:
            raise LoadFailed(f"IREE has no driver for device {name!r}", hint=f"one of {rt.query_available_drivers()}")
        hal_device = self._devices[name]
        path = folder / main
        if path.stat().st_size < 64:
            raise LoadFailed(f"{main} is no .vmfb: it has only {path.stat().st_size} bytes")
        try:
            module = rt.VmModule.mmap(self._instance, str(path))
            modules = [rt.create_hal_module(self._instance, hal_device)]
            parameters = sorted(folder.glob("*.irpa"))
            if parameters:
                index = rt.ParameterIndex()
                for parameter in parameters:
                    index.load(str(parameter))
                provider = index.create_provider(scope=PARAMETER_SCOPE)
                modules.append(rt.create_io_parameters_module(self._instance, provider))
            context = rt.VmContext(self._instance, [*modules, module])
        except Exception as error:
            raise LoadFailed(
                f"IREE refused {main}: {_first_line(error)}", detail=str(error), hint=_hint(error)
            ) from error
        return IreeProgram(hal_device, context, module, function, _Files(name, path, parameters), [*modules, module])


@dataclass(frozen=True)
class _Files:
    """What a program is made of, as a command would load it."""

    device: str
    module: Path
    parameters: list[Path]


class IreeProgram:
    """One function of a loaded module."""

    def __init__(self, device: Any, context: Any, module: Any, function: str, files: _Files, keep: list[Any]) -> None:
        self._files = files
        self._device = device
        self._context = context
        self._keep = keep
        names = [name for name in module.function_names if not name.startswith("__") and "$" not in name]
        chosen = function or (names[0] if len(names) == 1 else "main" if "main" in names else "")
        if chosen not in names:
            wanted = (
                "no function"
                if not names
                else f"no function {function!r}"
                if function
                else "several functions and none chosen"
            )
            raise LoadFailed(f"the module has {wanted}", hint=one_of(names, "--function with one of: "))
        self.function = chosen
        self._function = module.lookup_function(chosen)
        declaration = self._function.reflection.get("iree.abi.declaration", "")
        self.inputs, self.outputs = parse_declaration(declaration)
        self._arguments: Any = None
        self._results: Any = None
        self._bound: list[Any] = []
        self._given: list[Array] = []

    def bind(self, inputs: list[Array]) -> None:
        """Make device buffers of the inputs, without a copy where they are large and aligned."""
        arguments = rt.VmVariantList(len(inputs))
        self._bound = []
        self._given = inputs
        for spec, array in zip(self.inputs, inputs, strict=True):
            if is_number(spec):
                push = arguments.push_float if array.dtype.kind == "f" else arguments.push_int
                push(array.item())
                continue
            view = self._buffer_view(spec, array)
            self._bound.append((view, array))
            arguments.push_ref(view)
        self._arguments = arguments

    def _buffer_view(self, spec: TensorSpec, array: Array) -> Any:
        element = element_of(spec.dtype)
        shape = list(array.shape)
        memory = int(rt.MemoryType.DEVICE_LOCAL | rt.MemoryType.HOST_VISIBLE)
        usage = int(rt.BufferUsage.DEFAULT | rt.BufferUsage.MAPPING)
        allocator = self._device.allocator
        if array.size == 0:
            buffer = allocator.allocate_buffer(memory_type=memory, allowed_usage=usage, allocation_size=0)
            return rt.HalBufferView(buffer, shape, element)
        raw = pack(array) if spec.dtype in SUB_BYTE_BITS else np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if raw.nbytes >= _IMPORT_FROM and raw.ctypes.data % _ALIGNMENT == 0:
            # A device that cannot see host memory refuses, and gets a copy.
            with contextlib.suppress(Exception):
                return rt.HalBufferView(allocator.import_host_allocation(raw, memory, usage), shape, element)
        buffer = allocator.allocate_buffer_copy(
            memory_type=memory, allowed_usage=usage, device=self._device, buffer=raw
        )
        return rt.HalBufferView(buffer, shape, element)

    def run(self) -> None:
        """Invoke the function; IREE's synchronous ABI returns when the results are there."""
        results = rt.VmVariantList(len(self.outputs))
        try:
            self._context.invoke(self._function, self._arguments, results)
        except Exception as error:
            raise RunFailed(f"IREE failed to run {self.function}: {_first_line(error)}", detail=str(error)) from error
        self._results = results

    def profile(self, warmup: int, iterations: int, folder: Path, tool: Path | None) -> list[Path]:
        """Run IREE's own tool on the inputs, in a process of its own: the Python bindings cannot profile."""
        found = own_tool(PROFILE_TOOL) if tool is None else profiling.executable(tool, folder, PROFILE_TOOL)
        if found is None:
            raise RunFailed(f"IREE profiles by the command {PROFILE_TOOL}, which this board does not have")
        for spec in self.inputs:
            if is_number(spec) and spec.dtype not in NUMBERS:
                raise RunFailed(f"{spec}: a command takes no {spec.dtype} numbers, and IREE profiles by a command")
        argv = profile_command(
            str(found),
            str(self._files.module),
            device=self._files.device,
            function=self.function,
            inputs=[
                give(spec, array, f"i{position}", folder, str(folder)).value
                for position, (spec, array) in enumerate(zip(self.inputs, self._given, strict=True))
            ],
            weights=[str(path) for path in self._files.parameters],
            runs=warmup + iterations,
            output=PROFILE_FILE,
        )
        clocks = profiling.ClockPairs(time.monotonic_ns)
        clocks.look()
        profiling.run_command(argv, folder, folder / PROFILE_FILE)
        clocks.look()
        return [folder / PROFILE_FILE, clocks.write(folder)]

    def fetch(self) -> list[Array]:
        """The results as arrays that view the device's buffers where the host can see them."""
        arrays: list[Array] = []
        for position, spec in enumerate(self.outputs):
            if is_number(spec):
                arrays.append(np.asarray(self._results.get_variant(position), dtype_of(spec.dtype)))
                continue
            view = self._results.get_as_object(position, rt.HalBufferView)
            dtype = dtype_of(dtype_of_element(view.element_type, spec.dtype))
            shape = tuple(view.shape)
            count = math.prod(shape)
            if count == 0:
                arrays.append(np.empty(shape, dtype))
                continue
            mapped = np.frombuffer(view.map(), np.uint8)
            if spec.dtype in SUB_BYTE_BITS:
                arrays.append(unpack(mapped, spec.dtype, shape))
            else:
                arrays.append(mapped[: count * dtype.itemsize].view(dtype).reshape(shape))
        return arrays


def _has_device(driver: str) -> bool:
    try:
        return bool(rt.get_driver(driver).query_available_devices())
    except Exception:
        return False


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip()[:400] if lines else type(error).__name__


def _hint(error: Exception) -> str:
    if "INCOMPATIBLE" in str(error) or "no executable" in str(error):
        return "the program was compiled for another CPU or device: check the board's compile flags"
    return ""
