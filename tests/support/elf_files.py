"""Small ELF files of firmware."""

from __future__ import annotations

import struct


def make_elf(code: bytes = b"\x01\x02\x03\x04", library: str = "") -> bytes:
    """Return an ELF file with a segment of code at 0x1000, and the symbol `main`.

    Args:
        library: name of an object at 0x1000; "": no object.
    """
    names, header = b"\0main\0" + library.encode() + b"\0", 52 + 32
    symbols = bytes(16) + struct.pack("<IIIBBH", 1, 0x1001, 4, 2, 0, 1)
    if library:
        symbols += struct.pack("<IIIBBH", 6, 0x1000, 4, 1, 0, 1)
    symbols_at = header + len(code)
    names_at = symbols_at + len(symbols)
    sections_at = names_at + len(names)
    fields = (b"\x7fELF\x01\x01\x01", 2, 40, 1, 0x1001, 52, sections_at, 0, 52, 32, 1, 40, 3, 0)
    segment = (1, header, 0x1000, 0x1000, len(code), len(code) + 8, 5, 4)
    sections = (
        bytes(40)
        + struct.pack("<10I", 0, 2, 0, 0, symbols_at, len(symbols), 2, 1, 4, 16)
        + struct.pack("<10I", 0, 3, 0, 0, names_at, len(names), 0, 0, 1, 0)
    )
    return struct.pack("<16sHHIIIIIHHHHHH", *fields) + struct.pack("<8I", *segment) + code + symbols + names + sections
