"""Modules with model files as methods: ONNX, MLIR, TFLite and all other formats that hil imports."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.controller.backends.references import load_references, run_reference
from hil.controller.models.importers import import_model
from hil.controller.pipeline.settings.options import CaseSettings
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import convert_write_errors
from hil.controller.workloads.traces.trace import CallProgram
from hil.core.files import copy_file
from hil.core.results import Artifact, Model, RunResult
from hil.core.runtimes import list_known_runtimes
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import get_dtype_name
from hil.errors import NotRun, UsageError, did_you_mean
from hil.testing.traces.backends import Backend
from hil.testing.traces.runners import BackendRunner, CallResult, Inputs, ProgramResult
from hil.testing.traces.target import BoardTarget


@dataclass(frozen=True)
class ModelFile:
    """Method defined by a model file: an attribute of a traced class."""

    path: str | Path  # path relative to the file of the class, or to the working directory at a prompt
    function: str = ""  # entry point; "" is the only entry point


class FileSubject:
    """Class with :class:`ModelFile` attributes. Raises UsageError if a name of ``exported_names`` is missing."""

    def __init__(
        self,
        module_class: Callable[[], Any],
        files: dict[str, ModelFile],
        exported_names: Sequence[str] | None,
        name: str,
    ) -> None:
        self.name = name
        try:
            self._folder = Path(inspect.getfile(module_class)).absolute().parent
        except (TypeError, OSError):  # defined at a prompt
            self._folder = Path.cwd()
        for name in exported_names or ():
            if name not in files:
                hint = f"{did_you_mean(name, files)}known methods: {', '.join(files)}"
                raise UsageError(f"method {name!r} not found in {self.name}", hint=hint)
        self._files = {name: files[name] for name in exported_names or files}
        self._models: dict[str, Model] = {}
        self.methods = tuple(self._files)
        self.references = tuple(load_references())
        # Default reference of these files. For formats that this reference does not support, the user must select a
        # backend.
        suffixes = {Path(file.path).suffix for file in self._files.values()}
        self.reference = "onnxruntime" if suffixes == {".onnx"} else "iree-llvm-cpu"

    @property
    def unseen(self) -> str:
        """Internal state of the files that a trace cannot see."""
        return "; ".join(f"{name}: {model.unseen}" for name, model in self._models.items() if model.unseen)

    def get_model(self, method: str, context: RunContext) -> Model:
        """Return a method's model, imported once."""
        if method not in self._models:
            file = self._files[method]
            self._models[method] = import_model(
                self._folder / file.path, function=file.function, isolated=context.isolated, cache=context.cache
            )
        return self._models[method]

    def copy_model(self, method: str, folder: Path, context: RunContext) -> Model:
        """Return a method's model, copied to the module's directory.

        The copy allows the user to recompile the programs later.
        """
        model = self.get_model(method, context)
        place = folder / "models" / method
        if not model.path.is_relative_to(place):
            copies = {name: place / name for name in model.files}
            with convert_write_errors(place):
                for name, path in model.files.items():
                    copies[name].parent.mkdir(parents=True, exist_ok=True)
                    copy_file(path, copies[name])
            main = next(copies[name] for name, path in model.files.items() if path == model.path)
            model = self._models[method] = replace(model, path=main, files=copies)
        return model

    def make_runner(self, backend: Backend, context: RunContext, folder: Path, settings: CaseSettings) -> BackendRunner:
        """Return a runner for a reference or a board. Raises UsageError for other backends."""
        if backend.choice is None and backend.runtime not in self.references:
            raise UsageError(
                f"backend {backend.name} runs only TensorFlow modules, but {self.name} consists of model files",
                hint=f"expected one of {', '.join(self.references)}, iree_llvmcpu, board:NAME",
            )
        return _FileRunner(self, backend, context, folder / backend.id, settings)


class _FileRunner(BackendRunner):
    def __init__(
        self, subject: FileSubject, backend: Backend, context: RunContext, folder: Path, settings: CaseSettings
    ) -> None:
        self._subject = subject
        self._context = context
        self._settings = settings
        self._reference = backend.runtime
        self._target = BoardTarget(backend, context, folder, settings) if backend.choice is not None else None
        self._artifacts: dict[str, Artifact] = {}

    def begin(self) -> None:
        """Open the board."""
        if self._target is not None:
            self._target.open()

    def inputs(self, method: str, args: Sequence[Any]) -> Inputs:
        """Validate the arguments: a tensor for every input of the model."""
        specs = self._subject.get_model(method, self._context).inputs
        inputs = super().inputs(method, args)
        if specs is not None and len(specs) != len(inputs):
            raise UsageError(f"{method} takes {len(specs)} inputs, got {len(inputs)}", hint=", ".join(map(str, specs)))
        for position, value in enumerate(inputs):
            what = f"argument {position} of {method}"
            if not hasattr(value, "dtype"):
                raise UsageError(
                    f"{what} must be an array, got {type(value).__name__}", hint="model files accept only tensors"
                )
            if specs is not None and not specs[position].accepts(get_dtype_name(value.dtype), value.shape):
                raise UsageError(f"{what}: expected {specs[position]}, got {list(value.shape)} {value.dtype}")
        return inputs

    def call(self, method: str, inputs: Inputs) -> CallResult:
        """Compute the reference, or run the method's program."""
        if self._target is None:
            model = self._subject.get_model(method, self._context)
            result = self._run_reference(model, inputs)
            arrays = [array.copy() for array in result.outputs.values()]
            return CallResult(_pack_outputs(list(result.outputs), arrays), result.source)
        model = self._subject.copy_model(method, self._target.folder.parent, self._context)
        answer = self._run_program(self._target, method, model, inputs)
        names = [spec.name for spec in model.outputs or ()]
        return CallResult(_pack_outputs(names, answer.returned), answer.source, answer)

    def _run_reference(self, model: Model, inputs: Inputs) -> RunResult:
        if model.format not in load_references()[self._reference].formats:
            raise NotRun(f"{self._reference} does not support {model.format} models")
        given = dict(zip([spec.name for spec in model.inputs or ()], inputs, strict=True))
        with make_temporary_folder("hil-trace-") as scratch:
            return run_reference(
                self._reference,
                model,
                given,
                cache=self._context.cache,
                isolated=self._context.isolated,
                recompute=self._settings.recompute,
                timeout=self._settings.timeout,
                log=Path(scratch) / "log",
            )

    def _run_program(self, target: BoardTarget, method: str, model: Model, inputs: Inputs) -> ProgramResult:
        if method not in self._artifacts:
            runtime = target.backend.runtime
            suffix = list_known_runtimes()[runtime].loads or runtime
            alone = len(self._subject.methods) == 1 and suffix == "vmfb"
            place = target.folder / ("compiled.vmfb" if alone else f"{method}/{method}.{suffix}")
            self._artifacts[method] = target.compile(model, place)
        artifact = self._artifacts[method]
        program = CallProgram(model.path, artifact.function, artifact.runtime)
        return target.run(artifact, artifact.function, inputs, model.outputs or (), program)

    def close(self) -> None:
        """Release the board."""
        if self._target is not None:
            self._target.close()


def _pack_outputs(names: Sequence[str], outputs: Sequence[Any]) -> Any:
    """Return a model's only output, or multiple outputs by name."""
    if len(outputs) == 1:
        return outputs[0]
    return dict(zip(names, outputs, strict=True)) if len(names) == len(outputs) else tuple(outputs)
