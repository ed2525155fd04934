"""Quantise exported PyTorch programs with pt2e for ExecuTorch's backends. Runs in an isolated process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hil.controller.models.executorch_backends import make_quantizer, pick_backend
from hil.controller.models.importers.exported.pt2 import call_of, is_tensor, list_user_inputs
from hil.controller.models.importers.exported.pt2_archive import load_program
from hil.controller.storage.tensor_files import load_tensors
from hil.errors import ImportFailed
from hil.formats.torch_values import to_torch

_NAMESPACE = "quantized_decomposed"


def quantize_static(model: str, output: str, external: bool, samples: Sequence[str], **settings: Any) -> dict[str, Any]:
    """Quantise weights and activations to int8, or as the backend's options specify.

    Samples define the activation ranges.

    Returns:
        ``quantise_s``: duration of the quantisation in seconds, without reading and exporting.

    Raises:
        ImportFailed: the model has no operators to quantise, or is already quantised.
    """
    return _quantise_program(model, output, samples, is_dynamic=False, **settings)


def quantize_dynamic(
    model: str, output: str, external: bool, samples: Sequence[str], **settings: Any
) -> dict[str, Any]:
    """Quantise weights in linear layers to int8.

    Activations are quantised at run time, by the current range of each tensor.

    The model is exported with the first sample.
    """
    return _quantise_program(model, output, samples[:1], is_dynamic=True, **settings)


def _quantise_program(
    model: str,
    output: str,
    samples: Sequence[str],
    *,
    is_dynamic: bool,
    per_channel: bool,
    backend: str,
    options: dict[str, str],
) -> dict[str, Any]:
    import torch
    from executorch.backends.transforms.duplicate_dynamic_quant_chain import DuplicateDynamicQuantChainPass
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    program = load_program(model)
    if _find_quantised_ops(program):
        raise ImportFailed(f"the model is already quantized: found {', '.join(_find_quantised_ops(program))}")
    given = ({name: to_torch(array) for name, array in load_tensors(Path(folder)).items()} for folder in samples)
    calls = [call_of(program, tensors) for tensors in given]
    quantizer = make_quantizer(backend, per_channel, is_dynamic, options)
    start = time.monotonic()
    with torch.no_grad():
        prepared = prepare_pt2e(program.module(check_guards=False), quantizer)
        for args, kwargs in calls:
            prepared(*args, **kwargs)
        converted = convert_pt2e(prepared, fold_quantize=pick_backend(backend).fold_quantize)
    DuplicateDynamicQuantChainPass()(converted)
    seconds = time.monotonic() - start
    args, kwargs = calls[0]
    again = torch.export.export(converted, args, kwargs, dynamic_shapes=_read_dynamic_shapes(program))
    if not _find_quantised_ops(again):
        found = sorted({str(node.target) for node in program.graph.nodes if node.op == "call_function"})
        raise ImportFailed(f"the model has no operators to quantize; operators: {', '.join(found)}")
    torch.export.save(again, output)
    return {"quantise_s": seconds}


def _find_quantised_ops(program: Any) -> list[str]:
    """Return the operators that only quantised programs have."""
    targets = (str(node.target) for node in program.graph.nodes if node.op == "call_function")
    return sorted({target for target in targets if target.startswith(_NAMESPACE)})


def _read_dynamic_shapes(program: Any) -> Any:
    """Return the program's dynamic dimensions in the format for ``torch.export.export``."""
    from torch.export import Dim
    from torch.utils._pytree import tree_unflatten

    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    dims: dict[str, Any] = {}

    def make_dim(size: Any) -> Any:
        expression = size.node.expr
        if not expression.is_Symbol:
            return Dim.AUTO  # the size is an expression of other sizes
        limits = program.range_constraints.get(expression)
        name = str(expression)
        bounds = {key: int(one) for key, one in (("min", limits.lower), ("max", limits.upper)) if one.is_Integer}
        return dims.setdefault(name, Dim(name, **bounds))

    flat = [
        {axis: make_dim(size) for axis, size in enumerate(values[name].shape) if not isinstance(size, int)} or None
        if is_tensor(spec.arg)
        else None
        for name, spec in list_user_inputs(program)
    ]
    if not any(flat):
        return None
    args, kwargs = tree_unflatten(flat, program.call_spec.in_spec)
    return (*args, *kwargs.values())
