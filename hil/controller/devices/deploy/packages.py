"""Packages to send to a board: the files of a wheel that an agent needs, or hil's files.

A package's name on the board contains a digest of its content, so an installed package is never sent twice. This module
also contains platform tags, and the errors for boards that cannot run an agent.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import hashlib
import io
import json
import re
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from hil.core import own_version
from hil.core.files import read_file
from hil.core.runtimes import RUNTIMES
from hil.errors import BoardError, StorageError

# Files to omit from wheels: tests, build files, gRPC's client certificates, and the patterns of a runtime's entry.
# Patterns match paths in the wheel. numpy imports numpy.random lazily, and neither agents nor runtimes use it.
_LEFT_OUT = {
    "numpy": (
        *("*/tests/*", "*/include/*", "*/f2py/*", "*/distutils/*", "*/_core/lib/*", "*.pyi", "*.pxd"),
        *("*/_core/_*_tests.*.so", "*/_core/_simd.*.so", "*/linalg/lapack_lite.*.so", "numpy/random/*"),
    ),
    "grpcio": ("*/_credentials/roots.pem",),
    "ml-dtypes": ("*/include/*", "*.pyi"),
    **{wheel.name: wheel.left_out for info in RUNTIMES.values() for wheel in info.wheels},
}
# Files to omit from every wheel: scripts and headers of the `.data` directory, and the list of files. Only installers
# need them.
_LEFT_OUT_ALWAYS = (
    *("*.data/scripts/*", "*.data/headers/*", "*.data/data/*"),
    *("*.dist-info/RECORD", "*.dist-info/sboms/*"),
)
# Increment this number after a change in these rules or in the package format. All packages are then rebuilt.
FORMAT = 3
_BLOCK = 4096
# gzip's default level. A board unpacks such data faster than a network transfers it.
_LEVEL = 6


@dataclass(frozen=True)
class File:
    """File of a package. Files of wheels may have hundreds of megabytes, so they are read during packing."""

    open: Callable[[], IO[bytes]]
    size: int
    executable: bool = False

    @staticmethod
    def of(data: bytes, *, executable: bool = False) -> File:
        """Return a file with this content."""
        return File(partial(io.BytesIO, data), len(data), executable)


@dataclass(frozen=True)
class Package:
    """Package that is ready to send."""

    id: str  # directory name on the board, ``numpy-2.4.6-<digest>``
    title: str
    path: Path  # gzipped tar
    size: int
    sha256: str
    disk_bytes: int  # disk space of the files


def make_package_id(title: str, digest: str) -> str:
    """Return a package's name on a board, given the SHA-256 digest of the content."""
    return f"{title.replace(' ', '-')}-{digest[:16]}"


class _Hashed(io.RawIOBase):
    """Writer that hashes the data it writes to a file."""

    def __init__(self, target: IO[bytes] | gzip.GzipFile) -> None:
        self._target = target
        self.hash = hashlib.sha256()

    def write(self, data: Any, /) -> int:
        self.hash.update(data)
        return self._target.write(data)


def archive_files(files: Mapping[str, File]) -> bytes:
    """Return a reproducible tar of files."""
    buffer = io.BytesIO()
    _write_archive(sorted(files.items()), _Hashed(buffer))
    return buffer.getvalue()


def write_package(title: str, files: Mapping[str, File], folder: Path) -> Package:
    """Pack files into a package in a directory."""
    return _pack(title, sorted(files.items()), folder)


def _pack(title: str, files: Iterable[tuple[str, File]], folder: Path) -> Package:
    """Pack files that are sorted by name."""
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as target:
        compressed = _Hashed(target)
        with gzip.GzipFile("", "wb", _LEVEL, compressed, mtime=0) as packing:
            content = _Hashed(packing)
            disk = _write_archive(files, content)
    name = make_package_id(title, content.hash.hexdigest())
    path = Path(target.name).rename(folder / f"{name}.tar.gz")
    return Package(name, title, path, path.stat().st_size, compressed.hash.hexdigest(), disk)


def _write_archive(files: Iterable[tuple[str, File]], target: _Hashed) -> int:
    """Write a reproducible tar. Return the disk space of the files in bytes."""
    blocks = 0
    folders: set[Path] = set()
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        for name, file in files:
            member = tarfile.TarInfo(name)
            member.size = file.size
            member.mode = 0o700 if file.executable else 0o600
            with file.open() as content:
                archive.addfile(member, content)
            blocks += -(-file.size // _BLOCK)
            folders.update(Path(name).parents)
    return (blocks + len(folders)) * _BLOCK


def read_wheel_title(wheel: Path) -> tuple[str, str]:
    """Return a wheel's normalized name and version, from the file name."""
    name, version = wheel.name.split("-")[:2]
    return name.replace("_", "-").lower(), version


def iter_wheel_files(wheel: Path) -> Iterator[tuple[str, File]]:
    """Yield a wheel's files for a board, sorted by name. Open each file before requesting the next."""
    name, _ = read_wheel_title(wheel)
    left_out = (*_LEFT_OUT.get(name, ()), *_LEFT_OUT_ALWAYS)
    found: dict[str, zipfile.ZipInfo] = {}
    with zipfile.ZipFile(wheel) as source:
        for item in source.infolist():
            path = item.filename
            if item.is_dir() or any(fnmatch.fnmatchcase(path, pattern) for pattern in left_out):
                continue
            head, _, tail = path.partition("/")
            found[tail.partition("/")[2] if head.endswith(".data") else path] = item
        for path, item in sorted(found.items()):
            yield path, File(partial(source.open, item), item.file_size, bool(item.external_attr >> 16 & 0o111))


def pack_wheel(wheel: Path, folder: Path) -> Package:
    """Pack a wheel into a package in a directory."""
    return _pack(" ".join(read_wheel_title(wheel)), iter_wheel_files(wheel), folder)


def write_wheels(wheels: Iterable[Path], folder: Path) -> None:
    """Pack wheels into packages in a directory, and write the index for :func:`read_index`."""
    packages = [pack_wheel(wheel, folder) for wheel in wheels]
    entries = [{**asdict(package), "path": package.path.name} for package in packages]
    (folder / "index.json").write_text(json.dumps(entries, indent=1))


def read_index(folder: Path) -> list[Package]:
    """Return the packages in a directory."""
    entries = json.loads(read_file(folder / "index.json"))
    return [Package(**{**entry, "path": folder / entry["path"]}) for entry in entries]


# Top-level parts of hil that only the controller uses.
_CONTROLLERS = {"api.py", "plugins.py", "board_configs", "controller", "mcu", "py.typed", "sim", "testing"}
# Packages in shared packages that only the controller uses.
_CONTROLLER_PACKAGES = {"compare/generation"}
# Modules in shared packages that only the controller uses.
_OF_CONTROLLER = {
    *(f"core/{name}.py" for name in ("board_config", "board_parser", "boards", "bounded_http", "chips")),
    *(f"core/{name}.py" for name in ("config_files", "config_keys", "config_values", "console_config", "mcu_config")),
    *(f"core/{name}.py" for name in ("examples", "json_values", "meter_config", "stack_config")),
    *(f"core/{name}.py" for name in ("bounded_command", "compile_flags", "futures", "line_pattern")),
    *(f"core/{name}.py" for name in ("narrow_integers", "peak_config", "serial_device", "timeline", "variables")),
    *(f"formats/{name}.py" for name in ("elf32", "firmware", "onnx_arithmetic", "onnx_file", "onnx_functions")),
    *("compare/random_outputs.py", "protocol/v1/farm_pb2.py"),
}


def own_title() -> str:
    """Return hil's name and version."""
    return f"hil {own_version()}"


def own_files() -> dict[str, File]:
    """Return the files of ``hil`` that an agent needs, and metadata with the version."""
    root = Path(__file__).parents[3]
    files = {}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        is_used = inside.as_posix() not in _OF_CONTROLLER and inside.parent.as_posix() not in _CONTROLLER_PACKAGES
        if inside.parts[0] not in _CONTROLLERS and is_used:
            files[f"hil/{inside.as_posix()}"] = File.of(path.read_bytes())
    metadata = f"Metadata-Version: 2.1\nName: hil\nVersion: {own_version()}\n"
    files[f"hil-{own_version()}.dist-info/METADATA"] = File.of(metadata.encode())
    return files


_EVERY_SECONDS = 10.0


class ProgressPrinter:
    """Progress reporter that prints at most every ten seconds. Shorter operations print nothing."""

    def __init__(self, say: Callable[[str], None], what: str) -> None:
        self._say = say
        self._what = what
        self._told = time.monotonic()
        self._done = 0

    def add_progress(self, size: int, total: int) -> None:
        """Add ``size`` bytes to the progress."""
        self._done += size
        self.set_progress(self._done, total)

    def set_progress(self, done: int, total: int) -> None:
        """Set the progress to ``done`` of ``total`` bytes."""
        if time.monotonic() - self._told >= _EVERY_SECONDS:
            self._told = time.monotonic()
            self._say(f"{self._what}: {format_megabytes(done)} of {format_megabytes(total)}")


def format_megabytes(size: int) -> str:
    """Format a size for messages, such as ``4.7 MB``."""
    return f"{size / 1e6:.1f} MB" if size < 1e7 else f"{size / 1e6:.0f} MB"


COMMAND_HINT = 'use the board without an agent: set runtime.kind = "command" in the board\'s config'


@contextlib.contextmanager
def translate_storage_errors() -> Iterator[None]:
    """Translate file errors of this machine to StorageError, so that hil does not report a board error."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot prepare the agent's packages on this machine: {error}",
            hint="free disk space, or set TMPDIR to a different directory",
        ) from error


class NoAgentHere(BoardError):
    """The board cannot run hil's agent at all. The board may still work without an agent."""


class NoPython(NoAgentHere):
    """The board has no Python that the agent can use."""


class NoWheels(NoAgentHere):
    """A required package is not published for the board's platform."""


# Architecture -> minor version of the oldest glibc with manylinux tags; and older tag names.
_OLDEST_GLIBC = {"x86_64": 5, "i686": 5}
_NEWER_MACHINES_GLIBC = 17
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_LIBC = re.compile(r"(glibc|musl)-([0-9]{1,3})\.([0-9]{1,3})")


@dataclass(frozen=True)
class Interpreter:
    """Python interpreter on a board."""

    path: str  # the executable with symbolic links resolved
    version: tuple[int, int]  # for instance (3, 11)
    machine: str  # target architecture of the build, in the form of ``uname -m``
    libc: str  # ``glibc-2.36`` or ``musl-1.2``; "" if unknown
    problem: str = ""  # why the interpreter is unusable; "" if it is usable

    @property
    def text(self) -> str:
        """Short description, such as ``Python 3.11 on aarch64, glibc 2.36``."""
        name = f"Python {'.'.join(map(str, self.version))} on {self.machine}"
        return f"{name}, {self.libc.replace('-', ' ')}" if self.libc else name


def list_platform_tags(interpreter: Interpreter) -> list[str]:
    """Return the platform tags of supported wheels, the newest first. Return no tags if the C library is unknown."""
    found = _LIBC.fullmatch(interpreter.libc)
    if not found or found[2] != ("2" if found[1] == "glibc" else "1"):
        return []
    machine, newest = interpreter.machine, int(found[3])
    if found[1] == "musl":
        return [f"musllinux_1_{minor}_{machine}" for minor in range(newest, -1, -1)]
    tags = []
    for minor in range(newest, _OLDEST_GLIBC.get(machine, _NEWER_MACHINES_GLIBC) - 1, -1):
        tags.append(f"manylinux_2_{minor}_{machine}")
        if minor in _OLD_NAMES:
            tags.append(f"{_OLD_NAMES[minor]}_{machine}")
    return tags


def make_pip_options(interpreter: Interpreter) -> list[str]:
    """Return pip options that select wheels for that interpreter instead of this machine's."""
    number = "".join(map(str, interpreter.version))
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={number}"]
    options += [f"--abi={abi}" for abi in (f"cp{number}", "abi3", "none")]
    return options + [f"--platform={tag}" for tag in list_platform_tags(interpreter)]
