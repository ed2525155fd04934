"""LiteRT without XNNPACK: with its reference kernels, which are plain loops and slow, or with its own optimised ones.

The reference kernels lack some operators (ELU, CEIL, ROUND, ...); the board's own interpreter is the same library.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hil.controller.storage.packages import needed_version
from hil.core.tensors import Array
from hil.errors import LoadFailed, ReferenceFailed, RunFailed
from hil.formats.litert import PACKAGE, open_signature


def source(kernels: str) -> str:
    """Who speaks: which kernels."""
    return f"{PACKAGE} {needed_version(PACKAGE, 'tflite')} {kernels} kernels"


def run(model: str, given: Mapping[str, Array], function: str, kernels: str) -> dict[str, Array]:
    """Run a model; called in the isolated process. Raises ReferenceFailed: LiteRT cannot, with these kernels."""
    try:
        opened = open_signature(Path(model), function, kernels=kernels)
        opened.set_inputs(list(given.values()))
        opened.invoke()
        arrays = opened.outputs_now()
    except (LoadFailed, RunFailed) as error:
        raise ReferenceFailed(error.message, detail=error.detail) from error
    return {spec.name: array for spec, array in zip(opened.outputs, arrays, strict=True)}
