"""Cases of a model: the whole model and the layers."""

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
from hil.bundles.checks import check_cases
from hil.controller.analysis.layers import (
    Activations,
    Layer,
    compute_activations,
    drop_merged,
    extract_layers,
    find_changed_layers,
    select_layer_inputs,
)
from hil.controller.models.default_inputs import add_given_defaults, list_default_specs, override_defaults
from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.flow_registry import check_flow
from hil.controller.models.flows.recipe import apply_recipe
from hil.controller.models.generation.decode import choose_importer
from hil.controller.models.generation.spec import read_spec
from hil.controller.models.importers import import_model
from hil.controller.models.inputs import CALIBRATION, OpenDimensions, make_inputs
from hil.controller.models.sizing.dimensions import check_known, find_symbols, own_sizes
from hil.controller.models.sizing.size_hints import suggest_sizes
from hil.controller.models.sizing.sizes import format_sized_name, sweep
from hil.controller.pipeline.settings.model_settings import apply_model_settings, find_model_runtime
from hil.controller.pipeline.settings.options import COMPILE_TIMEOUT_SECONDS, CaseSettings, RunSettings, split_dims
from hil.controller.records.suite import SuiteModelFile
from hil.controller.storage.paths import make_sibling_path, path_exists
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.bundles.case_files import read_case
from hil.controller.workloads.suites.cases.spec import (
    CaseData,
    CaseSpec,
    OwnCase,
    SuiteModel,
    replace_forbidden,
    shorten_name,
)
from hil.core.digest import digest_of
from hil.core.files import digest_file
from hil.core.results import Model
from hil.core.runtimes import can_load_onnx, choose_runtime
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import Array
from hil.core.text import make_names_unique
from hil.errors import HilError, ImportFailed, NotRun, StorageError, UsageError

T = TypeVar("T")

# Formats other than ONNX from which hil cuts layers. Formats that tf2onnx converts are missing: their node names, and
# so the case names, differ between processes.
_ALSO_CUT = ("pt2",)


@dataclass(frozen=True)
class LayerChoice:
    """Layer settings of a suite request: how layers are formed, their inputs, and which layers are merged."""

    group: str = "node"
    inputs: str = "real"
    merge: str = "content"


def make_cases(
    models: Sequence[SuiteModel],
    flow: Flow,
    context: RunContext,
    *,
    layers: LayerChoice | None,
    settings: CaseSettings,
    dims: Mapping[str, int | str] | None = None,
    is_default_flow: bool = False,
) -> tuple[CaseSpec, ...]:
    """Return the cases of models, in order.

    The cases of a model are ``<model>_full_model``, ``<model>_<case>`` for its data sets and bundled cases, then
    ``<model>_layer_<op>_<name>`` for its layers. A model with a specification of ``--generate`` has a case
    ``<model>_<prompt>`` per prompt instead. Layers are cut from the model after the flow's recipe. Of a group of merged
    layers, only the first is a case. Layers that draw random numbers are skipped. If a model cannot be read, the
    model's case raises the error. If a model can be read but not cut, the case ``<model>_layers`` raises the error.

    Args:
        models: models with different names.
        layers: None for no layers.
        settings: the seed, and the project file's settings for models (seed, input range and sizes).
        dims: sizes or ranges of symbolic dimensions, for the models that have these dimensions; None if the models
            already have their sizes.
        is_default_flow: see :func:`choose_model_flow`.

    Raises:
        UsageError: unknown layer settings, or a dimension that no model has.
        StorageError: the cache cannot be written.
    """
    sized = models if dims is None else size_models(models, dims, context, settings)
    flows = [choose_model_flow(flow, model.path, settings, is_default_flow=is_default_flow) for model in sized]
    wholes = [
        _PreparedModel(model, own, context, _resolve_settings(model, settings))
        for model, own in zip(sized, flows, strict=True)
    ]
    with concurrent.futures.ThreadPoolExecutor(context.isolated.workers, thread_name_prefix="collect") as pool:
        found = list(pool.map(lambda whole: _collect_cases(whole, layers), wholes))
    every = [replace(spec, flow=own) for own, specs in zip(flows, found, strict=True) for spec in specs]
    # Cases of two models may have the same name. Number such cases, so that their records differ.
    return tuple(
        replace(spec, id=name)
        for spec, name in zip(every, make_names_unique([shorten_name(spec.id) for spec in every]), strict=True)
    )


def choose_model_flow(flow: Flow, path: Path, settings: CaseSettings, *, is_default_flow: bool) -> Flow:
    """Return the flow of a model.

    The project file's runtime for the model replaces the flow's runtime. If the user selected no flow, so does the
    only runtime of a format, such as TFLite.

    Args:
        settings: the project file's settings for models. They have no runtime if the command line selects a flow or a
            runtime.
        is_default_flow: whether the user selected no flow.

    Raises:
        UsageError: the project file's runtime does not exist.
    """
    wanted = find_model_runtime(settings, path)
    own = flow.with_runtime(choose_runtime(path.suffix[1:].lower(), wanted) if is_default_flow else wanted)
    if wanted:
        check_flow(own, f"runtime of {path.name} in the project file")
    return own


def size_models(
    models: Sequence[SuiteModel],
    dims: Mapping[str, int | str],
    context: RunContext,
    settings: CaseSettings,
    option: str = "--dim",
) -> list[SuiteModel]:
    """Return the models with the sizes of their dimensions.

    A range gives a model for every size that :func:`.sweep` selects.

    The project file's sizes for a model override the file's sizes for all models. Of the models for a range, only the
    largest has layers. Models for a range do not use tensors from the model's files.

    Raises:
        UsageError: a dimension that no model has.
    """
    given = [_resolve_settings(model, settings) for model in models]
    if not dims and not any(own.dims or own.dim_ranges for own in given):
        return list(models)
    with concurrent.futures.ThreadPoolExecutor(context.isolated.workers, thread_name_prefix="symbols") as pool:
        symbols = list(pool.map(lambda model: find_symbols(model.path, context), models))
    check_known(dims, {model.name: own for model, own in zip(models, symbols, strict=True)}, option)
    found: list[SuiteModel] = []
    for model, symbols_of_model, own in zip(models, symbols, given, strict=True):
        sizes, ranges = split_dims(own_sizes(dims, symbols_of_model))
        fixed = {name: size for name, size in {**model.dims, **sizes}.items() if name not in own.dim_ranges}
        model = replace(model, dims={**fixed, **own.dims})
        swept = {**{name: one for name, one in ranges.items() if name not in own.dims}, **own.dim_ranges}
        found += [set_sizes(model, one, is_cut=one == sweep(swept)[-1]) for one in sweep(swept)] if swept else [model]
    return found


def _resolve_settings(model: SuiteModel, settings: CaseSettings) -> RunSettings:
    """Return the settings for a model's inputs."""
    shared = {name: getattr(settings, name) for name in ("seed", "input_range", "per_model")}
    return apply_model_settings(RunSettings(**shared), model.path)


def set_sizes(model: SuiteModel, sizes: Mapping[str, int], *, is_cut: bool) -> SuiteModel:
    """Return a renamed copy of a model with these sizes and random inputs.

    Args:
        is_cut: whether the layers are cases too.
    """
    return replace(
        model,
        name=replace_forbidden(format_sized_name(model.name, sizes)),
        dims={**model.dims, **sizes},
        given=dict,
        expected=dict,
        data_sets=(),
        is_cut=is_cut,
    )


def _collect_cases(whole: _PreparedModel, choice: LayerChoice | None) -> list[CaseSpec]:
    source, context = whole.source, whole.context
    own = _read_bundled_cases(source, whole.flow, context)
    if own and not source.is_case:
        return own
    if source.generate is not None:
        return [*own, *_list_prompts(whole, source.generate)]
    name = source.name
    spec = functools.partial(CaseSpec, model=name, content=whole.digest_content(), file=whole.file())
    specs = [spec(f"{name}_full_model", make=whole.make), *own]
    for place in source.data_sets:
        make_set = functools.partial(whole.make_data_set, place)
        specs.append(spec(f"{name}_{place.name}", make=make_set))
    if choice is None or not source.is_cut or not whole.can_be_cut():
        return specs
    with make_temporary_folder("hil-suite-") as folder:
        log = Path(folder) / "layers.log"
        try:
            model, inputs = whole.make_final(log), whole.inputs()
        except StorageError:
            raise
        except HilError:  # the case of the whole model reports the error
            return specs
        work: dict[str, Any] = {"cache": context.cache, "isolated": context.isolated, "log": log}
        try:
            layers = extract_layers(model, group=choice.group, inputs=inputs, **work)
        except UsageError:
            raise
        except HilError as error:
            if model.format != "onnx":  # the whole model may still run
                error = NotRun(f"cannot extract layers as ONNX: {error.message}", stage="import", detail=error.detail)
            return [*specs, spec(f"{name}_layers", make=_make_raiser(error))]
    for layer in drop_merged(layers, choice.merge):
        if not layer.by_chance:
            make = functools.partial(whole.make_layer, layer, choice.inputs)
            specs.append(spec(f"{name}_layer_{layer.name}", make=make, layer=layer.name, op=layer.op))
    return specs


def _list_prompts(whole: _PreparedModel, generate: Path) -> list[CaseSpec]:
    """Return a case per prompt. For an unreadable specification, return a case that raises the error."""
    name = whole.source.name
    try:
        prompts = read_spec(generate).cases
    except UsageError as error:
        return [CaseSpec(f"{name}_full_model", name, _make_raiser(error.as_kind(ImportFailed)))]
    spec = functools.partial(CaseSpec, model=name, content=whole.digest_content(), file=whole.file())
    return [
        spec(f"{name}_{replace_forbidden(one.name)}", make=functools.partial(whole.make_prompt, generate, one.name))
        for one in prompts
    ]


def _read_bundled_cases(source: SuiteModel, flow: Flow, context: RunContext) -> list[CaseSpec]:
    """Return the cases bundled in the model's file. For an unreadable file, return a case that raises the error."""
    try:
        found = source.own_cases(context) if source.own_cases else ()
    except StorageError:
        raise
    except HilError as error:
        return [CaseSpec(f"{source.name}_full_model", source.name, _make_raiser(error))]
    return [
        CaseSpec(
            f"{source.name}_{replace_forbidden(own.name)}",
            source.name,
            functools.partial(_make_bundled_case, own, source.path, flow),
            content=own.content and digest_of(repr((own.content, flow)).encode()),
        )
        for own in found
    ]


def _make_bundled_case(own: OwnCase, path: Path, flow: Flow, folder: Path) -> CaseData:
    program = own.make(folder)
    runtime = program.artifact.runtime
    if flow.recipe:
        raise ImportFailed(f"the recipe {flow.recipe} requires a model, got the compiled program {path.name}")
    if runtime != flow.runtime:
        raise ImportFailed(
            f"{path.name} contains a program for {runtime}, but the flow {flow.name} runs {flow.runtime}",
            hint=f"choose a flow that runs {runtime}",
        )
    return CaseData(path, rtol=program.given.rtol, atol=program.given.atol, program=program)


def _make_raiser(error: HilError) -> Callable[[Path], CaseData]:
    def make(folder: Path) -> CaseData:
        raise error

    return make


class _PreparedModel:
    """A model with its inputs, its form after the recipe, and reference results.

    Each part is computed once, on demand.
    """

    def __init__(self, source: SuiteModel, flow: Flow, context: RunContext, settings: RunSettings) -> None:
        self.source = source
        self.flow = flow
        self.context = context
        self._settings = settings
        self._lock = threading.RLock()
        self._known: dict[str, Any] = {}

    def make(self, folder: Path) -> CaseData:
        """Return the data of the whole model's case."""
        return self._create_case_data(self.inputs(), _read_tensors(self.source.expected), folder)

    def make_prompt(self, generate: Path, prompt: str, folder: Path) -> CaseData:
        """Return the data of a prompt's case. The files of the model may contain constant inputs."""
        path, dims = self._apply_recipe(folder / "prepare.log", {}), self._load_plain_model().dims
        return CaseData(path, self._read_given_inputs(), dims=dims, generate=generate, prompt=prompt)

    def make_data_set(self, place: Path, folder: Path) -> CaseData:
        """Return a case's data from a directory with inputs and expected outputs."""
        given = self._read_data_set(place)
        defaults = {spec.name for spec in list_default_specs(self._load_plain_model())}
        inputs = {name: array for name, array in given.inputs.items() if name not in defaults}
        others = {name: array for name, array in given.inputs.items() if name in defaults}
        whole = self
        if others:
            path = override_defaults(self._load_plain_model(), others, self.context).path
            whole = _PreparedModel(replace(self.source, path=path, given=dict), self.flow, self.context, self._settings)
        return whole._create_case_data(inputs, given.expected_outputs, folder)

    def _create_case_data(self, inputs: Mapping[str, Array], expected: Mapping[str, Array], folder: Path) -> CaseData:
        plain = self._load_plain_model()
        path = self._apply_recipe(folder / "prepare.log", self._resolve_sizes(inputs))
        if path == plain.path:
            return CaseData(path, inputs, expected, rtol=self.source.rtol, atol=self.source.atol, dims=plain.dims)
        return CaseData(path, inputs, plain_path=plain.path, plain_expected=expected, dims=plain.dims)

    def _read_data_set(self, place: Path) -> BundledCase:
        model = self._load_plain_model()
        inputs, defaults, outputs = model.inputs or (), list_default_specs(model), tuple(model.outputs or ())
        case = read_case(place, Signature((*inputs, *defaults), outputs))
        # Inputs with default values are matched by name, or by position after the other inputs.
        more = defaults[: max(len(case.inputs) - len(inputs), 0)]
        if isinstance(case.inputs, Mapping):
            more = tuple(spec for spec in defaults if spec.name in case.inputs)
        (given,) = check_cases(model.function, Signature((*inputs, *more), outputs), [case])
        return given

    def make_layer(self, layer: Layer, mode: str, folder: Path) -> CaseData:
        """Return the data of a layer's case.

        The inputs are activations that the reference computed for the whole model.
        """
        log = folder / "prepare.log"
        work: dict[str, Any] = {"cache": self.context.cache, "isolated": self.context.isolated, "log": log}
        limits: dict[str, Any] = {"recompute": False, "timeout": COMPILE_TIMEOUT_SECONDS}
        computed: Activations = self._compute_once(
            "activations", lambda: compute_activations(self.make_final(log), self.inputs(), **limits, **work)
        )
        if changed := find_changed_layers([layer], computed, **limits, **work):
            raise ImportFailed(changed[layer.name], stage="import")
        return CaseData(layer.path, select_layer_inputs(layer, computed, mode=mode, seed=self._settings.seed))

    def make_final(self, log: Path) -> Model:
        """Return the model after the recipe. All dimensions that the inputs determine are fixed.

        Layers are cut from the returned model.
        """

        def read() -> Model:
            sizes = self._resolve_sizes(self.inputs())
            return _import_model(self._apply_recipe(log, sizes), sizes, self.context)

        return self._compute_once("final", read)

    def can_be_cut(self) -> bool:
        """Return whether the model has layers.

        Layers are ONNX models, so for other formats the flow must accept ONNX.
        """
        try:
            format = self._load_plain_model().format
        except StorageError:
            raise
        except HilError:  # the model's case reports it
            return False
        takes_onnx = format in _ALSO_CUT and can_load_onnx(self.flow.runtime)
        return format == "onnx" or (takes_onnx and not self.flow.recipe)

    def digest_content(self) -> str:
        """Return a digest of the model, accompanying files and the flow; "" for an unreadable model."""
        model = self.file()
        if model is None:
            return ""
        beside = [_try_digest(file) for file in self.source.beside]
        return digest_of(repr((model.digest, beside, self.flow)).encode())

    def file(self) -> SuiteModelFile | None:
        """Return the model's file, or None for an unreadable model."""
        try:
            return SuiteModelFile(path=str(self.source.path), digest=self._load_plain_model().digest)
        except StorageError:
            raise
        except HilError:  # the model's case reports it
            return None

    def _load_plain_model(self) -> Model:
        def read() -> Model:
            read = choose_importer(self.source.generate)
            model = _import_model(self.source.path, self.source.dims, self.context, read)
            return add_given_defaults(model, _read_tensors(self.source.given), self.context)[0]

        return self._compute_once("plain", read)

    def inputs(self) -> dict[str, Array]:
        """Return all inputs by name: given inputs, and seeded random values for the other inputs."""

        def read() -> dict[str, Array]:
            model, given = self._load_plain_model(), self._read_given_inputs()
            if model.inputs is None:  # only the board knows the inputs; others are made later
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
                    error.suggest(suggest_sizes(model, self.context), self.source.path)
                failed = error.as_kind(ImportFailed)
                failed.hint = error.hint or f"put all inputs in {self.source.path.stem}.inputs.npz next to the model"
                raise failed from error

        return self._compute_once("inputs", read)

    def _read_given_inputs(self) -> Mapping[str, Array]:
        """Return the inputs from the files of the model."""
        defaults = {spec.name for spec in list_default_specs(self._load_plain_model())}
        if given := _read_tensors(self.source.given):
            return {name: array for name, array in given.items() if name not in defaults}
        for place in self.source.data_sets:
            # Skip an invalid data set: its own case reports the error. The whole model and the layers use the next data
            # set.
            with contextlib.suppress(UsageError):
                return {
                    name: array for name, array in self._read_data_set(place).inputs.items() if name not in defaults
                }
        return {}

    def _resolve_sizes(self, inputs: Mapping[str, Array]) -> dict[str, int]:
        """Return the sizes of all known dimensions: given sizes, and sizes that the inputs determine."""
        plain = self._load_plain_model()
        sizes = dict(plain.dims)
        for spec in plain.inputs or ():
            pairs = zip(spec.shape, inputs[spec.name].shape, strict=True)
            sizes |= {dim: size for dim, size in pairs if isinstance(dim, str)}
        return sizes

    def _apply_recipe(self, log: Path, sizes: Mapping[str, int]) -> Path:
        def apply() -> Path:
            return apply_recipe(
                self.flow, self._load_plain_model().path, self._find_samples(), self.context, log, dims=sizes
            )

        return self._compute_once(f"recipe {sorted(sizes.items())}", apply)

    def _find_samples(self) -> Sequence[Mapping[str, Array]]:
        """Return calibration samples for a recipe, or an empty list if the recipe must find samples itself."""
        if found := self.source.calibration():
            return found
        if path_exists(make_sibling_path(self.source.path, CALIBRATION)):
            return []
        given = self._read_given_inputs()
        return [given] if given else []

    def _compute_once(self, what: str, make: Callable[[], T]) -> T:
        """Return a cached value, or compute it. Errors are also cached and raised again."""
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
            raise copy.copy(known)  # handlers modify the error
        return cast(T, known)


def _import_model(
    path: Path, dims: Mapping[str, int], context: RunContext, read: Callable[..., Model] = import_model
) -> Model:
    try:
        return read(path, dims=dims, isolated=context.isolated, cache=context.cache)
    except StorageError:
        raise
    except UsageError as error:
        raise error.as_kind(ImportFailed) from error


def _try_digest(file: Path) -> str:
    """Return a file's digest, or "" if the file is missing or unreadable. The case then reports the error."""
    try:
        return digest_file(file)
    except (OSError, UsageError):
        return ""


def _read_tensors(beside: Callable[[], Mapping[str, Array]]) -> Mapping[str, Array]:
    try:
        return beside()
    except UsageError as error:
        raise error.as_kind(ImportFailed) from error
