"""Export PyTorch modules from the user's Python code as ``.pt2`` files for hil.

Unlike importers, this runs in the user's process, which has the module.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.models.importers.exported.pt2 import is_tensor, list_user_inputs
from hil.controller.storage.screen.texts import convert_foreign_errors
from hil.core.tensors import Array
from hil.errors import ImportFailed, UsageError
from hil.formats.torch_values import convert_from_torch, to_torch


def is_torch(model: object) -> bool:
    """Return True for a ``torch.nn.Module`` or an ``ExportedProgram``, without importing torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    export = sys.modules.get("torch.export")
    return isinstance(model, torch.nn.Module) or (export is not None and isinstance(model, export.ExportedProgram))


def export_module(
    model: Any, example_inputs: Any = (), path: str | Path = "model.pt2", *, dynamic_shapes: Any = None
) -> Path:
    """Export a module and save it for ``hil run`` and other commands.

    The module is exported in its current mode. For inference, call ``module.eval()`` first.

    Args:
        model: a ``torch.nn.Module``, or an ``ExportedProgram``, which is saved unchanged.
        example_inputs: arguments of ``forward``: a sequence of positional arguments or a mapping of keyword arguments,
            with tensors, numpy arrays, or structures of them. They determine the program's dtypes and shapes.
        path: file to write.
        dynamic_shapes: see ``torch.export.export``.

    Returns:
        The path.

    Raises:
        UsageError: the model has an unsupported type, or the arguments are invalid.
        ImportFailed: torch cannot export the model.
    """
    program, _ = export_program(model, example_inputs, dynamic_shapes=dynamic_shapes)
    save_program(program, Path(path))
    return Path(path)


def export_program(model: Any, inputs: Any, *, dynamic_shapes: Any = None) -> tuple[Any, Mapping[str, Array]]:
    """Export a module as a program. Return the program, and the inputs under hil's names.

    Args:
        model: see :func:`export_module`.
        inputs: see :func:`export_module`; for a program, also a mapping from hil's names to tensors.
        dynamic_shapes: see ``torch.export.export``.

    Raises:
        UsageError, ImportFailed: see :func:`export_module`.
    """
    if not is_torch(model):
        raise UsageError(
            f"expected a torch.nn.Module or an ExportedProgram, got {type(model).__name__}",
            hint="export_module(module, (torch.randn(1, 8),), 'model.pt2')",
        )
    import torch

    if isinstance(model, torch.export.ExportedProgram):
        return model, _match_named(model, inputs)
    args, kwargs = torch.utils._pytree.tree_map(_make_tensor, _call("module", inputs))
    hint = "" if inputs else "pass example inputs: torch.export requires them for tracing"
    with convert_foreign_errors(ImportFailed, f"torch.export cannot export {type(model).__name__}", hint=hint):
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
    return program, _match_traced(program, (args, kwargs))


def _call(what: str, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert inputs to positional and keyword arguments."""
    if isinstance(inputs, str) or not isinstance(inputs, Mapping | Sequence):
        raise UsageError(
            f"invalid inputs of a {what}: expected a sequence or a mapping of arguments, got {type(inputs).__name__}",
            hint="pass a single argument as (x,)",
        )
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


def save_program(program: Any, path: Path) -> None:
    """Save a program with ``torch.export.save``. Raises UsageError if writing failed."""
    import torch

    try:
        torch.export.save(program, path)
    except (OSError, RuntimeError) as error:
        raise UsageError(f"cannot write {path}: {error}") from error


def _match_traced(program: Any, inputs: Any) -> dict[str, Array]:
    """Return the tensors with which a module was traced, under the program's input names."""
    import torch

    leaves = torch.utils._pytree.tree_leaves(inputs)
    named = zip(list_user_inputs(program), leaves, strict=True)
    return {name: convert_from_torch(leaf) for (name, _), leaf in named if isinstance(leaf, torch.Tensor)}


def _match_named(program: Any, inputs: Any) -> dict[str, Array]:
    """Return the tensors in a call under the program's input names.

    A mapping by name may be incomplete. The missing inputs are random.
    """
    call = _call("program", inputs)
    if not inputs:
        return {}
    wanted = list_user_inputs(program)
    names = [name for name, spec in wanted if is_tensor(spec.arg)]
    nested = any(isinstance(value, Mapping | list | tuple) for value in call[1].values())
    if isinstance(inputs, Mapping) and inputs.keys() <= set(names) and not nested:
        return {name: _make_array(name, value) for name, value in inputs.items()}
    takes = f"tensor inputs: {', '.join(names)}"
    places = dict(
        zip(_list_places(program, program.call_spec.in_spec.unflatten(range(len(wanted)))), wanted, strict=True)
    )
    given = _list_places(program, call)
    if unknown := given.keys() - places.keys():
        raise UsageError(f"unknown input of the program: {min(unknown)}", hint=takes)
    found: dict[str, Array] = {}
    for place, (name, spec) in places.items():
        if is_tensor(spec.arg):
            if place not in given:
                raise UsageError(f"missing input of the program: {place}", hint=takes)
            found[name] = _make_array(name, given[place])
        elif place in given and not _is_same(given[place], spec.arg.value):
            raise UsageError(f"the program was exported with {place} = {spec.arg.value!r}, not {given[place]!r:.80}")
    return found


def _list_places(program: Any, call: Any) -> dict[str, Any]:
    """Return the parts of a call ``(args, kwargs)`` by path, such as ``batch['image']``."""
    import torch

    parameters = program.module_call_graph[0].signature.forward_arg_names or ()
    found = {}
    for (kind, first, *rest), value in torch.utils._pytree.tree_flatten_with_path(call)[0]:
        if kind.idx:
            parameter = str(first.key)
        else:
            parameter = parameters[first.idx] if first.idx < len(parameters) else f"argument {first.idx + 1}"
        found["".join([parameter, *map(str, rest)])] = value
    return found


def _is_same(value: Any, constant: Any) -> bool:
    return isinstance(value, int | float | str | None) and value == constant


def _make_array(name: str, value: Any) -> Array:
    import torch

    tensor = _make_tensor(value)
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"expected a tensor for {name}, got {value!r:.80}")
    return convert_from_torch(tensor)


def _make_tensor(value: Any) -> Any:
    """Convert a numpy array to a tensor. Other values are returned unchanged."""
    return to_torch(value) if isinstance(value, np.ndarray) else value
