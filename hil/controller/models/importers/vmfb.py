"""Programs that IREE compiled elsewhere: taken as they are, with the signature that they tell."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.core.tensors import TensorSpec
from hil.errors import ImportFailed, LoadFailed
from hil.formats.iree_values import SCALAR_PREFIX, choose_function, functions_in, read_functions

# A flatbuffer of an IREE module has this identifier; by default it lies in a ZIP archive made for memory mapping.
_IDENTIFIER = b"IREE"
_ZIP = b"PK\x03\x04"
_LEAST_BYTES = 64


def describe(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Check the first bytes, and read what the function takes and gives where the IREE of this machine can.

    Raises:
        ImportFailed: this is no .vmfb, or it has no outputs.
    """
    file = Path(path)
    with file.open("rb") as opened:
        head = opened.read(_LEAST_BYTES)
    if len(head) < _LEAST_BYTES or not (head.startswith(_ZIP) or _IDENTIFIER in head[4:16]):
        raise ImportFailed(f"{file.name} is no IREE program", hint="a .vmfb is what iree-compile writes")
    try:
        chosen = choose_function(functions_in(read_functions(str(file))), function)
        inputs, outputs = chosen.signature()
    except LoadFailed:
        # Of a newer IREE, or of a vendor's, or with other functions: the board decides, and says why.
        return {"function": function, "inputs": None, "outputs": None, "ranges": {}, "external": [], "producer": {}}
    if not outputs:
        raise ImportFailed(f"{file.name} has no outputs", hint="a program that returns nothing cannot be checked")
    return {
        "function": chosen.name,
        "inputs": list(map(_told, inputs)),
        "outputs": list(map(_told, outputs)),
        "ranges": {},
        "external": [],
        "producer": {},
    }


def _told(spec: TensorSpec) -> list[Any]:
    return [spec.name.removeprefix(SCALAR_PREFIX), spec.dtype, list(spec.shape)]
