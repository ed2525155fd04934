"""Files that hold tensors, beside .npy: NumPy's archives, and ONNX's TensorProto."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from hil.errors import UsageError
from hil.tensors import READING_NPY, Array, dtype_of


def load_npz(path: Path) -> dict[str, Array]:
    """The arrays in an .npz file, by key.

    Raises:
        UsageError: the file is missing, is no such archive, or unpacks to more than this machine's memory holds.
    """
    try:
        with READING_NPY, np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it is no archive of arrays")
            # zipfile gives no more of a member than is said here.
            size = sum(member.file_size for member in archive.zip.infolist()) if archive.zip is not None else 0
            if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                raise ValueError(f"it unpacks to {size} bytes, more than this machine's memory holds")
            return {key: archive[key] for key in archive.files}
    except FileNotFoundError as error:
        raise UsageError(f"no such file: {path}") from error
    except Exception as error:
        raise UsageError(f"{path} is not a readable .npz file: {error}") from error


def typed(array: Array, dtype: str) -> Array:
    """As :func:`hil.tensors.load_npy` does: raw bytes become the dtype that numpy's format has no name for."""
    if array.dtype.kind == "V" and dtype and dtype_of(dtype).itemsize == array.dtype.itemsize:
        return array.view(dtype_of(dtype))
    return array.astype(object) if array.dtype.kind == "U" else array


def load_pb(path: Path) -> Array:
    """The tensor in a file that holds an ONNX TensorProto, as ONNX's own test data does.

    Raises:
        UsageError: the file is missing or holds none.
    """
    import onnx
    from onnx import numpy_helper

    try:
        tensor = onnx.TensorProto.FromString(path.read_bytes())
        if not tensor.data_type:
            raise ValueError("no dtype in it")
        array: Array = numpy_helper.to_array(tensor, base_dir=str(path.parent))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except Exception as error:
        raise UsageError(f"{path} holds no ONNX tensor: {error}") from error
    if array.dtype.kind in "OSU":
        text = [item.decode() if isinstance(item, bytes) else str(item) for item in array.ravel().tolist()]
        array = np.array([*text, ""], dtype=object)[:-1].reshape(array.shape)
    return array
