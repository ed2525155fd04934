"""The layer type, and a model's activations: every tensor that a CPU reference computes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hil.controller.models.compiling import Work, call_isolated
from hil.controller.models.conversions import convert_to_onnx
from hil.controller.models.inputs import make_random_tensor
from hil.controller.models.onnx_files.rewrite_check import check_rewrites
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import convert_errors
from hil.controller.storage.runs import convert_write_errors
from hil.controller.storage.tensor_files import INDEX, load_tensors, save_tensors
from hil.core.digest import digest_of
from hil.core.files import copy_file, read_file
from hil.core.installed import get_version
from hil.core.npy import load_npy, save_npy
from hil.core.results import Model
from hil.core.tensors import Array, TensorSpec, get_dtype_name, make_spec, to_bytes
from hil.errors import ReferenceFailed, UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

MODES = ("real", "random")
# References in order of preference, with their packages.
_ORACLES = {"onnxruntime": "onnxruntime", "onnx-reference": "onnx"}
# Increase this when the values change without new reference versions.
_VERSION = 4


@dataclass(frozen=True)
class Layer:
    """A layer in a model."""

    name: str  # ``<op>_<node name>``, unique in the model, with only letters, digits and ``._+-``
    op: str  # the operator, or a group's operators in order: ``Conv+Relu``
    nodes: tuple[str, ...]  # node names in the model
    path: Path  # the layer as a separate ONNX model, with constants
    # inputs, outputs: tensor names in the whole model, in the sub-model's order.
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    depth: int  # 0 if the layer uses only model inputs, otherwise 1 plus the largest depth of used layers
    # first layer with the same signature (operators, attributes, shapes, dtypes, quantisation), possibly with other
    # weights and inputs; "" if this layer is the first.
    same_as: str = ""
    # first layer with the same signature, weights and input values, for any input of the model; "" if this layer is the
    # first.
    copy_of: str = ""
    # True if it draws random numbers (RandomNormal, Dropout in training mode), so that runs differ.
    by_chance: bool = False
    # True if it has constants computed by onnx's evaluator: :func:`changed_layers` checks them.
    folded: bool = False


class Activations(Mapping[str, Array]):
    """Tensor name -> value computed by the reference, read from the file at every access.

    Includes the model's inputs and outputs, but not constants and values that are not tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        about = json.loads(read_file(folder / _ABOUT))
        self.source: str = about["source"]  # the reference, with version
        self.outputs = tuple(about["outputs"])  # the model's output names, in order
        self.refused: list[list[str]] = about["refused"]  # [name, reason] of references that failed before
        self._files: dict[str, tuple[Path, TensorSpec]] = {}
        for part in (folder / _INPUTS, folder / _VALUES):
            for item in json.loads(read_file(part / INDEX)):
                spec = TensorSpec(item["name"], item["dtype"], tuple(item["shape"]))
                self._files[spec.name] = (part / item["file"], spec)

    def __getitem__(self, name: str) -> Array:
        file, spec = self._files[name]
        return load_npy(file, spec.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def iter_specs(self) -> Iterator[TensorSpec]:
        """Return names, dtypes and shapes, without reading any values."""
        return (spec for _, spec in self._files.values())

    def get_spec(self, name: str) -> TensorSpec:
        """Return a tensor's dtype and shape, without reading its values."""
        return self._files[name][1]


_ABOUT, _INPUTS, _VALUES = "activations.json", "inputs", "values"


def compute_activations(
    model: Model,
    inputs: Mapping[str, Array],
    *,
    references: Sequence[str] = (),
    **work: Unpack[Work],
) -> Activations:
    """Compute every tensor in a model with a CPU reference, or read them from the cache.

    ONNX Runtime runs without optimisations, so that no value is fused away. If ONNX Runtime fails, hil uses ONNX's
    reference evaluator.

    Args:
        references: references to try in order instead of the defaults.

    Raises:
        UsageError: a reference does not provide intermediate values.
        UsageError, CompileFailed, CompileCrashed: the model is not ONNX and cannot be converted.
        ImportFailed: inlining functions changes an output.
        ReferenceFailed: no reference can run this model with these inputs.
        StageTimeout, StorageError: the timeout expired; the values cannot be stored.
    """
    if blind := [name for name in references if name not in _ORACLES]:
        raise UsageError(
            f"reference {blind[0]} does not provide intermediate values", hint=f"expected one of {', '.join(_ORACLES)}"
        )
    model = convert_to_onnx(model, cache=work["cache"], isolated=work["isolated"], log=work["log"])
    check_rewrites(model, inputs, is_converted=False, **work)
    sources = {name: f"{name} {get_version(_ORACLES[name])}" for name in references or _ORACLES}
    key = Cache.key(
        "activations",
        sources=list(sources.values()),
        model=model.digest,
        dims=dict(model.dims),
        inputs=digest_tensors(inputs),
        version=_VERSION,
    )

    def make(folder: Path) -> None:
        save_tensors(folder / _INPUTS, inputs)
        refused: list[list[str]] = []
        arguments = {"path": str(model.path.absolute()), "dims": dict(model.dims)}
        arguments |= {"inputs": str(folder / _INPUTS), "outputs": str(folder / _VALUES)}
        for name in sources:
            try:
                with convert_errors(
                    "refer", f"computing intermediate values of {model.path.name}", ReferenceFailed, ""
                ):
                    own = call_isolated(run, {**arguments, "oracle": name}, work)
            except ReferenceFailed as error:
                refused.append([name, error.message])
                continue
            about = {"source": sources[name], "outputs": own, "refused": refused}
            (folder / _ABOUT).write_text(json.dumps(about))
            return
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
        raise ReferenceFailed(
            f"no reference can compute intermediate values of {model.path.name} ({reasons})",
            stage="refer",
            hint="check the input values, and check with `hil run` that a reference supports the whole model",
        )

    entry, _ = work["cache"].get_or_make(key, {"model": model.name, "values": "all"}, make, work["recompute"])
    return Activations(entry)


def select_layer_inputs(
    layer: Layer, activations: Mapping[str, Array], *, mode: str = "real", seed: int = 0
) -> dict[str, Array]:
    """Return a layer's input values by name, in the layer model's order.

    Args:
        mode: ``real``: the reference's values in the whole model; ``random``: seeded values with the same dtype and
            shape, between the real values' minimum and maximum (bools and strings: any).

    Raises:
        UsageError: the mode is unknown.
        ReferenceFailed: the reference computed no value for an input.
    """
    if mode not in MODES:
        raise UsageError(f"invalid mode {mode!r}", hint=f"expected one of {', '.join(MODES)}")
    values = _select_values(layer, layer.inputs, activations)
    return {name: _draw_similar(name, value, seed) for name, value in values.items()} if mode == "random" else values


def select_layer_outputs(layer: Layer, activations: Mapping[str, Array]) -> dict[str, Array]:
    """Return the reference's values for a layer's outputs in the whole model, by name, in order.

    Raises:
        ReferenceFailed: the reference computed no value for an output.
    """
    return _select_values(layer, layer.outputs, activations)


def digest_tensors(tensors: Mapping[str, Array]) -> list[list[Any]]:
    """Return the cache key parts that identify tensors."""
    return [
        [name, get_dtype_name(array.dtype), list(array.shape), digest_of(to_bytes(array))]
        for name, array in tensors.items()
    ]


def _select_values(layer: Layer, names: tuple[str, ...], activations: Mapping[str, Array]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for name in names:
        if name not in activations:
            raise ReferenceFailed(
                f"layer {layer.name}: the reference has no value for tensor {name!r}",
                stage="refer",
                hint="the inputs do not affect the tensor, or the values are from a different model: recompute them",
            )
        found[name] = activations[name]
    return found


def _draw_similar(name: str, value: Array, seed: int) -> Array:
    """Draw a random tensor like ``value``: same dtype, shape and range."""
    spec = make_spec(name, value)
    bounds = _find_range(value)
    drawn = make_random_tensor(spec, value.shape, seed=seed, bounds=bounds)
    if bounds is None or value.dtype.kind == "c":
        return drawn
    # Clip the values, because rounding to the dtype may move a value beyond the bounds.
    low, high = (np.asarray(bound).astype(value.dtype) for bound in bounds)
    return np.asarray(np.clip(drawn, low, high), value.dtype)


def _find_range(value: Array) -> tuple[float, float] | None:
    """Return the minimum and maximum finite value, or None without finite values."""
    if value.dtype.kind in "bOU" or not value.size:
        return None
    if get_dtype_name(value.dtype).lstrip("u").startswith("int"):
        return int(value.min()), int(value.max())
    parts = value.astype(np.complex128 if value.dtype.kind == "c" else np.float64).ravel()
    numbers = parts.view(np.float64)
    finite = numbers[np.isfinite(numbers)]
    return (float(finite.min()), float(finite.max())) if finite.size else None


@dataclass(frozen=True)
class SavedLayer:
    """A saved layer's files."""

    model: Path  # the ONNX file; large weights are in a ``.data`` file next to it, with the same name
    # inputs, outputs: .npy files in the model's order.
    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]

    @property
    def command(self) -> str:
        """The command that runs the layer on the simulator and compares the outputs."""
        parts = ["hil", "run", str(self.model), "--runtime-hw-type", "sim"]
        for option, files in (("--input", self.inputs), ("--expected", self.outputs)):
            parts += [part for file in files for part in (option, str(file))]
        return shlex.join(parts)


def save_layer(layer: Layer, activations: Mapping[str, Array], folder: Path) -> SavedLayer:
    """Copy a layer's model to a directory, and the input and output values as .npy to a subdirectory for the layer.

    Raises:
        ReferenceFailed: the reference computed no value for an input or an output.
        StorageError: the directory cannot be written.
    """
    sides = {"input": select_layer_inputs(layer, activations), "output": select_layer_outputs(layer, activations)}
    values = folder / layer.name
    files: dict[str, tuple[Path, ...]] = {}
    with convert_write_errors(folder, "--save"):
        values.mkdir(parents=True, exist_ok=True)
        model = copy_file(layer.path, folder / layer.path.name)
        if (data := layer.path.with_name(f"{layer.path.name}.data")).exists():
            copy_file(data, folder / data.name)
        for side, tensors in sides.items():
            files[side] = tuple(values / f"{side}_{number}.npy" for number in range(len(tensors)))
            for file, array in zip(files[side], tensors.values(), strict=True):
                save_npy(file, array)
    return SavedLayer(model, files["input"], files["output"])


def run(path: str, dims: Mapping[str, int], oracle: str, inputs: str, outputs: str) -> list[str]:
    """Compute all values that depend on the inputs, and save them in the model's order. Runs in an isolated process.

    Args:
        oracle: ``onnxruntime`` or ``onnx-reference``.
        inputs, outputs: directories in the format of :mod:`hil.controller.storage.tensor_files`.

    Returns:
        The model's output names, in order.
    """
    from hil.controller.analysis.layers.graph import prepare_model

    model = prepare_model(Path(path), dims)
    own = [value.name for value in model.graph.output]
    _expose_values(model)
    compute = _run_onnxruntime if oracle == "onnxruntime" else _run_evaluator
    save_tensors(Path(outputs), compute(model, Path(path).parent, load_tensors(Path(inputs))))
    return own


def _expose_values(model: Any) -> None:
    """Turn every value that depends on inputs or on random numbers into an output of the model."""
    import onnx

    from hil.controller.analysis.layers.graph import list_reads
    from hil.controller.models.onnx_files.random_nodes import is_random

    graph = model.graph
    known = {value.name: value for value in graph.value_info}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    runtime = {value.name for value in graph.input} - constants.keys()
    shown = {value.name for value in graph.output}
    for node in graph.node:
        if is_random(node, constants) or not runtime.isdisjoint(list_reads(node)):
            made = [name for name in node.output if name]
            runtime.update(made)
            graph.output.extend(known.get(name) or onnx.ValueInfoProto(name=name) for name in made if name not in shown)


def _run_onnxruntime(model: Any, folder: Path, inputs: Mapping[str, Any]) -> dict[str, Any]:
    from hil.controller.backends.references.runners.onnx import format_ort_error, open_exact_session
    from hil.formats.ort_values import copy_from_ort, parse_type, to_ort

    try:
        session = open_exact_session(folder / "model.onnx", model)
        feeds = {name: to_ort(array) for name, array in inputs.items()}
    except UsageError as error:
        raise ReferenceFailed(error.message) from error
    except Exception as error:
        raise ReferenceFailed(
            f"ONNX Runtime cannot load the model: {format_ort_error(error)}", detail=str(error)
        ) from error
    kinds = {node.name: parse_type(node.type) for node in session.get_outputs()}
    wanted = {name: dtype for name, dtype in kinds.items() if dtype is not None}
    try:
        values = session.run_with_ort_values(list(wanted), feeds)
    except Exception as error:
        raise ReferenceFailed(
            f"ONNX Runtime failed to run the model: {format_ort_error(error)}", detail=str(error)
        ) from error
    return {name: copy_from_ort(value, wanted[name]) for name, value in zip(wanted, values, strict=True)}


def _run_evaluator(model: Any, folder: Path, inputs: Mapping[str, Any]) -> dict[str, Any]:
    from hil.controller.backends.references.runners.onnx import format_evaluator_error, make_evaluator
    from hil.controller.models.importers.onnx_data import embed_all

    embed_all(model, folder)
    try:
        evaluator = make_evaluator(model)
        with np.errstate(all="ignore"):
            values = evaluator.run(None, dict(inputs))
    except Exception as error:
        raise ReferenceFailed(f"onnx's evaluator failed to run the model: {format_evaluator_error(error)}") from error
    results: dict[str, Any] = {}
    for name, value in zip(evaluator.output_names, values, strict=True):
        if isinstance(value, (list, dict)) or value is None:
            continue
        array = np.asarray(value)
        try:
            get_dtype_name(array.dtype)
        except UsageError:  # an optional or a map, not a tensor
            continue
        results[name] = array.astype(object) if array.dtype.kind in "US" else array
    return results
