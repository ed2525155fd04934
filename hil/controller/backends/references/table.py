"""Define the references by name, with their formats and functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hil.controller.models.compiling import Work, call_isolated
from hil.controller.storage.sources.packages import load_registered
from hil.controller.storage.tensor_files import call_on_files
from hil.core.installed import list_entry_points
from hil.core.named import defer_import
from hil.core.results import Model

if TYPE_CHECKING:
    from typing_extensions import Unpack

GROUP = "hil.references"


class Compute(Protocol):
    """Callable that runs a model on the tensors in a directory and writes the outputs to another directory."""

    def __call__(self, model: Model, inputs: Path, outputs: Path, **work: Unpack[Work]) -> None:
        """Compute the outputs. Raises ReferenceFailed if the reference cannot run the model."""


@dataclass(frozen=True)
class Reference:
    """Reference that computes a model's outputs for comparison with a board.

    ``compute(model, inputs, outputs, *, isolated, timeout, log, cache, recompute)`` runs a :class:`hil.plugins.Model`.
    It reads tensors from the directory ``inputs`` (:func:`hil.plugins.load_tensors`) and writes the results to the
    directory ``outputs``, in the model's order (:func:`hil.plugins.save_tensors`). Use
    ``isolated.call(function, arguments, timeout=timeout, log=log)`` for code that may crash. ``compute`` raises
    ReferenceFailed if the reference cannot run the model; other exceptions are converted to ReferenceFailed. The return
    value is ignored.

    Attributes:
        formats: The supported model formats.
        source: Returns the reference's name and version. The cache key contains this text and the file of ``compute``.
    """

    formats: tuple[str, ...]
    source: Callable[[], str]
    compute: Compute


def load_references() -> dict[str, Reference]:
    """Return all references by name: built-in references and the entry points of the group ``hil.references``."""
    return load_registered(GROUP, _BUILT_IN, Reference)


def list_reference_names() -> list[str]:
    """Return the names of all references without loading them."""
    return [*_BUILT_IN, *(point.name for point in list_entry_points(GROUP))]


def _make_compute(run: str, *fields: str, **settings: Any) -> Compute:
    """Return a ``compute`` that calls a function in an isolated process.

    Args:
        run: The function's name. The function receives ``model`` (the file), ``given`` (the inputs) and the following
            arguments. It returns the outputs.
        fields: Attributes of the model to pass as arguments.
        settings: Further arguments.
    """

    def compute(model: Model, inputs: Path, outputs: Path, **work: Unpack[Work]) -> None:
        arguments: dict[str, Any] = {"model": str(model.path.absolute()), "run": run, **settings}
        for field in fields:
            value = getattr(model, field)
            arguments[field] = dict(value) if isinstance(value, Mapping) else value
        call_isolated(call_on_files, {"inputs": str(inputs), "outputs": str(outputs), **arguments}, work)

    return compute


_HERE = "hil.controller.backends.references.runners"
_ONNX, _TFLITE = f"{_HERE}.onnx", f"{_HERE}.tflite"
_IREE, _TORCH, _TENSORFLOW = f"{_HERE}.iree_llvm_cpu", f"{_HERE}.torch_eager", f"{_HERE}.tensorflow"
_BUILT_IN = {
    "onnxruntime": Reference(
        ("onnx",), defer_import(f"{_ONNX}:describe_runtime"), _make_compute(f"{_ONNX}:run_runtime")
    ),
    "onnx-reference": Reference(
        ("onnx",), defer_import(f"{_ONNX}:describe_evaluator"), _make_compute(f"{_ONNX}:run_evaluator")
    ),
    "iree-llvm-cpu": Reference(
        ("onnx", "mlir"), defer_import(f"{_IREE}:describe_source"), defer_import(f"{_IREE}:compute")
    ),
    "torch-eager": Reference(("pt2",), defer_import(f"{_TORCH}:describe_source"), _make_compute(f"{_TORCH}:run")),
    "tensorflow": Reference(
        ("tf", "keras"),
        defer_import(f"{_TENSORFLOW}:describe_source"),
        _make_compute(f"{_TENSORFLOW}:run", "function", "dims"),
    ),
} | {
    name: Reference(
        ("tflite",),
        partial(defer_import(f"{_TFLITE}:describe_source"), kernels),
        _make_compute(f"{_TFLITE}:run", "function", kernels=kernels),
    )
    for name, kernels in (("tflite", "reference"), ("tflite-builtin", "builtin"))
}
# CPU time limit of the evaluator, which is slow, if another reference can replace it.
EVALUATOR_CPU_SECONDS = 2.0
EVALUATOR = "onnx-reference"
QUICK_EVALUATOR = replace(
    _BUILT_IN[EVALUATOR], compute=_make_compute(f"{_ONNX}:run_evaluator", cpu_seconds=EVALUATOR_CPU_SECONDS)
)
