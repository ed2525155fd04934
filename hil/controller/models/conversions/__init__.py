"""Models of one format made into another, in a process of their own, once: PyTorch into MLIR, Keras into ONNX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hil.controller.models.compiling import IsolatedCall, Work, call_isolated, compiling
from hil.controller.models.description import digest_of_files
from hil.controller.storage.cache import Cache, digests_in
from hil.controller.storage.isolated import Isolated, function_version
from hil.controller.storage.packages import needed_version
from hil.core.results import Model
from hil.errors import UsageError


@dataclass(frozen=True)
class Conversion:
    """How a model of one format becomes one of another."""

    # ``module:function``: called in a process of its own with ``path`` (the model's file), ``function`` (its entry
    # point), ``dims`` (sizes of symbolic dimensions by name) and ``output`` (the file to write; further files beside
    # it). Inputs and outputs keep order, dtypes and shapes. Raises CompileFailed; whatever else it raises becomes one.
    convert: str
    by: str
    suffix: str
    packages: tuple[str, ...]  # whose versions the result depends on; the first names the extra of hil
    # what shows how the framework's own compiler sees the model: called likewise, with a ``folder`` in the place of the
    # output, the ``log`` of what it prints, and ``passes``, whether to show every pass.
    debug: str | None = None


_HERE = "hil.controller.models.conversions"
_TF_TO_MLIR = (f"{_HERE}.tensorflow_program:to_mlir", "tensorflow", ".mlirbc")
_TF_TO_TFLITE = (f"{_HERE}.tensorflow_program:to_tflite", "tflite converter", ".tflite")
_TF_TO_ONNX = (f"{_HERE}.tensorflow_onnx:to_onnx", "tf2onnx", ".onnx")
_HLO = "hil.controller.models.tensorflow.hlo:write_hlo"
# (format, format) -> how. What is not here is not converted.
CONVERSIONS: Mapping[tuple[str, str], Conversion] = MappingProxyType(
    {
        ("pt2", "mlir"): Conversion(
            f"{_HERE}.torch_program:to_mlir", "torch-mlir", ".mlirbc", ("torch", "iree-base-compiler")
        ),
        ("pt2", "onnx"): Conversion(
            f"{_HERE}.torch_program:to_onnx", "torch.onnx", ".onnx", ("torch", "onnx", "onnxscript")
        ),
        ("tf", "mlir"): Conversion(*_TF_TO_MLIR, ("tensorflow", "iree-base-compiler"), _HLO),
        ("keras", "mlir"): Conversion(*_TF_TO_MLIR, ("tensorflow", "iree-base-compiler", "keras"), _HLO),
        ("tf", "tflite"): Conversion(*_TF_TO_TFLITE, ("tensorflow",)),
        ("keras", "tflite"): Conversion(*_TF_TO_TFLITE, ("tensorflow", "keras")),
        ("tf", "onnx"): Conversion(*_TF_TO_ONNX, ("tensorflow", "tf2onnx", "onnx")),
        ("keras", "onnx"): Conversion(*_TF_TO_ONNX, ("tensorflow", "tf2onnx", "onnx", "keras")),
        ("tflite", "onnx"): Conversion(
            f"{_HERE}.tensorflow_onnx:tflite_to_onnx",
            "tf2onnx",
            ".onnx",
            ("tensorflow", "tf2onnx", "onnx", "ai-edge-litert"),
        ),
    }
)
# Raise this when what is made of a model changes without those packages.
_VERSION = 3
CONVERT_TIMEOUT_S = 1800.0
# What to try where torch-mlir, or IREE after it, does not know an operator.
ONNX_HINT = "--compile-flag=--via=onnx goes through ONNX instead (in a suite: --flow iree-via-onnx)"
# A file beside a converted model (JSON): of each name in the locations of MLIR, what kind of operator or module it is,
# in the model's order.
OP_TYPES = "op_types.json"
# What a conversion may write beside the model.
_BESIDE = (".data", ".irpa", OP_TYPES)


def can_convert(have: str, want: str) -> bool:
    """Whether models of one format can be made into another."""
    return (have, want) in CONVERSIONS


def convert(
    model: Model, want: str, work: Work, debug_ir: Path | None = None, *, debug_ir_passes: bool = False
) -> tuple[Model, str]:
    """A model in another format, made or from the cache.

    Args:
        work: how it is done; a ``timeout`` of None is half an hour.
        debug_ir: a folder for what the framework's own compiler makes of the model, where it shows that; or None.
        debug_ir_passes: whether what it is after every pass goes there as well.

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
    versions = [needed_version(package, conversion.packages[0]) for package in conversion.packages]
    by = f"{conversion.by} {versions[0]}"
    key = Cache.key(
        "conversion",
        model=model.digest,
        function=model.function,
        dims=dict(model.dims),
        convert=function_version(conversion.convert),
        versions=versions,
        version=_VERSION,
    )
    name = f"model{conversion.suffix}"
    timeout = work["timeout"] or CONVERT_TIMEOUT_S
    how: IsolatedCall = {"isolated": work["isolated"], "timeout": timeout, "log": work["log"]}

    def make(folder: Path) -> None:
        arguments: dict[str, Any] = {"path": str(model.path.absolute()), "function": model.function}
        arguments |= {"dims": dict(model.dims), "output": str(folder / name)}
        who = conversion.by
        with compiling(who, died=f"{who} died", failed=f"{who} cannot convert {model.path.name} to {want}"):
            call_isolated(conversion.convert, arguments, how)

    if debug_ir is not None and conversion.debug is not None:
        seen: dict[str, Any] = {"path": str(model.path.absolute()), "function": model.function}
        seen |= {"dims": dict(model.dims), "passes": debug_ir_passes}
        seen |= {"folder": str(debug_ir.absolute()), "log": str(work["log"].absolute())}
        with compiling(conversion.by):
            call_isolated(conversion.debug, seen, how)
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
