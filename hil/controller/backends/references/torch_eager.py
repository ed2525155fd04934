"""PyTorch itself, eagerly, on the CPU: what an exported program says as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hil.controller.models.importers.pt2 import is_tensor, new_values, output_names, user_inputs
from hil.controller.models.importers.pt2_archive import load_program
from hil.controller.storage.packages import needed_version
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.controller.storage.texts import first_line
from hil.errors import ReferenceFailed
from hil.formats.torch_values import from_torch, to_torch

# Sums are split among threads, so their number must not follow the machine: the same answer wherever it is asked for.
_THREADS = 4


def source() -> str:
    """Who speaks.

    Raises:
        UsageError: torch is not installed.
    """
    return f"torch-eager {needed_version('torch', 'torch')} CPU"


def run(model: str, inputs: str, outputs: str) -> None:
    """Run a program on the tensors of one folder, into another; called in the isolated process.

    Its state (buffers that it changes) is as it was saved, and what it makes of it is written after the outputs. The
    random numbers that it draws are seeded with 0.

    Raises:
        ReferenceFailed: torch cannot run it on a CPU, or not with these inputs.
    """
    from functools import reduce

    import torch

    torch.set_num_threads(_THREADS)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    program = load_program(model)
    given = {name: to_torch(array) for name, array in load_tensors(Path(inputs)).items()}
    flat = [given[name] if is_tensor(spec.arg) else spec.arg.value for name, spec in user_inputs(program)]
    args, kwargs = torch.utils._pytree.tree_unflatten(flat, program.call_spec.in_spec)
    try:
        with torch.no_grad():
            module = program.module(check_guards=False)
            returned = module(*args, **kwargs)
    except Exception as error:  # whatever an operator may raise
        raise ReferenceFailed(f"torch failed to run the program: {first_line(error)}", detail=str(error)) from error
    values = torch.utils._pytree.tree_leaves(returned)
    names = output_names(program)
    results: dict[str, Any] = {
        name: from_torch(value) for (name, arg), value in zip(names, values, strict=True) if is_tensor(arg)
    }
    for name, spec in new_values(program):
        value = given[spec.arg.name] if spec.target is None else reduce(getattr, spec.target.split("."), module)
        results[name] = from_torch(value.detach())
    save_tensors(Path(outputs), results)
