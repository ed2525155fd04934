"""PyTorch modules as the user's own Python has them, made into ``.pt2`` files that hil takes.

Unlike whatever reads a file, this runs in the user's process: the module lives there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.errors import ImportFailed, UsageError
from hil.tensors import Array


def is_torch(model: object) -> bool:
    """Whether something is a ``torch.nn.Module`` or an ``ExportedProgram``; torch is not imported for it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    export = sys.modules.get("torch.export")
    return isinstance(model, torch.nn.Module) or (export is not None and isinstance(model, export.ExportedProgram))


def export_module(
    model: Any, example_inputs: Any = (), path: str | Path = "model.pt2", *, dynamic_shapes: Any = None
) -> Path:
    """Export a module and save it, for ``hil run`` and everything else that takes a model's file.

    It is exported in the mode that it is in: call ``module.eval()`` before, unless training is what you mean.

    Args:
        model: a ``torch.nn.Module``, or an ``ExportedProgram``, which is saved as it is.
        example_inputs: what ``forward`` is called with: a sequence of positional arguments, or a mapping of keyword
            arguments; tensors, numpy arrays, or structures of them. Their dtypes and shapes become the program's.
        path: the file to write, ``.pt2``.
        dynamic_shapes: which dimensions may vary, as ``torch.export.export`` takes it.

    Returns:
        The path.

    Raises:
        UsageError: it is neither, or the arguments are none.
        ImportFailed: torch cannot export it.
    """
    program, _ = exported(model, example_inputs, dynamic_shapes=dynamic_shapes)
    save_program(program, Path(path))
    return Path(path)


def exported(model: Any, inputs: Any, *, dynamic_shapes: Any = None) -> tuple[Any, Mapping[str, Array]]:
    """A module as a program, and what it is called with under the names that hil gives to its inputs.

    Args:
        model: a ``torch.nn.Module``, or an ``ExportedProgram``, which needs no inputs.
        inputs: as for :func:`export_module`; for a program also a mapping by hil's names.
        dynamic_shapes: as for :func:`export_module`.

    Raises:
        UsageError, ImportFailed: as for :func:`export_module`.
    """
    if not is_torch(model):
        raise UsageError(
            f"a torch.nn.Module or an ExportedProgram is wanted, got {type(model).__name__}",
            hint="export_module(module, (torch.randn(1, 8),), 'model.pt2')",
        )
    import torch

    if isinstance(model, torch.export.ExportedProgram):
        return model, _named(model, inputs)
    if isinstance(inputs, str) or not isinstance(inputs, Mapping | Sequence):
        raise UsageError(
            f"the inputs of a module are a sequence or a mapping of its arguments, got {type(inputs).__name__}",
            hint="one argument is (x,)",
        )
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    args, kwargs = torch.utils._pytree.tree_map(_tensor, (args, kwargs))
    try:
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
    except Exception as error:  # a module may raise anything, and torch has many errors for what it cannot trace
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ImportFailed(
            f"torch.export cannot export {type(model).__name__}: {lines[0][:300] if lines else type(error).__name__}",
            hint="" if inputs else "a module needs its inputs, to be traced with",
            detail=str(error),
        ) from error
    return program, _named(program, (args, kwargs))


def save_program(program: Any, path: Path) -> None:
    """Write a program as ``torch.export.save`` does.

    Raises:
        UsageError: the file cannot be written.
    """
    import torch

    try:
        torch.export.save(program, path)
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{path} cannot be written: {error}") from error


def _named(program: Any, inputs: Any) -> dict[str, Array]:
    """Inputs under the names of a program's own, in any structure whose tensors are in its order."""
    import torch

    from hil.controller.importers.pt2 import is_tensor, user_inputs
    from hil.controller.references.torch_eager import to_numpy

    names = [name for name, spec in user_inputs(program) if is_tensor(spec.arg)]
    if isinstance(inputs, Mapping) and inputs.keys() <= set(names):
        given = {name: _tensor(value) for name, value in inputs.items()}
    else:
        leaves = [_tensor(leaf) for leaf in torch.utils._pytree.tree_leaves(inputs)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if tensors and len(tensors) != len(names):
            raise UsageError(
                f"the program takes {len(names)} tensors ({', '.join(names)}), got {len(tensors)}",
            )
        given = dict(zip(names, tensors, strict=False))
    return {name: to_numpy(value) for name, value in given.items()}


def _tensor(value: Any) -> Any:
    """A numpy array as a tensor; anything else as it is."""
    import numpy as np

    from hil.controller.references.torch_eager import from_numpy

    return from_numpy(value) if isinstance(value, np.ndarray) else value
