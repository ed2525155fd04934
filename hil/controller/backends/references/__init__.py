"""Compute references on a CPU. The board's outputs are compared with the reference's outputs for the same inputs."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.backends.references.expected import read_expected
from hil.controller.backends.references.independence import find_relation, list_shared_parts
from hil.controller.backends.references.noise import FAR, FAR_RUNS, RUNS, compute_noise, perturb_inputs
from hil.controller.backends.references.own_code import own_code
from hil.controller.backends.references.rounding import write_rounding_models
from hil.controller.backends.references.table import (
    EVALUATOR,
    EVALUATOR_CPU_SECONDS,
    GROUP,
    QUICK_EVALUATOR,
    Reference,
    load_references,
)
from hil.controller.models.compiling import IsolatedCall, Work, call_isolated
from hil.controller.models.inputs import digest_of_samples
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import IsolatedCrash, IsolatedFailure, convert_errors, make_file_version
from hil.controller.storage.sources.own_code import digest_code
from hil.controller.storage.sources.packages import pick
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.core.files import digest_file, read_text
from hil.core.guarded import find_package, format_plugin, guard
from hil.core.installed import get_version
from hil.core.results import Model, Relation, RunResult
from hil.core.scratch import make_temporary_folder
from hil.core.storage_errors import make_full_disk_error
from hil.core.tensors import Array, TensorSpec, get_dtype_name
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
    StorageError,
    UsageError,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "EVALUATOR_CPU_SECONDS",
    "Reference",
    "choose_default_references",
    "list_default_chain",
    "load_references",
    "measure_noise",
    "read_expected",
    "refer_each",
    "run_reference",
    "run_reference_with_fallback",
]

# Increase this when a reference's outputs change, but neither its version nor a file of :func:`own_code` changes.
_VERSION = 4
EXPECTED_HINT = "pass the expected outputs: --expected out.npy"
# Maximum size for a model with rounding operators, below protobuf's limit (2 GiB).
_MAX_BYTES = 1 << 30
_REASON = "reason.txt"


# (model format, the program's runtime) or model format -> default references, in the order to try.
# :func:`list_default_chain` skips self-checks.
_ORDER: Mapping[tuple[str, str] | str, tuple[str, ...]] = {
    ("onnx", "onnxruntime"): ("onnx-reference", "onnxruntime"),
    "onnx": ("onnxruntime", "onnx-reference", "iree-llvm-cpu"),
    "mlir": ("iree-llvm-cpu",),
    "pt2": ("torch-eager",),
    "tf": ("tensorflow",),
    "keras": ("tensorflow",),
    # tflite-builtin runs models with operators that LiteRT's reference kernels lack.
    "tflite": ("tflite", "tflite-builtin"),
}


def choose_default_references(model: Model) -> list[str]:
    """Return the default references for a model; [] if only a board can run the model."""
    return list(_ORDER.get(model.format, ())[:1])


def list_default_chain(model_format: str, runtime: str) -> tuple[str, ...]:
    """Return the default references in fallback order, without self-checks.

    Args:
        runtime: The runtime of the program to judge.
    """
    names = _ORDER.get((model_format, runtime), _ORDER.get(model_format, ()))
    return tuple(name for name in names if find_relation(runtime, name) is not Relation.SELF_CHECK)


def run_reference(
    name: str, model: Model, inputs: Mapping[str, Array], *, runtime: str = "", **work: Unpack[Work]
) -> RunResult:
    """Compute a model's outputs with one reference. Results are cached by model, inputs and reference version.

    Args:
        runtime: The runtime of the program to judge, which determines the relation of the result.

    Raises:
        UsageError: unknown reference, or the reference does not support the model's format.
        ReferenceFailed: the reference cannot run this model with these inputs.
        StageTimeout: the reference timed out.
    """
    return _run(name, pick("reference", load_references(), name), model, inputs, runtime, work)


def _run(
    name: str, reference: Reference, model: Model, inputs: Mapping[str, Array], runtime: str, work: Work
) -> RunResult:
    if model.format not in reference.formats:
        fitting = [other for other, entry in load_references().items() if model.format in entry.formats]
        raise UsageError(
            f"the reference {name} does not support {model.format} models",
            hint=f"use one of {', '.join(fitting)}" if fitting else EXPECTED_HINT,
            option="" if fitting else "--expected",
        )
    who = format_plugin("reference", GROUP, name)
    with guard("reference", GROUP, name, ReferenceFailed, UsageError):
        source, code = reference.source(), make_file_version(reference.compute.__module__)
        if not isinstance(source, str):
            raise TypeError(f"expected a string from source(), got {source!r:.80}")
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
            raise ReferenceTooSlow(read_text(known / _REASON))
        with make_temporary_folder("hil-reference-") as given:
            save_tensors(Path(given), inputs)
            try:
                with (
                    guard("reference", GROUP, name, ReferenceFailed, ReferenceFailed, StageTimeout, NotRun, UsageError),
                    convert_errors("refer", who, ReferenceFailed, f"{who} failed", died=f"{who} died"),
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
                if (full := make_full_disk_error(error)) is not None:
                    raise full from error
                text = f"{who} failed: {type(error).__name__}: {error}"
                raise ReferenceFailed(text, detail=traceback.format_exc()) from error
        try:
            outputs = load_tensors(folder)
        except UsageError as error:
            hint = "compute must write them to the directory outputs with hil.plugins.save_tensors"
            raise ReferenceFailed(f"cannot read the outputs of {who}", hint=hint) from error
        if find_package(GROUP, name):
            _check_outputs(who, model, outputs)

    meta = {"reference": source, "model": model.name}
    entry, cached = work["cache"].get_or_make(key, meta, make, work["recompute"])
    provenance = {"reference": name, "version": source, "cached": cached}
    return RunResult(source, load_tensors(entry), provenance=provenance, relation=find_relation(runtime, name))


def _keep_reason(cache: Cache, key: str, error: ReferenceTooSlow) -> None:
    """Store in the cache that a reference is too slow, so that later cases skip the reference."""

    def make(folder: Path) -> None:
        (folder / _REASON).write_text(error.message)

    cache.put(key, {}, make)


def _check_outputs(who: str, model: Model, outputs: Mapping[str, Array]) -> None:
    """Raise ReferenceFailed if a plugin reference's outputs differ from the model's declaration.

    Built-in references are not checked. They take names and dtypes from the model's framework, which are right even if
    the model's declaration is wrong. Only ONNX models must have equal names. For other formats, different names are
    matched by position, as in the comparison.
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
    if not fits or not all(spec.accepts(get_dtype_name(array.dtype), array.shape) for spec, array in pairs):
        given = ", ".join(str(TensorSpec(name, get_dtype_name(one.dtype), one.shape)) for name, one in outputs.items())
        wanted = ", ".join(map(str, model.outputs)) or "no outputs"
        raise ReferenceFailed(f"{who} returned {given or 'no outputs'}: the model declares {wanted}")


def refer_each(
    names: Sequence[str], model: Model, inputs: Mapping[str, Array], **settings: Any
) -> tuple[list[RunResult], dict[str, StageError]]:
    """Compute a model's outputs with multiple references.

    A failing reference does not hide the results of other references.

    Returns:
        The results, in order, and name -> error of the failed references. References that do not support the model's
        format also count as failed.

    Raises:
        UsageError: no reference supports the model's format.
        ReferenceFailed: all references failed. If there is only one reference, hil raises the error of this reference:
            see :func:`run_reference`.
        StorageError: a disk of the host is full or read-only.
    """
    answers: list[RunResult] = []
    failed: dict[str, StageError] = {}
    foreign: list[UsageError] = []
    for name in dict.fromkeys(names):
        try:
            answers.append(run_reference(name, model, inputs, **settings))
        except StorageError:
            raise
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
        reasons = _join_reasons({name: error.message for name, error in failed.items()})
        detail = "\n".join(f"{name}:\n{error.detail}" for name, error in failed.items() if error.detail)
        raise ReferenceFailed(
            f"all references failed ({reasons})",
            hint=EXPECTED_HINT,
            detail=detail,
            option="--expected",
        )
    return answers, failed


def run_reference_with_fallback(
    model: Model, inputs: Mapping[str, Array], *, runtime: str = "", **work: Unpack[Work]
) -> tuple[RunResult, dict[str, StageError]]:
    """Try the references of :func:`list_default_chain`. Return the first result, and the errors of earlier references.

    Args:
        runtime: The runtime of the program to judge; "" excludes no reference.

    Raises:
        ReferenceFailed: all references failed, or only self-checks exist.
        StageTimeout: a reference timed out.
    """
    refused: dict[str, StageError] = {}
    names = list_default_chain(model.format, runtime)
    for name in names:
        # There is no alternative to the last reference, so its CPU time is unlimited.
        is_quick = name == EVALUATOR and name != names[-1]
        try:
            reference = QUICK_EVALUATOR if is_quick else pick("reference", load_references(), name)
            return _run(name, reference, model, inputs, runtime, work), refused
        except ReferenceFailed as error:
            refused[name] = error
        except StageTimeout as error:
            if not is_quick:
                raise
            refused[name] = error
    self_checks = [name for name in _ORDER.get(model.format, ()) if name not in names]
    hint = EXPECTED_HINT
    if self_checks:
        hint += f", or request a self-check: --reference {self_checks[0]}"
    if refused:
        reasons = _join_reasons({name: error.message for name, error in refused.items()})
        kind = "independent reference" if self_checks else "reference"
        raise ReferenceFailed(f"no {kind} can run this model ({reasons})", hint=hint, option="--expected")
    if self_checks:
        shared = ", ".join(list_shared_parts(runtime, self_checks[0]))
        text = f"no independent reference supports {model.format} models: {self_checks[0]} and {runtime} share {shared}"
        raise ReferenceFailed(text, hint=hint, option="--expected")
    raise ReferenceFailed(f"no reference supports {model.format} models", hint=hint, option="--expected")


def _join_reasons(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def measure_noise(model: Model, inputs: Mapping[str, Array], result: RunResult, **settings: Any) -> dict[str, Array]:
    """Measure the noise of a reference's outputs: see :func:`compute_noise`.

    Args:
        result: The reference's outputs. If hil did not compute them (expected outputs from the user), the model's
            default reference is used instead.

    Returns:
        Output name -> noise. Outputs that depend on random numbers have no entry. The result is empty if no input can
        be perturbed, or if the reference cannot run.
    """
    try:
        if result.provenance.get("reference") not in load_references():
            if not choose_default_references(model):
                return {}
            result, _ = run_reference_with_fallback(model, inputs, **settings)
        return _measure_cached_noise(model, inputs, result, settings)
    except StorageError:
        raise
    except (StageError, UsageError):
        return {}


def _measure_cached_noise(
    model: Model, inputs: Mapping[str, Array], result: RunResult, settings: Mapping[str, Any]
) -> dict[str, Array]:
    """Return the noise of a reference's outputs, from the cache if available.

    If a process crashed or timed out, the noise is incomplete and is not cached. A later run may measure the full
    noise.
    """
    name = result.provenance["reference"]
    key = Cache.key(
        "noise",
        reference=name,
        source=result.source,
        compute=make_file_version(load_references()[name].compute.__module__),
        onnx=get_version("onnx") if model.format == "onnx" else "",
        model=model.digest,
        function=model.function,
        dims=dict(model.dims),
        tensors=digest_of_samples([inputs, result.outputs]),
        code=[own_code(), digest_code("compare/tolerance.py", "compare/values.py")],
    )
    cache = settings["cache"]
    if not settings["recompute"] and (known := cache.get(key)):
        return load_tensors(known)
    disturbed: list[StageError] = []
    near, far = (
        _run_perturbed(name, model, inputs, units, count, settings, disturbed)
        for units, count in ((1, RUNS), (FAR, FAR_RUNS))
    )
    steady = {name: array for name, array in result.outputs.items() if name not in model.random_outputs}
    noise = compute_noise(steady, near, far)
    if not disturbed:
        cache.put(key, {"noise of": result.source, "model": model.name}, lambda folder: save_tensors(folder, noise))
    return noise


def _run_perturbed(
    name: str,
    model: Model,
    inputs: Mapping[str, Array],
    units: int,
    count: int,
    settings: Mapping[str, Any],
    disturbed: list[StageError],
) -> list[Mapping[str, Array]]:
    """Run a reference on perturbed inputs and, for an ONNX model, with operators that round randomly.

    Returns [] if there is no input to perturb and no operator to round.

    Args:
        disturbed: List that receives errors that may not occur in another run.
    """
    runs: list[Mapping[str, Array]] = []
    with make_temporary_folder("hil-noise-") as folder:
        models = (
            _write_rounding_models(model, inputs, units, count, Path(folder), settings, disturbed) or [model] * count
        )
        for seed, one in enumerate(models):
            given = perturb_inputs(inputs, seed, units)
            if one is model and all(given[key] is array for key, array in inputs.items()):
                return []
            try:
                runs.append(run_reference(name, one, given, **settings).outputs)
            except ReferenceFailed as error:
                if one is model:
                    raise
                if isinstance(error.__cause__, IsolatedCrash):
                    disturbed.append(error)
                # The reference lacks an operator that generates the rounding errors.
                runs.append(run_reference(name, model, given, **settings).outputs)
    return runs


def _write_rounding_models(
    model: Model,
    inputs: Mapping[str, Array],
    units: int,
    count: int,
    folder: Path,
    settings: Mapping[str, Any],
    disturbed: list[StageError],
) -> list[Model]:
    """Write copies of an ONNX model whose operators round randomly. Returns [] if this is impossible."""
    if model.format != "onnx" or sum(file.stat().st_size for file in model.files.values()) > _MAX_BYTES:
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
