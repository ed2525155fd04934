"""The service ``Artifacts``: files by content, to and from the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from hil.controller.farm.artifacts import Incoming
from hil.controller.farm.desk import access as desk
from hil.controller.farm.gateway.calls import Call
from hil.controller.farm.gateway.parts import Parts
from hil.core.digest import check
from hil.errors import UsageError
from hil.protocol.v1 import farm_pb2 as pb

MOST_DIGESTS = 100_000
MOST_BYTES = 64 << 30
_USED = """
    insert into hil.artifacts (digest, size) select * from unnest(%s::text[], %s::bigint[])
    on conflict (digest) do update set used_at = now()
"""
_AGAIN = "update hil.artifacts set used_at = now() where digest = any(%s)"


class ArtifactService:
    """Coroutines of the service's methods."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def lacks(self, request: pb.LacksRequest, call: Call) -> pb.LacksReply:
        """Which of these the store lacks; the others are kept from `gc` as if they had just come."""
        if len(request.digests) > MOST_DIGESTS:
            raise UsageError(f"at most {MOST_DIGESTS} digests at a time")
        for digest in request.digests:
            check(digest)
        # First, so that none of them is deleted between this answer and the submission.
        async with self._parts.db.transaction() as tx:
            await tx.execute(_AGAIN, [list(request.digests)])
        lacking = await asyncio.to_thread(self._parts.store.lacks, list(request.digests))
        return pb.LacksReply(digests=lacking)

    async def upload(self, requests: AsyncIterator[pb.FilePiece], call: Call) -> pb.UploadReply:
        """Store files, each verified before anybody can read it."""
        stored: dict[str, int] = {}
        try:
            await self._store(requests, call, stored)
        finally:
            # Also where it breaks off: a file that nobody knows of would never be deleted.
            if stored:
                async with self._parts.db.transaction() as tx:
                    await tx.execute(_USED, [list(stored), list(stored.values())])
                    said = {"files": len(stored), "bytes": sum(stored.values())}
                    await desk.note_audit(tx, call.who, call.name, next(iter(stored)), True, said)
        return pb.UploadReply(stored=list(stored))

    async def _store(self, requests: AsyncIterator[pb.FilePiece], call: Call, stored: dict[str, int]) -> None:
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
                    incoming = self._parts.store.receive(piece.start.digest, piece.start.size)
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
        store, digest = self._parts.store, check(request.digest)
        size = await asyncio.to_thread(store.size, digest)
        await call.send(pb.FilePiece(start=pb.FileStart(digest=digest, size=size)))
        pieces = store.read(digest)
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
