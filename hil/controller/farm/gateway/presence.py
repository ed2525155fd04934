"""Workers present their boards, are heard of by their beats, and leave: what the database is told of it.

The beats that come within a moment are written down together, in one statement however many boards there are.
"""

from __future__ import annotations

import asyncio
import logging

from hil.controller.farm.desk import access as desk
from hil.controller.farm.desk import boards, leases
from hil.controller.farm.desk.database import Database, DatabaseAway
from hil.controller.farm.desk.engine import Engine
from hil.controller.farm.gateway.dispatch import Attending, Dispatch
from hil.controller.farm.terms import Terms
from hil.controller.farm.words import Bearer
from hil.protocol.v1 import farm_pb2 as pb

_LOG = logging.getLogger("hil.farm.gateway")
_GATHER_S = 0.25
# Leases that their board's worker should know of by now, and does not.
_UNHEARD = """
    select id from hil.leases
    where ended_at is null and board = any(%s) and worker = any(%s) and not id = any(%s)
        and granted_at < clock_timestamp() - interval '2 s'
"""


class Presence:
    """Which workers there are, of those that attend here."""

    def __init__(self, db: Database, engine: Engine, dispatch: Dispatch, terms: Terms) -> None:
        self._db, self._engine, self._dispatch, self._terms = db, engine, dispatch, terms

    async def present(self, attending: Attending, who: Bearer | None = None) -> None:
        """A worker presents its board, and hears whether it owns it and what it is to do.

        Args:
            who: the bearer, to be written down; None where it only says so again.
        """
        card, worker = attending.card, attending.worker
        async with self._db.transaction() as tx:
            attendance = await boards.attend(tx, self._engine, card, worker, sorted(attending.leases), self._terms)
            if who is not None:
                said = {"worker": worker, "host": card.host, "site": card.site}
                await desk.note_audit(tx, who, "Hosts.Attend", card.name, True, said)
        for one in self._dispatch.everybody() if attendance.owner else ():
            if one is not attending and one.board == attending.board and one.owner:
                one.stand(False, self._terms)
        attending.stand(attendance.owner, self._terms)
        for lease, reason in attendance.over.items():
            attending.end(lease, reason)
        attending.keep(attending.leases - attendance.over.keys())
        for grant in attendance.grants:
            attending.grant(grant)
        self._dispatch.poke()
        told = {"board": card.name, "worker": worker, "host": card.host, "owner": attendance.owner}
        _LOG.info("attending", extra=told)

    async def leave(self, attending: Attending) -> None:
        """A worker takes its leave: its board is offline at once."""
        async with self._db.transaction() as tx:
            await boards.leave(tx, self._engine, attending.board, attending.worker, self._terms)
        self._dispatch.poke()
        _LOG.info("left", extra={"board": attending.board, "worker": attending.worker})

    async def run(self) -> None:
        """Write beats down, until cancelled. While the database is away none is answered."""
        while True:
            await asyncio.sleep(_GATHER_S)
            now = [one for one in self._dispatch.everybody() if one.beaten]
            try:
                if now:
                    await self._beats(now)
            except DatabaseAway as error:
                _LOG.warning("database.away", extra={"task": "beats", "reason": error.message})

    async def _beats(self, now: list[Attending]) -> None:
        known = [lease for one in now for lease in one.leases]
        said = [leases.Said(one.board, one.worker, sorted(one.leases)) for one in now]
        async with self._db.transaction() as tx:
            beats = await leases.beats(tx, said, self._terms)
            asked = [[one.board for one in now], [one.worker for one in now], known]
            unheard = await (await tx.execute(_UNHEARD, asked)).fetchall()
            lost = await leases.grants_of(tx, [row["id"] for row in unheard], self._terms) if unheard else []
        self._dispatch.give(lost, again=True)
        for one, beat in zip(now, beats, strict=True):
            one.beaten = False
            for lease, reason in beat.over.items():
                one.end(lease, reason)
            if beat.vacant:
                await self.present(one)
            elif beat.owner != one.owner:
                one.stand(beat.owner, self._terms)
            one.outgoing.put_nowait(pb.ToBoard(beat=pb.Beat()))
