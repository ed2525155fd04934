"""Find the model that a record names by a path. It may be gone, changed, or somebody else's."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.controller.models.conversions import as_onnx
from hil.controller.models.description import digest_of_files
from hil.controller.models.importers import import_model
from hil.controller.storage.cache import Cache
from hil.controller.storage.run_context import RunContext
from hil.controller.web.kept import bases, own
from hil.controller.web.published import is_published
from hil.core.digest import digest_file
from hil.errors import HilError, UsageError

# What a digest is made of in one request, the model's external data with it.
MOST_BYTES = 4 << 30


@dataclass(frozen=True)
class NamedModel:
    """A model as a record names it."""

    path: str
    digest: str = ""  # "" where the record does not tell
    dims: tuple[tuple[str, int], ...] = ()
    function: str = ""


@dataclass(frozen=True)
class FoundModel:
    """The file that is there, if any."""

    path: Path | None
    digest: str = ""  # of the file alone
    inside: bool = False  # whether it lies in the folders that are served
    why: str = ""  # why there is none


def find_model(named: NamedModel, folder: Path, roots: Sequence[Path]) -> FoundModel:
    """The file of a model that a record names.

    A file outside of the folders that are served is found only where the record has a digest: a record may be
    anybody's, and must not lead to files that its writer does not know.
    """
    if not named.path or "\0" in named.path:
        return FoundModel(None, why="the record names no file of the model")
    shown = Path(named.path).name
    outside = False
    for path in _candidates(named.path, bases(folder, roots)):
        inside = any(own(root, path) for root in roots)
        if not inside and not named.digest:
            outside = True
            continue
        digest = digest_now(path)
        if digest:
            return FoundModel(path, digest, inside)
    if outside:
        why = f"{shown} lies outside of the folders that are served, and the record does not tell its digest"
        return FoundModel(None, why=f"{why}: serve its folder too (--runs)")
    why = f"{shown} is gone, or cannot be read"
    if is_published(folder):
        why = f"{shown} is not here: hil publish sends a session's own folder, and its model does not lie in that"
    return FoundModel(None, why=why)


def _candidates(path: str, starts: Sequence[Path]) -> Iterator[Path]:
    for start in starts:
        one = start / path
        try:
            if one.is_file():
                yield one
        except OSError:
            continue


def digest_now(path: Path) -> str:
    """The digest of a plain file; "" where it cannot be read or is too large."""
    try:
        look = path.stat()
        if look.st_size > MOST_BYTES:
            return ""
        return _digest(str(path), look.st_size, look.st_mtime_ns, look.st_ino)
    except OSError:
        return ""


@functools.lru_cache(maxsize=256)
def _digest(path: str, size: int, changed: int, inode: int) -> str:
    return digest_file(Path(path))


def is_recorded(named: NamedModel, found: FoundModel, external: Sequence[str]) -> bool | None:
    """Whether a file is the one that was run, by its digest and that of its external data; None if nobody knows."""
    if not named.digest or found.path is None:
        return None
    digests = {"": found.digest}
    left = MOST_BYTES
    for name in external:
        beside = found.path.parent / name
        if not own(found.path.parent, beside) or not beside.is_file() or (left := left - beside.stat().st_size) < 0:
            return False if left >= 0 else None
        digests[name] = digest_now(beside)
    return digest_of_files(digests) == named.digest


class KeptOnly(Cache):
    """The user's cache, of which nothing is made anew: a page waits for no framework."""

    def get_or_make(
        self, key: str, meta: Mapping[str, Any], make: Callable[[Path], None], recompute: bool = False
    ) -> tuple[Path, bool]:
        """An entry that is there. Raises UsageError: it is not."""
        found = self.get(key)
        if found is None:
            raise UsageError("what it was made into is not kept here")
        return found, True


def kept_onnx(found: FoundModel, named: NamedModel, context: RunContext) -> FoundModel:
    """What a model of another format was made into when its layers were taken apart, where the cache still has it."""
    assert found.path is not None
    cache = KeptOnly(context.cache.root)
    with tempfile.TemporaryDirectory(prefix="hil-graph-") as folder:
        how: Any = {"cache": cache, "isolated": context.isolated}
        try:
            model = import_model(found.path, function=named.function, dims=dict(named.dims), **how)
            made = as_onnx(model, log=Path(folder) / "log", **how)
        except HilError as error:
            why = f"{found.path.name} is no ONNX file, and cannot be shown as one: {error.message}"
            return FoundModel(None, why=f"{why} (hil layers {found.path.name} makes it)")
    return FoundModel(made.path, digest_now(made.path), inside=True)
