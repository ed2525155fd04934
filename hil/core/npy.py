"""Read NumPy's .npy and .npz files safely: without evaluating the header, and without trusting its sizes.

numpy's reader evaluates the header as Python, so deep nesting ends the process. The reader also allocates the
size from the header before checking the data.
"""

from __future__ import annotations

import io
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from hil.core.file_tensor import FileTensor, OpenFile, make_contiguous_strides
from hil.core.files import open_file, suggest_path
from hil.core.tensors import ML_DTYPES, Array, parse_dtype
from hil.errors import UsageError

_MAGIC = b"\x93NUMPY"
# numpy's limits for untrusted headers and for dimensions.
MAX_HEADER_BYTES = 10_000
MAX_DIMS = 64
MAX_MEMBERS = 10_000
# Maximum unpacked size of an archive; the larger limit applies. A 5 MiB archive can contain 5 GiB zeros. Arrays that
# exactly match the model's inputs do not count.
FREE_BYTES = 256 << 20
MAX_RATIO = 100
_PIECE = 1 << 20
# Errors from reading a damaged file.
_DAMAGE = (ValueError, TypeError, OverflowError, MemoryError, EOFError, RuntimeError)
_DTYPE = re.compile(r"[<>|=]?[a-zA-Z?]\d{0,9}(\[\d{0,9}[a-zA-Z]{1,2}\])?")
_ITEM = re.compile(
    r"""\s*(?P<q>['"])(?P<key>\w{1,20})(?P=q)\s*:\s*"""
    r"""(?P<value>'[^']*'|"[^"]*"|True|False|\([\d\s,L]*\))\s*(?:,|(?=\s*\}))"""
)


# Checks an array's dtype and shape before allocation. Exceptions from the check propagate to the reader's caller.
Fits = Callable[[np.dtype[Any], tuple[int, ...]], bool]


@dataclass(frozen=True)
class Header:
    """Header of a .npy file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool  # the first index changes fastest
    bytes: int  # size of the header in bytes

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def save_npy(path: Path, array: Array) -> None:
    """Write a tensor as .npy without pickling: see :func:`make_storable`."""
    np.save(path, make_storable(array), allow_pickle=False)


def make_storable(array: Array) -> Array:
    """Return an array that numpy's formats can store: strings as fixed-width text, bfloat16 and float8 as raw bytes."""
    if array.dtype.kind == "O":
        return array.astype(np.str_)
    if array.dtype.name in ML_DTYPES:
        # numpy writes special names for some dtypes (float8_e5m2 as "<f1") that it cannot read back.
        return array.view(np.dtype(f"V{array.dtype.itemsize}"))
    return array


def load_npy(path: Path, dtype: str = "", *, mmap: bool = False, fits: Fits | None = None) -> Array:
    """Read a tensor from .npy. ``dtype`` restores dtypes that the format cannot represent (bfloat16, float8).

    Raises:
        UsageError: see :func:`read_npy`.
    """
    return restore_dtype(read_npy(path, mmap=mmap, fits=fits), dtype)


def restore_dtype(array: Array, dtype: str) -> Array:
    """Restore a tensor's dtype after .npy storage: raw bytes become ``dtype``, fixed-width text becomes strings."""
    if is_raw(array.dtype, dtype):
        return array.view(parse_dtype(dtype))
    return array.astype(object) if array.dtype.kind == "U" else array


def is_raw(found: np.dtype[Any], dtype: str) -> bool:
    """Return True if a file's dtype is the raw bytes that :func:`save_npy` writes for ``dtype``."""
    return found.kind == "V" and bool(dtype) and parse_dtype(dtype).itemsize == found.itemsize


def read_npy(path: Path, *, mmap: bool = False, fits: Fits | None = None) -> npt.NDArray[Any]:
    """Read a .npy file.

    Args:
        fits: called before allocation. Its return value is ignored; exceptions propagate.

    Raises:
        UsageError: the file is missing, not a regular file, truncated, pickled, structured, or not a .npy file.
    """
    with _convert_read_errors(path, ".npy"), open_file(path) as file:
        header = read_header(file, os.fstat(file.fileno()).st_size)
        if fits is not None:
            fits(header.dtype, header.shape)
        if mmap and header.nbytes:
            order = "F" if header.fortran else "C"
            # numpy's type stubs accept only a literal order
            return np.memmap(file, header.dtype, "r", header.bytes, header.shape, order)  # type: ignore[call-overload,no-any-return]
        return _read_array(file, header)


def open_npy(path: Path) -> FileTensor:
    """Open a .npy file without reading its data. Raises UsageError as :func:`read_npy`."""
    with _convert_read_errors(path, ".npy"), open_file(path) as file:
        header = read_header(file, os.fstat(file.fileno()).st_size)
        shape, size = header.shape, header.dtype.itemsize
        strides = (
            make_contiguous_strides(shape[::-1], size)[::-1] if header.fortran else make_contiguous_strides(shape, size)
        )
        return FileTensor(OpenFile(file, path), header.dtype, shape, strides, header.bytes)


def parse_npy(data: bytes) -> npt.NDArray[Any]:
    """Parse a .npy file's bytes. Raises ValueError if the bytes are invalid."""
    file = io.BytesIO(data)
    return _read_array(file, read_header(file, len(data)))


class Npz:
    """An .npz archive that unpacks arrays individually. Use as a context manager.

    Attributes:
        keys: array names, in order.

    Raises:
        UsageError: the file is missing, not a regular file, not an archive, or encrypted. Also for duplicate names,
            or members that are not arrays.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _convert_read_errors(path, ".npz"):
            self._file = open_file(path)
            try:
                self._zip = zipfile.ZipFile(self._file)
                self._members = _list_members(self._zip)
                self._free = max(FREE_BYTES, MAX_RATIO * os.fstat(self._file.fileno()).st_size)
            except BaseException:
                self._file.close()
                raise
        self.keys = tuple(self._members)

    def read(self, key: str, fits: Fits | None = None) -> npt.NDArray[Any]:
        """Read an array.

        Args:
            fits: returns True for the dtype and shape that the model needs; the size limit does not apply to such an
                array. None if the needed types are unknown.

        Raises:
            UsageError: the array is truncated, damaged, pickled, structured, or far larger than the archive.
        """
        member = self._members[key]
        with _convert_read_errors(self._path, ".npz", f"{key}: "), self._zip.open(member) as file:
            header = read_header(file, member.file_size)
            if fits is None or not fits(header.dtype, header.shape):
                if header.nbytes > self._free:
                    raise ValueError(
                        f"unpacks to {header.nbytes} bytes, much more than the archive has, and no model input has "
                        "this size; save the array as .npy"
                    )
                self._free -= header.nbytes
            array = _read_array(file, header)
            while file.read(_PIECE):  # read to the end, where zipfile checks the checksum
                pass
            return array

    def __enter__(self) -> Npz:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()
        self._file.close()


def read_header(file: BinaryIO | Any, size: int) -> Header:
    """Read the header of a .npy file with ``size`` bytes, and leave the file at the array's start.

    Raises:
        ValueError: the header is invalid, the array is not a tensor, or the file is truncated.
    """
    start = file.read(8)
    if start[:6] != _MAGIC or len(start) < 8:
        raise ValueError("missing npy signature")
    if start[6] not in (1, 2, 3):
        raise ValueError(f"unsupported version {start[6]}.{start[7]}")
    width = 2 if start[6] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"header has {length} bytes, maximum {MAX_HEADER_BYTES}")
    text = file.read(length)
    if len(text) != length:
        raise ValueError("truncated header")
    header = Header(*_parse_header_text(text.decode("latin-1")), 8 + width + length)
    if header.nbytes > size - header.bytes:
        raise ValueError(f"array needs {header.nbytes} bytes, file has {size - header.bytes}")
    return header


def _parse_header_text(text: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    fields: dict[str, str] = {}
    text = text.strip()
    at = 1
    while text.startswith("{") and (found := _ITEM.match(text, at)):
        fields[found["key"]] = found["value"]
        at = found.end()
    descr = fields.get("descr", "")[1:-1]
    if re.search(r"descr['\"]\s*:\s*[\[(]", text):
        raise ValueError("structured array: a tensor's elements have a single dtype")
    if text[at:].strip() != "}" or sorted(fields) != ["descr", "fortran_order", "shape"] or "(" in descr:
        raise ValueError("invalid header")
    if not _DTYPE.fullmatch(descr):
        raise ValueError(f"unsupported dtype {descr[:40]!r}")
    if descr.lstrip("<>|=") in ("O", "O8", "O4"):
        raise ValueError("array of Python objects, which hil never loads")
    dims = [dim for dim in fields["shape"][1:-1].replace("L", "").split(",") if dim.strip()]
    if len(dims) > MAX_DIMS or any(len(dim.strip()) > 18 for dim in dims):
        raise ValueError("shape exceeds numpy's limits")
    try:
        dtype = np.dtype(descr)
        shape = tuple(map(int, dims))
    except (TypeError, ValueError) as error:
        raise ValueError(f"invalid header: {error}") from error
    if dtype.hasobject or dtype.names or dtype.subdtype:
        raise ValueError(f"unsupported dtype {descr[:40]!r}")
    if not dtype.itemsize and 0 not in shape:
        raise ValueError("elements have 0 bytes")
    return dtype, shape, fields["fortran_order"] == "True"


def _read_array(file: Any, header: Header) -> npt.NDArray[Any]:
    count = math.prod(header.shape)
    flat = np.empty(count, header.dtype)
    view = memoryview(flat.view(np.uint8).reshape(-1).data) if flat.nbytes else memoryview(b"")
    at = 0
    while at < len(view):
        data = file.read(min(_PIECE, len(view) - at))
        if not data:
            raise ValueError("truncated file")
        view[at : at + len(data)] = data
        at += len(data)
    return flat.reshape(header.shape, order="F" if header.fortran else "C")


def _list_members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    found: dict[str, zipfile.ZipInfo] = {}
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise ValueError(f"contains {len(members)} arrays, at most {MAX_MEMBERS} are allowed")
    for member in members:
        name = member.filename
        if not name.endswith(".npy"):
            raise ValueError(f"{name[:80]!r} is not an array")
        if member.flag_bits & 1:
            raise ValueError("encrypted archive")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name[:80]!r} has an unsupported compression method")
        if found.setdefault(name.removesuffix(".npy"), member) is not member:
            raise ValueError(f"duplicate array {name[:80]!r}")
    return found


@contextmanager
def _convert_read_errors(path: Path, form: str, where: str = "") -> Iterator[None]:
    """Convert every error from reading a file to UsageError."""
    try:
        yield
    except FileNotFoundError as error:
        raise UsageError(f"no such file: {path}", hint=suggest_path(path).rstrip()) from error
    except OSError as error:
        raise UsageError(f"{path} is not a readable {form} file: {error.strerror or error}") from error
    except (*_DAMAGE, zipfile.BadZipFile, zlib.error) as error:
        why = str(error) or ("not enough memory" if isinstance(error, MemoryError) else "corrupt data")
        raise UsageError(f"{path} is not a readable {form} file: {where}{why}") from error
