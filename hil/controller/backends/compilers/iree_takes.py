"""Models of other frameworks on their way to iree-compile, which takes ONNX (by hil's importer) and MLIR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.controller.models.conversions import can_convert, convert
from hil.controller.models.conversions.torch_program import ONNX_HINT
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.core.results import Model
from hil.errors import UsageError

# The format that a model of another framework is converted to first; no flag of iree-compile.
VIA = "--via="


@dataclass(frozen=True)
class Taken:
    """A model in a format that iree-compile takes.

    Attributes:
        model: ONNX or MLIR.
        way: the flags that told how to get there.
        flags: the others, for iree-compile.
        by: who converted it, with version; "" where it came as it is.
        hint: what else to try where iree-compile refuses it; "" is nothing.
    """

    model: Model
    way: tuple[str, ...]
    flags: tuple[str, ...]
    by: str = ""
    hint: str = ""


def as_iree_takes(
    model: Model,
    flags: Sequence[str],
    *,
    cache: Cache,
    isolated: Isolated,
    recompute: bool = False,
    timeout: float | None,
    log: Path,
) -> Taken:
    """A model as ONNX or MLIR, converted where it is neither.

    Args:
        model: what was imported.
        flags: of the compiler; ``--via=onnx`` or ``--via=mlir`` says what to convert to (MLIR unless told).
        cache: where conversions are kept.
        isolated: where they are done.
        recompute: do it though the cache has it.
        timeout: seconds, or None.
        log: what is printed meanwhile is appended here.

    Raises:
        UsageError: it cannot be converted, or not this way.
        CompileFailed, CompileCrashed, StageTimeout: converting failed.
    """
    way = tuple(flag for flag in flags if flag.startswith(VIA))
    others = tuple(flag for flag in flags if not flag.startswith(VIA))
    if model.format in ("onnx", "mlir"):
        return Taken(model, (), others)
    want = way[-1].removeprefix(VIA) if way else "mlir"
    if want not in ("onnx", "mlir") or not can_convert(model.format, want):
        ways = [f"{VIA}{other}" for other in ("mlir", "onnx") if can_convert(model.format, other)]
        raise UsageError(
            f"the iree compiler cannot take {model.path.name}, which is {model.format}"
            + (f", through {want}" if way else ""),
            hint=f"one of {', '.join(ways)}" if ways else "it makes programs of models that are or become MLIR",
        )
    settings: dict[str, Any] = {"cache": cache, "isolated": isolated, "recompute": recompute, "log": log}
    hint = ONNX_HINT if want == "mlir" and can_convert(model.format, "onnx") else ""
    model, by = convert(model, want, timeout=timeout, **settings)
    return Taken(model, way, others, by, hint)
