"""TFLite models, read by LiteRT's own interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.storage.packages import needed_version
from hil.errors import ImportFailed, LoadFailed, UsageError
from hil.formats.litert import PACKAGE, open_signature


def describe(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Read the signature of one function; quantised inputs and outputs stay the integers that they are.

    An open dimension is a symbol such as ``x.dim0``.

    Raises:
        ImportFailed: it is no .tflite file, is damaged, takes or returns what hil cannot pass, or returns nothing.
        UsageError: LiteRT is not installed; no such function or dimension; several functions and none chosen.
    """
    version = needed_version(PACKAGE, "tflite")
    file = Path(path)
    _check_head(file)
    try:
        opened = open_signature(file, function, kernels="builtin")
    except LoadFailed as error:
        kind = UsageError if "--function" in error.hint else ImportFailed
        raise kind(error.message, hint=error.hint, detail=error.detail) from error
    if not opened.outputs:
        raise ImportFailed(f"{file.name} has no outputs", hint="a model that returns nothing cannot be checked")
    symbols = {dim for spec in opened.inputs for dim in spec.shape if isinstance(dim, str)}
    if unknown := sorted(set(dims) - symbols):
        have = ", ".join(sorted(symbols)) or "none: every dimension is fixed"
        raise UsageError(f"{file.name} has no dimension {unknown[0]!r}", hint=f"its symbolic dimensions: {have}")
    return {
        "function": opened.name,
        "inputs": [[spec.name, spec.dtype, [_sized(dim, dims) for dim in spec.shape]] for spec in opened.inputs],
        "outputs": [[spec.name, spec.dtype, list(spec.shape)] for spec in opened.outputs],
        "ranges": {},
        "external": [],
        "producer": {
            "read with": f"{PACKAGE} {version}",
            "functions": list(opened.signatures),
            "unseen_state": list(opened.keeping),
        },
    }


def _check_head(file: Path) -> None:
    with file.open("rb") as opened:
        head = opened.read(8)
    if head[4:8] != b"TFL3":
        raise ImportFailed(f"{file.name} is no TFLite model", hint="a .tflite is what TensorFlow's converter writes")


def _sized(dim: int | str | None, dims: Mapping[str, int]) -> int | str | None:
    return dims.get(dim, dim) if isinstance(dim, str) else dim
