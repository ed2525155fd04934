"""What goes into a call and comes out of it (dicts, lists, tuples of tensors) as numpy has it, and as JSON beside .npy.

A leaf is an array, or one of Python's own: None, a bool, a number or a text, which is no tensor and is compiled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.models.tensorflow.structure import Structure, leaves
from hil.core.files import within
from hil.core.tensors import Array, dtype_name, load_npy, save_npy
from hil.errors import UsageError

_PLAIN = (bool, int, float, str)


def arrays_in(structure: Structure) -> dict[str, Array]:
    """The tensors of a structure by their path: of ``({"a": [x]},)`` it is ``0.a.0``; dicts go by sorted keys."""
    return {path: leaf for path, leaf in leaves(structure) if isinstance(leaf, np.ndarray)}


def as_numpy(what: str, value: Any) -> Structure:
    """A structure of frameworks' tensors as one of arrays; tuples of any kind become plain ones.

    Args:
        what: how messages call it.
        value: dicts (their keys are texts or whole numbers), lists and tuples of whatever has a ``numpy()`` or is an
            array, None, or one of Python's numbers and texts.

    Raises:
        UsageError: something in it is none of these, or a tensor of a dtype that hil does not know.
    """
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise UsageError(f"{what}: {key!r} is no key that a trace can hold", hint="take texts or numbers")
        return {key: as_numpy(f"{what}.{key}", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [as_numpy(f"{what}.{number}", item) for number, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if value is None or type(value) in _PLAIN:
        return value
    array = value.numpy() if callable(getattr(value, "numpy", None)) else value
    if isinstance(array, (bytes, np.str_)):
        array = np.array(array, dtype=object)
    if not isinstance(array, (np.ndarray, np.generic)):
        raise UsageError(
            f"{what} is a {type(value).__name__}: a trace holds tensors", hint="give arrays, nested in dicts or lists"
        )
    # A copy: what is traced must not change with what the caller does next.
    return _tensor(what, np.array(array))


def _tensor(what: str, array: Array) -> Array:
    if array.dtype.kind in "OSU":
        texts = np.empty(array.size, dtype=object)
        texts[:] = [item.decode(errors="replace") if isinstance(item, bytes) else str(item) for item in array.flat]
        return texts.reshape(array.shape)
    try:
        dtype_name(array.dtype)
    except UsageError as error:
        raise UsageError(f"{what}: {error.message}", hint=error.hint) from error
    return array


def save(structure: Structure, folder: Path, stem: str) -> Any:
    """Write the tensors of a structure as ``STEM.npy``, ``STEM.0.npy`` and so on; the rest as JSON can say it.

    Args:
        structure: as :func:`as_numpy` makes it.
        folder: where the files go.
        stem: of the files' names.

    Raises:
        UsageError: it holds what a trace cannot.
    """
    if isinstance(structure, np.ndarray):
        save_npy(folder / f"{stem}.npy", structure)
        return {"npy": f"{stem}.npy", "dtype": dtype_name(structure.dtype), "shape": list(structure.shape)}
    if isinstance(structure, dict):
        items = [[key, save(item, folder, f"{stem}.{n}")] for n, (key, item) in enumerate(structure.items())]
        return {"dict": items}
    if isinstance(structure, (list, tuple)):
        kind = "list" if isinstance(structure, list) else "tuple"
        return {kind: [save(item, folder, f"{stem}.{number}") for number, item in enumerate(structure)]}
    if type(structure) is float:
        return {"float": repr(structure)}  # JSON has no inf or nan
    if structure is None or type(structure) in _PLAIN:
        return {"value": structure}
    raise UsageError(f"{stem} is a {type(structure).__name__}: a trace holds tensors")


def load(said: Any, folder: Path) -> Structure:
    """The structure that :func:`save` wrote.

    Raises:
        UsageError: it is none, or a file is missing or no tensor of the kind that it should be.
    """
    if isinstance(said, dict) and len(said) == 1:
        ((kind, content),) = said.items()
        if kind in ("list", "tuple") and isinstance(content, list):
            items = [load(item, folder) for item in content]
            return items if kind == "list" else tuple(items)
        if kind == "dict" and isinstance(content, list):
            return {name_of(pair, folder): load(pair[1], folder) for pair in content}
        if kind == "float" and isinstance(content, str):
            return _float(content, folder)
        if kind == "value" and (content is None or type(content) in (bool, int, str)):
            return content
    if isinstance(said, dict) and said.keys() == {"npy", "dtype", "shape"}:
        return _load_npy(said, folder)
    raise UsageError(f"{folder} holds no call of a trace: {str(said)[:60]!r} is none of its values")


def name_of(pair: Any, folder: Path) -> str | int:
    """The name of a pair of a name and what it stands for.

    Raises:
        UsageError: it is no such pair.
    """
    if isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int):
        key: str | int = pair[0]
        return key
    raise UsageError(f"{folder} holds no call of a trace: {str(pair)[:60]!r} is no key and value")


def _float(text: str, folder: Path) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{folder} holds no call of a trace: {text[:60]!r} is no number") from error


def _load_npy(said: Mapping[str, Any], folder: Path) -> Array:
    name, dtype = said["npy"], said["dtype"]
    if not isinstance(name, str) or not isinstance(dtype, str) or Path(name).name != name:
        raise UsageError(f"{folder} holds no call of a trace: {name!r} is no file in it")
    array = load_npy(within(folder, folder / name), dtype)
    if dtype_name(array.dtype) != dtype or list(array.shape) != said["shape"]:
        raise UsageError(f"{folder / name} is {array.shape} {array.dtype}, the trace says {said['shape']} {dtype}")
    return array
