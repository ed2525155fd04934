"""Dispatches that need local memory are refused at compile time."""

from __future__ import annotations

import struct

import pytest
from support.elf_files import make_elf

from hil.controller.backends.compilers.firmware.local_memory import check_local_memory
from hil.errors import CompileFailed
from hil.formats.elf32 import Elf32

BASE = 0x1000


def make_library(pages: list[int], *, has_attributes: bool = True, name: str = "model_query_v0") -> Elf32:
    """Return firmware with a library of the dispatches `first` and `second`, which need pages of local memory."""
    attributes_at = BASE + 36
    attributes = b"".join(struct.pack("<QHBBIIHH5Q", 0, count, 0, 3, 1, 1, 1, 0, *[0] * 5) for count in pages)
    names_at = attributes_at + len(attributes)
    texts_at = names_at + 8
    fields = (0, 0, 0, len(pages), 0, attributes_at if has_attributes else 0, 0, 0, names_at)
    texts = struct.pack("<2I", texts_at, texts_at + 6) + b"first\0second\0"
    return Elf32(make_elf(struct.pack("<9I", *fields) + attributes + texts, library=name))


def test_dispatch_with_local_memory_is_named() -> None:
    with pytest.raises(CompileFailed) as caught:
        check_local_memory(make_library([0, 2]), "model_query")
    assert caught.value.message.endswith("which these dispatches need: second (8,192 bytes)")


@pytest.mark.parametrize(("pages", "has_attributes"), [([0, 0], True), ([1, 2], False)])
def test_dispatches_without_local_memory_are_accepted(pages: list[int], has_attributes: bool) -> None:
    check_local_memory(make_library(pages, has_attributes=has_attributes), "model_query")


@pytest.mark.parametrize(
    ("elf", "message"),
    [
        (make_library([0, 0], name="other"), "has no symbol model_query_v0"),
        (Elf32(make_elf(bytes(8), library="model_query_v0")), "is damaged: the ELF file has no data for 36 bytes"),
    ],
)
def test_library_without_description_is_an_error(elf: Elf32, message: str) -> None:
    with pytest.raises(CompileFailed, match=message):
        check_local_memory(elf, "model_query")
