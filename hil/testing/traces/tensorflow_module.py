"""Trace a tf.Module or Keras model: run it with TensorFlow, or compile it to programs for IREE and TFLite.

For each trace, hil creates a new module in this process. The variables of this module are the state on all backends:
hil passes their values to a program, and writes new values back. So a module behaves in the same way on all backends.
After each call, hil reads all variables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil.controller.models.tensorflow.graphs import format_error, is_variable, replace_leaves, restore
from hil.controller.models.tensorflow.lower import CapturedFunction, flatten
from hil.controller.pipeline.settings.options import CaseSettings
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.screen.texts import get_first_line
from hil.controller.storage.sources.packages import require_version
from hil.controller.workloads.traces.trace import CallProgram, convert_to_numpy
from hil.core.results import Stage
from hil.core.tensors import Array
from hil.errors import RunFailed, UsageError, did_you_mean
from hil.testing.traces.backends import TF, TFLITE, Backend
from hil.testing.traces.runners import BackendRunner, CallResult, Inputs, ProgramResult, make_content_name
from hil.testing.traces.target import BoardTarget
from hil.testing.traces.tensorflow_programs import ModulePrograms, call_key, is_same_array, lower_method

# Methods of Keras models that are not tensor functions.
_LOOPS = ("predict", "fit", "evaluate")


class TfSubject:
    """Module class with the methods ``exported_names``, or every public ``tf.function``.

    Raises:
        UsageError: TensorFlow is not installed.
    """

    reference = TF
    references: tuple[str, ...] = ()
    unseen = ""

    def __init__(self, module_class: Callable[[], Any], exported_names: Sequence[str] | None, name: str) -> None:
        self.version = require_version("tensorflow", "tensorflow")
        self.name = name
        self._class = module_class
        self._exported = None if exported_names is None else tuple(exported_names)
        self._methods: tuple[str, ...] | None = self._exported
        self.variable_names: list[str] = []

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the callable methods. The first access may create a module."""
        if self._methods is None:
            self.make()
        assert self._methods is not None
        return self._methods

    def make(self) -> Any:
        """Create a module. Raises UsageError if an exported method is missing or unsupported."""
        module = self._class()
        found = list_exported(module)
        if self._exported is None:
            if not found:
                raise UsageError(
                    f"{self.name} does not define a public tf.function",
                    hint="decorate methods with @tf.function, or list them: exported_names=[...]",
                )
            self._methods = found
        for name in self._exported or ():
            if not callable(getattr(module, name, None)):
                raise UsageError(
                    f"method {name!r} in exported_names not found in {self.name}",
                    hint=f"{did_you_mean(name, found)}known functions: {', '.join(found) or 'none'}",
                )
            if name in _LOOPS and str(getattr(getattr(module, name), "__module__", "")).startswith("keras."):
                raise UsageError(
                    f"unsupported method {self.name}.{name}: Keras runs a loop over batches in Python",
                    hint="export the called method instead, exported_names=['call'], or write a tf.function",
                )
        return module

    def make_runner(self, backend: Backend, context: RunContext, folder: Path, settings: CaseSettings) -> BackendRunner:
        """Return a runner for TensorFlow, or for programs on a board."""
        if backend.runtime == TF:
            return _EagerRunner(self)
        target = BoardTarget(backend, context, folder / backend.id, settings)
        return _BoardRunner(self, target, ModulePrograms(self.name, context, folder))


class _TfRunner(BackendRunner):
    """Base of runners: the module, its variables, and calls of its methods."""

    def __init__(self, subject: TfSubject) -> None:
        self._subject = subject
        self.module: Any = None
        self._variables = Variables([])

    def begin(self) -> None:
        """Create the module."""
        self._variables = Variables(self._subject.variable_names)
        with self._variables.watch():
            self.module = self._subject.make()
        self._variables.read()

    def call(self, method: str, inputs: Inputs) -> CallResult:
        """Call a method, then read all variables."""
        with self._variables.watch():
            called = self._call_method(method, inputs)
        state, changed = self._variables.read()
        returned = called.answer.program.assigned if called.answer is not None else ()
        return replace(called, state=state, assigned=tuple(dict.fromkeys((*returned, *changed))))

    def _call_method(self, method: str, inputs: Inputs) -> CallResult:
        raise NotImplementedError

    def inputs(self, method: str, args: Sequence[Any]) -> Inputs:
        """Convert arguments to the dtypes of the method's signature, if it has one."""
        signature = getattr(getattr(self.module, method), "input_signature", None)
        if signature is not None:
            takes = f"{method} expects {_format_signature(signature) or 'no arguments'}"
            if len(args) != len(signature):
                raise UsageError(f"{takes}: got {len(args)} argument{'' if len(args) == 1 else 's'}")
            try:
                args = [_cast_to_signature(spec, value) for spec, value in zip(signature, args, strict=True)]
            except (TypeError, ValueError, LookupError) as error:
                raise UsageError(f"{takes}: {get_first_line(error)}") from error
        return super().inputs(method, args)

    def close(self) -> None:
        """Release the module."""
        self.module, self._variables = None, Variables([])


class _EagerRunner(_TfRunner):
    """Runner for TensorFlow."""

    def _call_method(self, method: str, inputs: Inputs) -> CallResult:
        import tensorflow as tf

        tensors = replace_leaves(inputs, lambda leaf: tf.constant(leaf) if hasattr(leaf, "dtype") else leaf)
        function = getattr(self.module, method)
        try:
            outputs = function(*tensors)
            if hasattr(function, "get_concrete_function"):
                self._variables.add(function.get_concrete_function(*tensors).graph.variables)
        except (tf.errors.OpError, TypeError, ValueError) as error:
            raise RunFailed(f"TensorFlow: {format_error(error)}", stage=Stage.RUN.value, detail=str(error)) from error
        return CallResult(convert_to_numpy(f"the result of {method}", outputs), f"tensorflow {self._subject.version}")


class _BoardRunner(_TfRunner):
    """Runner for programs on a board, with the variables of a module in this process."""

    def __init__(self, subject: TfSubject, target: BoardTarget, programs: ModulePrograms) -> None:
        super().__init__(subject)
        self._target = target
        self._programs = programs
        self._live: dict[str, CapturedFunction] = {}

    def begin(self) -> None:
        """Open the board and create the module. Discard the lowered functions."""
        self._target.open()
        super().begin()
        self._live.clear()

    def _call_method(self, method: str, inputs: Inputs) -> CallResult:
        on_tflite = self._target.backend.runtime == TFLITE
        outputs, answer = (self._run_tflite if on_tflite else self._run_iree)(method, inputs)
        found = convert_to_numpy(f"the result of {method}", outputs)
        return CallResult(found, answer.source, answer)

    def _run_iree(self, method: str, inputs: Inputs) -> tuple[Any, ProgramResult]:
        key = call_key(method, inputs)
        if key not in self._live:
            self._live[key] = lower_method(self.module, method, inputs)
        live = self._live[key]
        self._variables.add(filter(is_variable, live.captured))
        program = self._programs.get_program(method, inputs, live, self.module, self._subject.methods)
        artifact = self._programs.compile_program(program, self._target)
        function = live.function
        expected = [*function.outputs, *(state.spec for state in function.assigned)]
        state = [number for number in range(len(live.captured)) if number not in program.constants]
        variables = [live.captured[function.state.index(state)] for state in function.assigned]
        kept = CallProgram(
            program.model.path,
            method,
            artifact.runtime,
            captured=tuple(self._variables.name_of(live.captured[number]) for number in state),
            assigned=tuple(map(self._variables.name, variables)),
        )
        given = [*flatten(inputs), *(live.captured[number].numpy() for number in state)]
        answer = self._target.run(artifact, method, given, expected, kept)
        count = len(function.outputs)
        for variable, value in zip(variables, answer.returned[count:], strict=True):
            variable.assign(value)
        return function.nest_outputs(list(answer.returned[:count])), answer

    def _run_tflite(self, method: str, inputs: Inputs) -> tuple[Any, ProgramResult]:
        program = self._programs.get_tflite(method, inputs, self.module, self._target)
        kept = CallProgram(program.artifact.files[program.artifact.main], "", TFLITE)
        answer = self._target.run(program.artifact, "", flatten(inputs), program.outputs, kept)
        return restore(program.structure, answer.returned), answer

    def close(self) -> None:
        """Release the module and the board."""
        super().close()
        self._target.close()


def list_exported(module: Any) -> tuple[str, ...]:
    """Return the public tf.functions of a module, in order of definition: base classes, class, then instance."""
    places = [vars(kind) for kind in reversed(type(module).__mro__)] + [getattr(module, "__dict__", {})]
    names = (name for place in places for name, value in place.items() if hasattr(value, "get_concrete_function"))
    return tuple(dict.fromkeys(name for name in names if not name.startswith("_")))


def _cast_to_signature(spec: Any, value: Any) -> Any:
    """Convert a structure of values to tensors with the dtypes of a signature."""
    import tensorflow as tf

    if isinstance(spec, Mapping):
        if spec.keys() != value.keys():
            raise ValueError(f"expected keys {', '.join(map(str, spec))}, got {', '.join(map(str, value))}")
        return {name: _cast_to_signature(spec[name], item) for name, item in value.items()}
    if isinstance(spec, (list, tuple)):
        return tuple(_cast_to_signature(one, item) for one, item in zip(spec, value, strict=True))
    tensor = tf.convert_to_tensor(value, spec.dtype)
    if not spec.shape.is_compatible_with(tensor.shape):
        raise ValueError(f"expected shape {spec.shape}, got {tensor.shape}")
    return tensor


def _format_signature(signature: Sequence[Any]) -> str:
    return ", ".join(f"{spec.shape} {spec.dtype.name}" if hasattr(spec, "dtype") else "..." for spec in signature)


class Variables:
    """Variables of one module instance, by name.

    Variables are identified by creation order: the Nth created variable has the same name in each instance. The names
    that Keras assigns differ between instances, because Keras numbers names globally. The first instance fills
    ``names``.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._created = 0
        self._found: dict[str, Any] = {}
        self._values: dict[str, Array] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Record all variables created in the context."""
        import tensorflow as tf

        def create(following: Any, **settings: Any) -> Any:
            variable = following(**settings)
            if self._created == len(self._names):
                self._names.append(_make_unique(_get_base_name(variable), self._names))
            self._found[self._names[self._created]] = variable
            self._created += 1
            return variable

        with tf.variable_creator_scope(create):
            yield

    def add(self, variables: Iterable[Any]) -> None:
        """Add variables that a method uses. Variables created before the module keep their names."""
        for variable in variables:
            if not any(variable.handle is known.handle for known in self._found.values()):
                self._found[_make_unique(_get_base_name(variable), self._found)] = variable

    def name(self, variable: Any) -> str:
        """Return the name of a known variable."""
        return next(name for name, known in self._found.items() if known.handle is variable.handle)

    def name_of(self, item: Any) -> str:
        """Return the name of a captured variable, or a name for a constant, derived from its content."""
        if is_variable(item):
            return self.name(item)
        return f"constant {make_content_name(convert_to_numpy('a constant', item))}"

    def read(self) -> tuple[Mapping[str, Array], tuple[str, ...]]:
        """Read all variables.

        Returns:
            Values by name, and names of variables that changed since the last call. Unchanged variables have the same
            array object as before.
        """
        values, changed = {}, []
        for name, variable in self._found.items():
            # TensorFlow traced the function that creates the variable, but did not call it.
            if not variable.is_initialized():
                continue
            now, before = convert_to_numpy(f"the variable {name}", variable), self._values.get(name)
            same = before is not None and is_same_array(now, before)
            if before is not None and not same:
                changed.append(name)
            values[name] = before if before is not None and same else now
        self._values = values
        return values, tuple(changed)


def _get_base_name(variable: Any) -> str:
    return str(variable.name).split(":")[0]


def _make_unique(name: str, taken: Iterable[str]) -> str:
    others, number, unique = set(taken), 0, name
    while unique in others:
        number += 1
        unique = f"{name}_{number}"
    return unique
