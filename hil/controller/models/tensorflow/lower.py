"""Lower TensorFlow functions to StableHLO with TensorFlow's XLA bridge."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hil.controller.models.tensorflow.graphs import (
    Structure,
    format_error,
    is_variable,
    iter_leaves,
    list_captured,
    number_leaves,
    read_stablehlo,
    replace_leaves,
    restore,
)
from hil.controller.models.tensorflow.source import format_output_name, make_spec, name_outputs
from hil.controller.storage.screen.texts import convert_foreign_errors
from hil.core.tensors import Array, TensorSpec
from hil.errors import CompileFailed


@dataclass(frozen=True)
class CapturedFunction:
    """Lowered function with the captured objects of this process."""

    function: LoweredFunction
    captured: tuple[Any, ...]  # tf.Variable or tf.Tensor for each of ``function.state``

    def values(self) -> list[Array]:
        """Return the current values of captured variables and tensors.

        They are additional arguments of the lowered function.
        """
        return [item.numpy() for item in self.captured]


def lower_function(
    function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> CapturedFunction:
    """Lower a function for arguments of given types.

    Args:
        function: a ``tf.function``, a method that is a ``tf.function``, a Keras model, or any function of tensors.
        args: positional arguments, which may be nested. An array, tensor or ``tf.TensorSpec`` stands for any tensor of
            the same dtype and shape. Other values, including Python numbers, become constants.
        kwargs: keyword arguments, like ``args``.

    Raises:
        CompileFailed: tracing or lowering failed, or an argument or result is not a tensor.
    """
    import tensorflow as tf

    structure = (list(args), dict(kwargs or {}))
    inputs = [(name, tf.TensorSpec(leaf.shape, leaf.dtype)) for name, leaf in _name_tensors(function, structure)]
    called = function if hasattr(function, "get_concrete_function") else tf.function(function)
    returned: list[Any] = []

    def call_flat(*tensors: Any) -> list[Any]:
        given = iter(tensors)
        positional, named = replace_leaves(structure, lambda leaf: next(given) if _is_tensor(leaf) else leaf)
        returned[:] = [called(*positional, **named)]
        return [_as_tensor(path, leaf) for path, leaf in iter_leaves(returned[0]) if leaf is not None]

    traced = tf.function(call_flat, jit_compile=True, autograph=False)
    specs = [spec for _, spec in inputs]
    with convert_foreign_errors(CompileFailed, "TensorFlow cannot lower the function", error_text=format_error):
        concrete = traced.get_concrete_function(*specs)
        # Check captures first, because XLA's messages about unsupported captures are unclear.
        items = list_captured(concrete)
        text = traced.experimental_get_compiler_ir(*specs)(stage="stablehlo")
    return _build_lowered(concrete, items, text, [make_spec(name, spec) for name, spec in inputs], returned[0])


def flatten(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[Array]:
    """Return the tensors among the arguments as arrays, in the order of ``LoweredFunction.inputs``."""
    import numpy as np

    return [np.asarray(leaf) for _, leaf in iter_leaves((list(args), dict(kwargs or {}))) if _is_tensor(leaf)]


def _build_lowered(
    concrete: Any, items: list[tuple[str, Any]], text: str, inputs: list[TensorSpec], returned: Any
) -> CapturedFunction:
    module = read_stablehlo(text)
    if not module.aliases and not concrete.structured_outputs:
        raise CompileFailed("the function has no outputs and assigns no variables: expected at least one of them")
    if module.arguments != len(inputs) + len(items):
        raise CompileFailed(
            f"the lowered function takes {module.arguments} arguments, expected {len(inputs)} inputs and "
            f"{len(items)} captured variables"
        )
    named = zip(name_outputs(returned), concrete.structured_outputs, strict=True)
    outputs = [make_spec(name, spec) for (name, _), spec in named]
    results = {argument - len(inputs): result for result, argument in module.aliases.items()}
    state = tuple(
        State(make_spec(name, item), not is_variable(item), results.get(position))
        for position, (name, item) in enumerate(items)
    )
    lowered = LoweredFunction(module.mlir, tuple(inputs), tuple(outputs), state, number_leaves(returned))
    return CapturedFunction(lowered, tuple(item for _, item in items))


def _name_tensors(function: Any, structure: tuple[list[Any], dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors among the arguments. Their names contain parameter and path."""
    python = getattr(function, "python_function", function)
    try:
        kinds = inspect.signature(python).parameters.items()
        parameters = [name for name, kind in kinds if name != "self" and kind.kind is kind.POSITIONAL_OR_KEYWORD]
    except (TypeError, ValueError):
        parameters = []
    args, kwargs = structure
    names = [*parameters, *(f"arg{position}" for position in range(len(parameters), len(args)))]
    for name, argument in (*zip(names, args, strict=False), *sorted(kwargs.items())):
        yield from ((path, leaf) for path, leaf in iter_leaves(argument, name) if _is_tensor(leaf))


def _is_tensor(leaf: Any) -> bool:
    """Return True if a leaf has a dtype and a shape, as in numpy, TensorFlow and Keras.

    Return False for a Python number.
    """
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def _as_tensor(path: str, leaf: Any) -> Any:
    import tensorflow as tf

    if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor, tf.TensorArray)):
        raise CompileFailed(f"{format_output_name(path)} is a {type(leaf).__name__}: hil passes tensors only")
    return tf.identity(leaf)


# Name of the function in the MLIR module.
ENTRY = "main"


@dataclass(frozen=True)
class State:
    """Captured variable or tensor, which is an additional argument of the lowered function."""

    spec: TensorSpec  # unique name, dtype and shape; a number is appended to names used several times
    constant: bool = False  # True for a tensor, which never changes; False for a variable
    # Number of the result with the variable's new value (outputs count as well); None if the function does not assign
    # the variable.
    result: int | None = None


@dataclass(frozen=True)
class LoweredFunction:
    """StableHLO function for a fixed set of shapes.

    ``main(*inputs, *state) -> (*outputs, *new values for assigned variables)``.
    """

    mlir: str  # module text with a single public function, ``main``
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: tuple[State, ...]
    # Structure of the return value, with output numbers as leaves; see :meth:`nest_outputs`.
    structure: Structure

    @property
    def assigned(self) -> tuple[State, ...]:
        """Variables that the function assigns. The new values follow the outputs in this order."""
        found = [state for state in self.state if state.result is not None]
        return tuple(sorted(found, key=lambda state: state.result or 0))

    def nest_outputs(self, outputs: list[Any]) -> Structure:
        """Nest outputs in the structure that the function returns."""
        return restore(self.structure, outputs)
