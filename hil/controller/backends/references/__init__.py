"""The same inputs through a CPU: what a board's answer is compared with."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.backends.references.expected import expected_result
from hil.controller.backends.references.independence import relation_of, shared_parts
from hil.controller.backends.references.noise import FAR, FAR_RUNS, RUNS, noise_between, perturbed
from hil.controller.backends.references.own_code import own_code
from hil.controller.backends.references.rounding import write_rounding_models
from hil.controller.backends.references.table import (
    EVALUATOR,
    EVALUATOR_CPU_SECONDS,
    GROUP,
    QUICK_EVALUATOR,
    Reference,
    references,
)
from hil.controller.models.compiling import IsolatedCall, Work, call_isolated
from hil.controller.models.inputs import digest_of_samples
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import IsolatedCrash, IsolatedFailure, file_version, naming_errors
from hil.controller.storage.own_code import code_digest
from hil.controller.storage.packages import pick
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.core.digest import digest_file
from hil.core.guarded import called, guard, package_of
from hil.core.installed import version
from hil.core.results import Model, Relation, RunResult
from hil.core.scratch import temporary_folder
from hil.core.tensors import Array, TensorSpec, dtype_name
from hil.errors import (
    CompileCrashed,
    CompileFailed,
    HilError,
    LoadFailed,
    NotRun,
    ReferenceFailed,
    ReferenceTooSlow,
    StageError,
    StageTimeout,
    UsageError,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "EVALUATOR_CPU_SECONDS",
    "Reference",
    "default_chain",
    "default_references",
    "expected_result",
    "measure_noise",
    "refer_each",
    "references",
    "run_reference",
    "run_reference_with_fallback",
]

# Raise this when what a reference computes changes without its version and without a file of :func:`own_code`.
_VERSION = 4
_EXPECTED_HINT = "give what you expect: --expected out.npy"
# What one protobuf message holds, and some room.
_MOST_BYTES = 1 << 30
_REASON = "reason.txt"


# (model format, runtime of the program) or model format -> the references that are asked in this order where the user
# names none; self-checks among them are left out: see :func:`default_chain`.
_ORDER: Mapping[tuple[str, str] | str, tuple[str, ...]] = {
    ("onnx", "onnxruntime"): ("onnx-reference", "onnxruntime"),
    "onnx": ("onnxruntime", "onnx-reference", "iree-llvm-cpu"),
    "mlir": ("iree-llvm-cpu",),
    "pt2": ("torch-eager",),
    "tf": ("tensorflow",),
    "keras": ("tensorflow",),
    # LiteRT's reference kernels lack some operators.
    "tflite": ("tflite", "tflite-builtin"),
}


def default_references(model: Model) -> list[str]:
    """The references to ask when none is named: none for a model that only a board can run."""
    return list(_ORDER.get(model.format, ())[:1])


def default_chain(model_format: str, runtime: str) -> tuple[str, ...]:
    """Return the references that are asked in turn where the user names none: never a self-check.

    Args:
        runtime: of the program that is judged.
    """
    names = _ORDER.get((model_format, runtime), _ORDER.get(model_format, ()))
    return tuple(name for name in names if relation_of(runtime, name) is not Relation.SELF_CHECK)


def run_reference(
    name: str, model: Model, inputs: Mapping[str, Array], *, runtime: str = "", **work: Unpack[Work]
) -> RunResult:
    """What one reference makes of a model and its inputs; the cache keeps that by model, inputs and its version.

    Args:
        runtime: of the program that is judged, which decides the result's relation.

    Raises:
        UsageError: no such reference, or one that does not take this format.
        ReferenceFailed: it cannot run this model, or not with these inputs.
        StageTimeout: it took too long.
    """
    return _run(name, pick("reference", references(), name), model, inputs, runtime, work)


def _run(
    name: str, reference: Reference, model: Model, inputs: Mapping[str, Array], runtime: str, work: Work
) -> RunResult:
    if model.format not in reference.formats:
        fitting = [other for other, entry in references().items() if model.format in entry.formats]
        raise UsageError(
            f"the reference {name} cannot run {model.format} models",
            hint=f"one of {', '.join(fitting)}" if fitting else _EXPECTED_HINT,
        )
    who = called("reference", GROUP, name)
    with guard("reference", GROUP, name, ReferenceFailed, UsageError):
        source, code = reference.source(), file_version(reference.compute.__module__)
        if not isinstance(source, str):
            raise TypeError(f"its source() returned {source!r:.80}: expected a text")
    key = Cache.key(
        "reference",
        source=source,
        model=model.digest,
        function=model.function,
        dims=dict(model.dims),
        inputs=digest_of_samples([inputs]),
        version=_VERSION,
        code=own_code(),
        **({"compute": code} if code else {}),
    )

    slow = Cache.key("reference-slow", answer=key, seconds=EVALUATOR_CPU_SECONDS)

    def make(folder: Path) -> None:
        if reference is QUICK_EVALUATOR and not work["recompute"] and (known := work["cache"].get(slow)):
            raise ReferenceTooSlow((known / _REASON).read_text())
        with temporary_folder("hil-reference-") as given:
            save_tensors(Path(given), inputs)
            try:
                with (
                    guard("reference", GROUP, name, ReferenceFailed, ReferenceFailed, StageTimeout, NotRun, UsageError),
                    naming_errors("refer", who, ReferenceFailed, f"{who} failed", died=f"{who} died"),
                ):
                    reference.compute(model, Path(given), folder, **work)
            except ReferenceTooSlow as error:
                _keep_reason(work["cache"], slow, error)
                raise
            except (CompileFailed, CompileCrashed, LoadFailed) as error:
                raise ReferenceFailed(f"{who}: {error.message}", detail=error.detail) from error
            except HilError:
                raise
            except Exception as error:
                text = f"{who} failed: {type(error).__name__}: {error}"
                raise ReferenceFailed(text, detail=traceback.format_exc()) from error
        try:
            outputs = load_tensors(folder)
        except UsageError as error:
            hint = "its compute writes them into the folder outputs, with hil.plugins.save_tensors"
            raise ReferenceFailed(f"{who} wrote no outputs that can be read", hint=hint) from error
        if package_of(GROUP, name):
            _check_outputs(who, model, outputs)

    meta = {"reference": source, "model": model.name}
    entry, cached = work["cache"].get_or_make(key, meta, make, work["recompute"])
    provenance = {"reference": name, "version": source, "cached": cached}
    return RunResult(source, load_tensors(entry), provenance=provenance, relation=relation_of(runtime, name))


def _keep_reason(cache: Cache, key: str, error: ReferenceTooSlow) -> None:
    """Store that a reference is too slow, so that the next case does not wait for it."""

    def make(folder: Path) -> None:
        (folder / _REASON).write_text(error.message)

    cache.put(key, {}, make)


def _check_outputs(who: str, model: Model, outputs: Mapping[str, Array]) -> None:
    """Raise ReferenceFailed where a package's reference gave what the model does not.

    Hil's own take names and types from the model's framework, which knows better where a model declares wrong ones.
    Only ONNX files name their outputs for everybody; elsewhere other names are matched by position, as comparing does.
    """
    if model.outputs is None:
        return
    declared = {spec.name: spec for spec in model.outputs}
    named = outputs.keys() == declared.keys()
    pairs = (
        [(declared[name], array) for name, array in outputs.items()]
        if named
        else zip(model.outputs, outputs.values(), strict=False)
    )
    fits = len(outputs) == len(declared) and (named or model.format != "onnx")
    if not fits or not all(spec.accepts(dtype_name(array.dtype), array.shape) for spec, array in pairs):
        given = ", ".join(str(TensorSpec(name, dtype_name(one.dtype), one.shape)) for name, one in outputs.items())
        wanted = ", ".join(map(str, model.outputs)) or "no outputs"
        raise ReferenceFailed(f"{who} gave {given or 'no outputs'}: the model declares {wanted}")


def refer_each(
    names: Sequence[str], model: Model, inputs: Mapping[str, Array], **settings: Any
) -> tuple[list[RunResult], dict[str, StageError]]:
    """What each of several references makes of a model; one that fails hides no other's answer.

    Returns:
        The answers, in order; and name -> error of the references that could not answer, among them those that do not
        take the model's format.

    Raises:
        UsageError: none takes the model's format.
        ReferenceFailed: none could. Where there is only one: what :func:`run_reference` raises.
    """
    answers: list[RunResult] = []
    failed: dict[str, StageError] = {}
    foreign: list[UsageError] = []
    for name in dict.fromkeys(names):
        try:
            answers.append(run_reference(name, model, inputs, **settings))
        except UsageError as error:
            foreign.append(error)
            failed[name] = ReferenceFailed(error.message, stage="refer", hint=error.hint)
        except StageError as error:
            failed[name] = error
    if foreign and len(foreign) == len(failed) and not answers:
        raise foreign[0]
    if not answers and len(failed) == 1:
        raise next(iter(failed.values()))
    if not answers:
        reasons = _listed({name: error.message for name, error in failed.items()})
        detail = "\n".join(f"{name}:\n{error.detail}" for name, error in failed.items() if error.detail)
        raise ReferenceFailed(
            f"none of the references can run this model ({reasons})", hint=_EXPECTED_HINT, detail=detail
        )
    return answers, failed


def run_reference_with_fallback(
    model: Model, inputs: Mapping[str, Array], *, runtime: str = "", **work: Unpack[Work]
) -> tuple[RunResult, dict[str, StageError]]:
    """Return the answer of the first reference of :func:`default_chain` that can, and why those before it could not.

    Args:
        runtime: of the program that is judged; "" leaves no reference out.

    Raises:
        ReferenceFailed: none could, or there is none but self-checks.
        StageTimeout: one took too long.
    """
    refused: dict[str, StageError] = {}
    names = default_chain(model.format, runtime)
    for name in names:
        # The last one has no other to take its place.
        is_quick = name == EVALUATOR and name != names[-1]
        try:
            reference = QUICK_EVALUATOR if is_quick else pick("reference", references(), name)
            return _run(name, reference, model, inputs, runtime, work), refused
        except ReferenceFailed as error:
            refused[name] = error
        except StageTimeout as error:
            if not is_quick:
                raise
            refused[name] = error
    self_checks = [name for name in _ORDER.get(model.format, ()) if name not in names]
    hint = _EXPECTED_HINT
    if self_checks:
        hint += f", or ask for a self-check: --reference {self_checks[0]}"
    if refused:
        reasons = _listed({name: error.message for name, error in refused.items()})
        kind = "independent reference" if self_checks else "reference"
        raise ReferenceFailed(f"no {kind} can run this model ({reasons})", hint=hint)
    if self_checks:
        shared = ", ".join(shared_parts(runtime, self_checks[0]))
        text = f"no independent reference runs {model.format} models: {self_checks[0]} and {runtime} share {shared}"
        raise ReferenceFailed(text, hint=hint)
    raise ReferenceFailed(f"a {model.format} model has no reference", hint=_EXPECTED_HINT)


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def measure_noise(model: Model, inputs: Mapping[str, Array], result: RunResult, **settings: Any) -> dict[str, Array]:
    """Measure the noise of a reference's outputs: see :func:`noise_between`.

    Args:
        result: what the reference made of them. Where no reference of hil's made it (it was given, as what is
            expected), the model's default one is asked in its place.

    Returns:
        Output name -> its noise. Outputs that depend on random numbers have none. Empty where nothing can be moved, or
        the reference cannot run.
    """
    try:
        if result.provenance.get("reference") not in references():
            if not default_references(model):
                return {}
            result, _ = run_reference_with_fallback(model, inputs, **settings)
        return _cached_noise(model, inputs, result, settings)
    except (StageError, UsageError):
        return {}


def _cached_noise(
    model: Model, inputs: Mapping[str, Array], result: RunResult, settings: Mapping[str, Any]
) -> dict[str, Array]:
    """Return the noise of what a reference of hil's made, from the cache where it was measured before.

    Noise for which a process died or took too long is not kept: the next time it may be measured in full.
    """
    name = result.provenance["reference"]
    key = Cache.key(
        "noise",
        reference=name,
        source=result.source,
        compute=file_version(references()[name].compute.__module__),
        onnx=version("onnx") if model.format == "onnx" else "",
        model=model.digest,
        function=model.function,
        dims=dict(model.dims),
        tensors=digest_of_samples([inputs, result.outputs]),
        code=[own_code(), code_digest("compare/tolerance.py", "compare/values.py")],
    )
    cache = settings["cache"]
    if not settings["recompute"] and (known := cache.get(key)):
        return load_tensors(known)
    disturbed: list[StageError] = []
    near, far = (
        _moved_runs(name, model, inputs, units, count, settings, disturbed)
        for units, count in ((1, RUNS), (FAR, FAR_RUNS))
    )
    steady = {name: array for name, array in result.outputs.items() if name not in model.random_outputs}
    noise = noise_between(steady, near, far)
    if not disturbed:
        cache.put(key, {"noise of": result.source, "model": model.name}, lambda folder: save_tensors(folder, noise))
    return noise


def _moved_runs(
    name: str,
    model: Model,
    inputs: Mapping[str, Array],
    units: int,
    count: int,
    settings: Mapping[str, Any],
    disturbed: list[StageError],
) -> list[Mapping[str, Array]]:
    """Run a reference on moved inputs and, of an ONNX model, with operators that round at random; [] if neither is.

    Args:
        disturbed: takes the errors that may not happen another time.
    """
    runs: list[Mapping[str, Array]] = []
    with temporary_folder("hil-noise-") as folder:
        models = _rounding_models(model, inputs, units, count, Path(folder), settings, disturbed) or [model] * count
        for seed, one in enumerate(models):
            given = perturbed(inputs, seed, units)
            if one is model and all(given[key] is array for key, array in inputs.items()):
                return []
            try:
                runs.append(run_reference(name, one, given, **settings).outputs)
            except ReferenceFailed as error:
                if one is model:
                    raise
                if isinstance(error.__cause__, IsolatedCrash):
                    disturbed.append(error)
                # The reference lacks an operator that draws the errors.
                runs.append(run_reference(name, model, given, **settings).outputs)
    return runs


def _rounding_models(
    model: Model,
    inputs: Mapping[str, Array],
    units: int,
    count: int,
    folder: Path,
    settings: Mapping[str, Any],
    disturbed: list[StageError],
) -> list[Model]:
    """Write copies of an ONNX model whose operators round at random; [] where none can be made."""
    if model.format != "onnx" or sum(file.stat().st_size for file in model.files.values()) > _MOST_BYTES:
        return []
    shapes = {name: list(array.shape) for name, array in inputs.items()}
    given = {"model": str(model.path.absolute()), "folder": str(folder), "shapes": shapes}
    how: IsolatedCall = {"isolated": settings["isolated"], "timeout": settings["timeout"], "log": settings["log"]}
    try:
        written = call_isolated(write_rounding_models, {**given, "units": units, "count": count}, how)
    except IsolatedFailure:
        return []
    except StageError as error:
        disturbed.append(error)
        return []
    paths = [folder / name for name in written]
    return [replace(model, path=path, files={path.name: path}, digest=digest_file(path)) for path in paths]
