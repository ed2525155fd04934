"""Read and write tensor files other than .npy: NumPy archives, ONNX TensorProto files, directories of named tensors."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hil.core.bounded_json import read_json
from hil.core.files import MAX_MODEL_BYTES, MAX_TEXT_BYTES, read_file, resolve_within
from hil.core.named import resolve
from hil.core.npy import Npz, load_npy, restore_dtype, save_npy
from hil.core.tensors import Array, get_dtype_name
from hil.errors import UsageError

# Maximum elements per byte: elements in an ONNX tensor have at least two bits.
_ELEMENTS_PER_BYTE = 4


def load_npz(path: Path, dtypes: Mapping[str, str] | None = None) -> dict[str, Array]:
    """Load the arrays in an .npz file, by key.

    Args:
        dtypes: Key -> dtype, for dtypes that NumPy's format does not store.

    Raises:
        UsageError: the file is not a valid .npz file.
    """
    with Npz(path) as archive:
        return {key: restore_dtype(archive.read(key), (dtypes or {}).get(key, "")) for key in archive.keys}


def save_npz(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write arrays to an .npz file. Keys may be any text. For dtypes that the format lacks, see :func:`load_npz`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for key, array in tensors.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)


def load_pb(path: Path) -> Array:
    """Load the tensor in an ONNX TensorProto file. Raises UsageError if the file is missing or invalid."""
    return load_named_pb(path)[1]


def load_named_pb(path: Path) -> tuple[str, Array]:
    """Load the name ("" if unnamed) and the tensor of a TensorProto file. Raises UsageError: see :func:`load_pb`."""
    try:
        return parse_named_pb(read_file(path, MAX_MODEL_BYTES))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{path} is not an ONNX tensor: {error or type(error).__name__}") from error


def parse_pb(data: bytes) -> Array:
    """Parse an ONNX TensorProto and return the tensor. Raises ValueError or an error of protobuf if invalid."""
    return parse_named_pb(data)[1]


def parse_named_pb(data: bytes) -> tuple[str, Array]:
    """Parse an ONNX TensorProto and return name and tensor. Raises ValueError: see :func:`parse_pb`."""
    import onnx
    from onnx import numpy_helper

    tensor = onnx.TensorProto.FromString(data)
    if not tensor.data_type:
        raise ValueError("missing dtype")
    if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
        raise ValueError("external data is not supported")
    if any(dim < 0 for dim in tensor.dims) or math.prod(tensor.dims) > _ELEMENTS_PER_BYTE * len(data):
        raise ValueError(f"data does not match shape {tuple(tensor.dims)[:8]}")
    array: Array = numpy_helper.to_array(tensor)
    if array.dtype.kind in "OSU":
        text = [item.decode() if isinstance(item, bytes) else str(item) for item in array.ravel().tolist()]
        array = np.array([*text, ""], dtype=object)[:-1].reshape(array.shape)
    return tensor.name, array


INDEX = "index.json"


def save_tensors(folder: Path, tensors: Mapping[str, Array]) -> None:
    """Write tensors to a directory, created if necessary."""
    index = save_files(folder, {f"{number}.npy": item for number, item in enumerate(tensors.items())})
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def save_files(folder: Path, files: Mapping[str, tuple[str, Array]]) -> list[dict[str, Any]]:
    """Write named tensors as .npy files to a directory, created if necessary. Return name, dtype, shape and file."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for file, (name, array) in files.items():
        save_npy(folder / file, array)
        entries.append({"name": name, "dtype": get_dtype_name(array.dtype), "shape": list(array.shape), "file": file})
    return entries


def load_tensors(folder: Path) -> dict[str, Array]:
    """Load tensors written by :func:`save_tensors`. Raises UsageError if a file is missing or corrupt."""
    try:
        index = read_json(folder / INDEX, MAX_TEXT_BYTES)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read tensors in {folder}: {error}") from error
    try:
        return {item["name"]: load_npy(resolve_within(folder, folder / item["file"]), item["dtype"]) for item in index}
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise UsageError(f"invalid {folder / INDEX}: {type(error).__name__}: {error}") from error


def call_on_files(run: str, inputs: str, outputs: str, **arguments: Any) -> None:
    """Call a function with the tensors of a directory, and write the returned tensors to a directory.

    Isolated processes call this function.

    Args:
        run: The function (``module:function``). Its argument ``given`` contains the input tensors.
        inputs, outputs: The directories.
    """
    save_tensors(Path(outputs), resolve(run)(given=load_tensors(Path(inputs)), **arguments))
