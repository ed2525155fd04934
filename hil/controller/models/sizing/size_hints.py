"""Find sizes of dynamic dimensions with which an ONNX model runs in ONNX Runtime. hil suggests these sizes in hints."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hil.controller.storage.run_context import RunContext
from hil.core.results import Model
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import Dim
from hil.errors import StageError
from hil.formats.onnx_file import load_onnx

_SIZES = (1, 2, 3, 4, 8, 16, 32, 64, 96, 128, 224, 256, 320, 384, 512)
_MAX_RANK, _MAX_SIZE = 8, 4096  # limits for ranks and sizes in a graph's constants
# Larger models and inputs are not tried, because a hint must not take long.
_MAX_MODEL_BYTES = 256 << 20
_MAX_ELEMENTS = 4 << 20
_SECONDS = 5.0
_TIMEOUT_SECONDS = 30.0


def suggest_sizes(model: Model, context: RunContext) -> dict[str, int]:
    """Return a size for every dynamic dimension with which the model runs, or {}."""
    if model.format != "onnx" or sum(file.stat().st_size for file in model.files.values()) > _MAX_MODEL_BYTES:
        return {}
    inputs = [[spec.name, spec.dtype, list(spec.shape)] for spec in model.inputs or ()]
    with make_temporary_folder("hil-sizes-") as folder:
        arguments = {"path": str(model.path.absolute()), "inputs": inputs}
        try:
            found: dict[str, int] = context.isolated.call(
                find_sizes, arguments, timeout=_TIMEOUT_SECONDS, log=Path(folder) / "sizes.log"
            )
        except StageError:
            return {}
    return found


def find_sizes(path: str, inputs: Sequence[Any]) -> dict[str, int]:
    """Run the model on zeros with increasing sizes. Runs in the isolated process.

    Args:
        path: the model's file.
        inputs: name, dtype and shape of each input, with symbols for dynamic dimensions.
    """
    import numpy as np
    import onnxruntime as ort

    from hil.core.tensors import parse_dtype
    from hil.formats.ort_values import to_ort

    ort.set_default_logger_severity(4)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception:  # the case reports errors of the model
        return {}
    end = time.monotonic() + _SECONDS
    for sizes in iter_candidates([shape for _, _, shape in inputs], sorted({*_SIZES, *_find_sizes(path)})):
        if time.monotonic() > end:
            break
        shapes = [[sizes.get(dim, dim) for dim in shape] for _, _, shape in inputs]
        if sum(map(math.prod, shapes)) > _MAX_ELEMENTS:
            continue
        arrays = (np.zeros(shape, parse_dtype(dtype)) for (_, dtype, _), shape in zip(inputs, shapes, strict=True))
        try:
            feeds = {name: to_ort(array) for (name, *_), array in zip(inputs, arrays, strict=True)}
            outputs = session.run_with_ort_values(None, feeds)
        except Exception:  # the graph does not run with these sizes
            continue
        if all(math.prod(output.shape()) for output in outputs if output.is_tensor()):
            return sizes
    return {}


def _find_sizes(path: str) -> set[int]:
    """Return the sizes in shapes and values of the graph's constants, such as the shape of a Reshape."""
    from onnx import numpy_helper

    from hil.controller.models.importers.onnx_nodes import read_constants

    found: set[int] = set()
    for tensor in read_constants(load_onnx(path).graph).values():
        found.update(tensor.dims)
        is_shape = tensor.data_type == tensor.INT64 and math.prod(tensor.dims) <= _MAX_RANK
        if is_shape and tensor.data_location != tensor.EXTERNAL:
            found.update(int(size) for size in numpy_helper.to_array(tensor).reshape(-1))
    return {size for size in sorted(found) if 0 < size <= _MAX_SIZE}


def iter_candidates(shapes: Sequence[Sequence[Dim]], tried: Sequence[int] = _SIZES) -> Iterator[dict[str, int]]:
    """Yield sizes to try, small sizes first: for every size, first with batches of 1, then with all dimensions equal.

    A dimension counts as a batch if it occurs only as the first of several dimensions, or if its name contains "batch".
    """
    symbols = list(dict.fromkeys(dim for shape in shapes for dim in shape if isinstance(dim, str)))
    inner = {dim for shape in shapes for dim in (shape[1:] if len(shape) > 1 else shape)}
    seen: list[dict[str, int]] = []
    for size in tried:
        batches = {one: size if one in inner and "batch" not in one.lower() else 1 for one in symbols}
        for sizes in (batches, dict.fromkeys(symbols, size)):
            if sizes not in seen:
                seen.append(sizes)
                yield sizes
