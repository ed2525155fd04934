"""Models of one format made into another, in a process of their own, once: PyTorch into MLIR, Keras into TFLite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import MappingProxyType

from hil.bundle import Model
from hil.controller.cache import Cache
from hil.controller.isolated import Isolated, IsolatedCrash, IsolatedFailure, IsolatedTimeout
from hil.controller.versions import version
from hil.digest import digest_file
from hil.errors import CompileCrashed, CompileFailed, StageTimeout, UsageError


@dataclass(frozen=True)
class Conversion:
    """How a model of one format becomes one of another.

    Attributes:
        convert: ``module:function``, called in a process of its own with ``path`` (the model's file), ``function`` (its
            entry point) and ``output`` (the file to write; further files beside it). Inputs and outputs keep order,
            dtypes and shapes. Raises CompileFailed; whatever else it raises becomes one.
        by: who does it, as results say it.
        packages: whose versions the result depends on.
        suffix: of the file.
        extra: of hil, which installs the packages.
        version: raise it when the result changes without those.
    """

    convert: str
    by: str
    packages: tuple[str, ...]
    suffix: str
    extra: str
    version: int = 1


_TORCH = "hil.controller.conversions.torch_program"
_TENSORFLOW = "hil.controller.conversions.tensorflow_program"
# (format, format) -> how. What is not here is not converted.
CONVERSIONS: Mapping[tuple[str, str], Conversion] = MappingProxyType(
    {
        ("pt2", "mlir"): Conversion(
            f"{_TORCH}:to_mlir", "torch-mlir", ("torch", "iree-base-compiler"), ".mlirbc", "torch"
        ),
        ("pt2", "onnx"): Conversion(
            f"{_TORCH}:to_onnx", "torch.onnx", ("torch", "onnx", "onnxscript"), ".onnx", "torch"
        ),
        ("tf", "mlir"): Conversion(f"{_TENSORFLOW}:to_mlir", "tensorflow", ("tensorflow",), ".mlir", "tensorflow"),
        ("keras", "mlir"): Conversion(f"{_TENSORFLOW}:to_mlir", "tensorflow", ("tensorflow",), ".mlir", "tensorflow"),
        ("tf", "tflite"): Conversion(
            f"{_TENSORFLOW}:to_tflite", "tflite converter", ("tensorflow",), ".tflite", "tensorflow"
        ),
        ("keras", "tflite"): Conversion(
            f"{_TENSORFLOW}:to_tflite", "tflite converter", ("tensorflow",), ".tflite", "tensorflow"
        ),
    }
)
CONVERT_TIMEOUT_S = 1800.0


def can_convert(have: str, want: str) -> bool:
    """Whether models of one format can be made into another."""
    return (have, want) in CONVERSIONS


def convert(
    model: Model, want: str, *, cache: Cache, isolated: Isolated, recompute: bool, timeout: float | None, log: Path
) -> tuple[Model, str]:
    """A model in another format, made or from the cache.

    Args:
        model: what was imported.
        want: the format.
        cache: where results are kept, by content and versions.
        isolated: where the work is done: frameworks crash, and import for seconds.
        recompute: do it though the cache has it.
        timeout: seconds, or None for half an hour.
        log: what the framework prints is appended here.

    Returns:
        The model, with the same name, inputs and outputs, and who made it, with version.

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
        convert=conversion.convert,
        versions=[needed_version(package, conversion.extra) for package in conversion.packages],
        version=conversion.version,
    )
    name = f"model{conversion.suffix}"

    def make(folder: Path) -> None:
        arguments = {"path": str(model.path.absolute()), "function": model.function, "output": str(folder / name)}
        try:
            isolated.call(conversion.convert, arguments, timeout=timeout or CONVERT_TIMEOUT_S, log=log)
        except IsolatedTimeout as error:
            raise StageTimeout(f"{conversion.by} {error.message}", stage="compile", detail=error.detail) from error
        except IsolatedCrash as error:
            raise CompileCrashed(f"{conversion.by} died: {error.message}", detail=error.detail) from error
        except IsolatedFailure as error:
            raise CompileFailed(
                f"{conversion.by} cannot convert {model.path.name} to {want}: {error.message}", detail=error.detail
            ) from error

    entry, _ = cache.get_or_make(key, {"model": model.name, "converted by": by}, make, recompute)
    files = {path.name: path for path in sorted(entry.iterdir()) if path.name == name or path.suffix in (".data",)}
    return replace(model, format=want, path=entry / name, files=files, digest=digest_file(entry / name)), by


def needed_version(package: str, extra: str) -> str:
    """The version of a package that an extra of hil brings.

    Raises:
        UsageError: it is not installed.
    """
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise UsageError(f"this needs {package}, which is not installed here", hint=f"pip install 'hil[{extra}]'")
