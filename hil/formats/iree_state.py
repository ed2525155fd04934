"""Detect IREE modules with functions that store state between calls.

A module is a flatbuffer (iree/schemas/bytecode_module_def.fbs), optionally inside a zip file. IREE's
compiler turns each mutable global into a module-level variable, and functions write it with
``vm.global.store.*``. So a module has state if any function except the initializer contains such an
instruction.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

_IDENTIFIER = b"IREE"
# Numbers of the table fields that this module reads.
_TYPES, _EXPORTS, _STATE, _FUNCTIONS, _VERSION, _CODE = 4, 7, 11, 12, 13, 14
# Instruction set version of these opcodes. Only the major version, in the upper half, must match.
_KNOWN_VERSION = 17
_FUNCTION = struct.Struct("<iiIhhhh")
_INITIALIZER = b"__init"
# Store opcodes. The opcode for references is followed by a variable number and a type number, others by a byte offset.
_STORE_REF = re.compile(rb"(?=\x09(.{4})(.{4}))", re.DOTALL)
_STORE_NUMBER = re.compile(rb"(?=(?:\x01|\x05|\xe0\x01|\xe1\x01)(.{4}))", re.DOTALL)


def has_state(data: memoryview) -> bool:
    """Return True if a module's function calls may affect later calls.

    Returns False for damaged modules and unknown instruction sets. A constant in the code may look like a store
    instruction; the function then returns True.
    """
    try:
        return _has_state(_Table.get_root(data))
    except (struct.error, IndexError, ValueError, OverflowError):
        return False


def _has_state(module: _Table) -> bool:
    state = module.read_table(_STATE)
    if state is None or module.number(_VERSION) >> 16 != _KNOWN_VERSION:
        return False
    size, references = state.number(0), state.number(1)
    types = module.find_vector(_TYPES)[1]
    initializers = {export.number(1) for export in module.iter_tables(_EXPORTS) if export.text(0) == _INITIALIZER}
    at, count = module.find_vector(_FUNCTIONS)
    start, length = module.find_vector(_CODE)
    code = bytes(module.data[start : start + length])
    for number in range(count):
        begin, extent, *_ = _FUNCTION.unpack_from(module.data, at + number * _FUNCTION.size)
        if number in initializers:
            continue
        body = code[begin : begin + extent]
        if any(_decode_u32(m[1]) < references and _decode_u32(m[2]) < types for m in _STORE_REF.finditer(body)):
            return True
        if any(_decode_u32(m[1]) < size for m in (_STORE_NUMBER.finditer(body) if size else ())):
            return True
    return False


def _decode_u32(data: bytes) -> int:
    return int.from_bytes(data, "little")


class _Table:
    """Flatbuffer table. Agents do not have the flatbuffers package."""

    def __init__(self, data: memoryview, at: int) -> None:
        self.data = data
        self._at = at
        self._fields = at - struct.unpack_from("<i", data, at)[0]
        self._size = struct.unpack_from("<H", data, self._fields)[0]

    @staticmethod
    def get_root(data: memoryview) -> _Table:
        """Return the module's root table. Raises ValueError if missing."""
        # At the start, or after the header of a zip file's first entry.
        begin = bytes(data[:4096]).index(_IDENTIFIER) - 4
        return _Table(data[begin:], struct.unpack_from("<I", data, begin)[0])

    def _place(self, field: int) -> int:
        """Return the offset of a field's value; 0 if the field is missing."""
        slot = 4 + 2 * field
        offset = struct.unpack_from("<H", self.data, self._fields + slot)[0] if slot < self._size else 0
        return self._at + offset if offset else 0

    def number(self, field: int) -> int:
        place = self._place(field)
        return int(struct.unpack_from("<I", self.data, place)[0]) if place else 0

    def read_table(self, field: int) -> _Table | None:
        place = self._place(field)
        return _Table(self.data, self._find_target(place)) if place else None

    def find_vector(self, field: int) -> tuple[int, int]:
        """Return a vector's start offset and length."""
        place = self._place(field)
        if not place:
            return 0, 0
        start = self._find_target(place)
        return start + 4, int(struct.unpack_from("<I", self.data, start)[0])

    def iter_tables(self, field: int) -> Iterator[_Table]:
        start, count = self.find_vector(field)
        for number in range(count):
            yield _Table(self.data, self._find_target(start + 4 * number))

    def text(self, field: int) -> bytes:
        start, count = self.find_vector(field)
        return bytes(self.data[start : start + count])

    def _find_target(self, place: int) -> int:
        return place + int(struct.unpack_from("<I", self.data, place)[0])
