"""Compile models with IREE: ONNX, MLIR, and formats that convert to one of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hil.controller.backends.compilers import take_as_it_is
from hil.controller.backends.compilers.arithmetic import convert_arithmetic, split_flags
from hil.controller.backends.compilers.iree_program import VIA, choose_settings, compile_program, describe_source
from hil.controller.models.compiling import CompileOrder, Work
from hil.controller.models.conversions import ONNX_HINT, can_convert, convert
from hil.core.arithmetic import ARITHMETIC_FLAG
from hil.core.results import Artifact, Model
from hil.errors import CompileCrashed, CompileFailed, StageTimeout, UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack


def compile_iree(model: Model, **order: Unpack[CompileOrder]) -> Artifact:
    """Compile a model to a .vmfb file, with large weights in a separate file.

    Accepts ONNX, MLIR, and formats that convert to one of them.

    Arguments and errors: see :func:`hil.controller.backends.compilers.compile_model`.
    """
    if model.format == "vmfb":
        return take_as_it_is(model, **order)
    if order["runtime"] != "iree":
        raise UsageError(f"the iree compiler requires the runtime iree, got {order['runtime']}")
    passes = order.get("debug_ir_passes", False)
    arithmetic, flags = split_flags(order["flags"])
    taken = convert_for_iree(model, flags, order, order["debug_ir"], debug_ir_passes=passes)
    if arithmetic and taken.model.format == "onnx":
        way = (*taken.way, f"{ARITHMETIC_FLAG}{arithmetic}")
        taken = replace(taken, model=convert_arithmetic(taken.model, arithmetic, order), way=way)
    begin = time.monotonic()
    try:
        artifact = compile_program(taken.model, taken.flags, order["debug_ir"], order, debug_ir_passes=passes)
    except (CompileFailed, CompileCrashed, StageTimeout) as error:
        if isinstance(error, CompileFailed):
            error.hint = error.hint or taken.hint
        if "failure" in order:
            from hil.controller.backends.compilers.iree_failure import keep_failure

            recipe = choose_settings(taken.model, taken.flags, order["isolated"].folders)
            seconds = time.monotonic() - begin
            keep_failure(
                error, describe_source(taken.model, recipe.flags), recipe.key, seconds, order["failure"], order
            )
        raise
    compiler = " after ".join(filter(None, (artifact.compiler, taken.by)))
    return replace(artifact, compiler=compiler, flags=(*taken.way, *artifact.flags))


@dataclass(frozen=True)
class Taken:
    """Model in a format that iree-compile accepts, with the flags."""

    model: Model
    way: tuple[str, ...]  # flags that selected the conversion
    flags: tuple[str, ...]  # flags for iree-compile
    by: str = ""  # name and version of the converter; "" if not converted
    hint: str = ""  # an alternative to suggest if iree-compile rejects the model; "" if none


def convert_for_iree(
    model: Model, flags: Sequence[str], work: Work, debug_ir: Path | None = None, *, debug_ir_passes: bool = False
) -> Taken:
    """Return a model as ONNX or MLIR. Convert it if necessary.

    Args:
        debug_ir, debug_ir_passes: See :func:`hil.controller.models.conversions.convert`.
        flags: Compiler flags. ``--via=onnx`` or ``--via=mlir`` selects the target format. The default is MLIR if
            available.

    Raises:
        UsageError: the model cannot be converted to ONNX or MLIR, or to the requested format.
        CompileFailed, CompileCrashed, StageTimeout: conversion failed.
    """
    way = tuple(flag for flag in flags if flag.startswith(VIA))
    others = tuple(flag for flag in flags if not flag.startswith(VIA))
    if model.format in ("onnx", "mlir"):
        return Taken(model, (), others)
    ways = [f"{VIA}{other}" for other in ("mlir", "onnx") if can_convert(model.format, other)]
    want = (way[-1] if way else ways[0] if ways else VIA).removeprefix(VIA)
    if f"{VIA}{want}" not in ways:
        raise UsageError(
            f"the iree compiler cannot compile {model.path.name} ({model.format})"
            + (f" with {VIA}{want}" if way else ""),
            hint=f"use one of {', '.join(ways)}"
            if ways
            else "supported formats: ONNX, MLIR, and formats that convert to them",
        )
    hint = ONNX_HINT if want == "mlir" and can_convert(model.format, "onnx") else ""
    model, by = convert(model, want, work, debug_ir, debug_ir_passes=debug_ir_passes)
    return Taken(model, way, others, by, hint)
