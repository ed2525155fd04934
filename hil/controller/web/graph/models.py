"""Find a model by the path in a record. The file may be missing, changed, or belong to a different user."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.controller.models.conversions import convert_to_onnx
from hil.controller.models.description import digest_of_files
from hil.controller.models.importers import import_model
from hil.controller.storage.cache import Cache
from hil.controller.storage.run_context import RunContext
from hil.controller.web.files.kept import list_bases, own
from hil.controller.web.publish.parcels import is_published
from hil.core.files import digest_file
from hil.errors import HilError, UsageError

# Maximum bytes to digest in a request, including external data.
MAX_BYTES = 4 << 30


@dataclass(frozen=True)
class NamedModel:
    """Reference to a model, as a record stores it."""

    path: str
    digest: str = ""  # "" if not recorded
    dims: tuple[tuple[str, int], ...] = ()
    function: str = ""


@dataclass(frozen=True)
class FoundModel:
    """Path of the model file, if found."""

    path: Path | None
    digest: str = ""  # file digest without external data
    inside: bool = False  # True if the file is in a served directory
    why: str = ""  # reason for a missing file


def find_model(named: NamedModel, folder: Path, roots: Sequence[Path]) -> FoundModel:
    """Find the file for a model in a record.

    Files outside the served directories require a digest in the record. Records may come from anyone, and must not give
    access to files that their author does not know.
    """
    if not named.path or "\0" in named.path:
        return FoundModel(None, why="the record does not name a model file")
    shown = Path(named.path).name
    outside = False
    for path in _iter_existing_files(named.path, list_bases(folder, roots)):
        inside = any(own(root, path) for root in roots)
        if not inside and not named.digest:
            outside = True
            continue
        digest = digest_now(path)
        if digest:
            return FoundModel(path, digest, inside)
    if outside:
        why = f"{shown} is outside the served directories, and the record contains no digest for it"
        return FoundModel(None, why=f"{why}: add the directory with --runs")
    why = f"{shown} is missing or unreadable"
    if is_published(folder):
        why = f"{shown} was not published: hil publish only sends the files in the session directory"
    return FoundModel(None, why=why)


def _iter_existing_files(path: str, starts: Sequence[Path]) -> Iterator[Path]:
    for start in starts:
        one = start / path
        try:
            if one.is_file():
                yield one
        except OSError:
            continue


def digest_now(path: Path) -> str:
    """Return a regular file's digest, or "" if the file is unreadable or exceeds the limit."""
    try:
        look = path.stat()
        if look.st_size > MAX_BYTES:
            return ""
        return _digest_cached(str(path), look.st_size, look.st_mtime_ns, look.st_ino)
    except OSError:
        return ""


@functools.lru_cache(maxsize=256)
def _digest_cached(path: str, size: int, changed: int, inode: int) -> str:
    return digest_file(Path(path))


def is_recorded(named: NamedModel, found: FoundModel, external: Sequence[str]) -> bool | None:
    """Return True if the file and the external data match the recorded digest, or None if unknown."""
    if not named.digest or found.path is None:
        return None
    digests = {"": found.digest}
    left = MAX_BYTES
    for name in external:
        beside = found.path.parent / name
        if not own(found.path.parent, beside) or not beside.is_file() or (left := left - beside.stat().st_size) < 0:
            return False if left >= 0 else None
        digests[name] = digest_now(beside)
    return digest_of_files(digests) == named.digest


class KeptOnly(Cache):
    """Read-only view on the user's cache. Pages must not wait for a framework to recompute an entry."""

    def get_or_make(
        self, key: str, meta: Mapping[str, Any], make: Callable[[Path], None], recompute: bool = False
    ) -> tuple[Path, bool]:
        """Return a cached entry. Raises UsageError if the entry is missing."""
        found = self.get(key)
        if found is None:
            raise UsageError("the conversion is not cached")
        return found, True


def find_kept_onnx(found: FoundModel, named: NamedModel, context: RunContext) -> FoundModel:
    """Return a model's cached ONNX conversion, which `hil layers` creates."""
    assert found.path is not None
    cache = KeptOnly(context.cache.root)
    with tempfile.TemporaryDirectory(prefix="hil-graph-") as folder:
        how: Any = {"cache": cache, "isolated": context.isolated}
        try:
            model = import_model(found.path, function=named.function, dims=dict(named.dims), **how)
            made = convert_to_onnx(model, log=Path(folder) / "log", **how)
        except HilError as error:
            why = f"{found.path.name} is not an ONNX file, and has no ONNX conversion: {error.message}"
            return FoundModel(None, why=f"{why} (hil layers {found.path.name} creates it)")
    return FoundModel(made.path, digest_now(made.path), inside=True)
