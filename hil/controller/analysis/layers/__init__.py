"""Take a model apart into layers: each node, or group of nodes that belong together, as a model of its own."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from hil.controller.analysis.layers import extract
from hil.controller.analysis.layers.check import changed_layers
from hil.controller.analysis.layers.values import (
    Activations,
    Layer,
    activations,
    digests_of,
    layer_inputs,
    layer_outputs,
)
from hil.controller.models.conversions import as_onnx
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated, naming_errors
from hil.core.installed import version
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
    "activations",
    "changed_layers",
    "cut",
    "layer_inputs",
    "layer_outputs",
    "layer_specs",
    "layers_of",
    "unmerged",
]

GROUPS = ("node", "fused")
MERGES = ("content", "shape", "none")
TIMEOUT_S = 600.0
# Increase this when the layers of the same model change: older entries of the cache are then not used.
_VERSION = 5
_LAYERS = "layers.json"
_SIDES = ("inputs", "outputs")
_Extract = Callable[..., dict[str, Any]]


class _How(TypedDict):
    """What calls are cached in and isolated by, and the log that gets what they print."""

    cache: Cache
    isolated: Isolated
    log: Path


# Number of runs on random inputs that must agree on a dimension that inference cannot find, to take it as fixed.
_PROBES = 2


def layers_of(
    model: Model,
    *,
    group: str = "node",
    inputs: Mapping[str, Array] | None = None,
    **how: Unpack[_How],
) -> tuple[Layer, ...]:
    """Return a model's layers in topological order.

    Constants, and what follows from constants and fixed shapes alone, are in the layers that use them. Quantisation and
    dequantisation around an operator stay with it; values that are no tensors are never cut.

    Args:
        model: an ONNX model, or one that :func:`hil.controller.models.conversions.as_onnx` converts; its ``dims`` are
            fixed in the layers.
        group: ``node``: a layer for each node; ``fused``: one for what compilers fuse: Conv with BatchNormalization,
            Add and activation, MatMul and Gemm with Add and activation.
        inputs: of the model, by name. Their shapes fix its symbolic dimensions. A run on them, and runs on seeded
            random inputs, find shapes that inference cannot; a dimension that differs between those runs stays dynamic.

    Raises:
        UsageError: the model is not ONNX and cannot be converted, or the group is unknown.
        ImportFailed: the model cannot be taken apart.
        StageTimeout: it took longer than ten minutes.
        StorageError: the layers cannot be stored.
    """
    return _extracted(model, {"group": group}, extract.extract, inputs, how)


def cut(
    model: Model,
    start: str,
    end: str,
    *,
    group: str = "node",
    inputs: Mapping[str, Array] | None = None,
    **how: Unpack[_How],
) -> Layer:
    """Return the part of a model between two of its tensors, nodes or layers, as one layer.

    It has every node on a path from ``start`` to ``end``; values from other nodes become inputs too.

    Args:
        start: a tensor, which becomes an input; or a node or layer, which belongs to the part; "" for the model's
            inputs. A name that several have is the tensor's, else the node's.
        end: a tensor, or a node or layer whose results become the outputs; "" for the model's outputs.

    Raises:
        UsageError: no ONNX model; the tensor, node or layer does not exist; ``end`` does not depend on ``start``.
        ImportFailed, StageTimeout, StorageError: as for :func:`layers_of`.
    """
    (layer,) = _extracted(model, {"start": start, "end": end, "group": group}, extract.cut_out, inputs, how)
    return layer


def unmerged(layers: Sequence[Layer], merge: str) -> list[Layer]:
    """Return the layers without duplicates.

    Args:
        merge: ``content`` drops copies of other layers; ``shape`` also layers with the signature of another, whatever
            their weights and inputs; ``none`` drops nothing.

    Raises:
        UsageError: ``merge`` is unknown.
    """
    if merge not in MERGES:
        raise UsageError(f"layers cannot be merged by {merge!r}", hint=f"one of {', '.join(MERGES)}")
    if merge == "none":
        return list(layers)
    return [layer for layer in layers if not (layer.same_as if merge == "shape" else layer.copy_of)]


def layer_specs(layer: Layer) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the specs of a layer's inputs and outputs, in its model's order."""
    (item,) = (item for item in _document(layer.path.parent)["layers"] if item["name"] == layer.name)
    inputs, outputs = ([TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in item[side]] for side in _SIDES)
    return tuple(inputs), tuple(outputs)


def _extracted(
    model: Model, request: Mapping[str, Any], function: _Extract, inputs: Mapping[str, Array] | None, how: _How
) -> tuple[Layer, ...]:
    if request["group"] not in GROUPS:
        raise UsageError(f"there is no group {request['group']!r}", hint=f"one of {', '.join(GROUPS)}")
    model = as_onnx(model, **how)
    extractor = _Extractor(model if inputs is None else _fixed(model, inputs), function, request, how)
    folder = extractor.made(None)
    if inputs is not None and _document(folder)["open"]:
        folder = extractor.made(inputs)
    return tuple(_layer(folder, item) for item in _document(folder)["layers"])


@dataclass(frozen=True)
class _Extractor:
    """Takes a model apart; the cache keeps the results."""

    model: Model
    function: _Extract
    request: Mapping[str, Any]
    how: _How

    def made(self, inputs: Mapping[str, Array] | None) -> Path:
        model, request = self.model, self.request
        key = Cache.key(
            "layers",
            model=model.digest,
            dims=dict(model.dims),
            made_by=self.function.__name__,
            request=dict(request),
            inputs=None if inputs is None else digests_of(inputs),
            tools=[version("onnx"), version("onnxruntime")],
            version=_VERSION,
        )

        def make(folder: Path) -> None:
            if self._call(None, folder)["open"]:
                self._call(self._observed(inputs), folder)

        folder, _ = self.how["cache"].get_or_make(key, {"model": model.name, **request}, make)
        return folder

    def _call(self, observed: Any, folder: Path) -> Any:
        path, dims = self.model.path, dict(self.model.dims)
        arguments = {"path": str(path.absolute()), "dims": dims, "observed": observed, "folder": str(folder)}
        what = f"taking {path.name} apart"
        with naming_errors("import", what, functools.partial(ImportFailed, stage="import"), what):
            arguments |= self.request
            return self.how["isolated"].call(self.function, arguments, timeout=TIMEOUT_S, log=self.how["log"])

    def _observed(self, inputs: Mapping[str, Array] | None) -> dict[str, Any]:
        """Return tensor -> [dtype, shape] as observed in runs; a dimension that differed between them is None."""
        from hil.controller.models.inputs import make_inputs

        model = self.model
        cases = [] if inputs is None else [inputs]
        if model.inputs is not None and all(spec.is_static for spec in model.inputs):
            cases += [make_inputs(model.inputs, {}, seed=seed, ranges=model.ranges) for seed in range(_PROBES)]
        seen: dict[str, list[TensorSpec]] = {}
        for case in cases:
            try:
                values = activations(model, case, recompute=False, timeout=TIMEOUT_S, **self.how)
            except (ReferenceFailed, StageTimeout) as error:
                with self.how["log"].open("a") as file:
                    file.write(f"note: shapes could not be observed: {error.message}\n")
                continue
            for spec in values.specs():
                seen.setdefault(spec.name, []).append(spec)
        found: dict[str, Any] = {}
        for name, specs in seen.items():
            if len({len(spec.shape) for spec in specs}) == 1:  # else the rank is not known
                by_axis = zip(*(spec.shape for spec in specs), strict=True)
                found[name] = [specs[0].dtype, [sizes[0] if len(set(sizes)) == 1 else None for sizes in by_axis]]
        return found


def _fixed(model: Model, inputs: Mapping[str, Array]) -> Model:
    """Return the model with its symbolic dimensions replaced by the inputs' sizes."""
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
def _document(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / _LAYERS).read_text())
    return document


def _layer(folder: Path, item: Mapping[str, Any]) -> Layer:
    known = {name: item[name] for name in ("name", "op", "depth", "same_as", "copy_of", "by_chance", "folded")}
    inputs, outputs = (tuple(spec[0] for spec in item[side]) for side in _SIDES)
    return Layer(nodes=tuple(item["nodes"]), path=folder / item["file"], inputs=inputs, outputs=outputs, **known)
