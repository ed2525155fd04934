"""Files that hold tensors, beside .npy: NumPy's archives, ONNX's TensorProto, and folders of named tensors."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hil.core.files import read_file, read_text, within
from hil.core.named import resolve
from hil.core.npy import Npz, load_npy, save_npy, typed
from hil.core.tensors import Array, dtype_name
from hil.errors import UsageError

# An ONNX tensor's elements take at least two bits each.
_ELEMENTS_PER_BYTE = 4


def load_npz(path: Path, dtypes: Mapping[str, str] | None = None) -> dict[str, Array]:
    """The arrays in an .npz file, by key, with the dtypes that numpy's format forgot. Raises UsageError: it is none."""
    with Npz(path) as archive:
        return {key: typed(archive.read(key), (dtypes or {}).get(key, "")) for key in archive.keys}


def save_npz(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write arrays into an .npz file by key, which may be any text; see :func:`load_npz` for the dtypes it forgets."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for key, array in tensors.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)


def load_pb(path: Path) -> Array:
    """The tensor in a file that holds an ONNX TensorProto. Raises UsageError: the file is missing or holds none."""
    return load_named_pb(path)[1]


def load_named_pb(path: Path) -> tuple[str, Array]:
    """The name, "" where it has none, and the tensor of such a file. Raises UsageError as :func:`load_pb`."""
    try:
        return parse_named_pb(read_file(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{path} holds no ONNX tensor: {error or type(error).__name__}") from error


def parse_pb(data: bytes) -> Array:
    """The tensor in the bytes of an ONNX TensorProto. Raises ValueError, as protobuf and onnx do: there is none."""
    return parse_named_pb(data)[1]


def parse_named_pb(data: bytes) -> tuple[str, Array]:
    """The name and the tensor in the bytes of an ONNX TensorProto. Raises ValueError as :func:`parse_pb`."""
    import onnx
    from onnx import numpy_helper

    tensor = onnx.TensorProto.FromString(data)
    if not tensor.data_type:
        raise ValueError("no dtype in it")
    if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
        raise ValueError("its data is in another file, which hil does not follow")
    if any(dim < 0 for dim in tensor.dims) or math.prod(tensor.dims) > _ELEMENTS_PER_BYTE * len(data):
        raise ValueError(f"its data is not of its shape {tuple(tensor.dims)[:8]}")
    array: Array = numpy_helper.to_array(tensor)
    if array.dtype.kind in "OSU":
        text = [item.decode() if isinstance(item, bytes) else str(item) for item in array.ravel().tolist()]
        array = np.array([*text, ""], dtype=object)[:-1].reshape(array.shape)
    return tensor.name, array


INDEX = "index.json"


def save_tensors(folder: Path, tensors: Mapping[str, Array]) -> None:
    """Write tensors into a folder, which is made if need be."""
    index = save_files(folder, {f"{number}.npy": item for number, item in enumerate(tensors.items())})
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def save_files(folder: Path, files: Mapping[str, tuple[str, Array]]) -> list[dict[str, Any]]:
    """Write named tensors as .npy into a folder, which is made if need be; name, dtype, shape and file of each."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for file, (name, array) in files.items():
        save_npy(folder / file, array)
        entries.append({"name": name, "dtype": dtype_name(array.dtype), "shape": list(array.shape), "file": file})
    return entries


def load_tensors(folder: Path) -> dict[str, Array]:
    """Read what :func:`save_tensors` wrote. Raises UsageError: a file is missing or damaged."""
    try:
        index = json.loads(read_text(folder / INDEX))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{folder} holds no tensors: {error}") from error
    try:
        return {item["name"]: load_npy(within(folder, folder / item["file"]), item["dtype"]) for item in index}
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise UsageError(f"{folder / INDEX} is damaged: {type(error).__name__}: {error}") from error


def on_files(run: str, inputs: str, outputs: str, **arguments: Any) -> None:
    """Save in a folder what a function (``module:function``) makes of the tensors in another, which it gets as
    ``given``; for an isolated process."""
    save_tensors(Path(outputs), resolve(run)(given=load_tensors(Path(inputs)), **arguments))
