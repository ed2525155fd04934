"""Import compiled programs: IREE's .vmfb, ExecuTorch's .pte and .bpte, TFLite's .tflite, tfcompile's libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil.controller.models.description import make_description
from hil.controller.models.importers.heads import is_tflite, is_vmfb
from hil.controller.storage.sources.packages import require_version
from hil.core.files import MAX_MODEL_BYTES, open_file, read_file
from hil.errors import ImportFailed, LoadFailed, UsageError
from hil.formats.executorch_file import (
    Damaged,
    find_tensor_file,
    is_bundle,
    list_tensor_files,
    map_program,
    pick_method,
    read_methods,
)
from hil.formats.iree_values import SCALAR_PREFIX, choose_function, decode_functions, read_functions
from hil.formats.litert import PACKAGE, open_signature
from hil.formats.xla_program import find_signature, find_values

_ZIP = b"PK\x03\x04"
_MIN_BYTES = 64


def describe_vmfb(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Check the first bytes, and read the function's signature if the installed IREE supports the file.

    Raises:
        ImportFailed: the file is not a .vmfb, or the function has no outputs.
    """
    file = Path(path)
    head = _read_head(file)
    if len(head) < _MIN_BYTES or not (head.startswith(_ZIP) or is_vmfb(head)):
        raise ImportFailed(f"{file.name} is not an IREE program", hint="expected a .vmfb file from iree-compile")
    try:
        chosen = choose_function(decode_functions(read_functions(str(file))), function)
        inputs, outputs = chosen.make_signature()
    except LoadFailed:
        # The program is from a newer IREE or a vendor, or lacks the function. The board may support it, or reports the
        # error.
        return {"function": function, "inputs": None, "outputs": None, "ranges": {}, "external": [], "producer": {}}
    takes, gives = (
        [replace(spec, name=spec.name.removeprefix(SCALAR_PREFIX)) for spec in side] for side in (inputs, outputs)
    )
    return make_description(file.name, chosen.name, takes, gives)


def describe_pte(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Read a method's signature.

    The file has no names: inputs are ``input0``, ``input1``..., outputs ``output0``... in order. The file does not
    specify which dimensions of a dynamic tensor are dynamic. So all its dimensions are symbolic, such as
    ``input0.dim0``. Number arguments are constants of the program, which rejects other values. ``producer`` lists these
    constants.

    Raises:
        ImportFailed: the file is invalid or damaged, or the method takes or returns values other than tensors.
        UsageError: the method or dimension does not exist, or the program has multiple methods and ``function`` is "".
    """
    file = Path(path)
    try:
        data = map_program(file)
        methods = read_methods(data)
        method = pick_method(methods, function)
        if method is None:
            problem = f"has no method {function!r}" if function else f"has {len(methods)} methods but no 'forward'"
            hint = f"choose one with --function: {', '.join(methods) or 'none'}"
            raise UsageError(f"{file.name} {problem}", hint=hint, option="--function")
        inputs, outputs = (
            [spec for _, spec in found] for found in (method.list_input_specs(), method.list_output_specs())
        )
        tensors = find_tensor_file(file, methods)
    except Damaged as error:
        raise ImportFailed(
            f"{file.name}: {error}", hint="expected a .pte file from ExecuTorch's to_executorch()"
        ) from error
    return make_description(
        file.name,
        method.name,
        inputs,
        outputs,
        dims,
        external=[tensors.name] if tensors else [],
        producer={
            "name": "executorch",
            "bundled": is_bundle(data),
            "methods": list(methods),
            "backends": list(method.backends),
            "operators": list(method.operators),
            "unseen_state": list(method.writers),
            "constants": [value.constant for value in method.inputs if value.constant is not None],
            "most": {
                spec.name: list(method.inputs[place].sizes)
                for place, spec in method.list_input_specs()
                if method.inputs[place].dynamic
            },
        },
        random=method.random,
    )


def describe_tflite(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Read the signature of a function. Quantised inputs and outputs stay integers.

    A dynamic dimension is a symbol such as ``x.dim0``.

    Raises:
        ImportFailed: the file is invalid or damaged, has unsupported inputs or outputs, or has no outputs.
        UsageError: LiteRT is not installed; the function or dimension does not exist; or the model has multiple
            functions and ``function`` is "".
    """
    version = require_version(PACKAGE, "tflite")
    file = Path(path)
    if not is_tflite(_read_head(file)):
        raise ImportFailed(
            f"{file.name} is not a TFLite model", hint="expected a .tflite file from TensorFlow's converter"
        )
    try:
        opened = open_signature(file, function, kernels="builtin")
    except LoadFailed as error:
        raise error.as_kind(UsageError if error.option == "--function" else ImportFailed) from error
    producer = {
        "read with": f"{PACKAGE} {version}",
        "functions": list(opened.signatures),
        "unseen_state": list(opened.keeping),
    }
    random = opened.random
    return make_description(
        file.name, opened.name, opened.inputs, opened.outputs, dims, producer=producer, random=random
    )


def describe_library(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Read the signature from a library that hil compiled with tfcompile.

    Initial values of variables come from ``NAME.variables.bin`` (or ``variables.bin``) in the same directory. Without
    that file, variables are inputs.

    Raises:
        ImportFailed: the library was not compiled by hil.
        UsageError: the function or dimension does not exist.
    """
    file = Path(path)
    values = find_values(file)
    try:
        signature = find_signature(read_file(file, MAX_MODEL_BYTES))
        if values and signature.variables:
            signature.values(read_file(values, MAX_MODEL_BYTES))
    except ValueError as error:
        raise ImportFailed(
            f"{file.name}: {error}", hint="expected a .so file from `hil compile --runtime xla-aot`"
        ) from error
    if function and function != signature.function:
        raise UsageError(
            f"{file.name} has no function {function!r}", hint=f"available function: {signature.function!r}"
        )
    takes = signature.inputs(variables=not values)
    external = [values.name] if values and signature.variables else []
    return make_description(file.name, signature.function, takes, signature.list_results(), dims, external=external)


def read_with_program(program: Path, function: str) -> list[Path]:
    """Return the files that may contain tensors of an ExecuTorch program. The program does not name these files."""
    return list_tensor_files(program.parent)


def read_with_library(library: Path, function: str) -> list[Path]:
    """Return the file with a library's variables, if present."""
    values = find_values(library)
    return [values] if values else []


def _read_head(file: Path) -> bytes:
    with open_file(file) as opened:
        return opened.read(_MIN_BYTES)
