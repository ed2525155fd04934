"""Descriptions and ELF files of firmware: what is damaged is refused."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.elf_files import make_elf

from hil.core.tensors import TensorSpec
from hil.errors import LoadFailed
from hil.formats.elf32 import Elf32
from hil.formats.firmware import (
    DESCRIPTION,
    ELF,
    FLAT,
    Firmware,
    FirmwareStep,
    Symbol,
    name_firmware,
    read_firmware,
    write_firmware,
)

SPEC = TensorSpec("x", "float32", (1, 4))
FIRMWARE = Firmware(
    "mps2-an386",
    "ab" * 32,
    7,
    25_000_000,
    1000,
    2000,
    (SPEC,),
    (SPEC,),
    (FirmwareStep("conv", "dispatch", ("Conv_0",)), FirmwareStep("", "fill")),
    (Symbol(0x100, 16, "main"), Symbol(0x200, 0, "spot")),
)


def read_all(data: bytes) -> None:
    """Use all of an ELF file."""
    elf = Elf32(data)
    elf.make_image()
    list(elf.iter_symbols())


def test_elf_has_image_and_symbols() -> None:
    elf = Elf32(make_elf())
    assert elf.make_image() == (0x1000, b"\x01\x02\x03\x04")
    assert list(elf.iter_symbols()) == [("main", 0x1000, 4, True)]


@pytest.mark.parametrize("size", range(0, len(make_elf()), 7))
def test_truncated_elf_is_an_error(size: int) -> None:
    with pytest.raises(ValueError, match=r"truncated|incomplete|not a 32-bit"):
        read_all(make_elf()[:size])


def test_elf_with_distant_segments_is_an_error() -> None:
    data = bytearray(make_elf() + bytes(64))
    data[52 + 32 : 52 + 32] = struct.pack("<8I", 1, 84, 0xF0000000, 0xF0000000, 4, 4, 5, 4)
    struct.pack_into("<H", data, 44, 2)
    with pytest.raises(ValueError, match="too far apart"):
        Elf32(bytes(data)).make_image()


def test_other_files_are_not_elf_files() -> None:
    with pytest.raises(ValueError, match="not a 32-bit little-endian ELF file"):
        Elf32(b"\x7fELF\x02\x01" + bytes(100))


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("digits.elf", ["digits.elf", "digits.json", "digits.bin"]),
        ("digits.bin", ["digits.elf", "digits.json", "digits.bin"]),
        ("digits", ["digits", "digits.json", "digits.bin"]),
        ("net.v2", ["net.v2", "net.v2.json", "net.v2.bin"]),
    ],
)
def test_files_of_firmware_have_selected_name(name: str, files: list[str]) -> None:
    named = name_firmware(name)
    assert [named[file] for file in (ELF, DESCRIPTION, FLAT)] == files


def test_description_survives_the_file(tmp_path: Path) -> None:
    write_firmware(FIRMWARE, tmp_path / "firmware.json")
    assert read_firmware(tmp_path / "firmware.json") == FIRMWARE


@pytest.mark.parametrize(
    ("address", "name"), [(0xFF, ""), (0x100, "main"), (0x10F, "main"), (0x110, ""), (0x200, "spot"), (0x201, "")]
)
def test_address_belongs_to_the_function_around_it(address: int, name: str) -> None:
    assert FIRMWARE.find_symbol(address) == name
    assert replace(FIRMWARE, symbols=()).find_symbol(address) == ""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image_crc", -1),
        ("tick_hz", 0),
        ("ram_bytes", True),
        ("flash_bytes", 1.5),
        ("digest", "xyz"),
        ("digest", 5),
        ("inputs", [{"name": "x", "dtype": "float32", "shape": ["n"]}]),
        ("inputs", [{"name": "x", "dtype": "float99", "shape": [1]}]),
        ("outputs", [{"name": "x", "dtype": "float32"}]),
        ("outputs", 3),
        ("steps", [{"name": "x"}]),
        ("steps", None),
        ("symbols", [{"address": "a", "size": 1, "name": "x"}, {"address": 1, "size": 1, "name": "x"}]),
        ("symbols", [{"address": 1, "size": "1", "name": "x"}]),
        ("symbols", [[]]),
    ],
)
def test_damaged_description_is_an_error(key: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "firmware.json"
    write_firmware(FIRMWARE, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(LoadFailed, match=r"^firmware\.json is not a description of firmware: "):
        read_firmware(path)
