"""Content-addressed file store of the farm: a directory, or an S3-compatible bucket, through fsspec.

Writes are atomic and verified. The store writes an upload to a local temporary file and verifies the digest. Only then
does the file appear under its final name.
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

from hil.controller.farm.database.database import Database
from hil.controller.farm.gateway.calls import GatewayCall
from hil.controller.farm.store import access
from hil.core import digest
from hil.errors import FarmError, HilError, StorageError, UsageError
from hil.protocol.v1 import farm_pb2 as pb

ARTIFACTS_VARIABLE = "HIL_FARM_ARTIFACTS"
CHUNK = 1 << 20
_INCOMING = ".incoming"
# Concurrent requests to a remote store, each with a network round trip.
_AT_ONCE = 16


class ArtifactStore:
    """Content-addressed store in a directory, or at an fsspec URL. All methods may block: call them in a thread."""

    def __init__(self, where: str) -> None:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        try:
            self._fs: Any
            self._fs, root = url_to_fs(where, use_listings_cache=False, skip_instance_cache=True)
        except (ValueError, ImportError) as error:
            raise UsageError(
                f"cannot open the farm's store {where!r}: {error}", hint="use a directory, or s3://BUCKET/PREFIX"
            ) from error
        self.where, self._root = where, str(root).rstrip("/")
        self._incoming: Path | None = None
        if isinstance(self._fs, LocalFileSystem):
            self._incoming = Path(self._root) / _INCOMING
            with _convert_store_errors(where):
                self._incoming.mkdir(parents=True, exist_ok=True, mode=0o700)

    def list_missing(self, digests: Iterable[str]) -> list[str]:
        """Return the digests that are not in the store, without duplicates. Raises UsageError for an invalid digest."""
        wanted = [digest.check(one) for one in dict.fromkeys(digests)]
        if self._incoming is not None or len(wanted) < 2:
            return [one for one in wanted if not self._has_file(one)]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return [one for one, has in zip(wanted, pool.map(self._has_file, wanted), strict=True) if not has]

    def size(self, name: str) -> int:
        """Return the size of a file in bytes. Raises FarmError if the store does not have the file."""
        with self._require_file(name):
            return int(self._fs.info(self._build_path(name))["size"])

    def receive(self, name: str, size: int) -> ArtifactUpload:
        """Begin to store a file. The caller adds the data, then calls ``finish``."""
        return ArtifactUpload(self, digest.check(name), size, self._incoming)

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file. Raises FarmError if the store does not have the file."""
        with self._require_file(name), self._fs.open(self._build_path(name), "rb") as file:
            while data := file.read(CHUNK):
                yield data

    def delete(self, name: str) -> None:
        """Delete a file. A missing file is not an error."""
        with contextlib.suppress(FileNotFoundError), _convert_store_errors(self.where):
            self._fs.rm_file(self._build_path(name))

    def sweep(self, older_than_s: float, now: float) -> int:
        """Delete leftovers of interrupted uploads and return their number."""
        gone = 0
        for left in self._incoming.iterdir() if self._incoming else ():
            with contextlib.suppress(FileNotFoundError):
                if now - left.stat().st_mtime > older_than_s:
                    left.unlink()
                    gone += 1
        return gone

    def _commit_file(self, name: str, part: Path) -> None:
        path = self._build_path(name)
        with _convert_store_errors(self.where):
            if self._incoming is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                part.replace(path)
            else:
                self._fs.put_file(str(part), path)

    def _has_file(self, name: str) -> bool:
        with _convert_store_errors(self.where):
            return bool(self._fs.exists(self._build_path(name)))

    def _build_path(self, name: str) -> str:
        algorithm, _, figures = digest.check(name).partition(":")
        return f"{self._root}/{algorithm}/{figures[:2]}/{figures}"

    @contextlib.contextmanager
    def _require_file(self, name: str) -> Iterator[None]:
        try:
            with _convert_store_errors(self.where):
                yield
        except FileNotFoundError as error:
            raise FarmError(
                f"{name} not found in the farm's store", hint="the file was deleted; resubmit the job"
            ) from error


class ArtifactUpload:
    """File being stored. A context manager that removes the temporary file."""

    def __init__(self, store: ArtifactStore, name: str, size: int, folder: Path | None) -> None:
        self._store, self.name, self.size = store, name, size
        self._hasher, self._got = digest.Hasher(digest.get_algorithm(name)), 0
        with _convert_store_errors(store.where):
            handle, path = tempfile.mkstemp(prefix="upload-", dir=folder)
        self._part = Path(path)
        self._file = os.fdopen(handle, "wb")

    def __enter__(self) -> ArtifactUpload:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._part.unlink(missing_ok=True)

    def add(self, data: bytes) -> None:
        """Add data. Raises UsageError if the file exceeds the announced size."""
        self._got += len(data)
        if self._got > self.size:
            raise UsageError(f"{self.name} exceeds the announced size of {self.size} bytes")
        self._hasher.update(data)
        with _convert_store_errors(self._store.where):
            self._file.write(data)

    def finish(self) -> None:
        """Verify size and digest, and make the file visible. Raises UsageError on a mismatch."""
        if self._got != self.size:
            raise UsageError(f"upload of {self.name} ended after {self._got} of {self.size} bytes")
        if (found := self._hasher.digest()) != self.name:
            raise UsageError(
                f"digest mismatch: expected {self.name}, got {found}", hint="the file changed during the upload"
            )
        with _convert_store_errors(self._store.where):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        self._store._commit_file(self.name, self._part)


@contextlib.contextmanager
def _convert_store_errors(where: str) -> Iterator[None]:
    """Convert errors of the store to StorageError, except a missing file."""
    try:
        yield
    except (FileNotFoundError, HilError):
        raise
    except Exception as error:  # depends on the library of the service
        raise StorageError(f"the farm's store {where} failed: {error}") from error


MAX_DIGESTS = 100_000
MAX_BYTES = 64 << 30
_USED = """
    insert into hil.artifacts (digest, size) select * from unnest(%s::text[], %s::bigint[])
    on conflict (digest) do update set used_at = now()
"""
_AGAIN = "update hil.artifacts set used_at = now() where digest = any(%s)"


class ArtifactService:
    """Methods of the service."""

    def __init__(self, db: Database, store: ArtifactStore) -> None:
        self._db, self._store = db, store

    async def lacks(self, request: pb.LacksRequest, call: GatewayCall) -> pb.LacksReply:
        """Return the digests that the store lacks.

        This method protects the other requested files from `gc`, like new uploads.
        """
        if len(request.digests) > MAX_DIGESTS:
            raise UsageError(f"at most {MAX_DIGESTS} digests per request")
        for name in request.digests:
            digest.check(name)
        # Protect the files before the check, so that `gc` does not delete them between this reply and the submission.
        async with self._db.transaction() as tx:
            await tx.execute(_AGAIN, [list(request.digests)])
        lacking = await asyncio.to_thread(self._store.list_missing, list(request.digests))
        return pb.LacksReply(digests=lacking)

    async def upload(self, requests: AsyncIterator[pb.FilePiece], call: GatewayCall) -> pb.UploadReply:
        """Store files. Each file is verified before the file becomes readable."""
        stored: dict[str, int] = {}
        try:
            await self._receive_files(requests, call, stored)
        finally:
            # Add the rows even after an error, because `gc` never deletes a file without a row.
            if stored:
                async with self._db.transaction() as tx:
                    await tx.execute(_USED, [list(stored), list(stored.values())])
                    fields = {"files": len(stored), "bytes": sum(stored.values())}
                    await access.note_audit(tx, call.who, call.name, next(iter(stored)), True, fields)
        return pb.UploadReply(stored=list(stored))

    async def _receive_files(
        self, requests: AsyncIterator[pb.FilePiece], call: GatewayCall, stored: dict[str, int]
    ) -> None:
        """Store the received files, and add the size of every complete file to ``stored``."""
        incoming: ArtifactUpload | None = None
        try:
            async for piece in requests:
                await call.recheck_token()
                if piece.WhichOneof("kind") == "start":
                    await self._finish_file(incoming, stored)
                    incoming = None
                    if piece.start.size > MAX_BYTES or len(stored) >= MAX_DIGESTS:
                        raise UsageError(f"uploads are limited to {MAX_DIGESTS} files of {MAX_BYTES >> 30} GiB")
                    # Do not call this in a thread: a cancellation would leave the temporary file behind.
                    incoming = self._store.receive(piece.start.digest, piece.start.size)
                elif incoming is None:
                    raise UsageError("an upload must begin with a start message")
                else:
                    await asyncio.to_thread(incoming.add, piece.data)
            await self._finish_file(incoming, stored)
            incoming = None
        finally:
            if incoming is not None:
                incoming.__exit__(None, None, None)

    async def download(self, request: pb.DownloadRequest, call: GatewayCall) -> None:
        """Send a file's header, then the data."""
        name = digest.check(request.digest)
        size = await asyncio.to_thread(self._store.size, name)
        await call.send(pb.FilePiece(start=pb.FileStart(digest=name, size=size)))
        pieces = self._store.read(name)
        while (data := await asyncio.to_thread(next, pieces, None)) is not None:
            await call.recheck_token()
            await call.send(pb.FilePiece(data=data))

    async def _finish_file(self, incoming: ArtifactUpload | None, stored: dict[str, int]) -> None:
        if incoming is not None:
            with incoming:
                # Add the file before the call, because the file may exist even if this task is cancelled.
                stored[incoming.name] = incoming.size
                try:
                    await asyncio.to_thread(incoming.finish)
                except Exception:
                    del stored[incoming.name]
                    raise
