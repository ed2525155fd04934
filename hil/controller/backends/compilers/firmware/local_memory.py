"""Refuse dispatches that need memory for a workgroup, which the firmware does not provide.

The compiler describes its functions in structures of IREE's executable library, version 6 (`iree_hal_executable_*_v0_t`
in the compiler's LLVM IR, for 32-bit targets).
"""

from __future__ import annotations

import struct

from hil.errors import CompileFailed
from hil.formats.elf32 import Elf32

# Header, count and table of imports; count of functions, and tables of functions, attributes, parameters, occupancies
# and names.
_LIBRARY = struct.Struct("<9I")
# Flags, pages of local memory; then counts, sizes and reserved words.
_ATTRIBUTES = struct.Struct("<QH54x")
_POINTER = struct.Struct("<I")
_PAGE = 4096
_MAX_NAME = 256


def check_local_memory(elf: Elf32, query: str) -> None:
    """Raise CompileFailed if a dispatch needs local memory.

    Args:
        query: name of the library's query function.
    """
    symbol = f"{query}_v0"
    address = next((address for name, address, *_ in elf.iter_symbols() if name == symbol), None)
    if address is None:
        raise CompileFailed(
            f"the static library has no symbol {symbol}", hint="use IREE 3.13, which hil is tested with"
        )
    try:
        needs = _read_local_memory(elf, address)
    except ValueError as error:
        raise CompileFailed(f"the description of the static library is damaged: {error}") from error
    if needs:
        texts = [f"{name} ({size:,} bytes)" for name, size in needs.items()]
        raise CompileFailed(
            "firmware has no local memory for workgroups, which these dispatches need: " + ", ".join(texts),
            hint="remove compiler flags that select local memory, or compile the operation in another way",
        )


def _read_local_memory(elf: Elf32, library: int) -> dict[str, int]:
    """Return the bytes of local memory of each dispatch that needs some."""
    *_, count, _, attributes, _, _, names = _LIBRARY.unpack(elf.read_memory(library, _LIBRARY.size))
    if not attributes:
        return {}
    found = {}
    for place in range(count):
        _, pages = _ATTRIBUTES.unpack(elf.read_memory(attributes + place * _ATTRIBUTES.size, _ATTRIBUTES.size))
        if pages:
            name = f"dispatch {place}"
            if names:
                (pointer,) = _POINTER.unpack(elf.read_memory(names + place * _POINTER.size, _POINTER.size))
                name = _read_text(elf, pointer)
            found[name] = pages * _PAGE
    return found


def _read_text(elf: Elf32, address: int) -> str:
    """Return the text at an address, which ends with a zero byte."""
    text = bytearray()
    while len(text) < _MAX_NAME and (byte := elf.read_memory(address + len(text), 1)) != b"\0":
        text += byte
    return text.decode(errors="replace")
