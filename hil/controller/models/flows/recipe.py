"""Define and apply recipes. A recipe transforms a model before compilation, for example by quantisation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hil.controller.models.executorch_backends import check_recipe_inputs
from hil.controller.models.flows import onnx_recipes, pt2_recipes
from hil.controller.models.flows.flow import Flow
from hil.controller.models.importers import import_model
from hil.controller.models.inputs import digest_of_samples, make_calibration_samples
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import (
    IsolatedFunction,
    convert_errors,
    get_function_name,
    make_function_version,
)
from hil.controller.storage.sources.packages import load_registered, pick, require_version
from hil.controller.storage.tensor_files import save_tensors
from hil.core.files import copy_file, read_file
from hil.core.guarded import format_plugin, format_value, guard
from hil.core.results import Model
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import Array, TensorSpec
from hil.errors import ImportFailed, NotRun, StageTimeout, UsageError, did_you_mean

if TYPE_CHECKING:
    from hil.controller.storage.run_context import RunContext


_GROUP = "hil.recipes"
RECIPE_TIMEOUT_SECONDS = 1800.0
# Setting with the number of seeded random samples for a model without calibration data.
_SAMPLES = "samples"
# File with a recipe's notes, next to the resulting model.
_NOTES = "hil-recipe.json"


@dataclass(frozen=True)
class Recipe:
    """Transformation of a model.

    ``apply(model, output, external, samples, **settings)`` runs in an isolated process:

    - ``model`` is the file to read, ``output`` the file to write. Inputs and outputs keep names, dtypes and shapes.
    - ``external`` is True if the model stores data in separate files. The result must then also use separate files.
    - ``samples`` is a list of directories. Each contains one sample of every input, for
      :func:`hil.plugins.load_tensors`. The list is empty for a recipe without calibration.
    - Settings are passed by name. The setting ``samples``, the number of random samples, is not passed.

    The function returns None, or notes as a JSON object. Results of ExecuTorch programs contain the notes. Reports have
    a column for the note ``quantise_s``, the duration in seconds. ``apply`` raises ImportFailed if it cannot change the
    model. hil converts other exceptions to ImportFailed.

    Attributes:
        apply: module-level function, or ``module:function``.
        settings: name -> default. Values in a flow must have the type of the default.
        calibrated: whether the recipe uses samples.
        packages: distributions with versions that the result depends on.
        formats: supported model formats.
        version: increment it when the result changes with the same packages and the same source file for ``apply``.
        depends: called with the settings; returns further dependencies of the result as a JSON value. Raises UsageError
            for invalid settings.
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
        """Recipe settings, plus the number of random samples for a calibrated recipe."""
        return {**self.settings, **({_SAMPLES: 16} if self.calibrated else {})}


def _make_pt2e_recipe(apply: IsolatedFunction) -> Recipe:
    packages = ("torch", "torchao", "executorch")
    settings = {"per_channel": True, "backend": "xnnpack", "options": {}}
    return Recipe(apply, settings, calibrated=True, packages=packages, formats=("pt2",), depends=check_recipe_inputs)


_BUILT_IN = MappingProxyType(
    {
        "float16": Recipe(onnx_recipes.to_float16),
        "static-int8": Recipe(
            onnx_recipes.quantize_static,
            {"per_channel": False, "reduce_range": False, "activations": "int8", "method": "minmax"},
            calibrated=True,
        ),
        # uint8 weights, because older ONNX Runtime releases lack ConvInteger for int8 weights.
        "dynamic-int8": Recipe(
            onnx_recipes.quantize_dynamic, {"per_channel": False, "reduce_range": False, "weights": "uint8"}
        ),
        # PyTorch's quantisation, for int8 backends of ExecuTorch.
        "pt2e-static-int8": _make_pt2e_recipe(pt2_recipes.quantize_static),
        "pt2e-dynamic-int8": _make_pt2e_recipe(pt2_recipes.quantize_dynamic),
    }
)


def load_recipes() -> dict[str, Recipe]:
    """Return all recipes by name: hil's recipes and the entry point group ``hil.recipes``."""
    return load_registered(_GROUP, _BUILT_IN, Recipe, lambda one: get_function_name(one.apply))


def check_settings(flow: Flow) -> dict[str, Any]:
    """Return all settings for a flow's recipe, including defaults; empty for a flow without a recipe.

    Raises:
        UsageError: the recipe or setting does not exist, or a value has the wrong type.
    """
    if not flow.recipe:
        if flow.settings:
            raise UsageError("settings require a recipe", hint='set a recipe, such as recipe = "static-int8"')
        return {}
    defaults = pick("recipe", load_recipes(), flow.recipe).all_settings
    for name, value in flow.settings.items():
        if name not in defaults:
            taken = ", ".join(f"{key} = {default!r}" for key, default in defaults.items()) or "none"
            raise UsageError(
                f"unknown setting {name!r} for the recipe {flow.recipe}",
                hint=f"{did_you_mean(name, defaults)}known settings: {taken}",
            )
        if type(value) is not type(defaults[name]):
            raise UsageError(
                f"invalid value {value!r:.80} for setting {name}: expected {type(defaults[name]).__name__}",
                hint=f"for example {name} = {defaults[name]!r}",
            )
    if flow.settings.get(_SAMPLES, 1) < 1:
        raise UsageError(f"invalid value {flow.settings[_SAMPLES]} for setting samples: expected at least 1")
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
    """Apply the flow's recipe to a model, or return the cached result.

    Args:
        flow: flow with the recipe.
        path: the model's file.
        inputs: calibration data, input name -> tensor for every sample; missing inputs are seeded random. If empty,
            ``<model>.calibration.npz`` in the model's directory is used, with an additional first axis for samples.
            Without that file, the setting ``samples`` determines the number of seeded random samples.
        context: cache and isolated processes.
        log: file for the output of the recipe.
        dims: sizes for symbolic dimensions for random samples. The model keeps its symbols.

    Returns:
        Path of the new model, with the same file name as ``path``; ``path`` if the flow has no recipe.

    Raises:
        UsageError: the calibration data does not match the model, or the recipe or a setting is invalid.
        ImportFailed: the recipe cannot be applied to this model; ``detail`` has the tool's message.
        StageTimeout: the recipe took longer than half an hour.
    """
    if not flow.recipe:
        return path
    settings = check_settings(flow)
    recipe = pick("recipe", load_recipes(), flow.recipe)
    model = import_model(path, dims=dims, isolated=context.isolated, cache=context.cache)
    if model.format not in recipe.formats:
        taken = " and ".join(recipe.formats)
        raise ImportFailed(
            f"the recipe {flow.recipe} supports only {taken} models: {path.name} is {model.format}",
            stage="import",
        )
    count = settings.pop(_SAMPLES, 0)
    samples = make_calibration_samples(model, inputs, count) if recipe.calibrated else []
    failure = partial(ImportFailed, stage="import")
    with guard("recipe", _GROUP, flow.recipe, failure, ImportFailed, StageTimeout, NotRun, UsageError):
        return _apply_cached(flow.recipe, recipe, settings, path, model, samples, context, log)


def _apply_cached(
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
        apply=make_function_version(recipe.apply),
        versions={package: require_version(package) for package in recipe.packages},
        version=recipe.version,
        **({"depends": recipe.depends(settings)} if recipe.depends else {}),
    )

    def make(folder: Path) -> None:
        with make_temporary_folder("hil-samples-") as given:
            folders = [Path(given) / str(number) for number in range(len(samples))]
            for one, sample in zip(folders, samples, strict=True):
                save_tensors(one, sample)
            arguments = {
                "model": str(_resolve_links(model, Path(given) / "model").absolute()),
                "output": str(folder / path.name),
                "external": len(model.files) > 1,
                "samples": [str(one) for one in folders],
                **settings,
            }
            what = f"cannot apply the recipe {name} to {path.name}"
            failure = partial(ImportFailed, stage="import")
            with convert_errors("import", f"the recipe {name}", failure, what):
                try:
                    notes = context.isolated.call(recipe.apply, arguments, timeout=RECIPE_TIMEOUT_SECONDS, log=log)
                except ImportFailed as error:
                    error.args = (f"{what}: {error.message}",)
                    error.locate(stage="import")
                    raise
            _check_result(format_plugin("recipe", _GROUP, name), model, folder / path.name, context)
            if notes:
                if not isinstance(notes, dict):
                    raise TypeError(f"expected notes as a JSON object or None, got {format_value(notes)}")
                (folder / _NOTES).write_text(json.dumps(notes))

    meta = {"model": model.name, "recipe": name, "settings": settings}
    entry, _ = context.cache.get_or_make(key, meta, make)
    return entry / path.name


def _resolve_links(model: Model, folder: Path) -> Path:
    """Return the model's file.

    If files are symbolic links, return a copy, because onnx's tools reject links to data.
    """
    if len(model.files) == 1 or not any(file.is_symlink() for file in model.files.values()):
        return model.path
    for name, file in model.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy_file(file, folder / name)
    return folder / next(name for name, file in model.files.items() if file == model.path)


def _check_result(recipe: str, model: Model, made: Path, context: RunContext) -> None:
    """Raise ImportFailed if a recipe did not write a model with the same inputs and outputs."""
    failed = f"invalid {made.name} from {recipe}"
    if not made.is_file():
        raise ImportFailed(f"{failed}: the recipe wrote no file", stage="import", hint=_KEEPS)
    try:
        again = import_model(made, dims=model.dims, format=model.format, isolated=context.isolated, cache=context.cache)
    except (ImportFailed, UsageError) as error:
        text = f"{failed}: the file cannot be read: {error.message}"
        raise ImportFailed(text, stage="import", hint=_KEEPS, detail=error.detail) from error
    for what, before, after in (("inputs", model.inputs, again.inputs), ("outputs", model.outputs, again.outputs)):
        # Outputs are None if their rank is known only at run time.
        if before is not None and after is not None and not _is_same(before, after):
            raise ImportFailed(
                f"{failed}: {what} changed from {_format_specs(before)} to {_format_specs(after)}",
                stage="import",
                hint=_KEEPS,
            )


_KEEPS = "a recipe must keep the names, dtypes and shapes of the inputs and outputs"


def _is_same(before: Sequence[TensorSpec], after: Sequence[TensorSpec]) -> bool:
    """Return True if names, dtypes and ranks match. A size that is symbolic on either side matches any size."""
    return len(before) == len(after) and all(
        one.name == other.name
        and one.dtype == other.dtype
        and len(one.shape) == len(other.shape)
        and not any(
            isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(one.shape, other.shape, strict=True)
        )
        for one, other in zip(before, after, strict=True)
    )


def _format_specs(specs: Sequence[TensorSpec] | None) -> str:
    return ", ".join(map(str, specs or ())) or "none"


def read_recipe_notes(model: Path) -> dict[str, Any]:
    """Return the notes of the recipe that created a model, such as ``quantise_s``; empty if a recipe was not used."""
    file = model.with_name(_NOTES)
    if not file.is_file():
        return {}
    notes: dict[str, Any] = json.loads(read_file(file))
    return notes
