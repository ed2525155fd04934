"""A model's cases: the whole of it, and each of its layers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from hil.bundles import Signature
from hil.bundles.cases import BundledCase
from hil.bundles.checks import checked_cases
from hil.controller.analysis.layers import (
    Activations,
    Layer,
    activations,
    changed_layers,
    layer_inputs,
    layers_of,
    unmerged,
)
from hil.controller.models.default_inputs import default_specs, override_defaults, with_given_defaults
from hil.controller.models.dimensions import check_known, own_sizes, symbols_of
from hil.controller.models.flows import Flow, apply_recipe
from hil.controller.models.importers import import_model
from hil.controller.models.inputs import OpenDimensions, make_inputs
from hil.controller.models.size_hints import suggest_sizes
from hil.controller.models.sizes import sized_name, sweep
from hil.controller.pipeline.model_settings import for_model
from hil.controller.pipeline.options import COMPILE_TIMEOUT_S, CaseSettings, RunSettings, split_dims
from hil.controller.storage.paths import exists
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.bundles.case_files import read_case
from hil.controller.workloads.suites.spec import CaseData, CaseSpec, ModelFile, OwnCase, SuiteModel, short, worded
from hil.core.digest import digest_file, digest_of
from hil.core.results import Model
from hil.core.runtimes import RUNTIMES
from hil.core.scratch import temporary_folder
from hil.core.tensors import Array
from hil.core.text import numbered
from hil.errors import HilError, ImportFailed, NotRun, StorageError, UsageError

T = TypeVar("T")

# Formats whose models have layers as ONNX has them. Those that tf2onnx converts have not: its names of nodes differ
# from one process to another, and cases go by them.
_ALSO_CUT = ("pt2",)


@dataclass(frozen=True)
class LayerChoice:
    """What layers are, what goes into them, and which are one case: as a suite's request has them."""

    group: str = "node"
    inputs: str = "real"
    merge: str = "content"


def cases_of(
    models: Sequence[SuiteModel],
    flow: Flow,
    context: RunContext,
    *,
    layers: LayerChoice | None,
    settings: CaseSettings,
    dims: Mapping[str, int | str] | None = None,
) -> tuple[CaseSpec, ...]:
    """The cases of models, in their order: ``<model>_full_model``, ``<model>_<case>`` for each that came with it, then
    ``<model>_layer_<op>_<name>`` for each layer.

    Layers come from the model as the flow's recipe made it; of layers that are merged only the first is a case, and one
    that draws random numbers is none. A model that cannot be read is a case that says so when it is made. One that
    cannot be cut, though it can be read, has a case ``<model>_layers`` that says so.

    Args:
        models: their names differ.
        layers: None for no layers.
        settings: seed, and what the project file has for models: of that the seed, the range and the sizes of inputs.
        dims: sizes of symbolic dimensions, or ranges of them, for the models that have these dimensions; None where
            the models have their sizes already.

    Raises:
        UsageError: layers of a kind that there is not, or a dimension that no model has.
        StorageError: the cache cannot be written.
    """
    sized = models if dims is None else sized_models(models, dims, context, settings)
    wholes = [_Whole(model, flow, context, _settings_of(model, settings)) for model in sized]
    with concurrent.futures.ThreadPoolExecutor(context.isolated.workers, thread_name_prefix="collect") as pool:
        found = list(pool.map(lambda whole: _cases(whole, layers), wholes))
    every = [spec for specs in found for spec in specs]
    # Two models may bring cases whose names come to the same; each keeps its own record.
    return tuple(
        replace(spec, id=name) for spec, name in zip(every, numbered([short(spec.id) for spec in every]), strict=True)
    )


def sized_models(
    models: Sequence[SuiteModel],
    dims: Mapping[str, int | str],
    context: RunContext,
    settings: CaseSettings,
    option: str = "--dim",
) -> list[SuiteModel]:
    """Return the models with the sizes that are theirs; for a range of sizes a model for each of its edges.

    The project file's sizes for a model win over those for all.

    Of these the one of the largest sizes alone has layers, and none has tensors of the files beside the model.

    Raises:
        UsageError: no model has one of the dimensions.
    """
    given = [_settings_of(model, settings) for model in models]
    if not dims and not any(own.dims or own.dim_ranges for own in given):
        return list(models)
    with concurrent.futures.ThreadPoolExecutor(context.isolated.workers, thread_name_prefix="symbols") as pool:
        symbols = list(pool.map(lambda model: symbols_of(model.path, context), models))
    check_known(dims, {model.name: own for model, own in zip(models, symbols, strict=True)}, option)
    found: list[SuiteModel] = []
    for model, symbols_of_model, own in zip(models, symbols, given, strict=True):
        sizes, ranges = split_dims(own_sizes(dims, symbols_of_model))
        fixed = {name: size for name, size in {**model.dims, **sizes}.items() if name not in own.dim_ranges}
        model = replace(model, dims={**fixed, **own.dims})
        swept = {**{name: one for name, one in ranges.items() if name not in own.dims}, **own.dim_ranges}
        found += [with_sizes(model, one, is_cut=one == sweep(swept)[-1]) for one in sweep(swept)] if swept else [model]
    return found


def _settings_of(model: SuiteModel, settings: CaseSettings) -> RunSettings:
    """Return the settings with which a model's inputs are made."""
    return for_model(RunSettings(seed=settings.seed, per_model=settings.per_model), model.path)


def with_sizes(model: SuiteModel, sizes: Mapping[str, int], *, is_cut: bool) -> SuiteModel:
    """Return a model under a name of its own with these sizes, with random inputs.

    Args:
        is_cut: whether its layers are cases as well.
    """
    return replace(
        model,
        name=worded(sized_name(model.name, sizes)),
        dims={**model.dims, **sizes},
        given=dict,
        expected=dict,
        data_sets=(),
        is_cut=is_cut,
    )


def _cases(whole: _Whole, choice: LayerChoice | None) -> list[CaseSpec]:
    source, context = whole.source, whole.context
    own = _own_cases(source, whole.flow, context)
    if own and not source.is_case:
        return own
    name = source.name
    spec = functools.partial(CaseSpec, model=name, content=whole.content(), file=whole.file())
    specs = [spec(f"{name}_full_model", make=whole.make), *own]
    for place in source.data_sets:
        make_set = functools.partial(whole.make_data_set, place)
        specs.append(spec(f"{name}_{place.name}", make=make_set))
    if choice is None or not source.is_cut or not whole.can_be_cut():
        return specs
    with temporary_folder("hil-suite-") as folder:
        log = Path(folder) / "layers.log"
        try:
            model, inputs = whole.final(log), whole.inputs()
        except StorageError:
            raise
        except HilError:  # the whole model's case runs into it again, and tells
            return specs
        work: dict[str, Any] = {"cache": context.cache, "isolated": context.isolated, "log": log}
        try:
            layers = layers_of(model, group=choice.group, inputs=inputs, **work)
        except UsageError:
            raise
        except HilError as error:
            if model.format != "onnx":  # the whole model may run for all that
                error = NotRun(f"its layers are not told in ONNX: {error.message}", stage="import", detail=error.detail)
            return [*specs, spec(f"{name}_layers", make=_raising(error))]
    for layer in unmerged(layers, choice.merge):
        if not layer.by_chance:
            make = functools.partial(whole.make_layer, layer, choice.inputs)
            specs.append(spec(f"{name}_layer_{layer.name}", make=make, layer=layer.name, op=layer.op))
    return specs


def _own_cases(source: SuiteModel, flow: Flow, context: RunContext) -> list[CaseSpec]:
    """A case for each that the model's file brings with it; of a file that cannot be read one that says so."""
    try:
        found = source.own_cases(context) if source.own_cases else ()
    except StorageError:
        raise
    except HilError as error:
        return [CaseSpec(f"{source.name}_full_model", source.name, _raising(error))]
    return [
        CaseSpec(
            f"{source.name}_{worded(own.name)}",
            source.name,
            functools.partial(_make_own, own, source.path, flow),
            content=own.content and digest_of(repr((own.content, flow)).encode()),
        )
        for own in found
    ]


def _make_own(own: OwnCase, path: Path, flow: Flow, folder: Path) -> CaseData:
    program = own.make(folder)
    runtime = program.artifact.runtime
    if flow.recipe:
        raise ImportFailed(
            f"the recipe {flow.recipe} takes models: {path.name} holds a program that is compiled already"
        )
    if runtime != flow.runtime:
        raise ImportFailed(
            f"{path.name} holds a program for {runtime}, and the flow {flow.name} runs {flow.runtime}",
            hint=f"choose a flow that runs {runtime}",
        )
    return CaseData(path, rtol=program.given.rtol, atol=program.given.atol, program=program)


def _raising(error: HilError) -> Callable[[Path], CaseData]:
    def make(folder: Path) -> CaseData:
        raise error

    return make


class _Whole:
    """A model read, given inputs, put through the flow's recipe, run by the reference: each once, when asked for."""

    def __init__(self, source: SuiteModel, flow: Flow, context: RunContext, settings: RunSettings) -> None:
        self.source = source
        self.flow = flow
        self.context = context
        self._settings = settings
        self._lock = threading.RLock()
        self._known: dict[str, Any] = {}

    def make(self, folder: Path) -> CaseData:
        """The data of the whole model's case."""
        return self._data(self.inputs(), _read(self.source.expected), folder)

    def make_data_set(self, place: Path, folder: Path) -> CaseData:
        """The data of a case that is a folder of inputs and expected outputs."""
        given = self._data_set(place)
        defaults = {spec.name for spec in default_specs(self._plain())}
        inputs = {name: array for name, array in given.inputs.items() if name not in defaults}
        others = {name: array for name, array in given.inputs.items() if name in defaults}
        whole = self
        if others:
            path = override_defaults(self._plain(), others, self.context).path
            whole = _Whole(replace(self.source, path=path, given=dict), self.flow, self.context, self._settings)
        return whole._data(inputs, given.expected_outputs, folder)

    def _data(self, inputs: Mapping[str, Array], expected: Mapping[str, Array], folder: Path) -> CaseData:
        plain = self._plain()
        path = self._after_recipe(folder / "prepare.log", self._sizes(inputs))
        if path == plain.path:
            return CaseData(path, inputs, expected, rtol=self.source.rtol, atol=self.source.atol, dims=plain.dims)
        return CaseData(path, inputs, plain_path=plain.path, plain_expected=expected, dims=plain.dims)

    def _data_set(self, place: Path) -> BundledCase:
        model = self._plain()
        inputs, defaults, outputs = model.inputs or (), default_specs(model), tuple(model.outputs or ())
        case = read_case(place, Signature((*inputs, *defaults), outputs))
        # Those with a default value are given by name, or after the others.
        more = defaults[: max(len(case.inputs) - len(inputs), 0)]
        if isinstance(case.inputs, Mapping):
            more = tuple(spec for spec in defaults if spec.name in case.inputs)
        (given,) = checked_cases(model.function, Signature((*inputs, *more), outputs), [case])
        return given

    def make_layer(self, layer: Layer, mode: str, folder: Path) -> CaseData:
        """The data of a layer's case: its inputs come from what the reference computed for the whole model."""
        log = folder / "prepare.log"
        work: dict[str, Any] = {"cache": self.context.cache, "isolated": self.context.isolated, "log": log}
        limits: dict[str, Any] = {"recompute": False, "timeout": COMPILE_TIMEOUT_S}
        computed: Activations = self._once(
            "activations", lambda: activations(self.final(log), self.inputs(), **limits, **work)
        )
        if changed := changed_layers([layer], computed, **limits, **work):
            raise ImportFailed(changed[layer.name], stage="import")
        return CaseData(layer.path, layer_inputs(layer, computed, mode=mode, seed=self._settings.seed))

    def final(self, log: Path) -> Model:
        """The model as the recipe made it, every dimension that the inputs settle fixed: what layers are cut from."""

        def read() -> Model:
            sizes = self._sizes(self.inputs())
            return _import(self._after_recipe(log, sizes), sizes, self.context)

        return self._once("final", read)

    def can_be_cut(self) -> bool:
        """Whether it has layers. They are ONNX models, which the flow must take where the whole model is another."""
        try:
            format = self._plain().format
        except StorageError:
            raise
        except HilError:  # its case runs into it again, and tells
            return False
        takes_onnx = self.flow.runtime in RUNTIMES and RUNTIMES[self.flow.runtime].from_onnx
        return format == "onnx" or (format in _ALSO_CUT and takes_onnx and not self.flow.recipe)

    def content(self) -> str:
        """A digest of the model, the files beside it and the flow; "" of a model that cannot be read."""
        model = self.file()
        if model is None:
            return ""
        beside = [_digest(file) for file in self.source.beside]
        return digest_of(repr((model.digest, beside, self.flow)).encode())

    def file(self) -> ModelFile | None:
        """The model's file; None of one that cannot be read."""
        try:
            return ModelFile(str(self.source.path), self._plain().digest)
        except StorageError:
            raise
        except HilError:  # its case runs into it again, and tells
            return None

    def _plain(self) -> Model:
        def read() -> Model:
            model = _import(self.source.path, self.source.dims, self.context)
            return with_given_defaults(model, _read(self.source.given), self.context)[0]

        return self._once("plain", read)

    def inputs(self) -> dict[str, Array]:
        """Every input by name: those given, and seeded random ones."""

        def read() -> dict[str, Array]:
            model, given = self._plain(), self._given()
            if model.inputs is None:  # only the board knows them: what is missing is made when it has said
                return dict(given)
            try:
                return make_inputs(
                    model.inputs,
                    given,
                    seed=self._settings.seed,
                    ranges=model.ranges,
                    user_range=self._settings.input_range,
                    dims=model.dims,
                )
            except UsageError as error:
                if isinstance(error, OpenDimensions):
                    error.suggest(suggest_sizes(model, self.context))
                hint = error.hint or f"give all inputs in {self.source.path.stem}.inputs.npz beside the model"
                raise ImportFailed(error.message, hint=hint) from error

        return self._once("inputs", read)

    def _given(self) -> Mapping[str, Array]:
        """The inputs that lie beside the model."""
        defaults = {spec.name for spec in default_specs(self._plain())}
        if given := _read(self.source.given):
            return {name: array for name, array in given.items() if name not in defaults}
        for place in self.source.data_sets:
            # One that is not valid fails in its own case: the whole model and its layers have another's inputs.
            with contextlib.suppress(UsageError):
                return {name: array for name, array in self._data_set(place).inputs.items() if name not in defaults}
        return {}

    def _sizes(self, inputs: Mapping[str, Array]) -> dict[str, int]:
        """Every dimension that is known: those given, and those that the inputs settle."""
        plain = self._plain()
        sizes = dict(plain.dims)
        for spec in plain.inputs or ():
            pairs = zip(spec.shape, inputs[spec.name].shape, strict=True)
            sizes |= {dim: size for dim, size in pairs if isinstance(dim, str)}
        return sizes

    def _after_recipe(self, log: Path, sizes: Mapping[str, int]) -> Path:
        def apply() -> Path:
            return apply_recipe(self.flow, self._plain().path, self._samples(), self.context, log, dims=sizes)

        return self._once(f"recipe {sorted(sizes.items())}", apply)

    def _samples(self) -> Sequence[Mapping[str, Array]]:
        """What a recipe is told to calibrate with; nothing where it is to look for itself."""
        if found := self.source.calibration():
            return found
        if exists(self.source.path.with_name(f"{self.source.path.stem}.calibration.npz")):
            return []
        given = self._given()
        return [given] if given else []

    def _once(self, what: str, make: Callable[[], T]) -> T:
        """What was made before; an error comes again as well."""
        with self._lock:
            if what not in self._known:
                try:
                    self._known[what] = make()
                except StorageError:
                    raise
                except HilError as error:
                    self._known[what] = error
                    raise
            known = self._known[what]
        if isinstance(known, HilError):
            raise copy.copy(known)  # whoever catches it writes into it
        return cast(T, known)


def _import(path: Path, dims: Mapping[str, int], context: RunContext) -> Model:
    try:
        return import_model(path, dims=dims, isolated=context.isolated, cache=context.cache)
    except StorageError:
        raise
    except UsageError as error:
        raise ImportFailed(error.message, hint=error.hint) from error


def _digest(file: Path) -> str:
    """Of a file; "" where it is not there, or cannot be read: then its case says so."""
    try:
        return digest_file(file)
    except (OSError, UsageError):
        return ""


def _read(beside: Callable[[], Mapping[str, Array]]) -> Mapping[str, Array]:
    try:
        return beside()
    except UsageError as error:
        raise ImportFailed(error.message, hint=error.hint) from error
