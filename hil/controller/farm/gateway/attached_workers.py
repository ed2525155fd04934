"""Workers attached to this gateway: forward their messages to the database, and send them grants and other messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable

from hil.controller.farm import telemetry
from hil.controller.farm.database.database import Database, DatabaseAway
from hil.controller.farm.database.notifications import PubSub, drain_queue
from hil.controller.farm.gateway.metrics import Metrics
from hil.controller.farm.leasing import boards, leases
from hil.controller.farm.leasing.lease_queue import LeaseQueue
from hil.controller.farm.messages import BoardCard, Grant, Principal
from hil.controller.farm.rpc import encode_grant
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store import access
from hil.controller.farm.store.records import LEASES, NAME, fetch_rows
from hil.protocol.v1 import farm_pb2 as pb

_LOG = logging.getLogger("hil.farm.gateway")
# Poll interval, in case a notification is lost.
_LOOK_SECONDS = 2.0
_AWAY_SECONDS = 0.2
# The gateway writes all heartbeats of this interval together, in one statement.
_GATHER_SECONDS = 0.25
_MOST_HAD = 100
_WAITED = f"""
    select lease.board, lease.attempt, lease.granted_at, {NAME} as job, job.queued_at, job.kind, submission.priority,
        submission.trace
    from {LEASES} where lease.id = any(%s)
"""
# Leases that the board's worker should have received by now, but does not list in its heartbeats.
_UNHEARD = """
    select id from hil.leases
    where ended_at is null and board = any(%s) and worker = any(%s) and not id = any(%s)
        and granted_at < clock_timestamp() - interval '2 s'
"""


class AttachedWorker:
    """Worker attached to this gateway, with a queue of outgoing messages."""

    def __init__(self, card: BoardCard, worker: str) -> None:
        self.card, self.worker = card, worker
        self.owner = False  # True for the owner, False for a standby worker
        self.leases: set[int] = set()  # leases reported by the worker, unverified
        self.sent: set[int] = set()
        # Recent leases: a job's last output may arrive after the report, which uses a separate call.
        self._had: deque[int] = deque(maxlen=_MOST_HAD)
        self.beaten = False  # True while a received heartbeat is not yet written
        # Time of the last message. A frozen worker sends none, although the stream stays open.
        self.heard_at = time.monotonic()
        self.outgoing: asyncio.Queue[pb.ToBoard] = asyncio.Queue()

    @property
    def board(self) -> str:
        """Name of the board."""
        return self.card.name

    def has_had(self, lease: int) -> bool:
        """Return True if the worker has the lease, or recently had the lease."""
        return lease in self._had

    def keep(self, leases: Iterable[int]) -> None:
        """Add leases that the worker received before the worker attached to this gateway."""
        self._had.extend(lease for lease in leases if lease not in self._had)

    def send_ownership(self, owner: bool, settings: FarmSettings) -> None:
        """Notify the worker whether it owns the board."""
        self.owner = owner
        self.outgoing.put_nowait(pb.ToBoard(standing=pb.Standing(owner=owner, beat_s=settings.beat_s)))

    def send_grant(self, grant: Grant) -> None:
        """Send a grant to the worker."""
        self.sent.add(grant.lease)
        self._had.append(grant.lease)
        self.outgoing.put_nowait(pb.ToBoard(grant=encode_grant(grant)))

    def end(self, lease: int, reason: str) -> None:
        """Notify the worker that a lease has ended."""
        self.sent.discard(lease)
        self.outgoing.put_nowait(pb.ToBoard(ended=pb.Ended(lease=lease, reason=reason)))

    def request_dial(self, id: str, lease: int, gateway: str, *, console: bool = False) -> None:
        """Ask the worker to accept a connection to the agent or console through a gateway; "" is this gateway."""
        self.outgoing.put_nowait(pb.ToBoard(dial=pb.DialIn(id=id, lease=lease, gateway=gateway, console=console)))


class Dispatcher:
    """Registry of attached workers. Sends grants and lease ends to the workers, and stores the workers' heartbeats."""

    def __init__(self, db: Database, engine: LeaseQueue, settings: FarmSettings, metrics: Metrics) -> None:
        self._db, self._engine, self._settings, self._metrics = db, engine, settings, metrics
        self._here: dict[tuple[str, str], AttachedWorker] = {}
        self._poked = asyncio.Event()
        # Leases that were fetched from the queue but not sent, because the database became unavailable.
        self._fetched: list[int] = []
        self._sent: asyncio.Queue[int] = asyncio.Queue()

    def enter(self, attending: AttachedWorker) -> None:
        """Add a worker. The new stream replaces an earlier stream of the same worker."""
        self._here[attending.board, attending.worker] = attending
        self._metrics.attending.set(len(self._here))

    def leave(self, attending: AttachedWorker) -> bool:
        """Remove a worker's stream. Returns False if a newer stream has replaced this stream."""
        key = attending.board, attending.worker
        was = self._here.get(key) is attending
        if was:
            del self._here[key]
            self._metrics.attending.set(len(self._here))
        return was

    def remove_lease(self, lease: int, worker: str) -> None:
        """Remove a lease after the worker's report, so that the worker gets no message about the end of the lease."""
        for one in self._here.values():
            if one.worker == worker:
                one.sent.discard(lease)
                one.leases.discard(lease)

    def find_owner(self, board: str) -> AttachedWorker | None:
        """Return the owner of a board if the board's worker is attached to this gateway."""
        return next((one for one in self._list_owners() if one.board == board), None)

    def _list_owners(self) -> list[AttachedWorker]:
        """Return the live owners of boards. The standby worker may have replaced a silent owner."""
        since = time.monotonic() - self._settings.owner_s
        return [one for one in self._here.values() if one.owner and one.heard_at > since]

    def trigger_check(self, boards: Iterable[str] | None = None) -> None:
        """Trigger a queue check after a grant to one of these boards, or to any board."""
        if boards is None or any(self.find_owner(board) for board in boards):
            self._poked.set()

    def give(self, grants: Iterable[Grant], *, again: bool = False) -> None:
        """Send each grant once, to the attached owner of the granted board.

        If no worker is attached, the worker receives the grant when it attaches.

        Args:
            again: resend grants that the worker did not receive.
        """
        for grant in grants:
            attending = self.find_owner(grant.board)
            if attending is None:
                continue
            first = not attending.has_had(grant.lease)
            if first or again:
                attending.send_grant(grant)
            if first:
                fields = {"job": grant.job, "board": grant.board, "lease": grant.lease, "user": grant.user}
                _LOG.info("granted", extra=fields)
                self._sent.put_nowait(grant.lease)

    async def run(self) -> None:
        """Task: send grants to workers."""
        while True:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._poked.wait(), _LOOK_SECONDS)
            self._poked.clear()
            try:
                await self._send_grants()
            except DatabaseAway:
                await asyncio.sleep(_AWAY_SECONDS)
                self._poked.set()

    async def follow(self, hub: PubSub) -> None:
        """Task: tell workers about ended leases, power actions, and other gateways that the workers must dial."""
        with hub.subscribe() as queue:
            while True:
                for change in await drain_queue(queue):
                    if change["kind"] == "ended":
                        for one in list(self._here.values()):
                            if one.board == change["board"] and change["lease"] in one.leases | one.sent:
                                one.end(change["lease"], change["reason"])
                    elif change["kind"] == "dial" and (owner := self.find_owner(change["board"])) is not None:
                        console = change.get("console", False)  # absent in changes of an older gateway
                        owner.request_dial(change["id"], change["lease"], change["gateway"], console=console)
                    elif change["kind"] == "power" and (owner := self.find_owner(change["board"])) is not None:
                        about = {name: change[name] for name in ("id", "action", "lease", "force")}
                        # Absent in changes of an older gateway.
                        about |= {name: change.get(name, "") for name in ("file", "image")}
                        owner.outgoing.put_nowait(pb.ToBoard(power=pb.SwitchPower(**about)))

    async def measure(self) -> None:
        """Task: record queue times of sent grants. The task is separate, so that grants are not delayed."""
        while True:
            sent = [await self._sent.get()]
            while not self._sent.empty():
                sent.append(self._sent.get_nowait())
            async with self._db.transaction() as tx:
                rows = await fetch_rows(tx, _WAITED, [sent])
            for row in rows:
                queued, granted = row["queued_at"].timestamp(), row["granted_at"].timestamp()
                self._metrics.count_grant(row["kind"], row["priority"], granted - queued)
                fields = {name: row[name] for name in ("job", "board", "attempt", "priority")}
                telemetry.record("queue", row["trace"], queued, granted, **fields)

    async def _send_grants(self) -> None:
        owned = [one.board for one in self._list_owners()]
        if owned:
            self._fetched += await self._engine.fetch(owned)
        while self._fetched:
            async with self._db.transaction() as tx:
                grants = await leases.read_grants(tx, self._fetched, self._settings)
            self._fetched.clear()
            self.give(grants)

    async def register_board(self, attending: AttachedWorker, who: Principal | None = None) -> None:
        """Register a worker's board in the database.

        Send the worker its state (owner or standby), ended leases and grants.

        Args:
            who: caller for the audit.
        """
        card, worker = attending.card, attending.worker
        async with self._db.transaction() as tx:
            attendance = await boards.attach_worker(
                tx, self._engine, card, worker, sorted(attending.leases), self._settings
            )
            if who is not None:
                fields = {"worker": worker, "host": card.host, "site": card.site}
                await access.note_audit(tx, who, "Hosts.Attend", card.name, True, fields)
        for one in list(self._here.values()) if attendance.owner else ():
            if one is not attending and one.board == attending.board and one.owner:
                one.send_ownership(False, self._settings)
        attending.send_ownership(attendance.owner, self._settings)
        for lease, reason in attendance.over.items():
            attending.end(lease, reason)
        attending.keep(attending.leases - attendance.over.keys())
        for grant in attendance.grants:
            attending.send_grant(grant)
        self.trigger_check()
        extra = {"board": card.name, "worker": worker, "host": card.host, "owner": attendance.owner}
        _LOG.info("attending", extra=extra)

    async def release(self, attending: AttachedWorker) -> None:
        """Set the board of a leaving worker offline."""
        async with self._db.transaction() as tx:
            await boards.leave(tx, self._engine, attending.board, attending.worker, self._settings)
        self.trigger_check()
        _LOG.info("left", extra={"board": attending.board, "worker": attending.worker})

    async def write_beats(self) -> None:
        """Task: write heartbeats. While the database is unavailable, heartbeats are not acknowledged."""
        while True:
            await asyncio.sleep(_GATHER_SECONDS)
            now = [one for one in list(self._here.values()) if one.beaten]
            try:
                if now:
                    await self._store_beats(now)
            except DatabaseAway as error:
                _LOG.warning("database.away", extra={"task": "beats", "reason": error.message})

    async def _store_beats(self, now: list[AttachedWorker]) -> None:
        known = [lease for one in now for lease in one.leases]
        heard = [leases.WorkerBeat(one.board, one.worker, sorted(one.leases)) for one in now]
        async with self._db.transaction() as tx:
            beats = await leases.process_beats(tx, heard, self._settings)
            asked = [[one.board for one in now], [one.worker for one in now], known]
            unheard = await fetch_rows(tx, _UNHEARD, asked)
            lost = await leases.read_grants(tx, [row["id"] for row in unheard], self._settings) if unheard else []
        self.give(lost, again=True)
        for one, beat in zip(now, beats, strict=True):
            one.beaten = False
            for lease, reason in beat.over.items():
                one.end(lease, reason)
            if beat.vacant:
                await self.register_board(one)
            elif beat.owner != one.owner:
                one.send_ownership(beat.owner, self._settings)
            one.outgoing.put_nowait(pb.ToBoard(beat=pb.Beat()))
