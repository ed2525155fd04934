"""What a program takes and gives, read from its file on the host: loading it needs a device, reading it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hil.bundle import Artifact
from hil.controller.commanded.values import Signature
from hil.controller.isolated import Isolated, IsolatedError
from hil.errors import LoadFailed, one_of
from hil.iree_values import parse_declaration

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
    functions: dict[str, str] = said["functions"]
    names = list(functions)
    chosen = artifact.function or (names[0] if len(names) == 1 else "main" if "main" in names else "")
    if chosen not in functions:
        wanted = (
            "no function" if not names else f"no function {chosen!r}" if chosen else "several functions and none chosen"
        )
        raise LoadFailed(f"the module has {wanted}", hint=one_of(names, "--function with one of: "))
    # The compiler writes the function's name as it is, spaces and brackets and all.
    inputs, outputs = parse_declaration(functions[chosen].replace(f"func @{chosen}(", "func @f(", 1))
    return Signature(chosen, inputs, outputs)


def read(path: str) -> dict[str, Any]:
    """The functions of an IREE module and the declaration of each; runs in a process of its own.

    Raises:
        LoadFailed: it is no module.
    """
    import iree.runtime as rt

    try:
        module = rt.VmModule.mmap(rt.VmInstance(), path)
        every = set(module.function_names)
        # "f$async" is the second face of f; a name of the user's own may hold a dollar sign as well.
        names = [
            name for name in every if not name.startswith("__") and name.removesuffix("$async") not in every - {name}
        ]
        declared = {name: module.lookup_function(name).reflection.get("iree.abi.declaration", "") for name in names}
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = lines[0][:400] if lines else type(error).__name__
        raise LoadFailed(f"IREE refused {Path(path).name}: {said}", detail=str(error)) from error
    return {"functions": declared}
