"""The references by name: what they take and how they compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hil.controller.models.compiling import Work, call_isolated
from hil.controller.storage.packages import registered
from hil.controller.storage.tensor_files import on_files
from hil.core.named import later
from hil.core.results import Model

if TYPE_CHECKING:
    from typing_extensions import Unpack

GROUP = "hil.references"


class Compute(Protocol):
    """Runs a model on the tensors of one folder and writes its outputs, in order, into another."""

    def __call__(self, model: Model, inputs: Path, outputs: Path, **work: Unpack[Work]) -> None:
        """Compute. Raises ReferenceFailed where the reference cannot run the model."""


@dataclass(frozen=True)
class Reference:
    """An oracle.

    ``compute(model, inputs, outputs, *, isolated, timeout, log, cache, recompute)`` runs a :class:`hil.plugins.Model`
    on the tensors of the folder ``inputs`` (:func:`hil.plugins.load_tensors`) and writes what it gives into the folder
    ``outputs``, in the model's order (:func:`hil.plugins.save_tensors`). What may crash is called with
    ``isolated.call(function, arguments, timeout=timeout, log=log)``. It raises ReferenceFailed where it cannot run the
    model; anything else that it raises becomes one. What it returns is not looked at.

    Attributes:
        formats: of the models that it takes.
        source: returns who speaks, with version; the key of what is cached, with the file of ``compute``.
    """

    formats: tuple[str, ...]
    source: Callable[[], str]
    compute: Compute


def references() -> dict[str, Reference]:
    """Every reference by name: the built-in ones and those of the entry point group ``hil.references``."""
    return registered(GROUP, _BUILT_IN, Reference)


def _by(run: str, *fields: str, **settings: Any) -> Compute:
    """Compute by calling a function in a process of its own.

    Args:
        run: its name; it takes ``model`` (the file), ``given`` (the inputs), and what follows; returns the outputs.
        fields, settings: of the model, and others, which it takes as well.
    """

    def compute(model: Model, inputs: Path, outputs: Path, **work: Unpack[Work]) -> None:
        arguments: dict[str, Any] = {"model": str(model.path.absolute()), "run": run, **settings}
        for field in fields:
            value = getattr(model, field)
            arguments[field] = dict(value) if isinstance(value, Mapping) else value
        call_isolated(on_files, {"inputs": str(inputs), "outputs": str(outputs), **arguments}, work)

    return compute


_HERE = "hil.controller.backends.references"
_ONNX, _TFLITE = f"{_HERE}.onnx", f"{_HERE}.tflite"
_IREE, _TORCH, _TENSORFLOW = f"{_HERE}.iree_llvm_cpu", f"{_HERE}.torch_eager", f"{_HERE}.tensorflow"
_BUILT_IN = {
    "onnxruntime": Reference(("onnx",), later(f"{_ONNX}:runtime_source"), _by(f"{_ONNX}:run_runtime")),
    "onnx-reference": Reference(("onnx",), later(f"{_ONNX}:evaluator_source"), _by(f"{_ONNX}:run_evaluator")),
    "iree-llvm-cpu": Reference(("onnx", "mlir"), later(f"{_IREE}:source"), later(f"{_IREE}:compute")),
    "torch-eager": Reference(("pt2",), later(f"{_TORCH}:source"), _by(f"{_TORCH}:run")),
    "tensorflow": Reference(
        ("tf", "keras"), later(f"{_TENSORFLOW}:source"), _by(f"{_TENSORFLOW}:run", "function", "dims")
    ),
} | {
    name: Reference(
        ("tflite",), partial(later(f"{_TFLITE}:source"), kernels), _by(f"{_TFLITE}:run", "function", kernels=kernels)
    )
    for name, kernels in (("tflite", "reference"), ("tflite-builtin", "builtin"))
}
# The evaluator is plain numpy: where another reference can take its place, it gets this much CPU time.
EVALUATOR_CPU_SECONDS = 2.0
EVALUATOR = "onnx-reference"
QUICK_EVALUATOR = replace(
    _BUILT_IN[EVALUATOR], compute=_by(f"{_ONNX}:run_evaluator", cpu_seconds=EVALUATOR_CPU_SECONDS)
)
