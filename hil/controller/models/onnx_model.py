"""Read an ONNX model to be rewritten: sizes fixed, small weights in the model, large ones in their files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.models.compiling import EXTERNAL_FROM_BYTES, EXTERNAL_FROM_ELEMENTS
from hil.controller.models.importers.onnx import fix_dims
from hil.controller.models.importers.onnx_data import embed_data, size_of
from hil.controller.models.importers.onnx_nodes import tensors_of


def load_model(path: Path, dims: Mapping[str, int]) -> Any:
    """Read a model with sizes fixed and small external weights read."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    initialised = {tensor.name for tensor in model.graph.initializer}
    fix_dims([value for value in model.graph.input if value.name not in initialised], dims)
    _load_small(model, path.parent)
    model.graph.name = model.graph.name or "main_graph"
    return model


def is_heavy(model: Any) -> bool:
    """Return whether a model has so much data that large tensors stay outside of what is made of it."""
    return sum(map(size_of, model.graph.initializer)) > EXTERNAL_FROM_BYTES


def _load_small(model: Any, folder: Path) -> None:
    """Read external data into the model, but for the large weights of a heavy one."""
    heavy = is_heavy(model)
    large = (tensor for tensor in model.graph.initializer if math.prod(tensor.dims) >= EXTERNAL_FROM_ELEMENTS)
    kept_out = {tensor.name for tensor in large if heavy}
    for tensor in tensors_of(model):
        if tensor.data_location == tensor.EXTERNAL and tensor.name not in kept_out:
            embed_data(tensor, folder)
