"""Packages: what is sent to a board. A wheel's files without what an agent never needs, or hil's own files.

A package's name on the board holds a digest of its content, so what is there never has to be sent again. Here too are
the platforms that packages are for, and why no agent can be put on a board.
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
from hil.core.runtimes import RUNTIMES
from hil.errors import BoardError, StorageError

# What is left out of a wheel: tests, what only building against it needs, and the certificates for clients that gRPC
# brings; of a runtime's, what its entry says. Patterns of paths in the wheel.
# (numpy imports numpy.random only for whoever asks for it, and nothing of an agent or a runtime does.)
_LEFT_OUT = {
    "numpy": (
        *("*/tests/*", "*/include/*", "*/f2py/*", "*/distutils/*", "*/_core/lib/*", "*.pyi", "*.pxd"),
        *("*/_core/_*_tests.*.so", "*/_core/_simd.*.so", "*/linalg/lapack_lite.*.so", "numpy/random/*"),
    ),
    "grpcio": ("*/_credentials/roots.pem",),
    "ml-dtypes": ("*/include/*", "*.pyi"),
    **{wheel.name: wheel.left_out for info in RUNTIMES.values() for wheel in info.wheels},
}
# Of every wheel: its `.data` folder holds scripts and headers, which are for installing; so is the list of its files.
_LEFT_OUT_ALWAYS = (
    *("*.data/scripts/*", "*.data/headers/*", "*.data/data/*"),
    *("*.dist-info/RECORD", "*.dist-info/sboms/*"),
)
# A change of these rules or of a package's form makes every package anew.
FORMAT = 3
_BLOCK = 4096
# Gzip's own default; a board unpacks it faster than a network brings it.
_LEVEL = 6


@dataclass(frozen=True)
class File:
    """A file of a package. One of a wheel may have hundreds of megabytes: it is read as it is packed."""

    open: Callable[[], IO[bytes]]
    size: int
    executable: bool = False

    @staticmethod
    def of(data: bytes, *, executable: bool = False) -> File:
        """A file with this content."""
        return File(partial(io.BytesIO, data), len(data), executable)


@dataclass(frozen=True)
class Package:
    """A package, ready to be sent."""

    id: str  # its folder's name on the board, ``numpy-2.4.6-<digest>``
    title: str
    path: Path  # the gzipped tar
    size: int
    sha256: str
    disk_bytes: int  # what its files take on a disk


def package_id(title: str, digest: str) -> str:
    """The name, on a board, of a package with content of that SHA-256 digest."""
    return f"{title.replace(' ', '-')}-{digest[:16]}"


class _Hashed(io.RawIOBase):
    """A file to write to, and the digest of what was written."""

    def __init__(self, target: IO[bytes] | gzip.GzipFile) -> None:
        self._target = target
        self.hash = hashlib.sha256()

    def write(self, data: Any, /) -> int:
        self.hash.update(data)
        return self._target.write(data)


def archive_of(files: Mapping[str, File]) -> bytes:
    """A tar of files, the same bytes for the same files."""
    buffer = io.BytesIO()
    _archive(sorted(files.items()), _Hashed(buffer))
    return buffer.getvalue()


def write_package(title: str, files: Mapping[str, File], folder: Path) -> Package:
    """Pack files, into a file in a folder."""
    return _pack(title, sorted(files.items()), folder)


def _pack(title: str, files: Iterable[tuple[str, File]], folder: Path) -> Package:
    """Pack files that come in the order of their names."""
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as target:
        compressed = _Hashed(target)
        with gzip.GzipFile("", "wb", _LEVEL, compressed, mtime=0) as packing:
            content = _Hashed(packing)
            disk = _archive(files, content)
    name = package_id(title, content.hash.hexdigest())
    path = Path(target.name).rename(folder / f"{name}.tar.gz")
    return Package(name, title, path, path.stat().st_size, compressed.hash.hexdigest(), disk)


def _archive(files: Iterable[tuple[str, File]], target: _Hashed) -> int:
    """Write a tar, the same bytes for the same files; returns what they take on a disk."""
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


def wheel_title(wheel: Path) -> tuple[str, str]:
    """Name and version of a wheel, from its file's name; the name as package indexes write it."""
    name, version = wheel.name.split("-")[:2]
    return name.replace("_", "-").lower(), version


def wheel_files(wheel: Path) -> Iterator[tuple[str, File]]:
    """The files of a wheel that belong on a board, in the order of their names; each can be opened until the next."""
    name, _ = wheel_title(wheel)
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


def write_wheels(wheels: Iterable[Path], folder: Path) -> None:
    """Make packages of wheels in a folder, and the index that :func:`read_index` reads."""
    packages = [_pack(" ".join(wheel_title(wheel)), wheel_files(wheel), folder) for wheel in wheels]
    entries = [{**asdict(package), "path": package.path.name} for package in packages]
    (folder / "index.json").write_text(json.dumps(entries, indent=1))


def read_index(folder: Path) -> list[Package]:
    """The packages in a folder."""
    entries = json.loads((folder / "index.json").read_bytes())
    return [Package(**{**entry, "path": folder / entry["path"]}) for entry in entries]


# The rooms of the package that are the controller's alone.
_CONTROLLERS = {"api.py", "plugins.py", "board_configs", "controller", "py.typed", "sim", "testing"}
# What only the controller asks of the rooms that it shares with the agent.
_OF_CONTROLLER = {"core/board_config.py", "core/boards.py", "core/config_files.py"}


def own_title() -> str:
    """hil's name and version."""
    return f"hil {own_version()}"


def own_files() -> dict[str, File]:
    """The files of the package ``hil`` that an agent needs, and metadata that tell its version."""
    root = Path(__file__).parents[3]
    files = {}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if inside.parts[0] not in _CONTROLLERS and inside.as_posix() not in _OF_CONTROLLER:
            files[f"hil/{inside.as_posix()}"] = File.of(path.read_bytes())
    metadata = f"Metadata-Version: 2.1\nName: hil\nVersion: {own_version()}\n"
    files[f"hil-{own_version()}.dist-info/METADATA"] = File.of(metadata.encode())
    return files


_EVERY_S = 10.0


class Progress:
    """Tells how far something has come, every ten seconds: of what is done sooner nothing is heard."""

    def __init__(self, say: Callable[[str], None], what: str) -> None:
        self._say = say
        self._what = what
        self._told = time.monotonic()
        self._done = 0

    def more(self, size: int, total: int) -> None:
        """So many more bytes are done."""
        self._done += size
        self.at(self._done, total)

    def at(self, done: int, total: int) -> None:
        """So many bytes of so many are done."""
        if time.monotonic() - self._told >= _EVERY_S:
            self._told = time.monotonic()
            self._say(f"{self._what}: {megabytes(done)} of {megabytes(total)}")


def megabytes(size: int) -> str:
    """A size for messages, such as ``4.7 MB``."""
    return f"{size / 1e6:.1f} MB" if size < 1e7 else f"{size / 1e6:.0f} MB"


COMMAND_HINT = 'the board can be served without an agent: set runtime.kind = "command" in its config'


@contextlib.contextmanager
def at_home() -> Iterator[None]:
    """Turn this machine's own troubles with files, which are none of the board's, into StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the agent could not be made ready on this machine: {error}", hint="is its disk full? TMPDIR names another"
        ) from error


class NoAgentHere(BoardError):
    """The board cannot run hil's agent, now or ever; without an agent it may still serve."""


class NoPython(NoAgentHere):
    """The board has no Python that the agent can use."""


class NoWheels(NoAgentHere):
    """A package that the agent needs is not published for the board's platform."""


# The oldest glibc that manylinux tags speak of, and the tags' older names.
_OLDEST_GLIBC = {"x86_64": 5, "i686": 5}
_NEWER_MACHINES_GLIBC = 17
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_LIBC = re.compile(r"(glibc|musl)-([0-9]{1,3})\.([0-9]{1,3})")


@dataclass(frozen=True)
class Interpreter:
    """A Python on a board."""

    path: str  # the executable, links followed
    version: tuple[int, int]  # (3, 11), say
    machine: str  # the architecture that it was built for, as ``uname -m`` would say it
    libc: str  # ``glibc-2.36`` or ``musl-1.2``; "" where it could not be told
    problem: str = ""  # why it cannot be used; "" where it can

    @property
    def text(self) -> str:
        """It in a few words, such as ``Python 3.11 on aarch64, glibc 2.36``."""
        name = f"Python {'.'.join(map(str, self.version))} on {self.machine}"
        return f"{name}, {self.libc.replace('-', ' ')}" if self.libc else name


def platform_tags(interpreter: Interpreter) -> list[str]:
    """The platform tags of the wheels that it takes, the newest first; none where its C library is unknown."""
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


def pip_options(interpreter: Interpreter) -> list[str]:
    """Options with which pip, on this machine, picks wheels for that interpreter."""
    number = "".join(map(str, interpreter.version))
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={number}"]
    options += [f"--abi={abi}" for abi in (f"cp{number}", "abi3", "none")]
    return options + [f"--platform={tag}" for tag in platform_tags(interpreter)]
