"""Bisection inputs: the model, the layers, reference activations, and the model to compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.compare.criteria import name_outputs
from hil.compare.tolerance import fit_tolerance, refuse_vacuous
from hil.controller.analysis.layers import Activations, Layer, compute_activations, extract_layers, find_changed_layers
from hil.controller.models.compiling import CachedCall, call_isolated
from hil.controller.models.conversions import convert_to_onnx
from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.recipe import apply_recipe
from hil.controller.models.importers import import_model
from hil.controller.models.inputs import make_inputs
from hil.controller.pipeline.settings.options import Options
from hil.controller.pipeline.verdicts.accepting import check_accepted_outputs
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import convert_errors
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import convert_write_errors
from hil.core.files import copy_file
from hil.core.results import Model
from hil.core.tensors import Array, TensorSpec, get_dtype_name
from hil.errors import ImportFailed, UsageError
from hil.formats.onnx_file import load_onnx

if TYPE_CHECKING:
    from typing_extensions import Unpack

_HINT = "pass the file that the compiler received to --artifact-model: same network as MODEL, any weights"


def check_signatures(model: Model, other: Model) -> None:
    """Raise UsageError unless both models have the same inputs and outputs."""
    what = f"{other.path.name} is not the same network as {model.path.name}"
    for kind, mine, theirs in (("inputs", model.inputs, other.inputs), ("outputs", model.outputs, other.outputs)):
        if mine != theirs:
            had, wanted = (", ".join(map(str, specs or ())) or "unknown" for specs in (theirs, mine))
            raise UsageError(f"{what}: expected the {kind} {wanted}, got {had}", hint=_HINT)


def check_layers(model: Model, layers: Sequence[Layer], other: Model, others: Sequence[Layer]) -> None:
    """Raise UsageError unless both models have the same layers in the same order, with the same inputs and outputs."""
    what = f"{other.path.name} is not the same network as {model.path.name}"
    for layer, twin in zip(layers, others, strict=False):
        if (layer.op, layer.nodes, layer.inputs, layer.outputs) != (twin.op, twin.nodes, twin.inputs, twin.outputs):
            raise UsageError(
                f"{what}: expected the layer {_describe_layer(layer)}, got {_describe_layer(twin)}", hint=_HINT
            )
    if len(layers) != len(others):
        raise UsageError(f"{what}: expected {len(layers)} layers, got {len(others)}", hint=_HINT)


def _describe_layer(layer: Layer) -> str:
    return f"{layer.name} ({', '.join(layer.inputs) or 'no inputs'} to {', '.join(layer.outputs)})"


_VERSION = 2
_NAME = "exposed.onnx"


def expose_tensors(
    model: Model,
    tensors: Sequence[TensorSpec],
    *,
    only: bool = False,
    **how: Unpack[CachedCall],
) -> Path:
    """Make an ONNX model that returns these tensors after the original outputs.

    Args:
        tensors: node outputs in the model. A tensor that is already an output keeps its position. Shapes are
            written only if the model's input shapes are fixed.
        only: return no other outputs, and remove every node that these tensors do not need.

    Raises:
        ImportFailed, StageTimeout: the model cannot be written, or writing took too long.
    """
    fixed = all(isinstance(dim, int) for spec in model.inputs or () for dim in spec.shape)
    specs = [[spec.name, spec.dtype, [dim if fixed else None for dim in spec.shape]] for spec in tensors]
    key = Cache.key("exposed", model=model.digest, tensors=specs, only=only, version=_VERSION)

    def make(folder: Path) -> None:
        files = {name: str(path.absolute()) for name, path in model.files.items() if path != model.path}
        arguments = {"model": str(model.path.absolute()), "files": files, "tensors": specs, "only": only}
        failed = f"cannot add intermediate outputs to {model.path.name}"
        with convert_errors("import", "adding intermediate outputs", partial(ImportFailed, stage="import"), failed):
            call_isolated(write, {**arguments, "folder": str(folder)}, how)

    entry, _ = how["cache"].get_or_make(key, {"model": model.name, "outputs": len(specs)}, make)
    return entry / _NAME


def write(model: str, files: dict[str, str], tensors: list[Any], only: bool, folder: str) -> None:
    """Write the model and the external data to a directory. Runs in an isolated process."""
    import onnx

    from hil.controller.analysis.layers.graph import list_reads
    from hil.formats.onnx_functions import inline_functions
    from hil.formats.ort_values import ONNX_TYPES

    proto = load_onnx(model)
    if proto.functions:
        # Inline functions, because the layers were extracted from the inlined model.
        proto = inline_functions(proto)
    graph = proto.graph
    if only:
        wanted = {name for name, _, _ in tensors}
        own = [output for output in graph.output if output.name in wanted]
        del graph.output[:]
        graph.output.extend(own)
    there = {output.name for output in graph.output}
    for name, dtype, shape in tensors:
        if name not in there:
            graph.output.append(onnx.helper.make_tensor_value_info(name, ONNX_TYPES[dtype], shape))
    outputs = {output.name for output in graph.output}
    if only:
        needed = set(outputs)
        kept = []
        for node in reversed(graph.node):
            if not needed.isdisjoint(node.output):
                kept.append(node)
                needed.update(list_reads(node))
        del graph.node[:]
        graph.node.extend(reversed(kept))
    # An output must not also be in ``value_info``.
    inner = [value for value in graph.value_info if value.name not in outputs]
    del graph.value_info[:]
    graph.value_info.extend(inner)
    onnx.save(proto, Path(folder) / _NAME)
    for name, source in files.items():
        target = Path(folder) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_file(source, target)


@dataclass(frozen=True)
class BisectSubject:
    """A model prepared for bisection."""

    model: Model  # the model that the reference runs
    digest: str  # digest of the source file and its external data, as in a run's record
    compiled: Model  # the model to compile: ``model``, or the same layers with other weights
    options: Options
    inputs: Mapping[str, Array]
    layers: tuple[Layer, ...]  # layers of ``model``, in topological order
    twins: tuple[Layer, ...]  # layers of ``compiled``, in the same order as ``layers``
    activations: Activations
    # Tensors that depend on random numbers, and so differ in every run.
    by_chance: frozenset[str]
    changed: Mapping[str, str]  # layer -> reason why its results differ from the model's

    def missing(self, layer: Layer) -> str:
        """Return the reason if a layer cannot be compared, because the reference has no value for a tensor.

        Otherwise return "".
        """
        names = [name for name in (*layer.inputs, *layer.outputs) if name not in self.activations]
        return f"the reference has no value for {names[0]}" if names else ""


def open_subject(
    path: Path,
    options: Options,
    *,
    flow: Flow | None,
    artifact_model: Path | None,
    group: str,
    context: RunContext,
    folder: Path,
) -> BisectSubject:
    """Read a model, extract the layers, and compute all tensors with the reference.

    Args:
        path: an ONNX model, or a model that converts to ONNX. The ONNX model is compiled and split into layers.
        options: run options. A flow supplies the runtime, compiler, flags and tolerances, see :func:`apply_flow`.
    """
    asked = options = apply_flow(options, flow)
    log = folder / "logs" / "bisect.log"
    with convert_write_errors(log.parent):
        log.parent.mkdir(parents=True, exist_ok=True)
    model, digest = _import_model(path, options, flow, context, log)
    options = replace(options, dims=model.dims)
    inputs = make_inputs(
        model.inputs or (),
        options.inputs,
        seed=options.seed,
        ranges=model.ranges,
        user_range=options.input_range,
        dims=options.dims,
    )
    settings: dict[str, Any] = {"cache": context.cache, "isolated": context.isolated, "log": log}
    layers = extract_layers(model, group=group, inputs=inputs, **settings)
    compiled, twins = model, layers
    if artifact_model is not None:
        compiled, _ = _import_model(artifact_model, asked, flow, context, log)
        check_signatures(model, compiled)
        twins = extract_layers(compiled, group=group, inputs=inputs, **settings)
        check_layers(model, layers, compiled, twins)
    # Acceptance criteria apply to the model's outputs. Other tensors are compared within the tolerance.
    check_accepted_outputs([(options.accept, model)])
    if options.accept:
        options = replace(options, accept=name_outputs(options.accept, [spec.name for spec in model.outputs or ()]))
    computed = compute_activations(
        model,
        inputs,
        references=options.references,
        recompute=options.recompute,
        timeout=options.timeout,
        **settings,
    )
    for name in computed.outputs:
        # Reject a tolerance that outputs could never exceed.
        dtype = get_dtype_name(computed[name].dtype)
        tolerance, scale = fit_tolerance((dtype, dtype), computed[name], options.rtol, options.atol)
        refuse_vacuous(name, tolerance, scale, rtol=options.rtol, atol=options.atol)
    by_chance: set[str] = set()
    for layer in layers:
        if layer.by_chance or not by_chance.isdisjoint(layer.inputs):
            by_chance.update(layer.outputs)
    limits: dict[str, Any] = {"recompute": options.recompute, "timeout": options.timeout}
    changed = find_changed_layers(layers, computed, **limits, **settings)
    return BisectSubject(
        model, digest, compiled, options, inputs, layers, twins, computed, frozenset(by_chance), changed
    )


def apply_flow(options: Options, flow: Flow | None) -> Options:
    """Return the options with the flow's settings.

    The flow sets the runtime and the compiler, and the flow's flags precede the options' flags. The device, tolerances,
    acceptance criteria and arithmetic come from the flow only if the options leave them unset.
    """
    if flow is None:
        return options
    return replace(
        options,
        runtime=flow.runtime,
        device=options.device or flow.device,
        compiler=flow.compiler,
        compile_flags=(*flow.compile_flags, *options.compile_flags),
        rtol=flow.rtol if options.rtol is None else options.rtol,
        atol=flow.atol if options.atol is None else options.atol,
        accept=options.accept or flow.accept,
        arithmetic=options.arithmetic or flow.arithmetic,
    )


def _import_model(path: Path, options: Options, flow: Flow | None, context: RunContext, log: Path) -> tuple[Model, str]:
    """Import a model as ONNX and apply the flow's recipe.

    Returns:
        The model and the source model's digest. The model's ``dims`` contains the sizes still to be applied.
    """
    settings: dict[str, Any] = {"isolated": context.isolated, "cache": context.cache}
    model = import_model(path, function=options.function, dims=options.dims, **settings)
    digest = model.digest
    if model.format != "onnx":
        file = convert_to_onnx(model, log=log, **settings).path
        symbols = {dim for spec in import_model(file, **settings).inputs or () for dim in spec.shape}
        dims = {name: size for name, size in options.dims.items() if name in symbols}
        model = replace(import_model(file, dims=dims, **settings), name=model.name)
    if flow is None or not flow.recipe:
        return model, digest
    file = apply_recipe(flow, model.path, (), context, log, dims=model.dims)
    return import_model(file, dims=model.dims, **settings), digest
