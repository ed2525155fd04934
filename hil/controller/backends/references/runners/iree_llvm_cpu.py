"""Compute a reference with IREE on this machine: compiled for the host CPU, executed by the local-task driver."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hil.controller.backends.compilers.iree_program import PACKAGE, compile_program
from hil.controller.models.compiling import PARAMETER_SCOPE, PARAMETERS, Work, call_isolated
from hil.controller.storage.isolation.isolated import get_function_name
from hil.controller.storage.screen.texts import convert_foreign_errors, get_first_line
from hil.controller.storage.tensor_files import call_on_files
from hil.core.installed import get_version
from hil.core.results import Model
from hil.core.tensors import Array, parse_dtype
from hil.errors import ReferenceFailed
from hil.formats.iree_buffers import read_array, view_of
from hil.formats.iree_command import is_number
from hil.formats.iree_values import SCALAR_PREFIX, choose_function, list_module_functions

if TYPE_CHECKING:
    from typing_extensions import Unpack

_FLAGS = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
)
_DEVICE = "local-task"


def describe_source() -> str:
    """Return the name and version of the reference."""
    return f"iree {get_version(PACKAGE)} llvm-cpu"


def compute(model: Model, inputs: Path, outputs: Path, **work: Unpack[Work]) -> None:
    """Compile the model for the host and run it in an isolated process."""
    artifact = compile_program(model, _FLAGS, None, {**work, "recompute": False})
    parameters = artifact.files.get(PARAMETERS)
    arguments = {
        "model": str(artifact.files[artifact.main]),
        "parameters": str(parameters) if parameters else None,
        "function": artifact.function,
        "outputs_of_model": [[spec.name, spec.dtype] for spec in model.outputs] if model.outputs else None,
    }
    call_isolated(
        call_on_files,
        {"run": get_function_name(run), "inputs": str(inputs), "outputs": str(outputs), **arguments},
        work,
    )


def run(
    model: str,
    given: Mapping[str, Array],
    parameters: str | None,
    function: str,
    outputs_of_model: list[list[str]] | None,
) -> dict[str, Array]:
    """Run a .vmfb file. Runs in an isolated process. Raises ReferenceFailed if the file cannot be loaded or run."""
    from iree import runtime

    with convert_foreign_errors(
        ReferenceFailed, "IREE cannot load the program", error_text=partial(get_first_line, most=400)
    ):
        instance = runtime.VmInstance()
        device = runtime.get_device(_DEVICE)
        module = runtime.VmModule.mmap(instance, model)
        modules = [runtime.create_hal_module(instance, device)]
        if parameters is not None:
            index = runtime.ParameterIndex()
            index.load(parameters)
            modules.append(runtime.create_io_parameters_module(instance, index.create_provider(scope=PARAMETER_SCOPE)))
        context = runtime.VmContext(instance, [*modules, module])
        takes, gives = choose_function(list_module_functions(module), function).make_signature()
        arguments = runtime.VmVariantList(len(given))
        for spec, array in zip(takes, given.values(), strict=True):
            if is_number(spec):
                (arguments.push_float if array.dtype.kind == "f" else arguments.push_int)(array.item())
            else:
                arguments.push_ref(view_of(device, array))
    results = runtime.VmVariantList(len(gives))
    with convert_foreign_errors(
        ReferenceFailed, "IREE failed to run the program", error_text=partial(get_first_line, most=400)
    ):
        context.invoke(module.lookup_function(function), arguments, results)
    named = outputs_of_model or [[spec.name.removeprefix(SCALAR_PREFIX), spec.dtype] for spec in gives]
    found: dict[str, Array] = {}
    for position, ((name, dtype), spec) in enumerate(zip(named, gives, strict=True)):
        if is_number(spec):
            found[name] = np.asarray(results.get_variant(position), parse_dtype(dtype))
        else:
            found[name] = read_array(device, results.get_as_object(position, runtime.HalBufferView), dtype).copy()
    return found
