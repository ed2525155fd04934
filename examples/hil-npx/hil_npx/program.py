"""The program file: what the compiler writes and the runtime loads.

A file is an .npz archive: the entry ``program`` is JSON, the other entries are the weights.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# Increase this number if the file's content changes. It is part of the compiler's cache key.
FORMAT = 1
FILE = "program.npx"
_JSON = "program"
# Errors that numpy and zipfile raise for a damaged file. A damaged header may announce encryption or compression.
_DAMAGE = (zipfile.BadZipFile, zlib.error, OSError, EOFError, KeyError, TypeError, ValueError, RuntimeError)


@dataclass(frozen=True)
class Step:
    """Operation of the chip."""

    name: str  # node in the model
    op: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NpxProgram:
    """Compiled program. Inputs and outputs are lists [name, dtype, shape]."""

    inputs: list[Any]
    outputs: list[Any]
    steps: list[Step]
    weights: dict[str, Any]
    lanes: int  # vector lanes that the program needs


def write_program(program: NpxProgram, path: Path) -> None:
    """Write a program. Equal programs have equal files."""
    header = {
        "format": FORMAT,
        "inputs": program.inputs,
        "outputs": program.outputs,
        "steps": [asdict(step) for step in program.steps],
        "lanes": program.lanes,
        "weights": list(program.weights),
    }
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    # Names of weights may contain characters that are invalid in an archive.
    arrays = {f"w{number}": array for number, array in enumerate(program.weights.values())}
    with path.open("wb") as file:
        np.savez(file, **{_JSON: text}, **arrays)


def read_program(path: Path) -> NpxProgram:
    """Read a program. Raises ValueError if the file is not a program, is damaged, or has another format."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            header = json.loads(archive[_JSON].tobytes())
            if header["format"] != FORMAT:
                raise ValueError(f"the program has format {header['format']}, expected {FORMAT}")
            weights = {name: archive[f"w{number}"] for number, name in enumerate(header["weights"])}
        steps = [Step(**step) for step in header["steps"]]
        return NpxProgram(header["inputs"], header["outputs"], steps, weights, header["lanes"])
    except _DAMAGE as error:
        raise ValueError(f"{path.name} is not a program of NPX: {error}") from error
