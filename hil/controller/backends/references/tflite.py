"""LiteRT without XNNPACK: with its reference kernels, which are plain loops and slow, or with its own optimised ones.

The reference kernels lack some operators (ELU, CEIL, ROUND, ...); the board's own interpreter is the same library.
"""

from __future__ import annotations

from pathlib import Path

from hil.controller.storage.packages import needed_version
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.errors import LoadFailed, ReferenceFailed, RunFailed
from hil.formats.litert import PACKAGE, open_signature


def source() -> str:
    """Who speaks: the reference kernels."""
    return f"{PACKAGE} {needed_version(PACKAGE, 'tflite')} reference kernels"


def source_builtin() -> str:
    """Who speaks: the optimised kernels."""
    return f"{PACKAGE} {needed_version(PACKAGE, 'tflite')} builtin kernels"


def run(model: str, function: str, kernels: str, inputs: str, outputs: str) -> None:
    """Run a model on the tensors of one folder, into another; called in the isolated process.

    Raises:
        ReferenceFailed: LiteRT cannot load or run it with these kernels.
    """

    try:
        opened = open_signature(Path(model), function, kernels=kernels)
        opened.set_inputs(list(load_tensors(Path(inputs)).values()))
        opened.invoke()
        arrays = opened.outputs_now()
    except (LoadFailed, RunFailed) as error:
        raise ReferenceFailed(error.message, detail=error.detail) from error
    save_tensors(Path(outputs), {spec.name: array for spec, array in zip(opened.outputs, arrays, strict=True)})
