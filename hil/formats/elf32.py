"""Read 32-bit little-endian ELF files of firmware: the image in flash, memory sizes and symbols.

Source: Tool Interface Standard, "Executable and Linking Format", version 1.2.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_HEADER = struct.Struct("<16sHHIIIIIHHHHHH")
_SEGMENT = struct.Struct("<IIIIIIII")
_SECTION = struct.Struct("<IIIIIIIIII")
_SYMBOL = struct.Struct("<IIIBBH")
_LOAD, _SYMTAB = 1, 2
_FUNCTION, _OBJECT = 2, 1


@dataclass(frozen=True)
class Segment:
    """Loadable segment."""

    address: int  # at run time
    load_address: int  # in flash
    data: bytes
    size: int  # in memory


class Elf32:
    """ELF file. All methods raise ValueError if the file is damaged."""

    def __init__(self, data: bytes) -> None:
        try:
            fields = _HEADER.unpack_from(data)
        except struct.error as error:
            raise ValueError("the ELF header is incomplete") from error
        if fields[0][:6] != b"\x7fELF\x01\x01":
            raise ValueError("not a 32-bit little-endian ELF file")
        self._data = data
        (self._segments_at, self._sections_at) = fields[5:7]
        (self._segment_count, self._section_count) = fields[10], fields[12]

    def list_segments(self) -> list[Segment]:
        """Return the segments that are loaded."""
        found = []
        for place in range(self._segment_count):
            kind, offset, address, load_address, file_size, size, *_ = self._unpack(
                _SEGMENT, self._segments_at + place * _SEGMENT.size
            )
            if kind == _LOAD and size:
                found.append(Segment(address, load_address, self._slice(offset, file_size), size))
        return found

    def make_image(self, region: range = range(1 << 32)) -> tuple[int, bytes]:
        """Return the lowest load address in a region, and the bytes from there. Gaps are zero."""
        stored = [one for one in self.list_segments() if one.data and one.load_address in region]
        if not stored:
            raise ValueError("the ELF file has no code")
        start = min(one.load_address for one in stored)
        end = max(one.load_address + len(one.data) for one in stored)
        if end - start > len(self._data) + (1 << 20):
            raise ValueError("the segments are too far apart for one image")
        image = bytearray(end - start)
        for one in stored:
            image[one.load_address - start : one.load_address - start + len(one.data)] = one.data
        return start, bytes(image)

    def read_memory(self, address: int, size: int) -> bytes:
        """Return the initial bytes of memory at run time. Raises ValueError if the file does not contain them."""
        for one in self.list_segments():
            start = address - one.address
            if start >= 0 and start + size <= len(one.data):
                return one.data[start : start + size]
        raise ValueError(f"the ELF file has no data for {size} bytes at {address:#x}")

    def iter_symbols(self) -> Iterator[tuple[str, int, int, bool]]:
        """Yield name, address, size of functions and objects, and whether a symbol is a function."""
        for place in range(self._section_count):
            section = self._unpack(_SECTION, self._sections_at + place * _SECTION.size)
            if section[1] != _SYMTAB:
                continue
            names_at, names_size = self._unpack(_SECTION, self._sections_at + section[6] * _SECTION.size)[4:6]
            names = self._slice(names_at, names_size)
            for offset in range(section[4], section[4] + section[5], _SYMBOL.size):
                name_at, address, size, kind, *_ = self._unpack(_SYMBOL, offset)
                name = names[name_at : names.find(b"\0", name_at)].decode(errors="replace")
                if name and kind & 15 in (_FUNCTION, _OBJECT, 0):
                    yield name, address & ~1 if kind & 15 == _FUNCTION else address, size, kind & 15 == _FUNCTION

    def _unpack(self, form: struct.Struct, offset: int) -> tuple[int, ...]:
        try:
            return form.unpack_from(self._data, offset)
        except struct.error as error:
            raise ValueError("the ELF file is truncated") from error

    def _slice(self, offset: int, size: int) -> bytes:
        if offset + size > len(self._data):
            raise ValueError("the ELF file is truncated")
        return self._data[offset : offset + size]
