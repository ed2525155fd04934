"""Packages: what is sent to a board. A wheel's files without what an agent never needs, or hil's own files.

A package's name on the board holds a digest of its content, so what is there never has to be sent again.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

# What is left out of a wheel: tests, what only building against it needs, IREE's tools and the second copy of it, made
# for the Tracy profiler, and the certificates for clients that gRPC brings. Patterns of paths in the wheel.
# (numpy imports numpy.random only for whoever asks for it, and nothing of an agent or a runtime does.)
_LEFT_OUT = {
    "numpy": (
        *("*/tests/*", "*/include/*", "*/f2py/*", "*/distutils/*", "*/_core/lib/*", "*.pyi", "*.pxd"),
        *("*/_core/_*_tests.*.so", "*/_core/_simd.*.so", "*/linalg/lapack_lite.*.so", "numpy/random/*"),
    ),
    "iree-base-runtime": ("*/_runtime_libs_tracy/*", "*/_runtime_libs/iree-*", "*/_runtime_libs/share/*", "*.pyi"),
    "grpcio": ("*/_credentials/roots.pem",),
    "ml-dtypes": ("*/include/*", "*.pyi"),
    # The library is for C programs: the Python module has all of it in itself.
    "onnxruntime": ("*/transformers/*", "*/quantization/*", "*/tools/*", "*/datasets/*", "*/libonnxruntime.so.*"),
}
# Of every wheel: its `.data` folder holds scripts and headers, which are for installing; so is the list of its files.
_LEFT_OUT_ALWAYS = (
    "*.data/scripts/*",
    "*.data/headers/*",
    "*.data/data/*",
    "*.dist-info/RECORD",
    "*.dist-info/sboms/*",
)
# A change of these rules or of a package's form makes every package anew.
FORMAT = 3
_BLOCK = 4096
# Gzip's own default; a board unpacks it faster than a network brings it.
_LEVEL = 6


@dataclass(frozen=True)
class File:
    """A file of a package."""

    data: bytes
    executable: bool = False


@dataclass(frozen=True)
class Package:
    """A package, ready to be sent.

    Attributes:
        id: its folder's name on the board, ``numpy-2.4.6-<digest>``.
        title: ``numpy 2.4.6``.
        path: the gzipped tar.
        size: how many bytes that has.
        sha256: its digest.
        disk_bytes: what its files take on a disk.
    """

    id: str
    title: str
    path: Path
    size: int
    sha256: str
    disk_bytes: int


def package_id(title: str, archive: bytes) -> str:
    """The name, on a board, of a package with that content."""
    return f"{title.replace(' ', '-')}-{hashlib.sha256(archive).hexdigest()[:16]}"


def archive_of(files: Mapping[str, File]) -> bytes:
    """A tar of files, the same bytes for the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size = len(files[name].data)
            member.mode = 0o700 if files[name].executable else 0o600
            archive.addfile(member, io.BytesIO(files[name].data))
    return buffer.getvalue()


def write_package(title: str, files: Mapping[str, File], folder: Path) -> Package:
    """Pack files, into a file in a folder."""
    archive = archive_of(files)
    compressed = gzip.compress(archive, _LEVEL, mtime=0)
    name = package_id(title, archive)
    path = folder / f"{name}.tar.gz"
    path.write_bytes(compressed)
    blocks = sum(-(-len(file.data) // _BLOCK) for file in files.values())
    folders = {parent for file in files for parent in Path(file).parents}
    disk = (blocks + len(folders)) * _BLOCK
    return Package(name, title, path, len(compressed), hashlib.sha256(compressed).hexdigest(), disk)


def wheel_title(wheel: Path) -> tuple[str, str]:
    """Name and version of a wheel, from its file's name; the name as package indexes write it."""
    name, version = wheel.name.split("-")[:2]
    return name.replace("_", "-").lower(), version


def wheel_files(wheel: Path) -> Iterator[tuple[str, File]]:
    """The files of a wheel that belong on a board."""
    name, _ = wheel_title(wheel)
    left_out = (*_LEFT_OUT.get(name, ()), *_LEFT_OUT_ALWAYS)
    with zipfile.ZipFile(wheel) as source:
        for item in source.infolist():
            path = item.filename
            if item.is_dir() or any(fnmatch.fnmatchcase(path, pattern) for pattern in left_out):
                continue
            head, _, tail = path.partition("/")
            if head.endswith(".data"):
                path = tail.partition("/")[2]
            yield path, File(source.read(item), executable=bool(item.external_attr >> 16 & 0o111))


def write_wheels(wheels: Iterable[Path], folder: Path) -> None:
    """Make packages of wheels in a folder, and the index that :func:`read_index` reads."""
    packages = [write_package(" ".join(wheel_title(wheel)), dict(wheel_files(wheel)), folder) for wheel in wheels]
    entries = [{**asdict(package), "path": package.path.name} for package in packages]
    (folder / "index.json").write_text(json.dumps(entries, indent=1))


def read_index(folder: Path) -> list[Package]:
    """The packages in a folder."""
    entries = json.loads((folder / "index.json").read_bytes())
    return [Package(**{**entry, "path": folder / entry["path"]}) for entry in entries]
