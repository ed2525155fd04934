"""Open TensorFlow models (SavedModel, GraphDef, .keras).

A TensorFlow model may contain arbitrary code, so open models only in an isolated process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hil.controller.models.description import check_dims, make_description
from hil.controller.models.tensorflow import graph_def
from hil.controller.models.tensorflow.graphs import (
    find_assigned,
    format_error,
    iter_leaves,
    name_new_value,
    replace_leaves,
)
from hil.controller.storage.screen.texts import convert_foreign_errors
from hil.controller.storage.sources.packages import require_version
from hil.core.tensors import Array, Dim, TensorSpec, get_dtype_name
from hil.errors import CompileFailed, ImportFailed, UsageError

SAVED_MODEL = "saved_model.pb"
# Default signature of TensorFlow's tools.
_DEFAULT = "serving_default"
# Method that TensorFlow's loader needs to restore an optimizer's variables. Optimizers of TensorFlow 1 lack this
# method.
_SLOTS = "add_slot"
# Internal signatures of TensorFlow.
_INTERNAL_SIGNATURES = ("__saved_model_init_op", "__saved_model_train_op")
# Operators that draw random numbers. Stateless operators are deterministic for a seed.
_DRAWING = frozenset(
    "Multinomial ParameterizedTruncatedNormal RandomGamma RandomPoisson RandomPoissonV2 RandomShuffle "
    "RandomStandardNormal RandomUniform RandomUniformInt StatefulRandomBinomial StatefulStandardNormal "
    "StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt StatefulUniformInt "
    "TruncatedNormal".split()
)


@dataclass(frozen=True)
class OpenedFunction:
    """Opened function of a model."""

    name: str  # signature key, method name, or ``call`` for a Keras model
    function: Callable[..., Any]  # takes arguments with this ``structure``, in which tensors replace specs
    # (positional, named) arguments. Leaves are ``tf.TensorSpec``, static for sizes from ``--dim``, or constant values.
    structure: tuple[list[Any], dict[str, Any]]
    inputs: tuple[TensorSpec, ...]  # tensors among the arguments: names, dtypes, shapes with symbols
    functions: tuple[str, ...]
    model: Any

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return the specs for the function's results. A dimension known only at run time is None.

        Raises:
            ImportFailed: tracing failed, or a result is not a tensor.
        """
        named = name_outputs(self._concrete_function.structured_outputs, getattr(self.model, "output_names", ()))
        try:
            return tuple(make_spec(name, spec) for name, spec in named)
        except CompileFailed as error:
            raise ImportFailed(f"output {error.message}") from error

    @cached_property
    def assigned(self) -> dict[str, Any]:
        """Variables that the function assigns, by name. Raises ImportFailed if tracing failed."""
        return find_assigned(self._concrete_function)

    @property
    def random(self) -> list[str]:
        """Nodes of the function and of called functions that draw random numbers without explicit state.

        Raises:
            ImportFailed: tracing failed.
        """
        graph = self._concrete_function.graph.as_graph_def()
        called = (node for function in graph.library.function for node in function.node_def)
        return [f"{node.name} ({node.op})" for node in (*graph.node, *called) if node.op in _DRAWING]

    @cached_property
    def _concrete_function(self) -> Any:
        import tensorflow as tf

        with convert_foreign_errors(ImportFailed, f"TensorFlow cannot trace {self.name!r}", error_text=format_error):
            return tf.function(self.call, autograph=False).get_concrete_function(self.specs)

    @property
    def specs(self) -> list[Any]:
        """``tf.TensorSpec`` for every input."""
        return [leaf for _, leaf in iter_leaves(self.structure) if is_spec(leaf)]

    def list_sized_inputs(self) -> list[Any]:
        """Return the ``tf.TensorSpec`` for every input. Raises UsageError for a dynamic dimension without a size."""
        for spec in self.inputs:
            for dim in spec.shape:
                if not isinstance(dim, int):
                    raise UsageError(
                        f"missing size for dimension {dim!r} of input {spec.name!r}: expected a fixed shape",
                        hint=f"--dim {dim}=1",
                    )
        return self.specs

    def call(self, tensors: list[Any]) -> Any:
        """Call the function with tensors in input order."""
        given = iter(tensors)
        args, kwargs = replace_leaves(self.structure, lambda leaf: next(given) if is_spec(leaf) else leaf)
        return self.function(*args, **kwargs)


def is_spec(leaf: Any) -> bool:
    """Return True if an argument is a tensor's spec, not a value."""
    import tensorflow as tf

    return isinstance(leaf, tf.TensorSpec)


def open_model(path: str, function: str, dims: Mapping[str, int]) -> OpenedFunction:
    """Open a function of a model.

    Args:
        path: ``saved_model.pb`` of a SavedModel directory, a GraphDef, or a ``.keras`` file.
        function: function name; "" selects ``serving_default`` of a SavedModel if it exists, else the only function.
            For a GraphDef see :func:`hil.controller.models.tensorflow.graph_def.open_graph`.
        dims: sizes for symbolic dimensions.

    Raises:
        ImportFailed, UsageError: see :func:`describe`.
    """
    file = Path(path)
    if graph_def.is_config(file):
        raise UsageError(
            f"expected a graph, got the config {file.name}",
            hint=f"hil run GRAPH.pb --function {file.name}",
            option="--function",
        )
    if graph_def.is_graph(file):
        return _open_graph(file, function, dims)
    return _open_keras(file, function, dims) if file.suffix == ".keras" else _open_saved(file, function, dims)


def _open_graph(file: Path, function: str, dims: Mapping[str, int]) -> OpenedFunction:
    graph = graph_def.open_graph(file, function)
    structure, inputs = _fix_sizes(file.name, ([feed.spec for feed in graph.feeds], {}), dims, batch=False)
    return OpenedFunction(graph.name, graph.function(structure[0]), structure, inputs, graph.entries, graph)


def _open_saved(file: Path, function: str, dims: Mapping[str, int]) -> OpenedFunction:
    import tensorflow as tf

    with convert_foreign_errors(
        ImportFailed, f"TensorFlow cannot read the SavedModel {file.parent.name}", error_text=format_error
    ):
        try:
            model = tf.saved_model.load(str(file.parent))
        except AttributeError as error:
            if error.name != _SLOTS:
                raise
            raise ImportFailed(
                f"SavedModel {file.parent.name} contains a TensorFlow 1 optimizer, which TensorFlow cannot load",
                hint="instead of the optimizer, save self.apply = optimizer.apply_gradients and, after the first step, "
                "self.state = optimizer.variables()",
            ) from error
    signatures = {name: found for name, found in model.signatures.items() if name not in _INTERNAL_SIGNATURES}
    methods = _list_methods(model, signatures)
    functions = signatures | methods
    if not functions:
        raise ImportFailed(
            f"SavedModel {file.parent.name} has no functions",
            hint="save the model with signatures=..., or with tf.function methods that were called before saving",
        )
    default = _DEFAULT if _DEFAULT in signatures else next(iter(functions)) if len(functions) == 1 else ""
    chosen = function or default
    if chosen not in functions:
        problem = f"no function {chosen!r}" if chosen else "several functions"
        hint = f"choose one with --function: {', '.join(functions)}"
        raise UsageError(f"{file.parent.name} has {problem}", hint=hint, option="--function")
    structure, inputs = _fix_sizes(file.parent.name, _get_specs(functions[chosen]), dims, batch=False)
    return OpenedFunction(chosen, functions[chosen], structure, inputs, tuple(functions), model)


def _list_methods(model: Any, signatures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the methods of a saved tf.Module, each with the first signature that has only tensors."""
    found = {}
    for name, item in sorted(vars(model).items()):
        if name.startswith("_") or name in signatures:
            continue
        for concrete in getattr(item, "concrete_functions", ()):
            if all(is_spec(leaf) for _, leaf in iter_leaves(_get_specs(concrete))):
                found[name] = concrete
                break
    return found


def _get_specs(concrete: Any) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = concrete.structured_input_signature
    return list(args), dict(kwargs)


def _open_keras(file: Path, function: str, dims: Mapping[str, int]) -> OpenedFunction:
    import keras
    import tensorflow as tf

    if function not in ("", "call"):
        raise UsageError(f"{file.name} has no function {function!r}", hint="a Keras model has only the function 'call'")
    try:
        model = keras.saving.load_model(file, compile=False, safe_mode=True)
    except Exception as error:  # raised by Keras, zipfile, h5py, json or the layers
        hint = "hil does not run the code of custom layers or lambdas" if "ambda" in str(error) else ""
        raise ImportFailed(f"Keras cannot read {file.name}: {format_error(error)}", hint=hint) from error
    if not getattr(model, "inputs", None):
        raise ImportFailed(
            f"{file.name} does not define inputs",
            hint="save a functional or Sequential model with keras.Input, or use tf.saved_model.save",
        )
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype, tensor.name) for tensor in model.inputs]
    structure, inputs = _fix_sizes(file.name, (specs, {}), dims, batch=True)

    def call(*tensors: Any) -> Any:
        # Keras reports the structure of a Sequential model, a single tensor, only after a call.
        is_chain = isinstance(model, keras.Sequential)
        return model(tensors[0] if is_chain else tf.nest.pack_sequence_as(model.input, list(tensors)), training=False)

    return OpenedFunction("call", call, structure, inputs, ("call",), model)


def _fix_sizes(
    file: str, structure: tuple[list[Any], dict[str, Any]], dims: Mapping[str, int], *, batch: bool
) -> tuple[tuple[list[Any], dict[str, Any]], tuple[TensorSpec, ...]]:
    """Set sizes for dynamic dimensions. Return the structure and the inputs' specs, with symbols for missing sizes."""
    import tensorflow as tf

    symbols: set[str] = set()
    inputs: list[TensorSpec] = []
    args, kwargs = structure
    named = [(getattr(item, "name", None) or f"arg{number}", item) for number, item in enumerate(args)]
    paths = iter([path for name, item in (*named, *sorted(kwargs.items())) for path, _ in iter_leaves(item, name)])

    def fix_leaf(leaf: Any) -> Any:
        path = next(paths)
        if not is_spec(leaf):
            return leaf
        if leaf.shape.rank is None:
            raise ImportFailed(f"{file}: input {path!r} has an unknown number of dimensions: expected a shape")
        shape: list[Dim] = []
        for axis, dim in enumerate(leaf.shape):
            symbol = "batch" if batch and axis == 0 else f"{path}.dim{axis}"
            if dim is None:
                symbols.add(symbol)
            shape.append(dims.get(symbol, symbol) if dim is None else dim)
        try:
            dtype = make_spec(path, tf.TensorSpec([], leaf.dtype)).dtype
        except CompileFailed as error:
            raise ImportFailed(f"{file}: input {error.message}") from error
        inputs.append(TensorSpec(path, dtype, tuple(shape)))
        return tf.TensorSpec([dim if isinstance(dim, int) else None for dim in shape], leaf.dtype, leaf.name)

    made = replace_leaves((args, kwargs), fix_leaf)
    check_dims(file, dims, symbols)
    return made, tuple(inputs)


_FOLDERS = ("variables", "assets", "assets.extra")


def describe(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Read a function's signature: a SavedModel's signature or method, a Keras model's call, or a graph's config.

    Keras models are called with ``training=False``. New values for assigned variables are outputs named ``variable
    NAME``, after the function's results. A dynamic dimension is a symbol such as ``x.dim0``, or ``batch`` for the first
    dimension of a Keras model.

    Raises:
        ImportFailed: the file is unreadable or damaged, or contains layers that are code (lambdas, custom layers).
        UsageError: TensorFlow is not installed; the function or dimension does not exist; or the model has multiple
            functions and ``function`` is "".
    """
    version = require_version("tensorflow", "tensorflow")
    name = Path(path).name
    # TensorFlow validates nodes, types and operations only on use of the model.
    with convert_foreign_errors(ImportFailed, f"TensorFlow cannot read {name}", error_text=format_error):
        source = open_model(path, function, dims)
        new = [make_spec(name_new_value(name), variable) for name, variable in source.assigned.items()]
        return make_description(
            name,
            source.name,
            source.inputs,
            (*source.outputs(), *new),
            external=[file.relative_to(Path(path).parent).as_posix() for file in list_companions(Path(path), function)],
            producer={"read with": f"tensorflow {version}", "functions": list(source.functions)}
            | ({"first values": source.model.sources} if isinstance(source.model, graph_def.TfGraph) else {}),
            random=source.random,
        )


def list_companions(model: Path, function: str) -> list[Path]:
    """Return the further files of a SavedModel, or of a graph's entry point."""
    if model.name != SAVED_MODEL:
        return graph_def.list_companions(model, function)
    below = (file for name in _FOLDERS for file in sorted((model.parent / name).rglob("*")))
    return [file for file in (*below, model.with_name("fingerprint.pb")) if file.is_file()]


def make_spec(name: str, spec: Any) -> TensorSpec:
    """Convert a TensorFlow spec. Raises CompileFailed for unsupported dtypes."""
    try:
        dtype = get_dtype_name(spec.dtype.as_numpy_dtype)
    except UsageError as error:
        raise CompileFailed(f"{name} has the unsupported dtype {spec.dtype.name}") from error
    return TensorSpec(name, dtype, tuple(spec.shape))


def name_outputs(returned: Any, names: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """Return the results of a function that are not None. Names come from the structure, or from ``names``."""
    found = [(path, leaf) for path, leaf in iter_leaves(returned) if leaf is not None]
    if len(names) == len(found) and not any(_is_name(path) for path, _ in found):
        return [(name, leaf) for name, (_, leaf) in zip(names, found, strict=True)]
    return [(format_output_name(path), leaf) for path, leaf in found]


def read_array(tensor: Any) -> Array:
    """Return a tensor's values as an array. Strings become text."""
    import numpy as np

    array: Array = np.asarray(tensor.numpy())
    if tensor.dtype.name != "string":
        return array
    text = np.empty(array.shape, object)
    text.reshape(-1)[:] = [item.decode(errors="replace") for item in array.astype(object).ravel()]
    return text


def format_output_name(path: str) -> str:
    """Return the name for an output at this path of the return value."""
    return path if _is_name(path) else f"output{path or 0}"


def _is_name(path: str) -> bool:
    return bool(path) and not path[0].isdigit()
