"""Make the programs of a TensorFlow module.

All methods with a signature are in one IREE program. Each call has its own TFLite program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hil.controller.models.conversions.tensorflow_program import convert
from hil.controller.models.importers import import_model
from hil.controller.models.tensorflow.graphs import (
    Structure,
    find_assigned,
    format_error,
    iter_leaves,
    number_leaves,
    replace_leaves,
)
from hil.controller.models.tensorflow.lower import CapturedFunction, LoweredFunction, lower_function
from hil.controller.models.tensorflow.source import make_spec
from hil.controller.pipeline.settings.options import COMPILE_TIMEOUT_SECONDS
from hil.controller.storage.isolation.isolated import IsolatedCrash, IsolatedFailure
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import write_file
from hil.core.npy import save_npy
from hil.core.results import Artifact, Model, Stage
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import Array, TensorSpec, get_dtype_name, to_bytes
from hil.errors import CompileCrashed, CompileFailed, StageError, UsageError
from hil.testing.traces.mlir import merge
from hil.testing.traces.runners import Inputs
from hil.testing.traces.target import BoardTarget

T = TypeVar("T")
TF_INPUT = "tf_input.mlir"
IREE_INPUT = "iree_input.mlir"
# Additional file with all constants, if the constants exceed this size.
IREE_BYTECODE = "iree_input.mlirbc"
_MAX_TEXT_BYTES = 1 << 20
COMPILED = "compiled.vmfb"
# Separator of methods in tf_input.mlir, as used by MLIR's tools.
_SPLIT = "\n// -----\n\n"


@dataclass(frozen=True)
class MethodProgram:
    """Method of a program."""

    lowered: LoweredFunction  # the method
    model: Model  # the program before compilation; all methods of a program have the same model
    place: str  # path of the compiled program in a backend's directory
    # constants in the program: number in ``lowered.state`` -> value. No known method assigns these values.
    constants: Mapping[int, Array]

    def list_outdated(self, live: CapturedFunction) -> list[int]:
        """Return the constants that differ from the captured values."""
        return [
            place for place, value in self.constants.items() if not is_same_array(live.captured[place].numpy(), value)
        ]


class ModulePrograms:
    """Programs of a module for one backend. Failed programs are not retried.

    A captured value is a constant of the program. It becomes an argument if a known method assigns it, or if it changes
    between calls.
    """

    def __init__(self, name: str, context: RunContext, folder: Path) -> None:
        self._name = name
        self._context = context
        self._folder = folder
        # Key -> program or error. If a program has only one method, its key starts with the method's name.
        self._made: dict[str, Any] = {}
        # Call key -> numbers of changed items in the method's ``state``.
        self._changed: dict[str, set[int]] = {}

    def get_program(
        self, method: str, inputs: Inputs, live: CapturedFunction, module: Any, methods: Sequence[str]
    ) -> MethodProgram:
        """Return the program for a call.

        Args:
            live: The method lowered for these inputs.
            methods: Names of all methods.

        Raises:
            UsageError: the method's inputs, outputs or state differ from the existing program.
        """
        program = self._make_once("", lambda: self._make_group(module, methods)).get(method)
        if program is None or program.lowered.inputs != live.function.inputs:
            program = self._get_method_program(method, inputs, live, module)
        while True:
            if _summarize_function(program.lowered) != _summarize_function(live.function):
                raise UsageError(
                    f"{self._name}.{method} differs between instances of the module",
                    hint="inputs, outputs and captured values must not depend on random numbers or earlier instances",
                )
            if not (outdated := program.list_outdated(live)):
                return program
            others = set(range(len(live.captured))) - program.constants.keys()
            self._changed[call_key(method, inputs)] = others | set(outdated)
            program = self._get_method_program(method, inputs, live, module)

    def _get_method_program(self, method: str, inputs: Inputs, live: CapturedFunction, module: Any) -> MethodProgram:
        """Return the program of one method, for the dtypes and shapes of some inputs."""
        key, place = call_key(method, inputs), f"methods/{method}_{self._count_programs(method)}"
        changed = self._changed.get(key, set())
        made = self._make_once(
            " ".join([key, *map(str, sorted(changed))]),
            lambda: self._make_programs({method: live}, {method: (module, inputs)}, place, changed),
        )
        return made[method]

    def compile_program(self, program: MethodProgram, target: BoardTarget) -> Artifact:
        """Compile a program for a board. Raises StageError, BoardError."""

        def make() -> Artifact:
            try:
                return target.compile(program.model, target.folder / program.place)
            except StageError as error:
                if program.place == COMPILED:
                    error.hint += (
                        f"; use exported_names=[...] to exclude methods of {self._name} that cannot be compiled"
                    )
                raise

        return self._make_once(program.place, make)

    def get_tflite(self, method: str, inputs: Inputs, module: Any, target: BoardTarget) -> TfLiteMethod:
        """Return the TFLite program for a call."""
        count = self._count_programs(method)
        place = target.folder / (f"{method}_{count}.tflite" if count else f"{method}.tflite")
        return self._make_once(
            call_key(method, inputs), lambda: make_tflite(module, method, inputs, place, target, self._context)
        )

    def _count_programs(self, method: str) -> int:
        return sum(key.startswith(f"{method}(") for key in self._made)

    def _make_once(self, key: str, make: Callable[[], T]) -> T:
        if key not in self._made:
            try:
                self._made[key] = make()
            except StageError as error:
                self._made[key] = error
        made: T | StageError = self._made[key]
        if isinstance(made, StageError):
            raise made
        return made

    def _make_group(self, module: Any, methods: Sequence[str]) -> dict[str, MethodProgram]:
        """Create a program of all methods with a fully defined signature."""
        signed = {
            name: signature
            for name in methods
            if (signature := _get_fixed_signature(getattr(module, name))) is not None
        }
        if not signed:
            return {}
        lives = {}
        for name, signature in signed.items():
            try:
                lives[name] = lower_method(module, name, signature)
            except CompileFailed as error:
                others = ", ".join(repr(other) for other in signed if other != name)
                error.hint = error.hint or (f"exclude the method: exported_names=[{others}]" if others else "")
                error.locate(stage=Stage.COMPILE.value)
                raise
        return self._make_programs(lives, {name: (module, signature) for name, signature in signed.items()}, "")

    def _make_programs(
        self,
        lives: dict[str, CapturedFunction],
        calls: dict[str, tuple[Any, Sequence[Any]]],
        place: str,
        changed: Collection[int] = (),
    ) -> dict[str, MethodProgram]:
        """Write the MLIR of some methods and import it.

        Args:
            changed: Numbers of state items that are not constants.
        """
        folder = self._folder / place
        texts = [format_tf_dialect(getattr(module, name), name, args) for name, (module, args) in calls.items()]
        write_file(folder / TF_INPUT, _SPLIT.join(texts).encode(), option="", make_folder=True)
        constants = _find_constants(lives, changed)
        distinct = {id(value): value for found in constants.values() for value in found.values()}
        text, bytecode = folder / IREE_INPUT, folder / IREE_BYTECODE
        is_large = sum(value.nbytes for value in distinct.values()) > _MAX_TEXT_BYTES
        bytecode.unlink(missing_ok=True)
        with make_temporary_folder("hil-lowered-") as scratch:
            files = {one: Path(scratch) / f"{number}.npy" for number, one in enumerate(distinct)}
            for one, file in files.items():
                save_npy(file, distinct[one])
            methods = {}
            for number, (name, live) in enumerate(lives.items()):
                mlir, first = Path(scratch) / f"{number}.mlir", len(live.function.inputs)
                mlir.write_text(live.function.mlir)
                fixed = [
                    (first + at, get_dtype_name(value.dtype), value.shape, str(files[id(value)]))
                    for at, value in constants[name].items()
                ]
                methods[name] = {"mlir": str(mlir), "constants": fixed}
            arguments = {
                "methods": methods,
                "text": str(text.absolute()),
                "bytecode": str(bytecode.absolute()) if is_large else "",
            }
            try:
                self._context.isolated.call(
                    merge, arguments, timeout=COMPILE_TIMEOUT_SECONDS, log=Path(scratch) / "log"
                )
            except IsolatedCrash as error:
                raise CompileCrashed(f"IREE crashed on the StableHLO of {self._name}", detail=error.detail) from error
            except IsolatedFailure as error:
                raise CompileFailed(
                    f"IREE cannot read the output of TensorFlow: {error.message}", detail=error.detail
                ) from error
        source, isolated = bytecode if is_large else text, self._context.isolated
        model = import_model(source, function=next(iter(lives)), isolated=isolated, cache=self._context.cache)
        compiled = f"{place}/{COMPILED}" if place else COMPILED
        return {name: MethodProgram(live.function, model, compiled, constants[name]) for name, live in lives.items()}


def _find_constants(lives: Mapping[str, CapturedFunction], changed: Collection[int]) -> dict[str, dict[int, Array]]:
    """Return the state items that no method assigns: method -> number -> value. These become constants.

    A variable used by multiple methods has the same array in all of them.
    """
    assigned, values = set(), dict[int, Array]()
    for live in lives.values():
        for item, value, state in zip(live.captured, live.values(), live.function.state, strict=True):
            values.setdefault(id(item), value)
            if state.result is not None:
                assigned.add(id(item))
    return {
        name: {
            number: values[id(item)]
            for number, item in enumerate(live.captured)
            if id(item) not in assigned and number not in changed
        }
        for name, live in lives.items()
    }


def is_same_array(one: Array, other: Array) -> bool:
    """Return True if two arrays are bitwise equal, including NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(np.array_equal(np.asarray(to_bytes(one)), np.asarray(to_bytes(other))))


def _get_fixed_signature(function: Any) -> tuple[Any, ...] | None:
    """Return a function's signature if all shapes are fully defined, else None."""
    import tensorflow as tf

    signature = getattr(function, "input_signature", None)
    if signature is None or not all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(signature)):
        return None
    return tuple(signature)


def call_key(method: str, inputs: Inputs) -> str:
    """Return a program's key: method, dtypes and shapes of tensors, and values of other arguments."""
    kinds = (
        (path, f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf))
        for path, leaf in iter_leaves(inputs)
    )
    return f"{method}({'; '.join(f'{path}: {kind}' for path, kind in kinds)})"


def _summarize_function(function: LoweredFunction) -> tuple[Any, ...]:
    """Return the properties that must match between module instances.

    Variable names are excluded, because Keras changes them.
    """
    state = [(one.spec.dtype, one.spec.shape, one.constant, one.result) for one in function.state]
    return function.inputs, function.outputs, state


@dataclass(frozen=True)
class TfLiteMethod:
    """Method as a TFLite program."""

    artifact: Artifact
    outputs: tuple[TensorSpec, ...]  # output tensors
    structure: (
        Structure  # nesting of the method's outputs, see :func:`hil.controller.models.tensorflow.graphs.number_leaves`
    )


def lower_method(module: Any, method: str, inputs: Sequence[Any]) -> CapturedFunction:
    """Lower a method. Error messages start with the method's name."""
    try:
        return lower_function(getattr(module, method), inputs)
    except CompileFailed as error:
        error.args = (f"{method}: {error.message}", *error.args[1:])
        raise


def make_tflite(
    module: Any, method: str, inputs: Inputs, place: Path, target: BoardTarget, context: RunContext
) -> TfLiteMethod:
    """Convert a method for the dtypes and shapes of some inputs. Variables that it reads become constants.

    Raises:
        CompileFailed: TensorFlow cannot trace the method, it assigns variables, or the converter rejects it.
    """
    import tensorflow as tf

    function, returned = getattr(module, method), list[Any]()

    def call_flat(*tensors: Any) -> dict[str, Any]:
        given = iter(tensors)
        args = replace_leaves(list(inputs), lambda leaf: next(given) if hasattr(leaf, "dtype") else leaf)
        returned[:] = [function(*args)]
        present = (leaf for _, leaf in iter_leaves(returned[0]) if leaf is not None)
        return {f"output_{number:04}": tf.identity(leaf) for number, leaf in enumerate(present)}

    specs = [
        tf.TensorSpec(leaf.shape, leaf.dtype if leaf.dtype != object else tf.string, name=f"input_{number:04}")
        for number, leaf in enumerate(leaf for _, leaf in iter_leaves(inputs) if hasattr(leaf, "dtype"))
    ]
    try:
        concrete = tf.function(call_flat, autograph=False).get_concrete_function(*specs)
    except Exception as error:  # the method may raise any exception
        raise CompileFailed(
            f"TensorFlow cannot trace {method}: {format_error(error)}", stage=Stage.COMPILE.value, detail=str(error)
        ) from error
    if names := ", ".join(find_assigned(concrete)):
        raise CompileFailed(
            f"{method}: TFLite programs do not return updated variables: {names}",
            stage=Stage.COMPILE.value,
            hint="run the method on IREE, or list the tflite failure in expected.toml",
        )
    try:
        content = convert(concrete, place.stem)
    except CompileFailed as error:
        kept = place.with_suffix(".mlir")
        write_file(kept, format_tf_dialect(function, place.stem, inputs).encode(), option="", make_folder=True)
        error.hint = f"input of the converter: {kept}"
        error.locate(stage=Stage.COMPILE.value)
        raise
    write_file(place, content, option="", make_folder=True)
    model = import_model(place, isolated=context.isolated, cache=context.cache)
    artifact = target.compile(model, place)
    outputs = concrete.structured_outputs
    return TfLiteMethod(
        artifact, tuple(make_spec(name, outputs[name]) for name in sorted(outputs)), number_leaves(returned[0])
    )


def format_tf_dialect(function: Any, name: str, args: Sequence[Any]) -> str:
    """Return a method as readable MLIR in TensorFlow's dialect.

    Args:
        args: Arrays or ``tf.TensorSpec``.
    """
    import tensorflow as tf

    specs = replace_leaves(
        list(args), lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf
    )
    traced = function if hasattr(function, "get_concrete_function") else tf.function(function)
    try:
        text: str = tf.mlir.experimental.convert_function(traced.get_concrete_function(*specs))
    except Exception as error:  # this text is optional; lowering the method reports the error
        return f"// {name}: {format_error(error)}\n"
    return f"// {name}\n{text.strip()}\n"
