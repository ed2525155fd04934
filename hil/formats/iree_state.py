"""Find out from an IREE module whether its functions keep state from call to call.

A module is a flatbuffer (iree/schemas/bytecode_module_def.fbs), perhaps inside a zip file. IREE's compiler makes a
module-level variable of every mutable global, and the function that changes it writes to that variable. So a module
keeps state if any function but the initializer holds an instruction ``vm.global.store.*``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

_IDENTIFIER = b"IREE"
# The table's fields that are read here.
_TYPES, _EXPORTS, _STATE, _FUNCTIONS, _VERSION, _CODE = 4, 7, 11, 12, 13, 14
# The version of the instruction set whose opcodes these are; its upper half counts.
_KNOWN_VERSION = 17
_FUNCTION = struct.Struct("<iiIhhhh")
_INITIALIZER = b"__init"
# Opcodes of stores. After that of references come a variable's number and a type's, after others a place in bytes.
_STORE_REF = re.compile(rb"(?=\x09(.{4})(.{4}))", re.DOTALL)
_STORE_NUMBER = re.compile(rb"(?=(?:\x01|\x05|\xe0\x01|\xe1\x01)(.{4}))", re.DOTALL)


def keeps_state(data: memoryview) -> bool:
    """Return whether calls of a module's functions may leave something behind for later calls.

    A module whose instructions are not known, or that is damaged, counts as one that does not. A constant in the code
    may look like an instruction that stores: then a module counts as one that does.
    """
    try:
        return _keeps_state(_Table.root(data))
    except (struct.error, IndexError, ValueError, OverflowError):
        return False


def _keeps_state(module: _Table) -> bool:
    state = module.table(_STATE)
    if state is None or module.number(_VERSION) >> 16 != _KNOWN_VERSION:
        return False
    size, references = state.number(0), state.number(1)
    types = module.vector(_TYPES)[1]
    initializers = {export.number(1) for export in module.tables(_EXPORTS) if export.text(0) == _INITIALIZER}
    at, count = module.vector(_FUNCTIONS)
    start, length = module.vector(_CODE)
    code = bytes(module.data[start : start + length])
    for number in range(count):
        begin, extent, *_ = _FUNCTION.unpack_from(module.data, at + number * _FUNCTION.size)
        if number in initializers:
            continue
        body = code[begin : begin + extent]
        if any(_u32(m[1]) < references and _u32(m[2]) < types for m in _STORE_REF.finditer(body)):
            return True
        if any(_u32(m[1]) < size for m in (_STORE_NUMBER.finditer(body) if size else ())):
            return True
    return False


def _u32(data: bytes) -> int:
    return int.from_bytes(data, "little")


class _Table:
    """A flatbuffer's table: agents have no package that reads them."""

    def __init__(self, data: memoryview, at: int) -> None:
        self.data = data
        self._at = at
        self._fields = at - struct.unpack_from("<i", data, at)[0]
        self._size = struct.unpack_from("<H", data, self._fields)[0]

    @staticmethod
    def root(data: memoryview) -> _Table:
        """Return the table that the module begins with. Raises ValueError: there is none."""
        # At the beginning, or behind the header of a zip file's first entry.
        begin = bytes(data[:4096]).index(_IDENTIFIER) - 4
        return _Table(data[begin:], struct.unpack_from("<I", data, begin)[0])

    def _place(self, field: int) -> int:
        """Return where a field's value is; 0 where it is not there."""
        slot = 4 + 2 * field
        offset = struct.unpack_from("<H", self.data, self._fields + slot)[0] if slot < self._size else 0
        return self._at + offset if offset else 0

    def number(self, field: int) -> int:
        place = self._place(field)
        return int(struct.unpack_from("<I", self.data, place)[0]) if place else 0

    def table(self, field: int) -> _Table | None:
        place = self._place(field)
        return _Table(self.data, self._target(place)) if place else None

    def vector(self, field: int) -> tuple[int, int]:
        """Return where a vector's items are, and how many."""
        place = self._place(field)
        if not place:
            return 0, 0
        start = self._target(place)
        return start + 4, int(struct.unpack_from("<I", self.data, start)[0])

    def tables(self, field: int) -> Iterator[_Table]:
        start, count = self.vector(field)
        for number in range(count):
            yield _Table(self.data, self._target(start + 4 * number))

    def text(self, field: int) -> bytes:
        start, count = self.vector(field)
        return bytes(self.data[start : start + count])

    def _target(self, place: int) -> int:
        return place + int(struct.unpack_from("<I", self.data, place)[0])
