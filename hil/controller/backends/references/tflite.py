"""LiteRT without XNNPACK: with its reference kernels, which are plain loops and slow, or with its own optimised ones.

The reference kernels lack some operators (ELU, CEIL, ROUND, ...); the board's own interpreter is the same library.
"""

from __future__ import annotations

from pathlib import Path

from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.controller.storage.packages import needed_version
from hil.core.results import Model
from hil.formats.litert import PACKAGE


def source() -> str:
    """Who speaks: the reference kernels."""
    return f"{PACKAGE} {needed_version(PACKAGE, 'tflite')} reference kernels"


def source_builtin() -> str:
    """Who speaks: the optimised kernels."""
    return f"{PACKAGE} {needed_version(PACKAGE, 'tflite')} builtin kernels"


def compute(
    model: Model,
    inputs: Path,
    outputs: Path,
    *,
    cache: Cache,
    isolated: Isolated,
    recompute: bool,
    timeout: float | None,
    log: Path,
) -> None:
    """Run the model with the reference kernels in an isolated process."""
    _compute("reference", model, inputs, outputs, isolated, timeout, log)


def compute_builtin(
    model: Model,
    inputs: Path,
    outputs: Path,
    *,
    cache: Cache,
    isolated: Isolated,
    recompute: bool,
    timeout: float | None,
    log: Path,
) -> None:
    """Run the model with LiteRT's optimised kernels in an isolated process."""
    _compute("builtin", model, inputs, outputs, isolated, timeout, log)


def _compute(
    kernels: str, model: Model, inputs: Path, outputs: Path, isolated: Isolated, timeout: float | None, log: Path
) -> None:
    arguments = {"model": str(model.path.absolute()), "function": model.function, "kernels": kernels}
    folders = {"inputs": str(inputs), "outputs": str(outputs)}
    isolated.call(run, arguments | folders, timeout=timeout, log=log)


def run(model: str, function: str, kernels: str, inputs: str, outputs: str) -> None:
    """Run a model on the tensors of one folder, into another; called in the isolated process.

    Raises:
        ReferenceFailed: LiteRT cannot load or run it with these kernels.
    """
    from hil.controller.storage.tensor_files import load_tensors, save_tensors
    from hil.errors import LoadFailed, ReferenceFailed, RunFailed
    from hil.formats.litert import open_signature

    try:
        opened = open_signature(Path(model), function, kernels=kernels)
        opened.set_inputs(list(load_tensors(Path(inputs)).values()))
        opened.invoke()
        arrays = opened.outputs_now()
    except (LoadFailed, RunFailed) as error:
        raise ReferenceFailed(error.message, detail=error.detail) from error
    save_tensors(Path(outputs), {spec.name: array for spec, array in zip(opened.outputs, arrays, strict=True)})
