"""Take a model apart into layers: each node, or group of nodes that belong together, as a model of its own."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.controller.analysis.layers import extract
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
from hil.controller.storage.packages import version
from hil.core.results import Model
from hil.core.tensors import Array, TensorSpec
from hil.errors import ImportFailed, ReferenceFailed, StageTimeout, UsageError

__all__ = [
    "GROUPS",
    "MERGES",
    "Activations",
    "Layer",
    "activations",
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
_VERSION = 3
_LAYERS = "layers.json"
_Extract = Callable[..., dict[str, Any]]
# Number of runs on random inputs that must agree on a dimension that inference cannot find, to take it as fixed.
_PROBES = 2


def layers_of(
    model: Model,
    *,
    cache: Cache,
    isolated: Isolated,
    log: Path,
    group: str = "node",
    inputs: Mapping[str, Array] | None = None,
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
    return _Extractor.of(model, cache, isolated, log).layers({"group": group}, extract.extract, inputs)


def cut(
    model: Model,
    start: str,
    end: str,
    *,
    cache: Cache,
    isolated: Isolated,
    log: Path,
    group: str = "node",
    inputs: Mapping[str, Array] | None = None,
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
    extractor = _Extractor.of(model, cache, isolated, log)
    (layer,) = extractor.layers({"start": start, "end": end, "group": group}, extract.cut_out, inputs)
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
    inputs, outputs = (
        tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in item[side])
        for side in ("inputs", "outputs")
    )
    return inputs, outputs


@dataclass(frozen=True)
class _Extractor:
    """Takes a model apart; the cache keeps the results."""

    model: Model
    cache: Cache
    isolated: Isolated
    log: Path

    @classmethod
    def of(cls, model: Model, cache: Cache, isolated: Isolated, log: Path) -> _Extractor:
        return cls(as_onnx(model, cache=cache, isolated=isolated, log=log), cache, isolated, log)

    def layers(
        self, request: Mapping[str, Any], function: _Extract, inputs: Mapping[str, Array] | None
    ) -> tuple[Layer, ...]:
        if request["group"] not in GROUPS:
            raise UsageError(f"there is no group {request['group']!r}", hint=f"one of {', '.join(GROUPS)}")
        fixed = self if inputs is None else replace(self, model=_fixed(self.model, inputs))
        folder = fixed._made(request, function, None)
        if inputs is not None and _document(folder)["open"]:
            folder = fixed._made(request, function, inputs)
        return tuple(_layer(folder, item) for item in _document(folder)["layers"])

    def _made(self, request: Mapping[str, Any], function: _Extract, inputs: Mapping[str, Array] | None) -> Path:
        model = self.model
        key = Cache.key(
            "layers",
            model=model.digest,
            dims=dict(model.dims),
            made_by=function.__name__,
            request=dict(request),
            inputs=None if inputs is None else digests_of(inputs),
            tools=[version("onnx"), version("onnxruntime")],
            version=_VERSION,
        )

        def make(folder: Path) -> None:
            if self._call(function, request, None, folder)["open"]:
                self._call(function, request, self._observed(inputs), folder)

        folder, _ = self.cache.get_or_make(key, {"model": model.name, **request}, make)
        return folder

    def _call(self, function: _Extract, request: Mapping[str, Any], observed: Any, folder: Path) -> Any:
        model = self.model
        arguments = {
            "path": str(model.path.absolute()),
            "dims": dict(model.dims),
            "observed": observed,
            "folder": str(folder),
            **request,
        }
        what = f"taking {model.path.name} apart"
        with naming_errors("import", what, functools.partial(ImportFailed, stage="import"), what):
            return self.isolated.call(function, arguments, timeout=TIMEOUT_S, log=self.log)

    def _observed(self, inputs: Mapping[str, Array] | None) -> dict[str, Any]:
        """Return tensor -> [dtype, shape] as observed in runs; a dimension that differed between them is None."""
        from hil.controller.models.inputs import make_inputs

        model = self.model
        cases = [] if inputs is None else [inputs]
        if model.inputs is not None and all(spec.is_static for spec in model.inputs):
            cases += [make_inputs(model.inputs, {}, seed=seed, ranges=model.ranges) for seed in range(_PROBES)]
        settings: dict[str, Any] = {"cache": self.cache, "isolated": self.isolated, "log": self.log}
        seen: dict[str, list[TensorSpec]] = {}
        for case in cases:
            try:
                values = activations(model, case, recompute=False, timeout=TIMEOUT_S, **settings)
            except (ReferenceFailed, StageTimeout) as error:
                with self.log.open("a") as file:
                    file.write(f"note: shapes could not be observed: {error.message}\n")
                continue
            for spec in values.specs():
                seen.setdefault(spec.name, []).append(spec)
        return {
            name: [specs[0].dtype, shape] for name, specs in seen.items() if (shape := _common_shape(specs)) is not None
        }


def _common_shape(specs: Sequence[TensorSpec]) -> list[int | str | None] | None:
    """Return the common shape of tensors, with None for a dimension that differs; None if their ranks differ."""
    if len({len(spec.shape) for spec in specs}) > 1:
        return None
    by_axis = zip(*(spec.shape for spec in specs), strict=True)
    return [sizes[0] if len(set(sizes)) == 1 else None for sizes in by_axis]


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
    def names(specs: Sequence[Sequence[Any]]) -> tuple[str, ...]:
        return tuple(spec[0] for spec in specs)

    return Layer(
        name=item["name"],
        op=item["op"],
        nodes=tuple(item["nodes"]),
        path=folder / item["file"],
        inputs=names(item["inputs"]),
        outputs=names(item["outputs"]),
        depth=item["depth"],
        same_as=item["same_as"],
        copy_of=item["copy_of"],
        by_chance=item["by_chance"],
    )
