"""Named tensors as a folder: one .npy each and an index.json with names, dtypes and shapes in order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hil.core.files import read_text, within
from hil.core.npy import load_npy, save_npy
from hil.core.tensors import Array, dtype_name
from hil.errors import UsageError

INDEX = "index.json"


def save_tensors(folder: Path, tensors: Mapping[str, Array]) -> None:
    """Write tensors into a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    index = []
    for position, (name, array) in enumerate(tensors.items()):
        file = f"{position}.npy"
        save_npy(folder / file, array)
        index.append({"name": name, "dtype": dtype_name(array.dtype), "shape": list(array.shape), "file": file})
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def load_tensors(folder: Path) -> dict[str, Array]:
    """Read what :func:`save_tensors` wrote.

    Raises:
        UsageError: a file is missing or damaged.
    """
    try:
        index = json.loads(read_text(folder / INDEX))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{folder} holds no tensors: {error}") from error
    try:
        return {item["name"]: load_npy(within(folder, folder / item["file"]), item["dtype"]) for item in index}
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise UsageError(f"{folder / INDEX} is damaged: {type(error).__name__}: {error}") from error
