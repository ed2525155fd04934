"""Check that the sizes of a module's resources (``dense_resource<name>``) match their types.

MLIR does not check this.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hil.controller.models.importers.heads import is_bytecode
from hil.core.files import open_file
from hil.errors import ImportFailed

_RESOURCE = re.compile(r"dense_resource<(?P<name>\"[^\"]*\"|[^>]*)>")
# `w: "0x04000000..."`: four bytes of alignment, then the data. The lookbehind makes a name start at a word boundary.
# Without it, the regex would try each letter in a long token, such as other resources' data.
_ENTRY = re.compile(rb'(?P<name>"[^"\n]*"|(?<![\w.$-])[\w.$-]+)\s*:\s*"0x(?P<hex>[0-9A-Fa-f]*)"')
_ELEMENT = re.compile(r"(?P<complex>complex<)?(?:[su]?i|b?f|tf)(?P<bits>\d+)")
_ALIGNMENT_BYTES = 4
# Sections of MLIR bytecode, https://mlir.llvm.org/docs/BytecodeFormat.
_STRINGS, _RESOURCES, _RESOURCE_OFFSETS = 0, 5, 6
_MAGIC_BYTES = 4
_BLOB = 0


def check_resources(path: Path, module: Any) -> None:
    """Raise ImportFailed if a resource of the module has no data, or a size that does not match the type."""
    needed = dict(_iter_needed(module))
    if not needed:
        return
    with open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        held = dict(_find_in_bytecode(data) if is_bytecode(data[:64]) else _find_in_text(data))
    for name, (size, kind) in needed.items():
        if name not in held:
            raise ImportFailed(
                f"{path.name}: resource {name!r} ({kind}) has no data",
                hint="export the module without --mlir-elide-resource-strings-if-larger",
            )
        if held[name] != size:
            raise ImportFailed(
                f"{path.name}: resource {name!r} ({kind}) has {held[name]:,} bytes, expected {size:,}",
                hint="the module is damaged: export it again",
            )


def _iter_needed(module: Any) -> Iterator[tuple[str, tuple[int, str]]]:
    """Yield each resource that operations use, with the required size in bytes and the type."""
    from iree.compiler import ir

    found: dict[str, tuple[int, str]] = {}

    def visit_operation(operation: Any) -> Any:
        for named in operation.attributes:
            attribute = operation.attributes[named] if isinstance(named, str) else named.attr
            try:
                resource = ir.DenseResourceElementsAttr(attribute)
            except ValueError:  # a different kind of attribute
                continue
            name = _RESOURCE.match(str(resource))
            size = _count_bytes(ir.ShapedType(resource.type))
            if name and size is not None:
                found[name["name"].strip('"')] = size, str(resource.type)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit_operation)
    yield from found.items()


def _count_bytes(kind: Any) -> int | None:
    """Return the tensor's size in bytes, or None if the size is not a whole number of bytes."""
    element = _ELEMENT.match(str(kind.element_type))
    if element is None or int(element["bits"]) % 8:
        return None
    sizes = [int(kind.get_dim_size(axis)) for axis in range(kind.rank)]
    return math.prod(sizes) * int(element["bits"]) // 8 * (2 if element["complex"] else 1)


def _find_in_text(data: Any) -> Iterator[tuple[str, int]]:
    for entry in _ENTRY.finditer(data, max(data.rfind(b"{-#"), 0)):
        yield entry["name"].decode(errors="replace").strip('"'), len(entry["hex"]) // 2 - _ALIGNMENT_BYTES


def _find_in_bytecode(data: Any) -> Iterator[tuple[str, int]]:
    """Yield name and size of each resource blob. Raises ImportFailed if the file is damaged."""
    try:
        sections = dict(_iter_sections(data))
        if _RESOURCE_OFFSETS not in sections:
            return
        names = _read_names(data, sections[_STRINGS])
        reader, start = _Reader(data, sections[_RESOURCE_OFFSETS][0]), sections[_RESOURCES][0]
        end = sections[_RESOURCE_OFFSETS][1]
        reader.number()  # number of groups without a dialect; all groups have the same format
        while reader.at < end:
            reader.number()  # name or dialect of the group
            for _ in range(reader.number()):
                name, size, kind = names[reader.number()], reader.number(), reader.read_byte()
                if kind == _BLOB:
                    blob = _Reader(data, start)
                    blob.number()  # alignment
                    yield name, blob.number()
                start += size
    except (IndexError, KeyError) as error:
        raise ImportFailed("the MLIR bytecode is damaged: cannot read the resources") from error


def _iter_sections(data: Any) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the number of each section, with start and end offsets."""
    reader = _Reader(data, _MAGIC_BYTES)
    reader.number()  # version
    reader.at = data.find(b"\0", reader.at) + 1  # skip the producer string
    while reader.at < len(data):
        number = reader.read_byte()
        size = reader.number()
        if number & 0x80:
            alignment = reader.number()
            reader.at += -reader.at % max(alignment, 1)
        yield number & 0x7F, (reader.at, reader.at + size)
        reader.at += size


def _read_names(data: Any, section: tuple[int, int]) -> list[str]:
    reader = _Reader(data, section[0])
    sizes = [reader.number() for _ in range(reader.number())]
    names: list[str] = []
    for size in reversed(sizes):
        names.append(data[reader.at : reader.at + size - 1].decode(errors="replace"))
        reader.at += size
    return names


class _Reader:
    """Reader for variable-length numbers in bytecode."""

    def __init__(self, data: Any, at: int) -> None:
        self._data = data
        self.at = at

    def read_byte(self) -> int:
        self.at += 1
        return int(self._data[self.at - 1])

    def number(self) -> int:
        first = self.read_byte()
        if not first:
            self.at += 8
            return int.from_bytes(self._data[self.at - 8 : self.at], "little")
        more = (first & -first).bit_length() - 1
        self.at += more
        return int.from_bytes(self._data[self.at - more - 1 : self.at], "little") >> (more + 1)
