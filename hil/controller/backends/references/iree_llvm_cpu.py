"""IREE on this machine's own CPU: compiled for the host and run with the local-task driver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hil.controller.backends.compilers.iree_program import PARAMETERS, compile_program
from hil.controller.backends.compilers.onnx_to_mlir import PARAMETER_SCOPE
from hil.controller.models.compiling import Work, call_isolated
from hil.controller.storage.packages import version
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.controller.storage.texts import first_line
from hil.core.results import Model
from hil.core.tensors import Array, TensorSpec, dtype_of
from hil.errors import HilError, ReferenceFailed
from hil.formats.iree_buffers import array_of, view_of
from hil.formats.iree_command import is_number
from hil.formats.iree_values import SCALAR_PREFIX, choose_function, functions_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

_FLAGS = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
)
_DEVICE = "local-task"


def source() -> str:
    """Who speaks."""
    return f"iree {version('iree-base-compiler')} llvm-cpu"


def compute(model: Model, inputs: Path, outputs: Path, **work: Unpack[Work]) -> None:
    """Compile the model for the host and run it in an isolated process."""

    artifact = compile_program(model, _FLAGS, None, {**work, "recompute": False})
    parameters = artifact.files.get(PARAMETERS)
    arguments = {
        "program": str(artifact.files[artifact.main]),
        "parameters": str(parameters) if parameters else None,
        "function": artifact.function,
        "outputs_of_model": [[spec.name, spec.dtype] for spec in model.outputs] if model.outputs else None,
        "inputs": str(inputs),
        "outputs": str(outputs),
    }
    call_isolated(run, arguments, work)


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
        takes, gives = choose_function(functions_of(module), function).signature()
        given = load_tensors(Path(inputs))
        arguments = runtime.VmVariantList(len(given))
        for spec, array in zip(takes, given.values(), strict=True):
            if is_number(spec):
                (arguments.push_float if array.dtype.kind == "f" else arguments.push_int)(array.item())
            else:
                arguments.push_ref(view_of(device, array))
    except HilError as error:
        raise ReferenceFailed(f"IREE cannot take the model: {error.message}") from error
    except Exception as error:
        raise ReferenceFailed(f"IREE cannot load the program: {first_line(error, 400)}", detail=str(error)) from error
    results = runtime.VmVariantList(len(gives))
    try:
        context.invoke(module.lookup_function(function), arguments, results)
    except Exception as error:
        raise ReferenceFailed(f"IREE failed to run the program: {first_line(error, 400)}", detail=str(error)) from error
    named = outputs_of_model or [[spec.name.removeprefix(SCALAR_PREFIX), spec.dtype] for spec in gives]
    save_tensors(Path(outputs), dict(_results(runtime, device, results, named, gives)))


def _results(
    runtime: Any, device: Any, results: Any, named: Sequence[Sequence[str]], gives: Sequence[TensorSpec]
) -> Iterator[tuple[str, Array]]:

    for position, ((name, dtype), spec) in enumerate(zip(named, gives, strict=True)):
        if is_number(spec):
            yield name, np.asarray(results.get_variant(position), dtype_of(dtype))
        else:
            yield name, array_of(device, results.get_as_object(position, runtime.HalBufferView), dtype).copy()
