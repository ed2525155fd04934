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
    """Check the first bytes and, where the IREE of this machine can read the file, that it declares its signature.

    Raises:
        ImportFailed: this is no .vmfb, or nobody could tell what its function takes and gives.
    """
    file = Path(path)
    with file.open("rb") as opened:
        head = opened.read(_LEAST_BYTES)
    if len(head) < _LEAST_BYTES or not (head.startswith(_ZIP) or _IDENTIFIER in head[4:16]):
        raise ImportFailed(f"{file.name} is no IREE program", hint="a .vmfb is what iree-compile writes")
    _check_declaration(file, function)
    return {"function": function, "inputs": None, "outputs": None, "ranges": {}, "external": [], "producer": {}}


def _check_declaration(file: Path, function: str) -> None:
    from hil.controller.commanded.signature import read
    from hil.iree_values import parse_declaration

    try:
        declared: dict[str, str] = read(str(file))["functions"]
    except LoadFailed:
        return  # of a newer IREE, or of a vendor's: the board decides
    chosen = function or next(iter(declared), "")
    if chosen not in declared or (not function and len(declared) > 1):
        return  # as above: its message lists the functions
    if not declared[chosen]:
        raise ImportFailed(
            f"{file.name} does not say what its function {chosen!r} takes and gives: it has no iree.abi.declaration",
            hint="IREE's own way from ONNX leaves it out, hil's does not: hil run MODEL.onnx, hil compile MODEL.onnx",
        )
    try:
        _, outputs = parse_declaration(declared[chosen].replace(f"func @{chosen}(", "func @f(", 1))
    except LoadFailed:
        return
    if not outputs:
        raise ImportFailed(f"{file.name} has no outputs", hint="a program that returns nothing cannot be checked")
