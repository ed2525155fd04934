"""Description of a firmware: a JSON file next to the ELF file."""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hil.core.bounded_json import read_json
from hil.core.tensors import DTYPES, TensorSpec
from hil.errors import LoadFailed

ELF, DESCRIPTION, FLAT = "firmware.elf", "firmware.json", "firmware.bin"
_MAX_COUNT = 1 << 20


def name_firmware(name: str) -> dict[str, str]:
    """Return the names of all files of a firmware, for a directory with other programs.

    Args:
        name: file name that the user selected. Without the suffix of one of the files, it is the name of the ELF file.
    """
    suffixes = {file: Path(file).suffix for file in (ELF, DESCRIPTION, FLAT)}
    if Path(name).suffix in suffixes.values():
        return {file: Path(name).stem + suffix for file, suffix in suffixes.items()}
    return {file: name if file == ELF else name + suffix for file, suffix in suffixes.items()}


@dataclass(frozen=True)
class Symbol:
    """Function or variable of the ELF file."""

    address: int
    size: int
    name: str


@dataclass(frozen=True)
class FirmwareStep:
    """Step of the schedule. ``nodes`` are the model's nodes that a dispatch computes."""

    name: str
    kind: str  # fill, copy or dispatch
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Firmware:
    """Firmware of a program.

    Args:
        digest: digest of everything that the firmware was built from, as hexadecimal digits.
        image_crc: CRC-32 of the image in flash.
        tick_hz: frequency of the tick counter.
        flash_bytes, ram_bytes: used memory, with the stack.
    """

    chip: str
    digest: str
    image_crc: int
    tick_hz: int
    flash_bytes: int
    ram_bytes: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    steps: tuple[FirmwareStep, ...]
    symbols: tuple[Symbol, ...]

    def find_symbol(self, address: int) -> str:
        """Return the name of the function at an address, or "" if unknown."""
        found = bisect.bisect_right([one.address for one in self.symbols], address) - 1
        if found < 0:
            return ""
        symbol = self.symbols[found]
        return symbol.name if address < symbol.address + max(symbol.size, 1) else ""


def write_firmware(firmware: Firmware, path: Path) -> None:
    """Write the description."""
    path.write_text(json.dumps(asdict(firmware)))


def read_firmware(path: Path) -> Firmware:
    """Read a description.

    Raises:
        LoadFailed: the file is damaged.
    """
    try:
        values = read_json(path)
        numbers = ("image_crc", "tick_hz", "flash_bytes", "ram_bytes")
        if any(type(values[name]) is not int or values[name] < 0 for name in numbers) or not values["tick_hz"]:
            raise ValueError("invalid number")
        if max(len(values["steps"]), len(values["symbols"])) > _MAX_COUNT:
            raise ValueError("too many steps or symbols")
        return Firmware(
            chip=str(values["chip"]),
            digest=bytes.fromhex(values["digest"]).hex(),
            **{name: values[name] for name in numbers},
            inputs=_read_specs(values["inputs"]),
            outputs=_read_specs(values["outputs"]),
            steps=tuple(
                FirmwareStep(str(one["name"]), str(one["kind"]), tuple(one["nodes"])) for one in values["steps"]
            ),
            symbols=tuple(sorted(map(_read_symbol, values["symbols"]), key=lambda one: one.address)),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LoadFailed(f"{path.name} is not a description of firmware: {error}") from error


def _read_symbol(values: dict[str, Any]) -> Symbol:
    if not all(type(values[name]) is int and values[name] >= 0 for name in ("address", "size")):
        raise ValueError("invalid symbol")
    return Symbol(values["address"], values["size"], str(values["name"]))


def _read_specs(values: Sequence[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    specs = tuple(TensorSpec(str(one["name"]), str(one["dtype"]), tuple(one["shape"])) for one in values)
    if not all(type(dim) is int and dim >= 0 for spec in specs for dim in spec.shape):
        raise ValueError("a shape is not fixed")
    if any(spec.dtype not in DTYPES or spec.dtype == "string" for spec in specs):
        raise ValueError("a dtype is unknown")
    return specs
