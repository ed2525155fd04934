"""Compute a reference for an exported program with PyTorch in eager mode on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

from hil.controller.models.importers.exported.pt2 import call_of, is_tensor, list_new_values, list_output_names
from hil.controller.models.importers.exported.pt2_archive import load_program
from hil.controller.storage.screen.texts import convert_foreign_errors
from hil.controller.storage.sources.packages import require_version
from hil.core.tensors import Array
from hil.errors import ReferenceFailed
from hil.formats.torch_values import convert_from_torch, to_torch

# Threads split sums, so a fixed number of threads gives the same results on all machines.
_THREADS = 4


def describe_source() -> str:
    """Return the name and version of the reference."""
    return f"torch-eager {require_version('torch', 'torch')} CPU"


def run(model: str, given: Mapping[str, Array]) -> dict[str, Array]:
    """Run a program. Runs in an isolated process.

    The program's state (buffers that the program changes) starts with the saved values. The result contains the
    outputs, followed by the new state. The random seed is 0.

    Raises:
        ReferenceFailed: torch cannot run the program on a CPU.
    """
    from functools import reduce

    import torch

    torch.set_num_threads(_THREADS)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    program = load_program(model)
    tensors = {name: to_torch(array) for name, array in given.items()}
    args, kwargs = call_of(program, tensors)
    with convert_foreign_errors(ReferenceFailed, "torch failed to run the program"), torch.no_grad():
        module = program.module(check_guards=False)
        returned = module(*args, **kwargs)
    values = torch.utils._pytree.tree_leaves(returned)
    results = {
        name: convert_from_torch(value)
        for (name, arg), value in zip(list_output_names(program), values, strict=True)
        if is_tensor(arg)
    }
    for name, spec in list_new_values(program):
        value = tensors[spec.arg.name] if spec.target is None else reduce(getattr, spec.target.split("."), module)
        results[name] = convert_from_torch(value.detach())
    return results
