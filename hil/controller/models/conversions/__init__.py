"""Models of one format made into another, in a process of their own, once: PyTorch into MLIR, Keras into TFLite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hil.controller.models.compiling import Work, compiling
from hil.controller.models.conversions import tensorflow_program, torch_program
from hil.controller.models.conversions.torch_program import OP_TYPES
from hil.controller.models.description import digest_of_files
from hil.controller.storage.cache import Cache, digests_in
from hil.controller.storage.isolated import Isolated, function_name
from hil.controller.storage.packages import needed_version
from hil.core.results import Model
from hil.errors import UsageError


@dataclass(frozen=True)
class Conversion:
    """How a model of one format becomes one of another."""

    # called in a process of its own with ``path`` (the model's file), ``function`` (its entry point), ``dims`` (sizes
    # of symbolic dimensions by name) and ``output`` (the file to write; further files beside it). Inputs and outputs
    # keep order, dtypes and shapes. Raises CompileFailed; whatever else it raises becomes one.
    convert: Callable[..., None]
    by: str
    packages: tuple[str, ...]  # whose versions the result depends on
    suffix: str
    extra: str  # of hil, which installs the packages
    version: int = 1  # raise it when the result changes without those


_TF_TO_MLIR = Conversion(
    tensorflow_program.to_mlir,
    "tensorflow",
    ("tensorflow", "iree-base-compiler"),
    ".mlirbc",
    "tensorflow",
    version=2,
)
_TF_TO_TFLITE = Conversion(
    tensorflow_program.to_tflite, "tflite converter", ("tensorflow",), ".tflite", "tensorflow", version=2
)
# (format, format) -> how. What is not here is not converted.
CONVERSIONS: Mapping[tuple[str, str], Conversion] = MappingProxyType(
    {
        ("pt2", "mlir"): Conversion(
            torch_program.to_mlir, "torch-mlir", ("torch", "iree-base-compiler"), ".mlirbc", "torch", version=2
        ),
        ("pt2", "onnx"): Conversion(
            torch_program.to_onnx, "torch.onnx", ("torch", "onnx", "onnxscript"), ".onnx", "torch", version=2
        ),
        ("tf", "mlir"): _TF_TO_MLIR,
        ("keras", "mlir"): replace(_TF_TO_MLIR, packages=(*_TF_TO_MLIR.packages, "keras")),
        ("tf", "tflite"): _TF_TO_TFLITE,
        ("keras", "tflite"): replace(_TF_TO_TFLITE, packages=(*_TF_TO_TFLITE.packages, "keras")),
    }
)
CONVERT_TIMEOUT_S = 1800.0
# What a conversion may write beside the model: large weights, and what its nodes come from.
_BESIDE = (".data", ".irpa", OP_TYPES)


def can_convert(have: str, want: str) -> bool:
    """Whether models of one format can be made into another."""
    return (have, want) in CONVERSIONS


def convert(model: Model, want: str, work: Work) -> tuple[Model, str]:
    """A model in another format, made or from the cache.

    Args:
        work: how it is done; a ``timeout`` of None is half an hour.

    Raises:
        UsageError: there is no such conversion, or the framework is not installed.
        CompileFailed, CompileCrashed, StageTimeout: it did not work; ``detail`` is the framework's own words.
        StorageError: the result cannot be kept.
    """
    if model.format == want:
        return model, ""
    conversion = CONVERSIONS.get((model.format, want))
    if conversion is None:
        raise UsageError(f"{model.path.name} cannot be made into {want}: it is {model.format}")
    by = f"{conversion.by} {needed_version(conversion.packages[0], conversion.extra)}"
    key = Cache.key(
        "conversion",
        model=model.digest,
        function=model.function,
        dims=dict(model.dims),
        convert=function_name(conversion.convert),
        versions=[needed_version(package, conversion.extra) for package in conversion.packages],
        version=conversion.version,
    )
    name = f"model{conversion.suffix}"

    def make(folder: Path) -> None:
        arguments: dict[str, Any] = {"path": str(model.path.absolute()), "function": model.function}
        arguments |= {"dims": dict(model.dims), "output": str(folder / name)}
        who = conversion.by
        with compiling(who, died=f"{who} died", failed=f"{who} cannot convert {model.path.name} to {want}"):
            timeout = work["timeout"] or CONVERT_TIMEOUT_S
            work["isolated"].call(conversion.convert, arguments, timeout=timeout, log=work["log"])

    meta = {"model": model.name, "converted by": by}
    entry, _ = work["cache"].get_or_make(key, meta, make, work["recompute"])
    digests = {file: digest for file, digest in digests_in(entry).items() if file == name or file.endswith(_BESIDE)}
    files = {file: entry / file for file in digests}
    return replace(model, format=want, path=entry / name, files=files, digest=digest_of_files(digests)), by


def as_onnx(model: Model, *, cache: Cache, isolated: Isolated, log: Path) -> Model:
    """The model as ONNX, in which it can be taken apart and looked into; a PyTorch program's nodes bear module paths.

    Raises:
        UsageError, CompileFailed, CompileCrashed, StageTimeout: as of :func:`convert`.
    """
    if model.format != "onnx" and not can_convert(model.format, "onnx"):
        raise UsageError(
            f"{model.path.name} is {model.format}: only ONNX models can be taken apart, and what converts to ONNX",
            hint="name the ONNX file it was made from",
        )
    work: Work = {"cache": cache, "isolated": isolated, "recompute": False, "timeout": None, "log": log}
    return convert(model, "onnx", work)[0]
