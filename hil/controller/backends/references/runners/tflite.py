"""Compute references with LiteRT without XNNPACK, with reference kernels (plain, slow loops) or optimized kernels.

The reference kernels lack some operators (ELU, CEIL, ROUND, ...). The board's interpreter is the same library.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hil.controller.storage.sources.packages import require_version
from hil.core.tensors import Array
from hil.errors import LoadFailed, ReferenceFailed, RunFailed
from hil.formats.litert import PACKAGE, open_signature


def describe_source(kernels: str) -> str:
    """Return the name and version of the reference, including the kernels."""
    return f"{PACKAGE} {require_version(PACKAGE, 'tflite')} {kernels} kernels"


def run(model: str, given: Mapping[str, Array], function: str, kernels: str) -> dict[str, Array]:
    """Run a model.

    Runs in an isolated process. Raises ReferenceFailed if LiteRT cannot run the model with these kernels.
    """
    try:
        opened = open_signature(Path(model), function, kernels=kernels)
        opened.set_inputs(list(given.values()))
        opened.invoke()
        arrays = opened.copy_outputs()
    except (LoadFailed, RunFailed) as error:
        raise ReferenceFailed(error.message, detail=error.detail) from error
    return {spec.name: array for spec, array in zip(opened.outputs, arrays, strict=True)}
