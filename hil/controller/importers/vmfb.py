"""Programs that IREE compiled elsewhere: taken as they are. Only a board can load one and tell its signature."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.errors import ImportFailed

# A flatbuffer of an IREE module has this identifier; by default it lies in a ZIP archive made for memory mapping.
_IDENTIFIER = b"IREE"
_ZIP = b"PK\x03\x04"
_LEAST_BYTES = 64


def describe(path: str, function: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Check the first bytes.

    Raises:
        ImportFailed: this is no .vmfb.
    """
    file = Path(path)
    with file.open("rb") as opened:
        head = opened.read(_LEAST_BYTES)
    if len(head) < _LEAST_BYTES or not (head.startswith(_ZIP) or _IDENTIFIER in head[4:16]):
        raise ImportFailed(f"{file.name} is no IREE program", hint="a .vmfb is what iree-compile writes")
    return {"function": function, "inputs": None, "outputs": None, "ranges": {}, "external": [], "producer": {}}
