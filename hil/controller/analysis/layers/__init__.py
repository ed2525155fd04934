"""A model's layers: each node, or group of nodes that belong together, as a model of its own."""

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
from hil.controller.storage.isolated import Isolated, IsolatedCrash, IsolatedFailure, IsolatedTimeout
from hil.controller.storage.versions import version
from hil.core.artifacts import Model
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
# Raise this when the same model is taken apart in another way: older entries of the cache are then not used.
_VERSION = 3
_LAYERS = "layers.json"
_Extract = Callable[..., dict[str, Any]]
# How many runs on random inputs must agree on a dimension that inference cannot tell before it is taken as fixed.
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
    """A model's layers, each after those that it takes from.

    Constants, and what is computed from constants and fixed shapes alone, are in the layers that use them. What
    quantises and dequantises around an operator stays with it; values that are no tensors are never cut.

    Args:
        model: an ONNX model, or what :func:`hil.controller.models.conversions.as_onnx` makes into one; its ``dims``
            are fixed in the layers.
        cache: where the layers are kept.
        isolated: where the model is taken apart.
        log: what is printed meanwhile is appended here.
        group: ``node`` is a layer a node; ``fused`` keeps together what compilers fuse: Conv with BatchNormalization,
            Add and activation, MatMul and Gemm with Add and activation.
        inputs: what the model is run on, by name. Their shapes fix its symbolic dimensions, and where inference cannot
            tell a shape within, a run on them does, beside runs on seeded random inputs. What differs between those
            runs stays a dynamic dimension.

    Raises:
        UsageError: no ONNX model and none to be had, or no such group.
        ImportFailed: the model cannot be taken apart.
        StageTimeout: it took longer than ten minutes.
        StorageError: the layers cannot be kept.
    """
    return _Shop.of(model, cache, isolated, log).layers({"group": group}, extract.extract, inputs)


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
    """The part of a model from one place to another, as a layer of its own.

    It holds every node on a way from ``start`` to ``end``; what comes in from aside becomes an input too.

    Args:
        model: as for :func:`layers_of`.
        start: a tensor, which becomes an input; or a node or layer, which is part of it; "" is the model's inputs. A
            name that several have is the tensor's, then the node's.
        end: a tensor, or a node or layer whose results become the outputs; "" is the model's outputs.
        cache, isolated, log, group, inputs: as for :func:`layers_of`.

    Raises:
        UsageError: no ONNX model, no such tensor, node or layer, or ``end`` does not depend on ``start``.
        ImportFailed, StageTimeout, StorageError: as for :func:`layers_of`.
    """
    shop = _Shop.of(model, cache, isolated, log)
    (layer,) = shop.layers({"start": start, "end": end, "group": group}, extract.cut_out, inputs)
    return layer


def unmerged(layers: Sequence[Layer], merge: str) -> list[Layer]:
    """The layers that are left when those that are the same become one.

    Args:
        layers: all of a model's.
        merge: ``content`` leaves out the copies of others; ``shape`` also what has another's signature, whatever its
            weights and inputs are; ``none`` leaves out nothing.

    Raises:
        UsageError: there is no such way to merge.
    """
    if merge not in MERGES:
        raise UsageError(f"layers cannot be merged by {merge!r}", hint=f"one of {', '.join(MERGES)}")
    if merge == "none":
        return list(layers)
    return [layer for layer in layers if not (layer.same_as if merge == "shape" else layer.copy_of)]


def layer_specs(layer: Layer) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """What a layer of :func:`layers_of` or :func:`cut` takes and gives, in its model's order."""
    (item,) = (item for item in _document(layer.path.parent)["layers"] if item["name"] == layer.name)
    inputs, outputs = (
        tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in item[side])
        for side in ("inputs", "outputs")
    )
    return inputs, outputs


@dataclass(frozen=True)
class _Shop:
    """Takes a model apart, in the cache."""

    model: Model
    cache: Cache
    isolated: Isolated
    log: Path

    @classmethod
    def of(cls, model: Model, cache: Cache, isolated: Isolated, log: Path) -> _Shop:
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
        try:
            return self.isolated.call(function, arguments, timeout=TIMEOUT_S, log=self.log)
        except IsolatedTimeout as error:
            raise StageTimeout(f"{what} {error.message}", stage="import", detail=error.detail) from error
        except (IsolatedCrash, IsolatedFailure) as error:
            raise ImportFailed(f"{what}: {error.message}", stage="import", detail=error.detail) from error

    def _observed(self, inputs: Mapping[str, Array] | None) -> dict[str, Any]:
        """Tensor -> [dtype, shape] as runs of the model tell it; a dimension that differed between them is None."""
        from hil.controller.models.inputs import make_inputs

        model = self.model
        cases = [] if inputs is None else [inputs]
        if model.inputs is not None and all(spec.is_static for spec in model.inputs):
            cases += [make_inputs(model.inputs, {}, seed=seed, ranges=model.ranges) for seed in range(_PROBES)]
        shop: dict[str, Any] = {"cache": self.cache, "isolated": self.isolated, "log": self.log}
        seen: dict[str, list[TensorSpec]] = {}
        for case in cases:
            try:
                values = activations(model, case, recompute=False, timeout=TIMEOUT_S, **shop)
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
    """The shape that tensors share, None for a dimension that they do not; None where even their ranks differ."""
    if len({len(spec.shape) for spec in specs}) > 1:
        return None
    by_axis = zip(*(spec.shape for spec in specs), strict=True)
    return [sizes[0] if len(set(sizes)) == 1 else None for sizes in by_axis]


def _fixed(model: Model, inputs: Mapping[str, Array]) -> Model:
    """The model with the sizes that inputs have in place of its symbolic dimensions."""
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
