"""Run .vmfb programs with IREE, on the CPU (local-task, local-sync) or any driver with a device on this machine."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import iree.runtime as rt
import numpy as np

from hil.agent.runtimes import Check, ClockPairs, run_command
from hil.agent.runtimes.iree_devices import OpenedDevice, get_first_line, list_devices, open_device
from hil.core.files import copy_file, open_file
from hil.core.installed import get_version
from hil.core.results import Part, Placement
from hil.core.tensors import Array, TensorSpec, parse_dtype, settle_spec, to_bytes
from hil.errors import ErrorCode, LoadFailed, RunFailed, did_you_mean
from hil.formats.gpu_programs import find_mismatch, read_targets
from hil.formats.iree_buffers import counts_memory, make_shared_view, read_array, view_of
from hil.formats.iree_command import (
    NUMBERS,
    PARAMETER_SCOPE,
    PROFILE_FILE,
    PROFILE_TOOL,
    give,
    is_number,
    own_tool,
    profile_command,
)
from hil.formats.iree_devices import CPU_DRIVERS, get_driver, rejects_empty_tensors
from hil.formats.iree_errors import find_missing_device, load_error
from hil.formats.iree_state import has_state
from hil.formats.iree_values import choose_function, list_module_functions

DEFAULT_DEVICE = "local-task"


class IreeRuntime:
    """Runtime for .vmfb files with iree-base-runtime. Parameters are .irpa files in the program's directory."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._instance = rt.VmInstance()
        self._devices: dict[str, OpenedDevice] = {}

    @staticmethod
    def describe() -> dict[str, Any]:
        """Return the version and the drivers that have a device here."""
        found = list_devices()
        ordered = sorted(found, key=lambda name: (name != DEFAULT_DEVICE, name))
        return {
            "version": get_version("iree-base-runtime"),
            "devices": ordered,
            "device_details": [device for name in ordered for device in found[name]],
            "profile_tool": "" if own_tool(PROFILE_TOOL) else PROFILE_TOOL,
        }

    def prepare(self, device: str) -> None:
        """Open a device.

        Raises:
            LoadFailed: the device is missing, or the name is ambiguous.
        """
        name = device or DEFAULT_DEVICE
        if name not in self._devices and get_driver(name) in rt.query_available_drivers():
            self._devices[name] = open_device(name)

    def load(self, folder: Path, main: str, device: str, function: str) -> IreeProgram:
        """Load a module and look up the function."""
        name = device or DEFAULT_DEVICE
        try:
            self.prepare(name)
        except LoadFailed:
            raise
        except Exception as error:
            raise LoadFailed(f"IREE cannot open device {name!r}: {error}") from error
        if name not in self._devices:
            drivers = rt.query_available_drivers()
            raise LoadFailed(
                f"IREE driver for device {name!r} not found",
                hint=f"{did_you_mean(get_driver(name), drivers)}available: {', '.join(drivers)}",
            )
        opened = self._devices[name]
        hal_device = opened.device
        path = folder / main
        if path.stat().st_size < 64:
            raise LoadFailed(f"{main} is not a .vmfb file: it has only {path.stat().st_size} bytes")
        try:
            # VmModule.mmap opens the file for writing, which fails in a sandbox.
            with open_file(path) as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            _refuse_mismatch(content, main, name, opened.details)
            module = rt.VmModule.wrap_buffer(self._instance, content)
            modules = [rt.create_hal_module(self._instance, hal_device)]
            # In a process that was just forked, `glob` takes 0.4 ms because the kernel copies each touched page.
            parameters = sorted(path for path in folder.iterdir() if path.suffix == ".irpa")
            if parameters:
                index = rt.ParameterIndex()
                for parameter in parameters:
                    index.load(str(parameter))
                provider = index.create_provider(scope=PARAMETER_SCOPE)
                modules.append(rt.create_io_parameters_module(self._instance, provider))
            modules.append(module)

            def open_context() -> Any:
                return rt.VmContext(self._instance, modules)

            context = open_context()
        except LoadFailed:
            raise
        except Exception as error:
            targets = read_targets(memoryview(content)) if get_driver(name) in CPU_DRIVERS else []
            wanted = targets[0].driver if targets else find_missing_device(str(error))
            is_cpu = wanted == "local"
            # A program for another kind of CPU also reports a missing CPU.
            if wanted and wanted != get_driver(name) and not (is_cpu and get_driver(name) in CPU_DRIVERS):
                built = "the CPU" if is_cpu else f"{wanted} ({targets[0].arch})" if targets else wanted
                raise LoadFailed(
                    f"{main} was compiled for {built}, not for device {name!r}",
                    hint=f"select the program's device: --device {DEFAULT_DEVICE if is_cpu else wanted}; or compile "
                    "the model again for this device",
                ) from error
            message = f"IREE cannot load {main}: {get_first_line(error)}"
            raise load_error(message, str(error), detail=str(error)) from error
        reopen = open_context if has_state(memoryview(content)) else None
        return IreeProgram(
            hal_device, context, reopen, module, function, _Files(opened.details["id"] or name, path, parameters)
        )


@dataclass(frozen=True)
class _Files:
    """Device, module and parameter files of a program, for the profiling command."""

    device: str
    module: Path
    parameters: list[Path]


class IreeProgram:
    """Function of a loaded module.

    Args:
        device: opened HAL device.
        context: VM context with the module.
        reopen: creates a context with the initial state; None for a module without state.
        module: the VM module.
        function: name of the function.
        files: files of the program.
    """

    profile_has_outputs = False

    def __init__(
        self,
        device: Any,
        context: Any,
        reopen: Callable[[], Any] | None,
        module: Any,
        function: str,
        files: _Files,
    ) -> None:
        self._files = files
        self._device = device
        self._placed = _describe_device(device, get_driver(files.device))
        self._context = context
        self._reopen = reopen
        self._module = module
        entry = choose_function(list_module_functions(module), function)
        self.function = entry.name
        self.rejects_empty = rejects_empty_tensors(files.device)
        self.inputs, self.outputs = entry.make_signature()
        self._fences = entry.fences
        self._function = module.lookup_function(entry.name)
        self._arguments: list[Any] = []
        self._list: Any = None
        self._results: Any = None
        self._given: list[Array] = []
        self._is_all_shared = False
        # Indices of inputs with device copies that a run changed; None before the first run with them.
        self._changed: list[int] | None = None
        self._has_run = self._has_run_bound = False
        self._counts_memory: bool | None = None  # None if not tested

    def __del__(self) -> None:
        """Release the buffers before the device. IREE's Vulkan driver crashes if a buffer outlives its device."""
        self._results = self._list = None
        self._arguments = []
        self._context = self._reopen = None

    def bind(self, inputs: list[Array]) -> None:
        """Create device buffers for the inputs, without a copy if the inputs are large and aligned."""
        self._changed, self._has_run_bound = None, False
        if self._is_all_shared and inputs is self._given:
            return  # the device reads the shared memory, so it reads new content too
        is_all_shared = self._files.device.startswith("local-")  # only CPU devices: others may cache the content
        arguments: list[Any] = []
        self._copied: list[int] = []
        for place, (spec, array) in enumerate(zip(self.inputs, inputs, strict=True)):
            shared = None if is_number(spec) else make_shared_view(self._device, array)
            if shared is None:
                is_all_shared = False
                if is_number(spec):
                    shared = array.item()
                else:
                    shared = view_of(self._device, array)
                    self._copied.append(place)
            arguments.append(shared)
        self._list = _build_arguments(self.inputs, arguments)
        self._arguments, self._given, self._is_all_shared = arguments, inputs, is_all_shared

    def renew(self) -> None:
        """Reset the module's state, and copy inputs that the program changes.

        IREE may compute a result in the memory of an input. The affected inputs are detected after the first run.
        """
        if self._has_run and self._reopen is not None:
            self._context = self._reopen()
        if not self._has_run_bound:
            return
        if self._changed is None:
            self._changed = [place for place in self._copied if not self._is_as_given(place)]
        for place in self._changed:
            self._arguments[place] = view_of(self._device, self._given[place])
        if self._changed:
            self._list = _build_arguments(self.inputs, self._arguments)

    def _is_as_given(self, place: int) -> bool:
        array = read_array(self._device, self._arguments[place], self.inputs[place].dtype)
        return bytearray(to_bytes(array)) == to_bytes(self._given[place])

    def run(self) -> None:
        """Invoke the function and wait for the results. IREE's synchronous ABI waits implicitly."""
        self._has_run_bound = True
        self._results = self._invoke(self._list, self._arguments)

    def _invoke(self, arguments: Any, values: Sequence[Any]) -> Any:
        """Invoke the function.

        Args:
            arguments: argument list, which may be passed repeatedly.
            values: values of the list, for a function that also takes fences.
        """
        self._has_run = True
        results = rt.VmVariantList(len(self.outputs))
        done = None
        if self._fences:
            arguments = _build_arguments(self.inputs, values)
            done = rt.HalFence.create_at(self._device.create_semaphore(0), 1)
            arguments.push_ref(rt.HalFence(0))
            arguments.push_ref(done)
        try:
            self._context.invoke(self._function, arguments, results)
            if done is not None:
                done.wait()
        except Exception as error:
            raise RunFailed(
                f"IREE failed to run {self.function}: {get_first_line(error)}", detail=str(error)
            ) from error
        return results

    def step(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Invoke the function with arrays or buffer views."""
        values = [
            (value.item() if is_number(spec) else view_of(self._device, value))
            if isinstance(value, np.ndarray)
            else value
            for spec, value in zip(self.inputs, inputs, strict=True)
        ]
        results = self._invoke(_build_arguments(self.inputs, values), values)
        return [self._read_value(results, place) for place in range(len(self.outputs))]

    def to_array(self, place: int, value: Any) -> Array:
        """Return a buffer view or a number as an array."""
        spec = self.outputs[place]
        if is_number(spec):
            return np.asarray(value, parse_dtype(spec.dtype))
        return read_array(self._device, value, spec.dtype)

    def open_function(self, name: str) -> IreeProgram:
        """Return another function of the module, with the same state."""
        return IreeProgram(self._device, self._context, self._reopen, self._module, name, self._files)

    def placement(self) -> Placement:
        """Return the opened device, by its IREE name, as the only part."""
        return (self._placed,)

    def get_peak_device_memory(self) -> int | None:
        """Return the peak of the device's allocator, if its statistics contain all memory."""
        if self._counts_memory is None:
            self._counts_memory = counts_memory(self._device)
        return int(self._device.allocator.statistics["device_bytes_peak"]) if self._counts_memory else None

    def profile(self, warmup: int, iterations: int, folder: Path, tool: Path | None, check: Check) -> list[Path]:
        """Profile with IREE's command-line tool in a separate process, because the Python bindings cannot profile.

        The tool does not return outputs, so they are not checked.
        """
        found = own_tool(PROFILE_TOOL)
        if tool is not None:  # a blob from the store may not be executable
            found = copy_file(tool, folder / PROFILE_TOOL)
            found.chmod(0o700)
        if found is None:
            raise RunFailed(f"command {PROFILE_TOOL} not found on this board: IREE needs it for profiling")
        for spec in self.inputs:
            if is_number(spec) and spec.dtype not in NUMBERS:
                raise RunFailed(f"{spec}: IREE's profiling command does not support {spec.dtype} numbers")
        if get_driver(self._files.device) not in CPU_DRIVERS and self._files.device.rpartition("/")[2].isdecimal():
            raise RunFailed(
                f"IREE's profiling command cannot select device {self._files.device}: other devices have the same path"
            )
        argv = profile_command(
            str(found),
            str(self._files.module),
            device=self._files.device,
            function=self.function,
            inputs=[
                give(settle_spec(spec, array), array, f"i{position}", folder, str(folder)).value
                for position, (spec, array) in enumerate(zip(self.inputs, self._given, strict=True))
            ],
            weights=[str(path) for path in self._files.parameters],
            runs=warmup + iterations,
            output=PROFILE_FILE,
        )
        clocks = ClockPairs(time.monotonic_ns)
        clocks.read_clocks()
        run_command(argv, folder, folder / PROFILE_FILE)
        clocks.read_clocks()
        return [folder / PROFILE_FILE, clocks.write(folder)]

    def fetch(self) -> list[Array]:
        """Return the results as arrays.

        If the device's buffers are host-visible, the arrays are views of these buffers.
        """
        return [self.to_array(place, self._read_value(self._results, place)) for place in range(len(self.outputs))]

    def _read_value(self, results: Any, place: int) -> Any:
        """Return result ``place`` as a buffer view or a number."""
        if is_number(self.outputs[place]):
            return results.get_variant(place)
        try:
            return results.get_as_object(place, rt.HalBufferView)
        except Exception as error:
            name = self.outputs[place].name
            raise RunFailed(f"output {name!r} of {self.function} is not a tensor", detail=str(error)) from error


def _describe_device(device: Any, asked: str) -> Part:
    """Return the part for a device. IREE's drivers report the driver's name; vendor drivers may report any name."""
    own = str(device)
    return Part(own, elsewhere=True) if own != asked and own in rt.query_available_drivers() else Part(asked)


def _build_arguments(specs: Sequence[TensorSpec], arguments: Sequence[Any]) -> Any:
    """Build the argument list for a call from buffer views and numbers."""
    pushed = rt.VmVariantList(len(specs) + 2)
    for spec, argument in zip(specs, arguments, strict=True):
        if not is_number(spec):
            pushed.push_ref(argument)
        elif parse_dtype(spec.dtype).kind == "f":
            pushed.push_float(argument)
        else:
            pushed.push_int(argument)
    return pushed


def _refuse_mismatch(program: mmap.mmap, main: str, device: str, opened: dict[str, Any]) -> None:
    """Raise LoadFailed if a program was compiled for another GPU. IREE may run it and return wrong values."""
    reason = find_mismatch(memoryview(program), get_driver(device), opened["properties"])
    if reason:
        raise LoadFailed(
            f"{main} does not fit device {device!r} ({opened['name']}): {reason}",
            hint="select the program's device, or remove the target from the compile flags: hil then compiles for the "
            "device that the board reports",
            code=ErrorCode.WRONG_TARGET,
        )
