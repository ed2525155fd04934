"""What a program takes and gives, read from its file on the host: loading it needs a device, reading it does not."""

from __future__ import annotations

from pathlib import Path

from hil.controller.devices.agentless.values import Signature
from hil.controller.storage.isolated import Isolated, IsolatedError
from hil.core.artifacts import Artifact
from hil.errors import LoadFailed
from hil.formats.iree_values import choose_function, functions_in, read_functions

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
        said = isolated.call(read_functions, {"path": path}, timeout=_READ_S, log=log)
    except IsolatedError as error:
        raise LoadFailed(
            f"{artifact.main} is no program that IREE can read: {error.message}", detail=error.detail
        ) from error
    chosen = choose_function(functions_in(said), artifact.function)
    return Signature(chosen.name, *chosen.signature())
