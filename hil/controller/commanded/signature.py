"""What a program takes and gives, read from its file on the host: loading it needs a device, reading it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hil.bundle import Artifact
from hil.controller.commanded.values import Signature
from hil.controller.isolated import Isolated, IsolatedError
from hil.errors import LoadFailed
from hil.iree_values import Function, choose_function, functions_of

_READ_S = 60.0


def signature_of(artifact: Artifact, isolated: Isolated, log: Path, *, needs_own: bool) -> Signature:
    """A program's signature: its own where it is an IREE module that this host can read, else what import said.

    Args:
        artifact: the program.
        isolated: reads it in a process of its own; a damaged file may cost that process its life.
        log: what that process prints.
        needs_own: a module that cannot be read is refused; else what is known from the import will do.

    Raises:
        LoadFailed: the module is damaged or has no such function, or nothing is known of its inputs and outputs.
    """
    try:
        return _read_iree(artifact, isolated, log)
    except LoadFailed:
        if needs_own or artifact.inputs is None or artifact.outputs is None:
            raise
    return Signature(artifact.function, tuple(artifact.inputs), tuple(artifact.outputs))


def _read_iree(artifact: Artifact, isolated: Isolated, log: Path) -> Signature:
    path = str(artifact.files[artifact.main].absolute())
    try:
        said = isolated.call(f"{__name__}:read", {"path": path}, timeout=_READ_S, log=log)
    except IsolatedError as error:
        raise LoadFailed(
            f"{artifact.main} is no program that IREE can read: {error.message}", detail=error.detail
        ) from error
    chosen = choose_function(functions_in(said), artifact.function)
    return Signature(chosen.name, *chosen.signature())


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
