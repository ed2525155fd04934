"""What a flow is, and recipes: what it does with a model before that is compiled, such as quantising it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hil.controller.models.executorch_backends import recipe_inputs
from hil.controller.models.flows import onnx_recipes, pt2_recipes
from hil.controller.models.importers import import_model
from hil.controller.models.inputs import calibration_samples, digest_of_samples
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import IsolatedFunction, function_name, function_version, naming_errors
from hil.controller.storage.packages import needed_version, pick, registered
from hil.controller.storage.tensor_files import save_tensors
from hil.core.guarded import called, guard, shown
from hil.core.results import Model
from hil.core.scratch import temporary_folder
from hil.core.tensors import Array, TensorSpec
from hil.errors import ImportFailed, NotRun, StageTimeout, UsageError, did_you_mean

if TYPE_CHECKING:
    from hil.controller.storage.run_context import RunContext


_GROUP = "hil.recipes"
RECIPE_TIMEOUT_S = 1800.0
# The setting that says how many seeded random samples a model without any calibration data gets.
_SAMPLES = "samples"
# What a recipe tells of its work, beside the model that it made.
_NOTES = "hil-recipe.json"


@dataclass(frozen=True)
class Flow:
    """How a suite's models are made into programs and judged.

    Attributes:
        name, runtime: what ``--flow`` and ``--runtime`` say.
        compiler: makes the program; "" is the runtime's own.
        recipe: what is done with a model first, a name of the entry points ``hil.recipes``; "" is nothing.
        settings: of the recipe, where they are not its defaults.
        references: names of those that are asked where the user names none; empty is the default for the model's
            format.
        accept: criteria that judge outputs instead of a tolerance, where the user names none.
        rtol, atol: tolerance beside the flow's own reference (that of the model as the recipe made it); None is the
            case's own or the dtype's default.
        quanta: how many steps of its quantisation an output may be off beside that reference (docs/suites.md, Flows);
            None where ``atol`` or the case's own is meant.
        min_sqnr_db: what the answer must reach beside the model as it was before the recipe; None asks for nothing.
        arithmetic: what the runtime computes in; "" is as the board's config declares it.
    """

    name: str
    runtime: str
    compiler: str = ""
    compile_flags: tuple[str, ...] = ()
    recipe: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    references: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    rtol: float | None = None
    atol: float | None = None
    quanta: float | None = None
    min_sqnr_db: float | None = None
    arithmetic: str = ""
    description: str = ""


@dataclass(frozen=True)
class Recipe:
    """One way to change a model.

    ``apply(model, output, external, samples, **settings)`` is called in a process of its own. ``model`` is the file to
    read, ``output`` the file to write; inputs and outputs keep names, dtypes and shapes. ``external`` says whether the
    model keeps data outside its file, beside it: then so must the result. ``samples`` is a list of folders, each one
    sample of every input (:func:`hil.plugins.load_tensors` reads it); empty where the recipe is not calibrated. Every
    setting follows by its name, but for ``samples``, which says how many there are where the user gives none. It
    returns None, or notes on its work as a JSON object, which results of ExecuTorch's programs hold (``quantise_s``,
    the seconds that it took, has a column in reports). It raises ImportFailed where the model cannot be changed;
    anything else that it raises becomes one.

    Attributes:
        apply: the function, of a module, or its ``module:function``.
        settings: name -> default. What a flow gives must be of the default's type.
        calibrated: whether it looks at samples.
        packages: distributions on whose versions the result depends.
        formats: of the models that it takes.
        version: raise it when the result changes without those, and without the file that ``apply`` is in.
        depends: called with the settings; returns what else the result depends on, anything that JSON can say. Raises
            UsageError for settings that cannot be meant.
    """

    apply: IsolatedFunction
    settings: Mapping[str, Any] = field(default_factory=dict)
    calibrated: bool = False
    packages: tuple[str, ...] = ("onnx", "onnxruntime")
    formats: tuple[str, ...] = ("onnx",)
    version: int = 1
    depends: Callable[[Mapping[str, Any]], Any] | None = None

    @property
    def all_settings(self) -> dict[str, Any]:
        """Its own settings, and how many random samples a calibrated one takes."""
        return {**self.settings, **({_SAMPLES: 16} if self.calibrated else {})}


def _pt2e(apply: IsolatedFunction) -> Recipe:
    packages = ("torch", "torchao", "executorch")
    settings = {"per_channel": True, "backend": "xnnpack", "options": {}}
    return Recipe(apply, settings, calibrated=True, packages=packages, formats=("pt2",), depends=recipe_inputs)


_BUILT_IN = MappingProxyType(
    {
        "float16": Recipe(onnx_recipes.to_float16),
        "static-int8": Recipe(
            onnx_recipes.quantize_static,
            {"per_channel": False, "reduce_range": False, "activations": "int8", "method": "minmax"},
            calibrated=True,
        ),
        # uint8: older releases of ONNX Runtime have no ConvInteger for int8 weights.
        "dynamic-int8": Recipe(
            onnx_recipes.quantize_dynamic, {"per_channel": False, "reduce_range": False, "weights": "uint8"}
        ),
        # PyTorch's own way, for what a backend of ExecuTorch computes in int8.
        "pt2e-static-int8": _pt2e(pt2_recipes.quantize_static),
        "pt2e-dynamic-int8": _pt2e(pt2_recipes.quantize_dynamic),
    }
)


def recipes() -> dict[str, Recipe]:
    """Every recipe by name: hil's own and those of the entry point group ``hil.recipes``."""
    return registered(_GROUP, _BUILT_IN, Recipe, lambda one: function_name(one.apply))


def check_settings(flow: Flow) -> dict[str, Any]:
    """All settings of a flow's recipe, the defaults among them; empty for a flow without one.

    Raises:
        UsageError: there is no such recipe or setting, or a value is of the wrong type.
    """
    if not flow.recipe:
        if flow.settings:
            raise UsageError("settings without a recipe", hint='they are the recipe\'s: recipe = "static-int8"')
        return {}
    defaults = pick("recipe", recipes(), flow.recipe).all_settings
    for name, value in flow.settings.items():
        if name not in defaults:
            taken = ", ".join(f"{key} = {default!r}" for key, default in defaults.items()) or "none"
            raise UsageError(
                f"the recipe {flow.recipe} has no setting {name!r}",
                hint=f"{did_you_mean(name, defaults)}it takes {taken}",
            )
        if type(value) is not type(defaults[name]):
            raise UsageError(
                f"the setting {name} must be {type(defaults[name]).__name__}, not {value!r:.80}",
                hint=f"such as {name} = {defaults[name]!r}",
            )
    if flow.settings.get(_SAMPLES, 1) < 1:
        raise UsageError(f"the setting samples is {flow.settings[_SAMPLES]}: at least 1 is needed")
    return {**defaults, **flow.settings}


def apply_recipe(
    flow: Flow,
    path: Path,
    inputs: Sequence[Mapping[str, Array]],
    context: RunContext,
    log: Path,
    *,
    dims: Mapping[str, int] | None = None,
) -> Path:
    """A model as the flow's recipe makes it, made or from the cache.

    Args:
        inputs: calibration data, input name -> tensor for each sample; what a sample lacks is seeded random. Empty
            takes ``<model>.calibration.npz`` beside the model, whose arrays have one axis more, the samples', in
            front; where there is no such file, the setting ``samples`` many seeded random ones.
        dims: values of symbolic dimensions, for random samples. The model keeps its symbols.

    Returns:
        The new model's file, of the same name as ``path``; ``path`` itself where the flow has no recipe.

    Raises:
        UsageError: calibration data that the model does not take, or a recipe or setting that is none.
        ImportFailed: the recipe cannot be applied to this model; ``detail`` is the tool's own words.
        StageTimeout: it took longer than half an hour.
    """
    if not flow.recipe:
        return path
    settings = check_settings(flow)
    recipe = pick("recipe", recipes(), flow.recipe)
    model = import_model(path, dims=dims, isolated=context.isolated, cache=context.cache)
    if model.format not in recipe.formats:
        taken = " and ".join(recipe.formats)
        raise ImportFailed(
            f"the recipe {flow.recipe} takes models of the format {taken}: {path.name} is {model.format}",
            stage="import",
        )
    count = settings.pop(_SAMPLES, 0)
    samples = calibration_samples(model, inputs, count) if recipe.calibrated else []
    failure = partial(ImportFailed, stage="import")
    with guard("recipe", _GROUP, flow.recipe, failure, ImportFailed, StageTimeout, NotRun, UsageError):
        return _apply(flow.recipe, recipe, settings, path, model, samples, context, log)


def _apply(
    name: str,
    recipe: Recipe,
    settings: Mapping[str, Any],
    path: Path,
    model: Model,
    samples: Sequence[Mapping[str, Array]],
    context: RunContext,
    log: Path,
) -> Path:
    key = Cache.key(
        "recipe",
        name=path.name,
        model=model.digest,
        samples=digest_of_samples(samples),
        recipe=name,
        settings=settings,
        apply=function_version(recipe.apply),
        versions={package: needed_version(package) for package in recipe.packages},
        version=recipe.version,
        **({"depends": recipe.depends(settings)} if recipe.depends else {}),
    )

    def make(folder: Path) -> None:
        with temporary_folder("hil-samples-") as given:
            folders = [Path(given) / str(number) for number in range(len(samples))]
            for one, sample in zip(folders, samples, strict=True):
                save_tensors(one, sample)
            arguments = {
                "model": str(_without_links(model, Path(given) / "model").absolute()),
                "output": str(folder / path.name),
                "external": len(model.files) > 1,
                "samples": [str(one) for one in folders],
                **settings,
            }
            what = f"the recipe {name} cannot be applied to {path.name}"
            failure = partial(ImportFailed, stage="import")
            with naming_errors("import", f"the recipe {name}", failure, what):
                try:
                    notes = context.isolated.call(recipe.apply, arguments, timeout=RECIPE_TIMEOUT_S, log=log)
                except ImportFailed as error:
                    error.args = (f"{what}: {error.message}",)
                    error.located(stage="import")
                    raise
            _check_made(called("recipe", _GROUP, name), model, folder / path.name, context)
            if notes:
                if not isinstance(notes, dict):
                    raise TypeError(f"it returned {shown(notes)}: expected notes as a JSON object, or None")
                (folder / _NOTES).write_text(json.dumps(notes))

    meta = {"model": model.name, "recipe": name, "settings": settings}
    entry, _ = context.cache.get_or_make(key, meta, make)
    return entry / path.name


def _without_links(model: Model, folder: Path) -> Path:
    """Return the model's file, or that of a copy in a folder if its files are links: onnx's tools reject such data."""
    if len(model.files) == 1 or not any(file.is_symlink() for file in model.files.values()):
        return model.path
    for name, file in model.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)
    return folder / next(name for name, file in model.files.items() if file == model.path)


def _check_made(recipe: str, model: Model, made: Path, context: RunContext) -> None:
    """Raise ImportFailed for a recipe that made no model, or one of other inputs or outputs."""
    failed = f"{recipe} spoilt {made.name}"
    if not made.is_file():
        raise ImportFailed(f"{failed}: it wrote no model", stage="import", hint=_KEEPS)
    try:
        again = import_model(made, dims=model.dims, format=model.format, isolated=context.isolated, cache=context.cache)
    except (ImportFailed, UsageError) as error:
        text = f"{failed}: what it wrote cannot be read: {error.message}"
        raise ImportFailed(text, stage="import", hint=_KEEPS, detail=error.detail) from error
    for what, before, after in (("inputs", model.inputs, again.inputs), ("outputs", model.outputs, again.outputs)):
        # Of outputs whose number of dimensions only running it tells, none is known.
        if before is not None and after is not None and not _is_same(before, after):
            raise ImportFailed(
                f"{failed}: its {what} were {_listed(before)} and are {_listed(after)}", stage="import", hint=_KEEPS
            )


_KEEPS = "a recipe writes a model whose inputs and outputs keep names, dtypes and shapes"


def _is_same(before: Sequence[TensorSpec], after: Sequence[TensorSpec]) -> bool:
    """Whether names and types are the same; what is a number in one shape only is left open."""
    return len(before) == len(after) and all(
        one.name == other.name
        and one.dtype == other.dtype
        and len(one.shape) == len(other.shape)
        and not any(
            isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(one.shape, other.shape, strict=True)
        )
        for one, other in zip(before, after, strict=True)
    )


def _listed(specs: Sequence[TensorSpec] | None) -> str:
    return ", ".join(map(str, specs or ())) or "none"


def recipe_notes(model: Path) -> dict[str, Any]:
    """What the recipe told that made a model: ``quantise_s``, the seconds that it took. Empty where none made it."""
    file = model.with_name(_NOTES)
    if not file.is_file():
        return {}
    notes: dict[str, Any] = json.loads(file.read_bytes())
    return notes
