"""What is taken apart: a model, its layers, what the reference computed for its tensors, and the model to compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.compare.tolerance import fitted, refuse_vacuous
from hil.controller.analysis.bisect.pair import check_layers, check_signatures
from hil.controller.analysis.layers import Activations, Layer, activations, layers_of
from hil.controller.models.conversions import as_onnx
from hil.controller.models.flows import Flow, apply_recipe
from hil.controller.models.importers import import_model
from hil.controller.models.inputs import make_inputs
from hil.controller.pipeline.case import DEFAULT_TIMEOUT_S, Options, Workshop
from hil.controller.storage.runs import storing
from hil.core.artifacts import Model
from hil.core.tensors import Array, dtype_name


@dataclass(frozen=True)
class Subject:
    """A model made ready.

    Attributes:
        model: the one whose reference is taken for right.
        compiled: the one that programs are made of: the same, or one of the same layers with other weights.
        options: the user's, a flow's own filled in.
        inputs: of the whole model.
        layers: of ``model``, in topological order.
        twins: of ``compiled``, one for each of ``layers``.
        activations: what the reference computed for every tensor.
        by_chance: names of the tensors that random numbers go into: no two runs of the whole model agree on them.
    """

    model: Model
    compiled: Model
    options: Options
    inputs: Mapping[str, Array]
    layers: tuple[Layer, ...]
    twins: tuple[Layer, ...]
    activations: Activations
    by_chance: frozenset[str]

    def missing(self, layer: Layer) -> str:
        """Why a layer cannot be looked at: the reference made no value for a tensor of it; "" where it can."""
        names = [name for name in (*layer.inputs, *layer.outputs) if name not in self.activations]
        return f"the reference has no value for {names[0]}" if names else ""


def open_subject(
    path: Path,
    options: Options,
    *,
    flow: Flow | None,
    artifact_model: Path | None,
    group: str,
    shop: Workshop,
    folder: Path,
) -> Subject:
    """Read a model, take it apart and ask the reference for all of its tensors.

    Args:
        path: an ONNX model, or what converts to ONNX: it is that which is compiled and taken apart.
        options: how it is run; a flow's runtime, compiler, flags and tolerance go where it says nothing.
        flow: or None.
        artifact_model: the file to compile in its place, or None.
        group: how nodes make layers: see :func:`hil.controller.analysis.layers.layers_of`.
        shop: the cache and the isolated processes.
        folder: for logs.

    Raises:
        UsageError: it is no ONNX model, does not take these inputs, or the other model is another network.
        ImportFailed, ReferenceFailed, StageTimeout: it cannot be read, or not computed.
    """
    asked = options = with_flow(options, flow)
    log = folder / "logs" / "bisect.log"
    with storing(log.parent):
        log.parent.mkdir(parents=True, exist_ok=True)
    model = _read(path, options, flow, shop, log)
    options = replace(options, dims=model.dims)
    inputs = make_inputs(
        model.inputs or (),
        options.inputs,
        seed=options.seed,
        ranges=model.ranges,
        user_range=options.input_range,
        dims=options.dims,
    )
    settings: dict[str, Any] = {"cache": shop.cache, "isolated": shop.isolated, "log": log}
    layers = layers_of(model, group=group, inputs=inputs, **settings)
    compiled, twins = model, layers
    if artifact_model is not None:
        compiled = _read(artifact_model, asked, flow, shop, log)
        check_signatures(model, compiled)
        twins = layers_of(compiled, group=group, inputs=inputs, **settings)
        check_layers(model, layers, compiled, twins)
    computed = activations(
        model, inputs, recompute=options.recompute, timeout=max(options.timeout, DEFAULT_TIMEOUT_S), **settings
    )
    for name in computed.outputs:
        _check_tolerance(name, computed[name], options)
    return Subject(model, compiled, options, inputs, layers, twins, computed, _by_chance(layers))


def with_flow(options: Options, flow: Flow | None) -> Options:
    """The options with what a flow says filled in."""
    if flow is None:
        return options
    return replace(
        options,
        runtime=flow.runtime,
        compiler=flow.compiler,
        compile_flags=(*flow.compile_flags, *options.compile_flags),
        rtol=flow.rtol if options.rtol is None else options.rtol,
        atol=flow.atol if options.atol is None else options.atol,
    )


def _by_chance(layers: Sequence[Layer]) -> frozenset[str]:
    """What layers that draw random numbers make, and all that takes from it."""
    found: set[str] = set()
    for layer in layers:
        if layer.by_chance or not found.isdisjoint(layer.inputs):
            found.update(layer.outputs)
    return frozenset(found)


def _check_tolerance(name: str, reference: Array, options: Options) -> None:
    """Refuse a tolerance within which the model's own outputs could not be wrong."""
    dtype = dtype_name(reference.dtype)
    tolerance, scale = fitted((dtype, dtype), reference, options.rtol, options.atol)
    refuse_vacuous(name, tolerance, scale, rtol=options.rtol, atol=options.atol)


def _read(path: Path, options: Options, flow: Flow | None, shop: Workshop, log: Path) -> Model:
    """A model as the flow's recipe makes it, in ONNX; its ``dims`` are those that are still to be given to it."""
    settings: dict[str, Any] = {"isolated": shop.isolated, "cache": shop.cache}
    model = import_model(path, function=options.function, dims=options.dims, **settings)
    if model.format != "onnx":
        file = as_onnx(model, log=log, **settings).path
        symbols = {dim for spec in import_model(file, **settings).inputs or () for dim in spec.shape}
        dims = {name: size for name, size in options.dims.items() if name in symbols}
        model = replace(import_model(file, dims=dims, **settings), name=model.name)
    if flow is None or not flow.recipe:
        return model
    file = apply_recipe(flow, model.path, (), shop, log, dims=model.dims)
    return import_model(file, dims=model.dims, **settings)
