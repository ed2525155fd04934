"""IREE on this machine's own CPU: compiled for the host and run with the local-task driver."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hil.bundle import Model
from hil.controller.cache import Cache
from hil.controller.isolated import Isolated
from hil.controller.versions import version
from hil.tensors import Array, TensorSpec

_FLAGS = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
)
_DEVICE = "local-task"


def source() -> str:
    """Who speaks."""
    return f"iree {version('iree-base-compiler')} llvm-cpu"


def compute(
    model: Model,
    inputs: Path,
    outputs: Path,
    *,
    cache: Cache,
    isolated: Isolated,
    recompute: bool,
    timeout: float | None,
    log: Path,
) -> None:
    """Compile the model for the host and run it in an isolated process."""
    from hil.controller.compilers.iree import PARAMETERS, compile_iree

    artifact = compile_iree(
        model,
        runtime="iree",
        flags=_FLAGS,
        cache=cache,
        isolated=isolated,
        recompute=False,
        debug_ir=None,
        timeout=timeout,
        log=log,
    )
    parameters = artifact.files.get(PARAMETERS)
    isolated.call(
        f"{__name__}:run",
        {
            "program": str(artifact.files[artifact.main]),
            "parameters": str(parameters) if parameters else None,
            "function": artifact.function,
            "outputs_of_model": [[spec.name, spec.dtype] for spec in model.outputs] if model.outputs else None,
            "inputs": str(inputs),
            "outputs": str(outputs),
        },
        timeout=timeout,
        log=log,
    )


def run(
    program: str,
    parameters: str | None,
    function: str,
    outputs_of_model: list[list[str]] | None,
    inputs: str,
    outputs: str,
) -> None:
    """Run a .vmfb on the tensors of one folder, into another; called in the isolated process.

    Raises:
        ReferenceFailed: the program cannot be loaded or run here.
    """
    from iree import runtime

    from hil.controller.compilers.onnx_to_mlir import PARAMETER_SCOPE
    from hil.controller.tensor_folder import load_tensors, save_tensors
    from hil.errors import HilError, ReferenceFailed
    from hil.iree_values import SCALAR_PREFIX, parse_declaration

    try:
        instance = runtime.VmInstance()
        device = runtime.get_device(_DEVICE)
        module = runtime.VmModule.mmap(instance, program)
        modules = [runtime.create_hal_module(instance, device)]
        if parameters is not None:
            index = runtime.ParameterIndex()
            index.load(parameters)
            modules.append(runtime.create_io_parameters_module(instance, index.create_provider(scope=PARAMETER_SCOPE)))
        context = runtime.VmContext(instance, [*modules, module])
        entry = module.lookup_function(function)
        declared = entry.reflection.get("iree.abi.declaration")
        given = load_tensors(Path(inputs))
        takes, gives = parse_declaration(declared) if declared else (None, None)
        arguments = runtime.VmVariantList(len(given))
        for position, array in enumerate(given.values()):
            if takes and takes[position].name.startswith(SCALAR_PREFIX):
                (arguments.push_float if array.dtype.kind == "f" else arguments.push_int)(array.item())
            else:
                arguments.push_ref(_to_view(runtime, device, array))
    except HilError as error:
        raise ReferenceFailed(f"IREE cannot take the model: {error.message}") from error
    except Exception as error:
        raise ReferenceFailed(f"IREE cannot load the program: {_words(error)}", detail=str(error)) from error
    results = runtime.VmVariantList(len(gives or outputs_of_model or ()))
    try:
        context.invoke(entry, arguments, results)
    except Exception as error:
        raise ReferenceFailed(f"IREE failed to run the program: {_words(error)}", detail=str(error)) from error
    save_tensors(Path(outputs), _results(runtime, results, outputs_of_model, gives))


def _results(
    runtime: Any, results: Any, named: Sequence[Sequence[str]] | None, gives: Sequence[TensorSpec] | None
) -> dict[str, Array]:
    from hil.iree_values import SCALAR_PREFIX
    from hil.tensors import dtype_of

    arrays: dict[str, Array] = {}
    for position in range(results.size):
        spec = gives[position] if gives else None
        name, dtype = (
            named[position] if named else (spec.name if spec else f"output{position}", spec.dtype if spec else "")
        )
        if spec and spec.name.startswith(SCALAR_PREFIX):
            arrays[name.removeprefix(SCALAR_PREFIX)] = np.asarray(results.get_variant(position), dtype_of(dtype))
        else:
            arrays[name] = _from_view(results.get_as_object(position, runtime.HalBufferView), dtype)
    return arrays


def _to_view(runtime: Any, device: Any, array: Array) -> Any:
    from hil.iree_values import element_of
    from hil.packing import SUB_BYTE_BITS, pack
    from hil.tensors import dtype_name

    name = dtype_name(array.dtype)
    element = element_of(name)
    memory = int(runtime.MemoryType.DEVICE_LOCAL | runtime.MemoryType.HOST_VISIBLE)
    usage = int(runtime.BufferUsage.DEFAULT | runtime.BufferUsage.MAPPING)
    allocator = device.allocator
    if array.size == 0:
        buffer = allocator.allocate_buffer(memory_type=memory, allowed_usage=usage, allocation_size=0)
    else:
        data = pack(array) if name in SUB_BYTE_BITS else np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        buffer = allocator.allocate_buffer_copy(memory_type=memory, allowed_usage=usage, device=device, buffer=data)
    return runtime.HalBufferView(buffer, list(array.shape), element)


def _from_view(view: Any, declared: str) -> Array:
    from hil.iree_values import dtype_of_element
    from hil.packing import SUB_BYTE_BITS, unpack
    from hil.tensors import dtype_of

    name = dtype_of_element(view.element_type, declared)
    shape = tuple(view.shape)
    if 0 in shape:
        return np.empty(shape, dtype_of(name))
    raw = view.map().asarray((view.byte_length,), np.dtype(np.uint8))
    return unpack(raw, name, shape) if name in SUB_BYTE_BITS else raw.copy().view(dtype_of(name)).reshape(shape)


def _words(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:400] if lines else type(error).__name__
