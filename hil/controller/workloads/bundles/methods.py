"""Entry points of models, and signatures of a program's methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hil.bundles import MethodTestSuite, Signature
from hil.bundles.cases import Values
from hil.controller.devices.agentless.signature import read_signature
from hil.controller.devices.board_client import ProgramHandle
from hil.controller.models.importers import import_model, load_importers, mlir
from hil.controller.storage.isolation.isolated import IsolatedError
from hil.controller.storage.run_context import RunContext
from hil.core.files import digest_file, open_file
from hil.core.results import Artifact, Model
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import TensorSpec, get_dtype_name
from hil.errors import ImportFailed, LoadFailed, UsageError
from hil.formats.iree_command import is_number
from hil.formats.iree_values import SCALAR_PREFIX, decode_functions, list_entry_points, read_functions

# Key in :attr:`hil.bundles.Bundle.made` for the list with skipped cases, one line per case.
LEFT_OUT = "left_out"
# Key for the random operations of the models: method -> ``nodes`` and ``outputs``, as in :class:`Model`.
RANDOM = "random"
_READ_SECONDS = 600.0
# Formats in which a file contains all entry points of the program.
_WHOLE = ("mlir", "vmfb", "tflite", "pte")


def make_random_record(models: Mapping[str, Model]) -> dict[str, Any]:
    """Return a bundle's record of models that draw random numbers, by method; {} if none does."""
    found = {method: model.producer["random"] for method, model in models.items() if model.random}
    return {RANDOM: found} if found else {}


def read_random_record(made: Mapping[str, Any], method: str) -> dict[str, list[str]]:
    """Return the value that :func:`make_random_record` stored for a method, or {} if it is missing or invalid."""
    found = made.get(RANDOM)
    one = found.get(method) if isinstance(found, dict) else None
    texts: dict[str, Any] = {key: one.get(key) for key in ("nodes", "outputs")} if isinstance(one, dict) else {}
    valid = all(isinstance(value, list) and all(isinstance(text, str) for text in value) for value in texts.values())
    return texts if valid else {}


def import_methods(
    path: Path, functions: Sequence[str], context: RunContext, *, only_main: bool = False, **settings: Any
) -> tuple[list[Model], list[str]]:
    """Import a model once per entry point. Also return a line of text for every unsupported entry point.

    Args:
        functions: the entry points; empty for all entry points of the program.
        only_main: True if empty ``functions`` means only the main entry point. MLIR and ``.vmfb`` programs lack a main
            entry point, so hil imports all their entry points.
        settings: passed to :func:`import_model`, for example ``dims``.
    """
    settings |= {"isolated": context.isolated, "cache": context.cache}
    names = list(dict.fromkeys(functions))
    models, left_out = [], []
    # Import a module without functions too, so that the importer raises the error.
    for name in names or _list_functions(path, context, only_main=only_main) or [""]:
        try:
            models.append(import_model(path, function=name, **settings))
        except ImportFailed as error:
            if names or only_main:
                raise
            left_out.append((f"method {name}: {error.message}", error))
    if not models:
        raise left_out[0][1]
    if len(models) > 1 and models[0].format not in _WHOLE:
        raise UsageError(
            f"cannot combine functions of {path.name}: a {models[0].format} function is compiled separately",
            hint="create a bundle per function with --function",
        )
    return models, [text for text, _ in left_out]


def _list_functions(path: Path, context: RunContext, *, only_main: bool) -> list[str]:
    """Return the entry points of a module or program. For other models, return the importer's choice."""
    reader: Callable[[str], Any] = mlir.list_functions
    if not _is_mlir(path):
        found = import_model(path, isolated=context.isolated, cache=context.cache)
        if found.format != "vmfb":
            several = found.producer.get("methods") or found.producer.get("functions") or ()
            return list(several) if found.format in _WHOLE and several and not only_main else [found.function]
        reader = read_functions
    with make_temporary_folder("hil-bundle-") as folder:
        arguments = {"path": str(path.absolute())}
        try:
            found = context.isolated.call(reader, arguments, timeout=_READ_SECONDS, log=Path(folder) / "read.log")
        except (IsolatedError, LoadFailed) as error:
            raise ImportFailed(f"cannot read {path.name}: {error.message}", detail=error.detail) from error
    return sorted(list_entry_points(decode_functions(found))) if isinstance(found, dict) else list(found)


def _is_mlir(path: Path) -> bool:
    importer = load_importers()["mlir"]
    try:
        with open_file(path) as file:
            return path.suffix.lower() in importer.suffixes or importer.recognises(file.read(64))
    except OSError:
        return False  # the import reports the reason


def read_signatures(
    artifact: Artifact, models: Sequence[Model], context: RunContext, *, ask: Callable[[Artifact], ProgramHandle]
) -> dict[str, Signature]:
    """Return the signatures of a program's methods, from the model, the program's file, or a board, in this order.

    Args:
        artifact: the program, for the first model.
        ask: loads a program on the board. Called only if the signature is otherwise unknown.

    Raises:
        LoadFailed, BoardError: the board cannot load the program or is unavailable.
        UsageError: two methods have the same name.
    """
    found: dict[str, Signature] = {}
    for number, model in enumerate(models):
        program = artifact if number == 0 else replace(artifact, function=model.function)
        program = replace(program, inputs=model.inputs, outputs=model.outputs)
        name, signature = program.function, _read(program, context)
        if signature is None:
            described = ask(program)
            name = described.function
            signature = Signature(_strip_scalar_prefix(described.inputs), _strip_scalar_prefix(described.outputs))
        if name in found:
            raise UsageError(f"duplicate method name {name!r}")
        found[name or "main"] = signature
    return found


def settle_signatures(signatures: Mapping[str, Signature], suites: Sequence[MethodTestSuite]) -> dict[str, Signature]:
    """Return signatures with unknown tensors filled from the cases. A dimension that differs between cases is dynamic.

    Raises:
        UsageError: the cases differ in dtype or rank, or are missing.
    """
    found = {}
    for method, signature in signatures.items():
        cases = [case for suite in suites if suite.method_name == method for case in suite.test_cases]
        inputs, outputs = [case.inputs for case in cases], [case.expected_outputs for case in cases]
        sides = ("input", signature.inputs, inputs), ("output", signature.outputs, outputs)
        found[method] = Signature(
            *(
                tuple(
                    _settle_spec(
                        f"method {method!r}, {kind} {spec.name!r}",
                        spec,
                        [_get_tensor(one, spec, place) for one in given],
                    )
                    for place, spec in enumerate(specs)
                )
                for kind, specs, given in sides
            )
        )
    return found


def _get_tensor(values: Values, spec: TensorSpec, place: int) -> Any:
    """Return a case's tensor, or None if the tensor is missing. The case's check reports a missing tensor."""
    if isinstance(values, Mapping):
        return values.get(spec.name)
    return values[place] if place < len(values) else None


def _settle_spec(what: str, spec: TensorSpec, values: Sequence[Any]) -> TensorSpec:
    if spec.dtype:
        return spec
    arrays = [np.asarray(value) for value in values if value is not None]
    if not arrays or len({(array.dtype, array.ndim) for array in arrays}) > 1:
        raise UsageError(
            f"{what}: the program does not declare the type, and "
            + ("the cases differ in dtype or rank" if arrays else "no case contains the tensor"),
            hint="compile the program with hil from MLIR or ONNX, so that hil records the types",
        )
    sizes = zip(*(array.shape for array in arrays), strict=True)
    shape = tuple(one[0] if len(set(one)) == 1 else None for one in sizes)
    return TensorSpec(spec.name, get_dtype_name(arrays[0].dtype), shape)


def refuse_without_board(program: Artifact) -> ProgramHandle:
    """Raise UsageError. Used as ``ask`` without a board."""
    raise UsageError(
        "only a board can determine the inputs and outputs of this program",
        hint="create a bundle of the program with hil bundle create --board, and pass cases with --case",
    )


def make_program(
    runtime: str, files: Mapping[str, Path], main: str, *, function: str = "", compiler: str = "", **more: Any
) -> Artifact:
    """Create an Artifact from files. ``more`` contains further fields of the Artifact."""
    digests = {name: digest_file(file) for name, file in files.items()}
    return Artifact(runtime, main, files, digests, function, compiler, **more)


def own_signature(program: Artifact, context: RunContext) -> Signature:
    """Return the signature in IREE's program file. Only this signature distinguishes scalars from tensors.

    Raises:
        LoadFailed: the file cannot be read.
    """
    with make_temporary_folder("hil-bundle-") as folder:
        described = read_signature(program, context.isolated, Path(folder) / "read.log", needs_own=True)
    return Signature(tuple(described.inputs), tuple(described.outputs))


def _read(program: Artifact, context: RunContext) -> Signature | None:
    if program.inputs is not None and program.outputs is not None:
        return Signature(tuple(program.inputs), tuple(program.outputs))
    if program.runtime != "iree" or not program.function:
        return None
    try:
        described = own_signature(program, context)
    except LoadFailed:
        return None  # from a newer or vendor IREE: the board decides
    return Signature(_strip_scalar_prefix(described.inputs), _strip_scalar_prefix(described.outputs))


def _strip_scalar_prefix(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Remove the prefix of scalar names, which the model's names lack."""
    return tuple(
        replace(spec, name=spec.name.removeprefix(SCALAR_PREFIX)) if is_number(spec) else spec for spec in specs
    )
