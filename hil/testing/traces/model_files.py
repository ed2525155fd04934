"""A module whose methods are models in files: ONNX, MLIR, TFLite, whatever hil imports."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.controller.backends.references import refer, references
from hil.controller.models.importers import import_model
from hil.controller.pipeline.options import DEFAULT_TIMEOUT_S
from hil.controller.storage.run_context import RunContext
from hil.core.results import Artifact, Model
from hil.core.runtimes import RUNTIMES
from hil.core.scratch import temporary_folder
from hil.core.tensors import dtype_name
from hil.errors import UsageError
from hil.testing.traces.backends import Backend
from hil.testing.traces.runners import Called, Inputs, Program, Runner, recorded
from hil.testing.traces.target import Target


@dataclass(frozen=True)
class ModelFile:
    """A method that is a model in a file: an attribute of a class that is traced."""

    path: str | Path  # the file, relative to the one that has the class, or at a prompt to where one is
    function: str = ""  # its entry point; "" is the only one


def model_files(module_class: Any) -> dict[str, ModelFile]:
    """Return the methods of a class that are models in files."""
    return (
        {name: value for name, value in vars(module_class).items() if isinstance(value, ModelFile)}
        if inspect.isclass(module_class)
        else {}
    )


class FileSubject:
    """A class with :class:`ModelFile` attributes.

    Args:
        exported_names: those that are traced; None is all.

    Raises:
        UsageError: it has no such method.
    """

    def __init__(
        self, module_class: Callable[[], Any], files: dict[str, ModelFile], exported_names: Sequence[str] | None
    ) -> None:
        self.name = module_class.__name__
        try:
            self._folder = Path(inspect.getfile(module_class)).absolute().parent
        except (TypeError, OSError):  # typed at a prompt
            self._folder = Path.cwd()
        for name in exported_names or ():
            if name not in files:
                raise UsageError(f"{self.name} has no method {name!r}", hint=f"it has {', '.join(files)}")
        self._files = {name: files[name] for name in exported_names or files}
        self._models: dict[str, Model] = {}
        self.references = tuple(references())
        # The one that is asked first for such files; what none can run needs a backend's name.
        suffixes = {Path(file.path).suffix for file in self._files.values()}
        self.reference = "onnxruntime" if suffixes == {".onnx"} else "iree-llvm-cpu"

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of its methods."""
        return tuple(self._files)

    @property
    def unseen(self) -> str:
        """The state that its files keep to themselves."""
        notes = {name: model.unseen for name, model in self._models.items()}
        return "; ".join(f"{name}: {note}" for name, note in notes.items() if note)

    def model(self, method: str, context: RunContext) -> Model:
        """Return a method's model.

        Raises:
            UsageError: there is no such file or function.
            ImportFailed: it cannot be read.
        """
        if method not in self._models:
            file = self._files[method]
            self._models[method] = import_model(
                self._folder / file.path, function=file.function, isolated=context.isolated, cache=context.cache
            )
        return self._models[method]

    def runner(self, backend: Backend, context: RunContext, folder: Path) -> Runner:
        """Return a reference of hil's, or programs on a board."""
        if backend.choice is None:
            if backend.runtime not in self.references:
                raise UsageError(
                    f"the backend {backend.name} runs TensorFlow modules, and {self.name} consists of files",
                    hint=f"one of {', '.join(self.references)}, iree_llvmcpu, board:NAME",
                )
            return _Refers(self, backend.runtime, context)
        return _OnBoard(self, context, Target(backend, context, folder / backend.id))


class _Models:
    """What runners of such modules share."""

    def __init__(self, subject: FileSubject, context: RunContext) -> None:
        self._subject = subject
        self._context = context

    def begin(self) -> None:
        """A file has no state."""

    def inputs(self, method: str, args: Sequence[Any]) -> Inputs:
        """One tensor for each input of the model."""
        specs = self._subject.model(method, self._context).inputs
        inputs = recorded(method, args)
        if specs is not None and len(specs) != len(inputs):
            raise UsageError(f"{method} takes {len(specs)} inputs, got {len(inputs)}", hint=", ".join(map(str, specs)))
        for position, value in enumerate(inputs):
            if not hasattr(value, "dtype"):
                raise UsageError(
                    f"argument {position} of {method} is no array", hint="a model's file takes tensors only"
                )
            spec = specs[position] if specs is not None else None
            if spec is not None and not spec.accepts(dtype_name(value.dtype), value.shape):
                raise UsageError(
                    f"argument {position} of {method} is {list(value.shape)} {value.dtype}, the model takes {spec}"
                )
        return inputs

    def close(self) -> None:
        """There is nothing to give back."""


class _Refers(_Models):
    """A reference of hil's."""

    def __init__(self, subject: FileSubject, reference: str, context: RunContext) -> None:
        super().__init__(subject, context)
        self._reference = reference

    def call(self, method: str, inputs: Inputs) -> Called:
        model = self._subject.model(method, self._context)
        given = dict(zip([spec.name for spec in model.inputs or ()], inputs, strict=True))
        with temporary_folder("hil-trace-") as scratch:
            settings: dict[str, Any] = {
                "cache": self._context.cache,
                "isolated": self._context.isolated,
                "recompute": False,
            }
            log = Path(scratch) / "log"
            result = refer(self._reference, model, given, timeout=DEFAULT_TIMEOUT_S, log=log, **settings)
            outputs = {name: array.copy() for name, array in result.outputs.items()}
        return Called(_returned(list(outputs), list(outputs.values())), result.source)


class _OnBoard(_Models):
    """Programs on a board."""

    def __init__(self, subject: FileSubject, context: RunContext, target: Target) -> None:
        super().__init__(subject, context)
        self._target = target
        self._artifacts: dict[str, tuple[Artifact, Path]] = {}

    def call(self, method: str, inputs: Inputs) -> Called:
        model = self._subject.model(method, self._context)
        if method not in self._artifacts:
            suffix = RUNTIMES[self._target.backend.runtime].loads
            alone = len(self._subject.methods) == 1 and suffix == "vmfb"
            place = self._target.folder / ("compiled.vmfb" if alone else f"{method}/{method}.{suffix}")
            self._artifacts[method] = self._target.compile(model, place), place
        artifact, path = self._artifacts[method]
        answer = self._target.run(artifact, artifact.function, inputs, model.outputs or ())
        rest = tuple(path.parent / name for name in artifact.files if name != artifact.main)
        program = None
        if artifact.runtime == "iree":
            program = Program(path, artifact.function, self._target.device, answer, rest)
        names = [spec.name for spec in model.outputs or ()]
        return Called(_returned(names, list(answer.returned)), answer.source, program)

    def close(self) -> None:
        self._target.close()


def _returned(names: Sequence[str], outputs: Sequence[Any]) -> Any:
    """Return a model's outputs: the only one, or several by name."""
    if len(outputs) == 1:
        return outputs[0]
    return dict(zip(names, outputs, strict=True)) if len(names) == len(outputs) else tuple(outputs)
