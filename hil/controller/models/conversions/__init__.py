"""Convert models between formats in an isolated process, with caching: for example PyTorch to MLIR, Keras to ONNX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hil.controller.models.compiling import IsolatedCall, Work, call_isolated, convert_compiler_errors
from hil.controller.models.description import digest_of_files
from hil.controller.storage.cache import Cache, read_digests
from hil.controller.storage.isolation.isolated import Isolated, make_function_version
from hil.controller.storage.sources.packages import require_version
from hil.core.results import Model
from hil.core.runtimes import choose_runtime
from hil.errors import UsageError


@dataclass(frozen=True)
class Conversion:
    """Conversion of models from one format to another."""

    # Function to call in an isolated process, as ``module:function``. Arguments: ``path`` (the model's file),
    # ``function`` (the entry point), ``dims`` (sizes for symbolic dimensions by name) and ``output`` (the file to
    # write; further files go into the same directory). Inputs and outputs keep order, dtypes and shapes. The function
    # raises CompileFailed; other exceptions also become CompileFailed.
    convert: str
    by: str
    suffix: str
    packages: tuple[str, ...]  # packages whose versions affect the result; the first has the name of hil's extra
    # Optional function that dumps the IR of the framework's compiler. In place of ``output``, its arguments are
    # ``folder``, ``log`` (file for the compiler's output) and ``passes`` (True to dump the IR after every pass).
    debug: str | None = None


_HERE = "hil.controller.models.conversions"
_TF_TO_MLIR = (f"{_HERE}.tensorflow_program:to_mlir", "tensorflow", ".mlirbc")
_TF_TO_TFLITE = (f"{_HERE}.tensorflow_program:to_tflite", "tflite converter", ".tflite")
_TF_TO_ONNX = (f"{_HERE}.tensorflow_onnx:to_onnx", "tf2onnx", ".onnx")
_HLO = "hil.controller.models.tensorflow.hlo:write_hlo"
# (source format, target format) -> conversion.
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
# Increment this when the conversion result changes with the same packages.
_VERSION = 3
CONVERT_TIMEOUT_SECONDS = 1800.0
# Hint for operators that torch-mlir or IREE do not support.
ONNX_HINT = "convert through ONNX with --compile-flag=--via=onnx (in a suite: --flow iree-via-onnx)"
# JSON file next to a converted model: names in MLIR locations -> operator or module type, in the model's order.
OP_TYPES = "op_types.json"
# Name endings of files that a conversion may write in addition to the model.
_EXTRA_SUFFIXES = (".data", ".irpa", OP_TYPES)


def can_convert(have: str, want: str) -> bool:
    """Return True if hil can convert models between these formats."""
    return (have, want) in CONVERSIONS


def convert(
    model: Model, want: str, work: Work, debug_ir: Path | None = None, *, debug_ir_passes: bool = False
) -> tuple[Model, str]:
    """Convert a model or take the conversion from the cache.

    Return the new model, and the converter's name and version.

    Args:
        model: model to convert.
        want: target format.
        work: execution settings; a ``timeout`` of None means half an hour.
        debug_ir: directory for the IR of the framework's compiler, if supported; None disables it.
        debug_ir_passes: also dump the IR after every pass.

    Raises:
        UsageError: the conversion is unsupported, or the framework is not installed.
        CompileFailed, CompileCrashed, StageTimeout: the conversion failed; ``detail`` has the framework's message.
        StorageError: the result cannot be stored.
    """
    if model.format == want:
        return model, ""
    conversion = CONVERSIONS.get((model.format, want))
    if conversion is None:
        raise UsageError(f"cannot convert {model.path.name} to {want}: unsupported conversion from {model.format}")
    try:
        versions = [require_version(package, conversion.packages[0]) for package in conversion.packages]
    except UsageError as error:
        if runtime := choose_runtime(model.format, ""):
            # The flow has the same name as the runtime.
            error.hint += f"; or use --runtime {runtime} (in a suite: --flow {runtime}), which needs no conversion"
            error.option = "--runtime"
        raise
    by = f"{conversion.by} {versions[0]}"
    key = Cache.key(
        "conversion",
        model=model.digest,
        function=model.function,
        dims=dict(model.dims),
        convert=make_function_version(conversion.convert),
        versions=versions,
        version=_VERSION,
    )
    name = f"model{conversion.suffix}"
    timeout = work["timeout"] or CONVERT_TIMEOUT_SECONDS
    how: IsolatedCall = {"isolated": work["isolated"], "timeout": timeout, "log": work["log"]}

    def make(folder: Path) -> None:
        arguments: dict[str, Any] = {"path": str(model.path.absolute()), "function": model.function}
        arguments |= {"dims": dict(model.dims), "output": str(folder / name)}
        who = conversion.by
        with convert_compiler_errors(
            who, died=f"{who} crashed", failed=f"{who} cannot convert {model.path.name} to {want}"
        ):
            call_isolated(conversion.convert, arguments, how)

    if debug_ir is not None and conversion.debug is not None:
        seen: dict[str, Any] = {"path": str(model.path.absolute()), "function": model.function}
        seen |= {"dims": dict(model.dims), "passes": debug_ir_passes}
        seen |= {"folder": str(debug_ir.absolute()), "log": str(work["log"].absolute())}
        with convert_compiler_errors(conversion.by):
            call_isolated(conversion.debug, seen, how)
    meta = {"model": model.name, "converted by": by}
    entry, _ = work["cache"].get_or_make(key, meta, make, work["recompute"])
    digests = {
        file: digest for file, digest in read_digests(entry).items() if file == name or file.endswith(_EXTRA_SUFFIXES)
    }
    files = {file: entry / file for file in digests}
    return replace(model, format=want, path=entry / name, files=files, digest=digest_of_files(digests)), by


def convert_to_onnx(model: Model, *, cache: Cache, isolated: Isolated, log: Path) -> Model:
    """Convert a model to ONNX, the format for splitting and inspecting models.

    Nodes of PyTorch programs have module paths.

    Raises:
        UsageError, CompileFailed, CompileCrashed, StageTimeout: see :func:`convert`.
    """
    if model.format != "onnx" and not can_convert(model.format, "onnx"):
        raise UsageError(
            f"{model.path.name} is {model.format}: expected ONNX or a format that converts to ONNX",
            hint="pass the ONNX file that the model was converted from",
        )
    work: Work = {"cache": cache, "isolated": isolated, "recompute": False, "timeout": None, "log": log}
    return convert(model, "onnx", work)[0]
