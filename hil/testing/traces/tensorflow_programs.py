"""The programs of a TensorFlow module: IREE's, one for all methods with a signature; TFLite's, one for each call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hil.controller.models.conversions.tensorflow_program import convert
from hil.controller.models.importers import import_model
from hil.controller.models.tensorflow.graphs import Structure, assigned, error_text, leaves, numbered, replace_leaves
from hil.controller.models.tensorflow.lower import Live, LoweredFunction, lower
from hil.controller.models.tensorflow.source import spec_of
from hil.controller.pipeline.options import COMPILE_TIMEOUT_S
from hil.controller.storage.isolated import IsolatedCrash, IsolatedFailure
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import write_file
from hil.core.npy import save_npy
from hil.core.results import Artifact, Model, Stage
from hil.core.scratch import temporary_folder
from hil.core.tensors import Array, TensorSpec, dtype_name, to_bytes
from hil.errors import CompileCrashed, CompileFailed, StageError, UsageError
from hil.testing.traces.mlir import merge
from hil.testing.traces.runners import Inputs
from hil.testing.traces.target import Target

T = TypeVar("T")
TF_INPUT = "tf_input.mlir"
IREE_INPUT = "iree_input.mlir"
# The same with all constants, where they are more than this.
IREE_BYTECODE = "iree_input.mlirbc"
_MOST_TEXT_BYTES = 1 << 20
COMPILED = "compiled.vmfb"
# Between the methods of tf_input.mlir: MLIR's tools split at it.
_SPLIT = "\n// -----\n\n"


@dataclass(frozen=True)
class MethodProgram:
    """A method of a program."""

    lowered: LoweredFunction  # the method
    model: Model  # the program before it is compiled, whichever of its methods this is
    place: str  # where the compiled program lies in a backend's folder
    # of ``lowered.state`` what are constants of the program, by number: what no method is known to assign.
    constants: Mapping[int, Array]

    def outdated(self, live: Live) -> list[int]:
        """Which of the constants are not what the function captured any more."""
        return [place for place, value in self.constants.items() if not same_array(live.captured[place].numpy(), value)]


class Programs:
    """The programs of a module, for one backend. What failed once is not tried again.

    What a function captured is a constant of its program, unless a method is known to assign it, or it was found to
    hold something else when the program was called: that is a further argument.
    """

    def __init__(self, name: str, context: RunContext, folder: Path) -> None:
        self._name = name
        self._context = context
        self._folder = folder
        # Of what was made the key, and what came of it. The method of a single program is its key's beginning.
        self._made: dict[str, Any] = {}
        # Of a call's key the numbers in its method's ``state`` of what was found to change.
        self._changed: dict[str, set[int]] = {}

    def of(self, method: str, inputs: Inputs, live: Live, module: Any, methods: Sequence[str]) -> MethodProgram:
        """Return the program that a call needs; ``live`` is its method lowered for these inputs, ``methods`` are all.

        Raises:
            UsageError: the method takes, returns or keeps other tensors than when its program was made.
        """
        program = self._once("", lambda: self._make_group(module, methods)).get(method)
        if program is None or program.lowered.inputs != live.function.inputs:
            program = self._alone(method, inputs, live, module)
        while True:
            if _outline(program.lowered) != _outline(live.function):
                raise UsageError(
                    f"{self._name}.{method} is another function each time the module is made",
                    hint="what it takes, returns and captures must not depend on chance or on earlier modules",
                )
            if not (outdated := program.outdated(live)):
                return program
            others = set(range(len(live.captured))) - program.constants.keys()
            self._changed[call_key(method, inputs)] = others | set(outdated)
            program = self._alone(method, inputs, live, module)

    def _alone(self, method: str, inputs: Inputs, live: Live, module: Any) -> MethodProgram:
        """Return the program of one method, for the dtypes and shapes of some inputs."""
        key, place = call_key(method, inputs), f"methods/{method}_{self._count(method)}"
        changed = self._changed.get(key, set())
        made = self._once(
            " ".join([key, *map(str, sorted(changed))]),
            lambda: self._make({method: live}, {method: (module, inputs)}, place, changed),
        )
        return made[method]

    def compiled(self, program: MethodProgram, target: Target) -> Artifact:
        """Return a program compiled for a board. Raises StageError, BoardError: it cannot be compiled."""

        def make() -> Artifact:
            try:
                return target.compile(program.model, target.folder / program.place)
            except StageError as error:
                if program.place == COMPILED:
                    error.hint += f"; exported_names=[...] leaves out what cannot be compiled of {self._name}"
                raise

        return self._once(program.place, make)

    def tflite(self, method: str, inputs: Inputs, module: Any, target: Target) -> TfLiteProgram:
        """Return the TFLite program that a call needs."""
        count = self._count(method)
        place = target.folder / (f"{method}_{count}.tflite" if count else f"{method}.tflite")
        return self._once(
            call_key(method, inputs), lambda: make_tflite(module, method, inputs, place, target, self._context)
        )

    def _count(self, method: str) -> int:
        return sum(key.startswith(f"{method}(") for key in self._made)

    def _once(self, key: str, make: Callable[[], T]) -> T:
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
        """One program of all methods whose signature says it all."""
        signed = {name: signature for name in methods if (signature := _signature(getattr(module, name))) is not None}
        if not signed:
            return {}
        lives = {}
        for name, signature in signed.items():
            try:
                lives[name] = lower_method(module, name, signature)
            except CompileFailed as error:
                others = ", ".join(repr(other) for other in signed if other != name)
                error.hint = error.hint or (f"leave it out: exported_names=[{others}]" if others else "")
                error.located(stage=Stage.COMPILE.value)
                raise
        return self._make(lives, {name: (module, signature) for name, signature in signed.items()}, "")

    def _make(
        self,
        lives: dict[str, Live],
        calls: dict[str, tuple[Any, Sequence[Any]]],
        place: str,
        changed: Collection[int] = (),
    ) -> dict[str, MethodProgram]:
        """Write the MLIR of some methods and import it; ``changed`` are the numbers of state that is no constant."""
        folder = self._folder / place
        texts = [in_tf_dialect(getattr(module, name), name, args) for name, (module, args) in calls.items()]
        write_file(folder / TF_INPUT, _SPLIT.join(texts).encode(), option="", make_folder=True)
        constants = _constants(lives, changed)
        distinct = {id(value): value for found in constants.values() for value in found.values()}
        text, bytecode = folder / IREE_INPUT, folder / IREE_BYTECODE
        is_large = sum(value.nbytes for value in distinct.values()) > _MOST_TEXT_BYTES
        bytecode.unlink(missing_ok=True)
        with temporary_folder("hil-lowered-") as scratch:
            files = {one: Path(scratch) / f"{number}.npy" for number, one in enumerate(distinct)}
            for one, file in files.items():
                save_npy(file, distinct[one])
            methods = {}
            for number, (name, live) in enumerate(lives.items()):
                mlir, first = Path(scratch) / f"{number}.mlir", len(live.function.inputs)
                mlir.write_text(live.function.mlir)
                fixed = [
                    (first + at, dtype_name(value.dtype), value.shape, str(files[id(value)]))
                    for at, value in constants[name].items()
                ]
                methods[name] = {"mlir": str(mlir), "constants": fixed}
            arguments = {
                "methods": methods,
                "text": str(text.absolute()),
                "bytecode": str(bytecode.absolute()) if is_large else "",
            }
            try:
                self._context.isolated.call(merge, arguments, timeout=COMPILE_TIMEOUT_S, log=Path(scratch) / "log")
            except IsolatedCrash as error:
                raise CompileCrashed(f"IREE died of {self._name}'s StableHLO", detail=error.detail) from error
            except IsolatedFailure as error:
                raise CompileFailed(
                    f"IREE cannot read what TensorFlow made: {error.message}", detail=error.detail
                ) from error
        source, isolated = bytecode if is_large else text, self._context.isolated
        model = import_model(source, function=next(iter(lives)), isolated=isolated, cache=self._context.cache)
        compiled = f"{place}/{COMPILED}" if place else COMPILED
        return {name: MethodProgram(live.function, model, compiled, constants[name]) for name, live in lives.items()}


def _constants(lives: Mapping[str, Live], changed: Collection[int]) -> dict[str, dict[int, Array]]:
    """Return of each method the state that is a constant of its program, by number: what no method assigns.

    A variable of several methods has the same array in all.
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


def same_array(one: Array, other: Array) -> bool:
    """Return whether two arrays have the same bits: a NaN is itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(np.array_equal(np.asarray(to_bytes(one)), np.asarray(to_bytes(other))))


def _signature(function: Any) -> tuple[Any, ...] | None:
    """Return a function's own signature, where it leaves nothing open."""
    import tensorflow as tf

    signature = getattr(function, "input_signature", None)
    if signature is None or not all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(signature)):
        return None
    return tuple(signature)


def call_key(method: str, inputs: Inputs) -> str:
    """Return what a program is made for: the method, dtypes and shapes of tensors, and the values of all else."""
    kinds = (
        (path, f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf))
        for path, leaf in leaves(inputs)
    )
    return f"{method}({'; '.join(f'{path}: {kind}' for path, kind in kinds)})"


def _outline(function: LoweredFunction) -> tuple[Any, ...]:
    """Return what two makings of a module must have in common; Keras numbers its variables' names over all of them."""
    state = [(one.spec.dtype, one.spec.shape, one.constant, one.result) for one in function.state]
    return function.inputs, function.outputs, state


@dataclass(frozen=True)
class TfLiteProgram:
    """A method as a TFLite program."""

    artifact: Artifact
    outputs: tuple[TensorSpec, ...]  # the tensors that it returns
    structure: Structure  # of what the method returns, see :func:`hil.controller.models.tensorflow.graphs.numbered`


def lower_method(module: Any, method: str, inputs: Sequence[Any]) -> Live:
    """Lower a method; the error that says why it cannot be has its name."""
    try:
        return lower(getattr(module, method), inputs)
    except CompileFailed as error:
        error.args = (f"{method}: {error.message}", *error.args[1:])
        raise


def make_tflite(
    module: Any, method: str, inputs: Inputs, place: Path, target: Target, context: RunContext
) -> TfLiteProgram:
    """Convert a method for the dtypes and shapes of some inputs; variables that it reads become constants.

    Raises:
        CompileFailed: TensorFlow cannot trace it, it assigns variables, or the converter refuses it.
    """
    import tensorflow as tf

    function, returned = getattr(module, method), list[Any]()

    def flat(*tensors: Any) -> dict[str, Any]:
        given = iter(tensors)
        args = replace_leaves(list(inputs), lambda leaf: next(given) if hasattr(leaf, "dtype") else leaf)
        returned[:] = [function(*args)]
        present = (leaf for _, leaf in leaves(returned[0]) if leaf is not None)
        return {f"output_{number:04}": tf.identity(leaf) for number, leaf in enumerate(present)}

    specs = [
        tf.TensorSpec(leaf.shape, leaf.dtype if leaf.dtype != object else tf.string, name=f"input_{number:04}")
        for number, leaf in enumerate(leaf for _, leaf in leaves(inputs) if hasattr(leaf, "dtype"))
    ]
    try:
        concrete = tf.function(flat, autograph=False).get_concrete_function(*specs)
    except Exception as error:  # whatever the method itself raises
        raise CompileFailed(
            f"TensorFlow cannot trace {method}: {error_text(error)}", stage=Stage.COMPILE.value, detail=str(error)
        ) from error
    if names := ", ".join(assigned(concrete)):
        raise CompileFailed(
            f"{method} changes variables ({names}), which a TFLite program cannot hand back",
            stage=Stage.COMPILE.value,
            hint="run it on IREE; for tflite list it in expected.toml",
        )
    try:
        content = convert(concrete, place.stem)
    except CompileFailed as error:
        kept = place.with_suffix(".mlir")
        write_file(kept, in_tf_dialect(function, place.stem, inputs).encode(), option="", make_folder=True)
        error.hint = f"what it was given is in {kept}"
        error.located(stage=Stage.COMPILE.value)
        raise
    write_file(place, content, option="", make_folder=True)
    model = import_model(place, isolated=context.isolated, cache=context.cache)
    artifact = target.compile(model, place)
    outputs = concrete.structured_outputs
    return TfLiteProgram(
        artifact, tuple(spec_of(name, outputs[name]) for name in sorted(outputs)), numbered(returned[0])
    )


def in_tf_dialect(function: Any, name: str, args: Sequence[Any]) -> str:
    """Return a method, called with arrays or ``tf.TensorSpec``, as MLIR in TensorFlow's dialect, for people."""
    import tensorflow as tf

    specs = replace_leaves(
        list(args), lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf
    )
    traced = function if hasattr(function, "get_concrete_function") else tf.function(function)
    try:
        text: str = tf.mlir.experimental.convert_function(traced.get_concrete_function(*specs))
    except Exception as error:  # it is a by-product: what is wrong is said where the method is lowered
        return f"// {name}: {error_text(error)}\n"
    return f"// {name}\n{text.strip()}\n"
