"""Programs that IREE compiled elsewhere: taken as they are. Only a board can load one and tell its signature."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.errors import ImportFailed, LoadFailed

# A flatbuffer of an IREE module has this identifier; by default it lies in a ZIP archive made for memory mapping.
_IDENTIFIER = b"IREE"
_ZIP = b"PK\x03\x04"
_LEAST_BYTES = 64


def describe(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Check the first bytes and, where the IREE of this machine can read the file, that the function gives something.

    Raises:
        ImportFailed: this is no .vmfb, or it has no outputs.
    """
    file = Path(path)
    with file.open("rb") as opened:
        head = opened.read(_LEAST_BYTES)
    if len(head) < _LEAST_BYTES or not (head.startswith(_ZIP) or _IDENTIFIER in head[4:16]):
        raise ImportFailed(f"{file.name} is no IREE program", hint="a .vmfb is what iree-compile writes")
    _check_outputs(file, function)
    return {"function": function, "inputs": None, "outputs": None, "ranges": {}, "external": [], "producer": {}}


def _check_outputs(file: Path, function: str) -> None:
    from hil.controller.commanded.signature import functions_in, read
    from hil.iree_values import choose_function

    try:
        _, outputs = choose_function(functions_in(read(str(file))), function).signature()
    except LoadFailed:
        return  # of a newer IREE, or of a vendor's, or with other functions: the board decides, and says why
    if not outputs:
        raise ImportFailed(f"{file.name} has no outputs", hint="a program that returns nothing cannot be checked")
