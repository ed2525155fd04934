"""NumPy's .npy and .npz files, read by rules of our own: a header is never evaluated, and nothing is made room for
that the file does not hold.

numpy's own reader evaluates the header as Python (a deeply nested one ends the process) and makes the room that the
header asks for before it looks at the data.
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

from hil.core.file_tensor import FileTensor, OpenFile, contiguous
from hil.core.files import open_file
from hil.core.tensors import ML_DTYPES, Array, dtype_of
from hil.errors import UsageError

_MAGIC = b"\x93NUMPY"
# As numpy has it for files that are not trusted, and for dimensions.
MAX_HEADER_BYTES = 10_000
MAX_DIMS = 64
MAX_MEMBERS = 10_000
# What an archive may unpack to, the larger of the two (5 MiB can be 5 GiB of zeros). Arrays that are exactly what a
# model takes do not count.
FREE_BYTES = 256 << 20
MAX_RATIO = 100
_PIECE = 1 << 20
# What reading a damaged file raises.
_DAMAGE = (ValueError, TypeError, OverflowError, MemoryError, EOFError, RuntimeError)
_DTYPE = re.compile(r"[<>|=]?[a-zA-Z?]\d{0,9}(\[\d{0,9}[a-zA-Z]{1,2}\])?")
_ITEM = re.compile(
    r"""\s*(?P<q>['"])(?P<key>\w{1,20})(?P=q)\s*:\s*"""
    r"""(?P<value>'[^']*'|"[^"]*"|True|False|\([\d\s,L]*\))\s*(?:,|(?=\s*\}))"""
)


# Says of an array's dtype and shape whether it is what is wanted, before room is made for it; what it raises is the
# reader's error.
Fits = Callable[[np.dtype[Any], tuple[int, ...]], bool]


@dataclass(frozen=True)
class Header:
    """What a .npy file says of its array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool  # the first index changes fastest
    bytes: int  # how many bytes the header itself takes

    @property
    def nbytes(self) -> int:
        """What the array takes."""
        return math.prod(self.shape) * self.dtype.itemsize


def save_npy(path: Path, array: Array) -> None:
    """Write a tensor as .npy, never pickled: strings become numpy's fixed-width text, bfloat16 and float8 raw bytes."""
    if array.dtype.kind == "O":
        array = array.astype(np.str_)
    elif array.dtype.name in ML_DTYPES:
        # numpy would write names of its own for some of these (float8_e5m2 as "<f1") that it cannot read back.
        array = array.view(np.dtype(f"V{array.dtype.itemsize}"))
    np.save(path, array, allow_pickle=False)


def load_npy(path: Path, dtype: str = "", *, mmap: bool = False, fits: Fits | None = None) -> Array:
    """Read a tensor from .npy, as ``dtype`` where numpy's format forgot it (it knows no bfloat16 or float8).

    Raises:
        UsageError: as :func:`read_npy`.
    """
    return typed(read_npy(path, mmap=mmap, fits=fits), dtype)


def typed(array: Array, dtype: str) -> Array:
    """A tensor as it was before numpy's format forgot its dtype: raw bytes are ``dtype``, fixed-width text strings."""
    if is_raw(array.dtype, dtype):
        return array.view(dtype_of(dtype))
    return array.astype(object) if array.dtype.kind == "U" else array


def is_raw(found: np.dtype[Any], dtype: str) -> bool:
    """Whether a file's dtype is the raw bytes that :func:`save_npy` writes for a dtype that numpy does not know."""
    return found.kind == "V" and bool(dtype) and dtype_of(dtype).itemsize == found.itemsize


def read_npy(path: Path, *, mmap: bool = False, fits: Fits | None = None) -> npt.NDArray[Any]:
    """The array of a .npy file.

    Args:
        fits: asked before room is made; its answer does not count, what it raises does.

    Raises:
        UsageError: the file is missing, no plain file, cut off, pickled, structured, or no .npy file.
    """
    with _reading(path, ".npy"), open_file(path) as file:
        header = read_header(file, os.fstat(file.fileno()).st_size)
        if fits is not None:
            fits(header.dtype, header.shape)
        if mmap and header.nbytes:
            order = "F" if header.fortran else "C"
            # mypy: numpy's stubs know no order that is a variable.
            return np.memmap(file, header.dtype, "r", header.bytes, header.shape, order)  # type: ignore[call-overload,no-any-return]
        return _array(file, header)


def open_npy(path: Path) -> FileTensor:
    """The array of a .npy file, of which nothing is read yet. Raises UsageError: as :func:`read_npy`."""
    with _reading(path, ".npy"), open_file(path) as file:
        header = read_header(file, os.fstat(file.fileno()).st_size)
        shape, size = header.shape, header.dtype.itemsize
        strides = contiguous(shape[::-1], size)[::-1] if header.fortran else contiguous(shape, size)
        return FileTensor(OpenFile(file, path), header.dtype, shape, strides, header.bytes)


def parse_npy(data: bytes) -> npt.NDArray[Any]:
    """The array in the bytes of a .npy file. Raises ValueError: there is none."""
    file = io.BytesIO(data)
    return _array(file, read_header(file, len(data)))


class Npz:
    """An .npz archive, whose arrays are unpacked one by one. A context manager.

    Attributes:
        keys: the arrays' names, in order.

    Raises:
        UsageError: the file is missing, no plain file, no archive, encrypted, holds a name twice, or no arrays.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _reading(path, ".npz"):
            self._file = open_file(path)
            try:
                self._zip = zipfile.ZipFile(self._file)
                self._members = _members(self._zip)
                self._free = max(FREE_BYTES, MAX_RATIO * os.fstat(self._file.fileno()).st_size)
            except BaseException:
                self._file.close()
                raise
        self.keys = tuple(self._members)

    def read(self, key: str, fits: Fits | None = None) -> npt.NDArray[Any]:
        """One array.

        Args:
            fits: whether an array is what is wanted, however tightly it is packed; None is not known.

        Raises:
            UsageError: it is cut off, damaged, pickled, structured, or takes far more than the archive.
        """
        member = self._members[key]
        with _reading(self._path, ".npz", f"{key}: "), self._zip.open(member) as file:
            header = read_header(file, member.file_size)
            if fits is None or not fits(header.dtype, header.shape):
                if header.nbytes > self._free:
                    raise ValueError(
                        f"it unpacks to {header.nbytes} bytes, far more than the archive has, and is not known to be "
                        "what the model takes; save it as .npy"
                    )
                self._free -= header.nbytes
            array = _array(file, header)
            while file.read(_PIECE):  # the checksum is looked at where the member ends
                pass
            return array

    def __enter__(self) -> Npz:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()
        self._file.close()


def read_header(file: BinaryIO | Any, size: int) -> Header:
    """The header of a .npy file of ``size`` bytes; the file is then where the array begins.

    Raises:
        ValueError: it is none, of an array that is no tensor, or of one that is cut off.
    """
    start = file.read(8)
    if start[:6] != _MAGIC or len(start) < 8:
        raise ValueError("it does not begin as such a file does")
    if start[6] not in (1, 2, 3):
        raise ValueError(f"it is of version {start[6]}.{start[7]}")
    width = 2 if start[6] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes, {MAX_HEADER_BYTES} are allowed")
    text = file.read(length)
    if len(text) != length:
        raise ValueError("it is cut off in its header")
    header = Header(*_parsed(text.decode("latin-1")), 8 + width + length)
    if header.nbytes > size - header.bytes:
        raise ValueError(f"its array takes {header.nbytes} bytes, and {size - header.bytes} are there")
    return header


def _parsed(text: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    fields: dict[str, str] = {}
    text = text.strip()
    at = 1
    while text.startswith("{") and (found := _ITEM.match(text, at)):
        fields[found["key"]] = found["value"]
        at = found.end()
    descr = fields.get("descr", "")[1:-1]
    if re.search(r"descr['\"]\s*:\s*[\[(]", text):
        raise ValueError("its array is structured: a tensor's elements have one dtype")
    if text[at:].strip() != "}" or sorted(fields) != ["descr", "fortran_order", "shape"] or "(" in descr:
        raise ValueError("its header is damaged")
    if not _DTYPE.fullmatch(descr):
        raise ValueError(f"its dtype is {descr[:40]!r}")
    if descr.lstrip("<>|=") in ("O", "O8", "O4"):
        raise ValueError("its array holds Python objects, which hil never loads")
    dims = [dim for dim in fields["shape"][1:-1].replace("L", "").split(",") if dim.strip()]
    if len(dims) > MAX_DIMS or any(len(dim.strip()) > 18 for dim in dims):
        raise ValueError("its shape is beyond all arrays")
    try:
        dtype = np.dtype(descr)
        shape = tuple(map(int, dims))
    except (TypeError, ValueError) as error:
        raise ValueError(f"its header is damaged: {error}") from error
    if dtype.hasobject or dtype.names or dtype.subdtype:
        raise ValueError(f"its dtype is {descr[:40]!r}")
    if not dtype.itemsize and 0 not in shape:
        raise ValueError("its elements take no bytes")
    return dtype, shape, fields["fortran_order"] == "True"


def _array(file: Any, header: Header) -> npt.NDArray[Any]:
    count = math.prod(header.shape)
    flat = np.empty(count, header.dtype)
    view = memoryview(flat.view(np.uint8).reshape(-1).data) if flat.nbytes else memoryview(b"")
    at = 0
    while at < len(view):
        data = file.read(min(_PIECE, len(view) - at))
        if not data:
            raise ValueError("it is cut off")
        view[at : at + len(data)] = data
        at += len(data)
    return flat.reshape(header.shape, order="F" if header.fortran else "C")


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    found: dict[str, zipfile.ZipInfo] = {}
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise ValueError(f"it holds {len(members)} arrays, {MAX_MEMBERS} are allowed")
    for member in members:
        name = member.filename
        if not name.endswith(".npy"):
            raise ValueError(f"it holds {name[:80]!r}, which is no array")
        if member.flag_bits & 1:
            raise ValueError("it is encrypted")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name[:80]!r} is packed in a way that numpy never packs")
        if found.setdefault(name.removesuffix(".npy"), member) is not member:
            raise ValueError(f"it holds {name[:80]!r} twice")
    return found


@contextmanager
def _reading(path: Path, form: str, where: str = "") -> Iterator[None]:
    """Say of whatever is wrong with a file that it cannot be read."""
    try:
        yield
    except FileNotFoundError as error:
        raise UsageError(f"no such file: {path}") from error
    except OSError as error:
        raise UsageError(f"{path} is not a readable {form} file: {error.strerror or error}") from error
    except (*_DAMAGE, zipfile.BadZipFile, zlib.error) as error:
        why = str(error) or ("there is not enough memory" if isinstance(error, MemoryError) else "it is damaged")
        raise UsageError(f"{path} is not a readable {form} file: {where}{why}") from error
