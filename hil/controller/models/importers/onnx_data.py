"""Check the sizes of an ONNX model's tensors, and read external data."""

from __future__ import annotations

import math
import posixpath
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hil.controller.models.importers.onnx_nodes import iter_labelled_tensors, iter_tensors
from hil.core.files import open_file
from hil.core.tensors import SUB_BYTE_BITS, Array, get_dtype_name, pack, parse_dtype
from hil.errors import ImportFailed
from hil.formats.onnx_file import load_onnx
from hil.formats.ort_values import ONNX_TYPES

_NAMES = {number: name for name, number in ONNX_TYPES.items()}
# dtype -> TensorProto field that contains the elements. All other dtypes use int32_data.
_TYPED = {
    "float32": "float_data",
    "complex64": "float_data",
    "int64": "int64_data",
    "string": "string_data",
    "float64": "double_data",
    "complex128": "double_data",
    "uint32": "uint64_data",
    "uint64": "uint64_data",
}
_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
# dtypes of external weights that numpy reads without conversion.
_MAPPED = frozenset({"float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "bool"})
_DIGITS = re.compile("[0-9]{1,19}")


def check_data(file: str, model: Any) -> dict[str, tuple[int, str]]:
    """Check that the data of every tensor matches the shape and type.

    Returns:
        File of external data, relative to the model's directory -> (required size in bytes, label for the tensor).

    Raises:
        ImportFailed: a size does not match, or an external location, offset or length is invalid.
    """
    found: dict[str, tuple[int, str]] = {}
    for label, tensor in iter_labelled_tensors(model):
        where = f"{file}: {label}"
        if any(size < 0 for size in tensor.dims):
            raise ImportFailed(f"{where} has a negative dimension: {list(tensor.dims)}")
        if tensor.data_type not in _NAMES:
            raise ImportFailed(f"{where} has unknown element type {tensor.data_type}")
        if tensor.data_location != tensor.EXTERNAL:
            _check_inline(where, tensor)
            continue
        location, end = _check_external(where, tensor)
        found[location] = max(found.get(location, (0, "")), (end, label))
    return found


def compute_size(tensor: Any) -> int:
    """Return the size in bytes that a tensor's shape and type require."""
    name = _NAMES.get(tensor.data_type, "string")
    if name == "string":
        return int(tensor.ByteSize())
    bits = SUB_BYTE_BITS.get(name) or parse_dtype(name).itemsize * 8
    return -(-int(math.prod(tensor.dims)) * bits // 8)


def read_raw(tensor: Any, folder: Path) -> Any:
    """Return a tensor's data as uint8. External data is memory-mapped from a file in ``folder``."""
    from onnx import numpy_helper

    if tensor.data_location == tensor.EXTERNAL:
        return _map_external(tensor, folder, "r") if compute_size(tensor) else np.zeros(0, np.uint8)
    array = numpy_helper.to_array(tensor)
    if get_dtype_name(array.dtype) in SUB_BYTE_BITS:
        return pack(array)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _map_external(tensor: Any, folder: Path, mode: Literal["r", "c"]) -> Any:
    """Map the external data of a tensor with elements, as uint8. The mode is that of :class:`numpy.memmap`."""
    fields = {entry.key: entry.value for entry in tensor.external_data}
    with open_file(folder / fields["location"]) as file:
        return np.memmap(file, np.uint8, mode, int(fields.get("offset", 0)), (compute_size(tensor),))


def embed_data(tensor: Any, folder: Path) -> None:
    """Read a tensor's external data into the tensor. (onnx's function rejects symbolic links.)"""
    tensor.raw_data = read_raw(tensor, folder).tobytes()
    del tensor.external_data[:]
    tensor.ClearField("data_location")


def embed_all(model: Any, folder: Path) -> None:
    """Read all external data of a model into the tensors."""
    for tensor in iter_tensors(model):
        if tensor.data_location == tensor.EXTERNAL:
            embed_data(tensor, folder)


def detach_weights(model: Any, folder: Path) -> dict[str, Array]:
    """Change a model's external weights to inputs, in place.

    Return the weights, memory-mapped from files in ``folder``.

    A mapped weight needs no additional memory. The model keeps weights of subgraphs, weights with packed elements, and
    weights with a dtype that numpy lacks.
    """
    from onnx import helper

    graph = model.graph
    weights: dict[str, Array] = {}
    declared = {value.name for value in graph.input}
    for tensor in graph.initializer:
        name = _NAMES.get(tensor.data_type, "")
        if tensor.data_location != tensor.EXTERNAL or name not in _MAPPED or not compute_size(tensor):
            continue
        # "c": an operator that writes to its input changes a private copy.
        data = _map_external(tensor, folder, "c")
        weights[tensor.name] = data.view(parse_dtype(name)).reshape(tuple(tensor.dims))
        if tensor.name not in declared:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    kept = [tensor for tensor in graph.initializer if tensor.name not in weights]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return weights


def load_with_data(path: Path) -> Any:
    """Read a model with all external data."""

    model = load_onnx(path)
    embed_all(model, path.parent)
    return model


def _check_inline(where: str, tensor: Any) -> None:
    name = _NAMES[tensor.data_type]
    count = math.prod(tensor.dims)
    held = {field: len(getattr(tensor, field)) for field in _FIELDS if len(getattr(tensor, field))}
    what = f"{name} {list(tensor.dims)}"
    if tensor.HasField("raw_data"):
        if held or name == "string":
            raise ImportFailed(
                f"{where} ({what}) has raw_data together with {', '.join(held) or 'element type string'}"
            )
        if (size := len(tensor.raw_data)) != compute_size(tensor):
            raise ImportFailed(f"{where} ({what}) has {size:,} of {compute_size(tensor):,} bytes", hint=_DAMAGED)
        return
    field = _TYPED.get(name, "int32_data")
    if others := held.keys() - {field}:
        raise ImportFailed(f"{where} ({what}) has data in {', '.join(sorted(others))}: expected {field}")
    bits = SUB_BYTE_BITS.get(name)
    needed = -(-count * bits // 8) if bits else count * (2 if name.startswith("complex") else 1)
    if held.get(field, 0) != needed:
        raise ImportFailed(f"{where} ({what}) has {held.get(field, 0):,} of {needed:,} elements", hint=_DAMAGED)


_DAMAGED = "the model is damaged: export or copy it again"


def _check_external(where: str, tensor: Any) -> tuple[str, int]:
    """Return the file and the end offset of a tensor's external data. Raises ImportFailed for an invalid entry."""
    fields = {entry.key: entry.value for entry in tensor.external_data}
    if not fields.get("location"):
        raise ImportFailed(f"{where} has external data without a file name")
    if tensor.data_type == tensor.STRING:
        raise ImportFailed(f"{where} has external data of type string, which ONNX does not support")
    for key in ("offset", "length"):
        if not _DIGITS.fullmatch(fields.get(key, "0")):
            raise ImportFailed(f"{where} has invalid external {key} {fields[key]!r}: expected a number of bytes")
    size = compute_size(tensor)
    if "length" in fields and int(fields["length"]) != size:
        what = f"{_NAMES[tensor.data_type]} {list(tensor.dims)}"
        raise ImportFailed(
            f"{where} ({what}) has external length {int(fields['length']):,}, expected {size:,} bytes", hint=_DAMAGED
        )
    location = posixpath.normpath(fields["location"].replace("\\", "/"))
    return location, int(fields.get("offset", 0)) + size
