"""The functions of an IREE module, read from its file without a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hil.errors import LoadFailed
from hil.formats.iree_values import Function, functions_of


def read(path: str) -> dict[str, Any]:
    """The functions of an IREE module, for :func:`functions_in`; runs in a process of its own.

    Raises:
        LoadFailed: it is no module.
    """
    import iree.runtime as rt

    try:
        functions = functions_of(rt.VmModule.mmap(rt.VmInstance(), path))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = lines[0][:400] if lines else type(error).__name__
        raise LoadFailed(f"IREE refused {Path(path).name}: {said}", detail=str(error)) from error
    return {"functions": [asdict(one) for one in functions.values()]}


def functions_in(said: Mapping[str, Any]) -> dict[str, Function]:
    """The functions that :func:`read` found, by name."""
    return {one["name"]: Function(**one) for one in said["functions"]}
