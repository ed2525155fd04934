"""The farm's store of files by content: a folder, or a bucket of an S3-compatible service, through fsspec.

A file is there whole and verified, or not at all: what is uploaded goes to a file of this machine first, is checked
against its digest there, and only then gets its name in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hil.controller.farm.gateway.calls import Call
from hil.controller.farm.store import access
from hil.controller.farm.store.database import Database
from hil.core import digest
from hil.errors import FarmError, HilError, StorageError, UsageError
from hil.protocol.v1 import farm_pb2 as pb

ARTIFACTS_VARIABLE = "HIL_FARM_ARTIFACTS"
CHUNK = 1 << 20
_INCOMING = ".incoming"
# Questions to a service, which each take a journey there and back.
_AT_ONCE = 16


class Store:
    """A content-addressed store in a folder, or at a URL that fsspec knows. Every method may block: use a thread."""

    def __init__(self, where: str) -> None:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        try:
            self._fs: Any
            self._fs, root = url_to_fs(where, use_listings_cache=False, skip_instance_cache=True)
        except (ValueError, ImportError) as error:
            raise UsageError(
                f"the farm's store {where!r} cannot be opened: {error}", hint="a folder, or s3://BUCKET/PREFIX"
            ) from error
        self.where, self._root = where, str(root).rstrip("/")
        self._incoming: Path | None = None
        if isinstance(self._fs, LocalFileSystem):
            self._incoming = Path(self._root) / _INCOMING
            with _storage(where):
                self._incoming.mkdir(parents=True, exist_ok=True, mode=0o700)

    def lacks(self, digests: Iterable[str]) -> list[str]:
        """Those of some digests that are not in the store, each once; UsageError where one of them is none."""
        wanted = [digest.check(one) for one in dict.fromkeys(digests)]
        if self._incoming is not None or len(wanted) < 2:
            return [one for one in wanted if not self._has(one)]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return [one for one, has in zip(wanted, pool.map(self._has, wanted), strict=True) if not has]

    def size(self, name: str) -> int:
        """How large a file is, in bytes; FarmError where the store has it not."""
        with self._there(name):
            return int(self._fs.info(self._path(name))["size"])

    def receive(self, name: str, size: int) -> Incoming:
        """Begin to store a file: its data, then ``finish``."""
        return Incoming(self, digest.check(name), size, self._incoming)

    def read(self, name: str) -> Iterator[bytes]:
        """A file's content in pieces; FarmError where the store has it not."""
        with self._there(name), self._fs.open(self._path(name), "rb") as file:
            while data := file.read(CHUNK):
                yield data

    def delete(self, name: str) -> None:
        """Take a file out of the store; one that is not there is no error."""
        with contextlib.suppress(FileNotFoundError), _storage(self.where):
            self._fs.rm_file(self._path(name))

    def sweep(self, older_than_s: float, now: float) -> int:
        """Delete what uploads that were broken off have left; returns how many there were."""
        gone = 0
        for left in self._incoming.iterdir() if self._incoming else ():
            with contextlib.suppress(FileNotFoundError):
                if now - left.stat().st_mtime > older_than_s:
                    left.unlink()
                    gone += 1
        return gone

    def _keep(self, name: str, part: Path) -> None:
        path = self._path(name)
        with _storage(self.where):
            if self._incoming is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                part.replace(path)
            else:
                self._fs.put_file(str(part), path)

    def _has(self, name: str) -> bool:
        with _storage(self.where):
            return bool(self._fs.exists(self._path(name)))

    def _path(self, name: str) -> str:
        algorithm, _, figures = digest.check(name).partition(":")
        return f"{self._root}/{algorithm}/{figures[:2]}/{figures}"

    @contextlib.contextmanager
    def _there(self, name: str) -> Iterator[None]:
        try:
            with _storage(self.where):
                yield
        except FileNotFoundError as error:
            raise FarmError(f"the farm's store has no {name}", hint="it was deleted: submit the job again") from error


class Incoming:
    """A file that is being stored. A context manager: what was not finished leaves nothing."""

    def __init__(self, store: Store, name: str, size: int, folder: Path | None) -> None:
        self._store, self.name, self.size = store, name, size
        self._hasher, self._got = digest.Hasher(digest.algorithm_of(name)), 0
        with _storage(store.where):
            handle, path = tempfile.mkstemp(prefix="upload-", dir=folder)
        self._part = Path(path)
        self._file = os.fdopen(handle, "wb")

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._part.unlink(missing_ok=True)

    def add(self, data: bytes) -> None:
        """More of it; UsageError where it is longer than was said."""
        self._got += len(data)
        if self._got > self.size:
            raise UsageError(f"{self.name} is longer than the {self.size} bytes that were announced")
        self._hasher.update(data)
        with _storage(self._store.where):
            self._file.write(data)

    def finish(self) -> None:
        """That was all: check it, and let it be seen; UsageError where what came is something else."""
        if self._got != self.size:
            raise UsageError(f"{self.name} ended after {self._got} of {self.size} bytes")
        if (found := self._hasher.digest()) != self.name:
            raise UsageError(f"what came as {self.name} is {found}", hint="the file changed while it was sent")
        with _storage(self._store.where):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        self._store._keep(self.name, self._part)


@contextlib.contextmanager
def _storage(where: str) -> Iterator[None]:
    """Errors of the folder or the service leave as hil's, but for a file that is not there."""
    try:
        yield
    except (FileNotFoundError, HilError):
        raise
    except Exception as error:  # of whatever library talks to the service
        raise StorageError(f"the farm's store {where} fails: {error}") from error


MOST_DIGESTS = 100_000
MOST_BYTES = 64 << 30
_USED = """
    insert into hil.artifacts (digest, size) select * from unnest(%s::text[], %s::bigint[])
    on conflict (digest) do update set used_at = now()
"""
_AGAIN = "update hil.artifacts set used_at = now() where digest = any(%s)"


class ArtifactService:
    """Coroutines of the service's methods."""

    def __init__(self, db: Database, store: Store) -> None:
        self._db, self._store = db, store

    async def lacks(self, request: pb.LacksRequest, call: Call) -> pb.LacksReply:
        """Which of these the store lacks; the others are kept from `gc` as if they had just come."""
        if len(request.digests) > MOST_DIGESTS:
            raise UsageError(f"at most {MOST_DIGESTS} digests at a time")
        for name in request.digests:
            digest.check(name)
        # First, so that none of them is deleted between this answer and the submission.
        async with self._db.transaction() as tx:
            await tx.execute(_AGAIN, [list(request.digests)])
        lacking = await asyncio.to_thread(self._store.lacks, list(request.digests))
        return pb.LacksReply(digests=lacking)

    async def upload(self, requests: AsyncIterator[pb.FilePiece], call: Call) -> pb.UploadReply:
        """Store files, each verified before anybody can read it."""
        stored: dict[str, int] = {}
        try:
            await self._receive(requests, call, stored)
        finally:
            # Also where it breaks off: a file that nobody knows of would never be deleted.
            if stored:
                async with self._db.transaction() as tx:
                    await tx.execute(_USED, [list(stored), list(stored.values())])
                    fields = {"files": len(stored), "bytes": sum(stored.values())}
                    await access.note_audit(tx, call.who, call.name, next(iter(stored)), True, fields)
        return pb.UploadReply(stored=list(stored))

    async def _receive(self, requests: AsyncIterator[pb.FilePiece], call: Call, stored: dict[str, int]) -> None:
        """Store what comes; ``stored`` gets the size of each file that is there whole."""
        incoming: Incoming | None = None
        try:
            async for piece in requests:
                await call.still_good()
                if piece.WhichOneof("kind") == "start":
                    await self._finish(incoming, stored)
                    incoming = None
                    if piece.start.size > MOST_BYTES or len(stored) >= MOST_DIGESTS:
                        raise UsageError(f"the farm takes {MOST_DIGESTS} files of {MOST_BYTES >> 30} GiB at a time")
                    # Not in a thread, which would leave a file where this is cancelled meanwhile.
                    incoming = self._store.receive(piece.start.digest, piece.start.size)
                elif incoming is None:
                    raise UsageError("an upload begins with the start of a file")
                else:
                    await asyncio.to_thread(incoming.add, piece.data)
            await self._finish(incoming, stored)
            incoming = None
        finally:
            if incoming is not None:
                incoming.__exit__(None, None, None)

    async def download(self, request: pb.DownloadRequest, call: Call) -> None:
        """A file's start, then its data."""
        name = digest.check(request.digest)
        size = await asyncio.to_thread(self._store.size, name)
        await call.send(pb.FilePiece(start=pb.FileStart(digest=name, size=size)))
        pieces = self._store.read(name)
        while (data := await asyncio.to_thread(next, pieces, None)) is not None:
            await call.still_good()
            await call.send(pb.FilePiece(data=data))

    async def _finish(self, incoming: Incoming | None, stored: dict[str, int]) -> None:
        if incoming is not None:
            with incoming:
                # From now on it may be there, should we not hear of it any more.
                stored[incoming.name] = incoming.size
                try:
                    await asyncio.to_thread(incoming.finish)
                except Exception:
                    del stored[incoming.name]
                    raise
