"""TensorFlow functions lowered to StableHLO by TensorFlow's own bridge to XLA."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hil.controller.models.tensorflow.lowered import LoweredFunction, State
from hil.controller.models.tensorflow.structure import leaves, numbered, replace_leaves
from hil.controller.models.tensorflow.text import read
from hil.controller.models.tensorflow.variables import captured, is_variable
from hil.controller.models.tensorflow.words import words
from hil.core.tensors import Array, TensorSpec, dtype_name
from hil.errors import CompileFailed, UsageError


@dataclass(frozen=True)
class Live:
    """A lowered function with what it captured in this process.

    Attributes:
        function: what was lowered.
        captured: the tf.Variable or tf.Tensor of each of ``function.state``.
    """

    function: LoweredFunction
    captured: tuple[Any, ...]

    def values(self) -> list[Array]:
        """What is in the captured variables and tensors now: the further arguments."""
        return [item.numpy() for item in self.captured]


def lower(function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Live:
    """Lower a function for arguments of given types.

    Args:
        function: a ``tf.function``, a method that is one, a Keras model, or any function of tensors.
        args, kwargs: what it is called with, nested or not: an array, tensor or ``tf.TensorSpec`` stands for any tensor
            of its dtype and shape; any other value (a Python number too) is compiled in.

    Raises:
        CompileFailed: it cannot be traced with such arguments, uses what XLA has no translation for, or takes or
            returns what is no tensor.
    """
    import tensorflow as tf

    structure = (list(args), dict(kwargs or {}))
    inputs = [(name, _tensor_spec(leaf)) for name, leaf in _named(function, structure)]
    called = function if hasattr(function, "get_concrete_function") else tf.function(function)
    returned: list[Any] = []

    def flat(*tensors: Any) -> list[Any]:
        given = iter(tensors)
        positional, named = replace_leaves(structure, lambda leaf: next(given) if _is_tensor(leaf) else leaf)
        returned[:] = [called(*positional, **named)]
        return [_as_tensor(path, leaf) for path, leaf in leaves(returned[0]) if leaf is not None]

    traced = tf.function(flat, jit_compile=True, autograph=False)
    specs = [spec for _, spec in inputs]
    try:
        concrete = traced.get_concrete_function(*specs)
        text = traced.experimental_get_compiler_ir(*specs)(stage="stablehlo")
    except CompileFailed:
        raise
    except Exception as error:  # whatever the function itself raises, and TensorFlow's own many
        raise CompileFailed(f"TensorFlow cannot lower the function: {words(error)}", detail=str(error)) from error
    return _live(concrete, text, [spec_of(name, spec) for name, spec in inputs], returned[0])


def flatten(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[Array]:
    """The tensors among a call's arguments, as arrays, in the order of ``LoweredFunction.inputs``."""
    import numpy as np

    return [np.asarray(leaf) for _, leaf in leaves((list(args), dict(kwargs or {}))) if _is_tensor(leaf)]


def spec_of(name: str, spec: Any) -> TensorSpec:
    """Name, dtype and shape of what TensorFlow calls a tensor's spec.

    Raises:
        CompileFailed: hil has no such tensors.
    """
    try:
        dtype = dtype_name(spec.dtype.as_numpy_dtype)
    except UsageError as error:
        raise CompileFailed(f"{name} has elements of type {spec.dtype.name}, which hil cannot pass") from error
    return TensorSpec(name, dtype, tuple(spec.shape))


def named_outputs(returned: Any, names: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """What a function returned, without None, each tensor with its name.

    Args:
        returned: nested or not.
        names: what tensors are called that have no name of their own in the structure.
    """
    found = [(path, leaf) for path, leaf in leaves(returned) if leaf is not None]
    if len(names) == len(found) and not any(_is_name(path) for path, _ in found):
        return [(name, leaf) for name, (_, leaf) in zip(names, found, strict=True)]
    return [(_output_name(path), leaf) for path, leaf in found]


def array_of(tensor: Any) -> Array:
    """A tensor's values as hil has them: strings as text."""
    import numpy as np

    array: Array = np.asarray(tensor.numpy())
    if tensor.dtype.name != "string":
        return array
    text = np.empty(array.shape, object)
    text.reshape(-1)[:] = [item.decode(errors="replace") for item in array.astype(object).ravel()]
    return text


def _live(concrete: Any, text: str, inputs: list[TensorSpec], returned: Any) -> Live:
    module = read(text)
    items = captured(concrete)
    if not module.aliases and not concrete.structured_outputs:
        raise CompileFailed("the function returns nothing and assigns no variable: there is nothing to run")
    if module.arguments != len(inputs) + len(items):
        raise CompileFailed(
            f"the lowered function takes {module.arguments} arguments, expected were {len(inputs)} inputs and "
            f"{len(items)} captured variables"
        )
    named = zip(named_outputs(returned), concrete.structured_outputs, strict=True)
    outputs = [spec_of(name, spec) for (name, _), spec in named]
    results = {argument - len(inputs): result for result, argument in module.aliases.items()}
    state = tuple(
        State(spec_of(name, item), not is_variable(item), results.get(position))
        for position, (name, item) in enumerate(items)
    )
    structure = numbered(returned)
    lowered = LoweredFunction(module.mlir, tuple(inputs), tuple(outputs), state, structure)
    return Live(lowered, tuple(item for _, item in items))


def _named(function: Any, structure: tuple[list[Any], dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The tensors among arguments, each called by its parameter and its place in that."""
    python = getattr(function, "python_function", function)
    try:
        kinds = inspect.signature(python).parameters.items()
        parameters = [name for name, kind in kinds if name != "self" and kind.kind is kind.POSITIONAL_OR_KEYWORD]
    except (TypeError, ValueError):
        parameters = []
    args, kwargs = structure
    for position, argument in enumerate(args):
        name = parameters[position] if position < len(parameters) else f"arg{position}"
        yield from ((path, leaf) for path, leaf in leaves(argument, name) if _is_tensor(leaf))
    for name in sorted(kwargs):
        yield from ((path, leaf) for path, leaf in leaves(kwargs[name], name) if _is_tensor(leaf))


def _is_tensor(leaf: Any) -> bool:
    """Whether a leaf has an element type and a shape: numpy's, TensorFlow's and Keras's have, Python's numbers not."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def _tensor_spec(leaf: Any) -> Any:
    import tensorflow as tf

    return tf.TensorSpec(leaf.shape, leaf.dtype)


def _as_tensor(path: str, leaf: Any) -> Any:
    import tensorflow as tf

    if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor, tf.TensorArray)):
        raise CompileFailed(f"{_output_name(path)} is a {type(leaf).__name__}: hil passes tensors only")
    return tf.identity(leaf)


def _output_name(path: str) -> str:
    return path if _is_name(path) else f"output{path or 0}"


def _is_name(path: str) -> bool:
    return bool(path) and not path[0].isdigit()
