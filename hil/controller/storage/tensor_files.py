"""Files that hold tensors, beside .npy: NumPy's archives, and ONNX's TensorProto."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hil.core.files import read_file
from hil.core.npy import Npz, typed
from hil.core.tensors import Array
from hil.errors import UsageError

# An ONNX tensor's elements take at least two bits each.
_ELEMENTS_PER_BYTE = 4


def load_npz(path: Path, dtypes: Mapping[str, str] | None = None) -> dict[str, Array]:
    """The arrays in an .npz file, by key.

    Args:
        path: the file.
        dtypes: key -> dtype, where numpy's format forgot it.

    Raises:
        UsageError: the file is missing, is no such archive, or an array takes far more than the archive does.
    """
    with Npz(path) as archive:
        return {key: typed(archive.read(key), (dtypes or {}).get(key, "")) for key in archive.keys}


def load_pb(path: Path) -> Array:
    """The tensor in a file that holds an ONNX TensorProto, as ONNX's own test data does.

    Raises:
        UsageError: the file is missing or holds none.
    """
    try:
        return parse_pb(read_file(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{path} holds no ONNX tensor: {error or type(error).__name__}") from error


def parse_pb(data: bytes) -> Array:
    """The tensor in the bytes of an ONNX TensorProto.

    Raises:
        ValueError: there is none; so do protobuf and onnx, with errors of their own.
    """
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
    return array
