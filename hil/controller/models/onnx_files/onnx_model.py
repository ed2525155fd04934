"""Load an ONNX model for rewriting.

All dimensions get fixed sizes. Small weights are copied into the model; large weights stay in their files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.models.compiling import EXTERNAL_FROM_BYTES, EXTERNAL_FROM_ELEMENTS
from hil.controller.models.importers.onnx import fix_dims
from hil.controller.models.importers.onnx_data import compute_size, embed_data
from hil.controller.models.importers.onnx_nodes import iter_tensors
from hil.formats.onnx_file import load_onnx


def load_model(path: Path, dims: Mapping[str, int]) -> Any:
    """Load a model, set the sizes of its dimensions, and copy small weights into the model."""
    model = load_onnx(path)
    initialised = {tensor.name for tensor in model.graph.initializer}
    fix_dims([value for value in model.graph.input if value.name not in initialised], dims)
    _load_small(model, path.parent)
    model.graph.name = model.graph.name or "main_graph"
    return model


def is_heavy(model: Any) -> bool:
    """Return True if a model has so much data that large tensors must stay external."""
    return sum(map(compute_size, model.graph.initializer)) > EXTERNAL_FROM_BYTES


def _load_small(model: Any, folder: Path) -> None:
    """Read external data into the model, except the large weights in a heavy model."""
    heavy = is_heavy(model)
    large = (tensor for tensor in model.graph.initializer if math.prod(tensor.dims) >= EXTERNAL_FROM_ELEMENTS)
    kept_out = {tensor.name for tensor in large if heavy}
    for tensor in iter_tensors(model):
        if tensor.data_location == tensor.EXTERNAL and tensor.name not in kept_out:
            embed_data(tensor, folder)
