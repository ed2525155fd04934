"""Split a model into layers: every node, or group of related nodes, as a separate model."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from hil.controller.analysis.layers import extract
from hil.controller.analysis.layers.check import find_changed_layers
from hil.controller.analysis.layers.values import (
    Activations,
    Layer,
    compute_activations,
    digest_tensors,
    select_layer_inputs,
    select_layer_outputs,
)
from hil.controller.models.conversions import convert_to_onnx
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated, convert_errors
from hil.core.files import read_file
from hil.core.installed import get_version
from hil.core.results import Model
from hil.core.tensors import Array, TensorSpec
from hil.errors import ImportFailed, ReferenceFailed, StageTimeout, UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "GROUPS",
    "MERGES",
    "Activations",
    "Layer",
    "compute_activations",
    "cut",
    "drop_merged",
    "extract_layers",
    "find_changed_layers",
    "get_layer_specs",
    "select_layer_inputs",
    "select_layer_outputs",
]

GROUPS = ("node", "fused")
MERGES = ("content", "shape", "none")
TIMEOUT_SECONDS = 600.0
# Increase this when layers of the same model change, to invalidate cached entries.
_VERSION = 5
_LAYERS = "layers.json"
_SIDES = ("inputs", "outputs")
_Extract = Callable[..., dict[str, Any]]


class _CallContext(TypedDict):
    """The cache and the isolated processes for a call, and the log for their output."""

    cache: Cache
    isolated: Isolated
    log: Path


# Number of runs with random inputs. If inference cannot find a dimension, it is fixed only if all runs agree.
_PROBES = 2


def extract_layers(
    model: Model,
    *,
    group: str = "node",
    inputs: Mapping[str, Array] | None = None,
    **how: Unpack[_CallContext],
) -> tuple[Layer, ...]:
    """Return a model's layers in topological order.

    Constants, and nodes that depend only on constants and fixed shapes, belong to the layers that use them.
    Quantisation and dequantisation around an operator stay with the operator. The model is never cut at values that are
    not tensors.

    Args:
        model: an ONNX model, or a model that :func:`hil.controller.models.conversions.convert_to_onnx` converts; the
            layers have the fixed sizes in ``dims``.
        group: ``node``: a layer per node; ``fused``: a layer per group that compilers fuse: Conv with
            BatchNormalization, Add and activation; MatMul and Gemm with Add and activation.
        inputs: model inputs by name. Their shapes fix symbolic dimensions. If inference cannot find a shape, hil
            observes the shape in runs with these inputs and with seeded random inputs. A dimension that differs between
            runs stays dynamic.

    Raises:
        UsageError: the model is not ONNX and cannot be converted, or the group is unknown.
        ImportFailed: the model cannot be split.
        StageTimeout: splitting took longer than ten minutes.
        StorageError: the layers cannot be stored.
    """
    return _extract_layers(model, {"group": group}, extract.extract, inputs, how)


def cut(
    model: Model,
    start: str,
    end: str,
    *,
    group: str = "node",
    inputs: Mapping[str, Array] | None = None,
    **how: Unpack[_CallContext],
) -> Layer:
    """Return the part of a model between two tensors, nodes or layers, as a single layer.

    The layer contains every node on a path from ``start`` to ``end``. Values from other nodes also become inputs.

    Args:
        start: a tensor, which becomes an input; or a node or layer, which is included; "" for the model's inputs.
            Ambiguous names refer to a tensor first, then to a node.
        end: a tensor, or a node or layer with results that become the outputs; "" for the model's outputs.

    Raises:
        UsageError: the model is not ONNX and cannot be converted; the tensor, node or layer does not exist; ``end``
            does not depend on ``start``.
        ImportFailed, StageTimeout, StorageError: see :func:`extract_layers`.
    """
    (layer,) = _extract_layers(model, {"start": start, "end": end, "group": group}, extract.cut_out, inputs, how)
    return layer


def drop_merged(layers: Sequence[Layer], merge: str) -> list[Layer]:
    """Return the layers without duplicates.

    Args:
        merge: ``content`` drops copied layers; ``shape`` also drops layers with the same signature, for any
            weights and inputs; ``none`` keeps all.

    Raises:
        UsageError: ``merge`` is unknown.
    """
    if merge not in MERGES:
        raise UsageError(f"invalid merge mode {merge!r}", hint=f"expected one of {', '.join(MERGES)}")
    if merge == "none":
        return list(layers)
    return [layer for layer in layers if not (layer.same_as if merge == "shape" else layer.copy_of)]


def get_layer_specs(layer: Layer) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return a layer's input and output specs, in the layer model's order."""
    (item,) = (item for item in _read_document(layer.path.parent)["layers"] if item["name"] == layer.name)
    inputs, outputs = ([TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in item[side]] for side in _SIDES)
    return tuple(inputs), tuple(outputs)


def _extract_layers(
    model: Model, request: Mapping[str, Any], function: _Extract, inputs: Mapping[str, Array] | None, how: _CallContext
) -> tuple[Layer, ...]:
    if request["group"] not in GROUPS:
        raise UsageError(f"invalid group {request['group']!r}", hint=f"expected one of {', '.join(GROUPS)}")
    model = convert_to_onnx(model, **how)
    extractor = _Extractor(model if inputs is None else _fix_dims(model, inputs), function, request, how)
    folder = extractor.make_layers(None)
    if inputs is not None and _read_document(folder)["open"]:
        folder = extractor.make_layers(inputs)
    return tuple(_read_layer(folder, item) for item in _read_document(folder)["layers"])


@dataclass(frozen=True)
class _Extractor:
    """Splits a model and caches the result."""

    model: Model
    function: _Extract
    request: Mapping[str, Any]
    how: _CallContext

    def make_layers(self, inputs: Mapping[str, Array] | None) -> Path:
        model, request = self.model, self.request
        key = Cache.key(
            "layers",
            model=model.digest,
            dims=dict(model.dims),
            made_by=self.function.__name__,
            request=dict(request),
            inputs=None if inputs is None else digest_tensors(inputs),
            tools=[get_version("onnx"), get_version("onnxruntime")],
            version=_VERSION,
        )

        def make(folder: Path) -> None:
            if self._run_extraction(None, folder)["open"]:
                self._run_extraction(self._observe_specs(inputs), folder)

        folder, _ = self.how["cache"].get_or_make(key, {"model": model.name, **request}, make)
        return folder

    def _run_extraction(self, observed: Any, folder: Path) -> Any:
        path, dims = self.model.path, dict(self.model.dims)
        arguments = {"path": str(path.absolute()), "dims": dims, "observed": observed, "folder": str(folder)}
        what = f"splitting {path.name} into layers"
        with convert_errors("import", what, functools.partial(ImportFailed, stage="import"), f"{what} failed"):
            arguments |= self.request
            return self.how["isolated"].call(self.function, arguments, timeout=TIMEOUT_SECONDS, log=self.how["log"])

    def _observe_specs(self, inputs: Mapping[str, Array] | None) -> dict[str, Any]:
        """Return tensor -> [dtype, shape] as observed in runs; dimensions that differ between runs are None."""
        from hil.controller.models.inputs import make_inputs

        model = self.model
        cases = [] if inputs is None else [inputs]
        if model.inputs is not None and all(spec.is_static for spec in model.inputs):
            cases += [make_inputs(model.inputs, {}, seed=seed, ranges=model.ranges) for seed in range(_PROBES)]
        seen: dict[str, list[TensorSpec]] = {}
        for case in cases:
            try:
                values = compute_activations(model, case, recompute=False, timeout=TIMEOUT_SECONDS, **self.how)
            except (ReferenceFailed, StageTimeout) as error:
                with self.how["log"].open("a") as file:
                    file.write(f"note: cannot observe shapes: {error.message}\n")
                continue
            for spec in values.iter_specs():
                seen.setdefault(spec.name, []).append(spec)
        found: dict[str, Any] = {}
        for name, specs in seen.items():
            if len({len(spec.shape) for spec in specs}) == 1:  # otherwise the rank is unknown
                by_axis = zip(*(spec.shape for spec in specs), strict=True)
                found[name] = [specs[0].dtype, [sizes[0] if len(set(sizes)) == 1 else None for sizes in by_axis]]
        return found


def _fix_dims(model: Model, inputs: Mapping[str, Array]) -> Model:
    """Return the model with symbolic dimensions replaced by the inputs' sizes."""
    dims = dict(model.dims)
    for spec in model.inputs or ():
        if spec.name in inputs:
            sizes = zip(spec.shape, inputs[spec.name].shape, strict=False)
            dims |= {dim: size for dim, size in sizes if isinstance(dim, str)}
    specs = tuple(
        replace(spec, shape=tuple(dims.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.shape))
        for spec in model.inputs or ()
    )
    return replace(model, dims=dims, inputs=specs)


@functools.lru_cache(maxsize=16)
def _read_document(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(read_file(folder / _LAYERS))
    return document


def _read_layer(folder: Path, item: Mapping[str, Any]) -> Layer:
    known = {name: item[name] for name in ("name", "op", "depth", "same_as", "copy_of", "by_chance", "folded")}
    inputs, outputs = (tuple(spec[0] for spec in item[side]) for side in _SIDES)
    return Layer(nodes=tuple(item["nodes"]), path=folder / item["file"], inputs=inputs, outputs=outputs, **known)
