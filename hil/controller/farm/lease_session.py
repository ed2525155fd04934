"""A board of the farm that is leased to us: queued for, kept by beats, given back. ``--board farm:SELECTOR``."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import grpc
import tomlkit
from tomlkit.exceptions import TOMLKitError

from hil.controller.devices.board_client import Target
from hil.controller.devices.links.link import Link
from hil.controller.farm.client import SILENT_S, FarmClient, FarmTunnel, heard, is_away, translated
from hil.controller.farm.messages import BoardCard, Grant, JobSpec, JobState, Kind, Priority, Submission
from hil.controller.farm.paths import FarmAddress, farm_address
from hil.controller.farm.rpc import LEASE_KEY, LEASE_SECRET_KEY, card_of, grant_of, submission_message
from hil.core.board_config import BoardConfig
from hil.core.boards import parse_board
from hil.core.text import TextSink
from hil.errors import BoardBusy, FarmError, FarmUnreachable, HilError, NoSuchBoard, SessionEnded
from hil.protocol.v1 import farm_pb2 as pb

_BEAT_S = 1.5
_PAUSE_S = (0.1, 2.0)
_CLOSE_S = 5.0
_DIAL_S = 10.0
_SLICE_S = 0.2
# So long a farm may take to say whether there is a board.
_ANSWER_S = 10.0
# Who gets a board at once need not be told that it waits for one.
_QUIET_S = 0.5
_LOOK_S = 3.0
_QUEUE_MOST = 10_000
_PATIENCE_S = 1.0


class LeaseSession:
    """A lease, from the order to its end. A context manager that gives the board back.

    A stream to the farm stands for it; where that breaks, it is taken up again at any gateway. :meth:`close` may be
    called at any time, by any thread.
    """

    def __init__(self, address: FarmAddress, order: Submission) -> None:
        self._order = order
        self._client = FarmClient(address, patience_s=_PATIENCE_S, call_s=_LOOK_S)
        self._closing = threading.Event()
        self._there = threading.Event()
        self._changed = threading.Condition()
        self._waiting = pb.JobStatus()
        self._held: GrantedLease | None = None
        self._over: HilError | None = None
        self._stream: Any = None
        self._tunnel: FarmTunnel | None = None
        self._thread = threading.Thread(target=self._keep, daemon=True, name="hil-farm-lease")
        self._thread.start()

    @property
    def held(self) -> GrantedLease:
        """What was granted; to be asked after :meth:`wait` said so."""
        if self._held is None:
            raise FarmError("no board is leased yet")
        return self._held

    @property
    def name(self) -> str:
        """The name of the board that was granted."""
        return self.held.card.name

    @property
    def over(self) -> str:
        """Why the lease ended, though nobody here gave it back; "" where it goes on."""
        return self._over.message if self._over else ""

    def queue_text(self) -> str:
        """How many go first, in words; "" while that is not known."""
        mine = self._waiting
        if not mine.name:
            return ""
        try:
            queued = self._client.ask("jobs", state=[JobState.QUEUED.value], limit=_QUEUE_MOST)
        except HilError:
            return f"job {mine.name} is queued"
        own = _turn(mine.priority, mine.submission)
        ahead = sum(_turn(job["priority"], job["submission"]) < own for job in queued)
        return f"{ahead} ahead of you" if ahead else "you are next"

    def wait(self, seconds: float) -> bool:
        """Wait for a board, at most so long; whether there is one. It may be asked again: the place in the queue stays.

        Raises:
            HilError: the farm refused us; it gave up, or no board of it will ever do (FarmError).
        """
        return self._wait_for(lambda: self._held is not None, seconds)

    def wait_told(self, seconds: float, say: TextSink) -> None:
        """Wait for a board, at most so long once the farm has none for us, and tell how that goes.

        Raises:
            BoardBusy: there was none in time.
            FarmUnreachable: the farm has said nothing in that time.
            FarmError: as :meth:`wait`, or it was given back meanwhile.
        """
        begin, last, look = time.monotonic(), "", _QUIET_S
        if self._wait_for(lambda: self._held is not None or self._is_queued, _ANSWER_S):
            begin = time.monotonic()
        elif not self._waiting.name and seconds <= _ANSWER_S:
            raise FarmUnreachable(f"the farm has not said within {_ANSWER_S:g} s whether it has a board")
        while not self.wait(min(look, max(begin + seconds - time.monotonic(), 0.0))):
            if self._closing.is_set():
                raise FarmError("the lease was given back")
            text = self.queue_text()
            if time.monotonic() - begin >= seconds:
                raise BoardBusy(
                    f"the farm had no board for us within {seconds:g} s" + (f": {text}" if text else ""),
                    hint="--wait S waits longer; `hil farm boards` shows who has them",
                )
            if text and text != last:
                say(f"waiting for a board of the farm: {text}")
            last, look = text, _LOOK_S
        place = _place(self.held.card)
        say(f"board {self.name} of the farm" + (f" ({place})" if place else ""))

    def ended(self, seconds: float) -> str:
        """Why the lease ended; waits so long for it to end. "" where it goes on."""
        with self._changed:
            self._changed.wait_for(lambda: self._over is not None or self._closing.is_set(), seconds)
            return self.over

    @cached_property
    def address(self) -> str:
        """Where the board's agent is reached from here: itself, or through the farm."""
        card = self.held.card
        # Only the host's own user can open its sockets.
        path = card.direct.removeprefix("unix:")
        if path != card.direct and card.machine == machine_id() and os.access(path, os.W_OK):
            return card.direct
        self._tunnel = FarmTunnel(self._dial)
        return self._tunnel.address

    @property
    def config(self) -> BoardConfig:
        """The leased board's config, for as long as the lease goes on; NoSuchBoard where the board has no agent."""
        text = leased_config(self.held.card, self.held.grant, self.address)
        config = parse_board(text, Path(f"{self.name}.toml"))
        if config.command.kind == "command":
            raise NoSuchBoard(
                "it has no agent, so nobody can hold it",
                board=self.name,
                hint="`hil farm submit` runs models on it; a selector with !agentless leaves such boards out",
            )
        return config

    def log(self) -> str:
        """What the tunnel had to say."""
        return self._tunnel.log() if self._tunnel else ""

    def close(self) -> None:
        """Give the board back, or leave the queue; the farm knows it when this returns. Again: does nothing."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        if self._tunnel is not None:
            self._tunnel.close()
        self._thread.join(_CLOSE_S)
        if self._stream is not None:
            self._stream.cancel()
        self._client.close()

    def __enter__(self) -> LeaseSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _is_queued(self) -> bool:
        """Whether the farm has no board for us now; one that it makes ready for us is one."""
        return self._waiting.state == JobState.QUEUED.value

    def _wait_for(self, come: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            deadline = time.monotonic() + seconds
            while not (come() or self._over or self._closing.is_set()) and (left := deadline - time.monotonic()) > 0:
                # In slices, so that Ctrl-C is heard on every platform.
                self._changed.wait(min(left, _SLICE_S))
            if self._over is not None:
                raise self._over
            return come()

    def _keep(self) -> None:
        """Keep a stream to the farm until the lease is over or given back."""
        pause, longest = _PAUSE_S
        while True:
            began = time.monotonic()
            try:
                self._talk()
                self._end(FarmError("the farm ended the lease"))
            except Exception as error:
                if isinstance(error, grpc.RpcError) and not is_away(error):
                    self._end(translated(error))
                elif not is_away(error):
                    self._end(FarmError(f"the farm cannot be understood: {error}"))
            if self._over is not None or self._closing.is_set():
                return
            pause = _PAUSE_S[0] if time.monotonic() - began > longest else min(pause * 2, longest)
            self._closing.wait(pause)
            with contextlib.suppress(HilError):
                self._client.connect()

    def _talk(self) -> None:
        """One stream, from its opening to its end."""
        if self._held is None:
            opening = pb.LeaseRequest(open=submission_message(self._order))
        else:
            opening = pb.LeaseRequest(resume=pb.ResumeLease(lease=self._held.grant.lease, key=self._held.key))
        ended = threading.Event()
        self._stream = self._client.stub.Lease(self._requests(opening, ended), metadata=self._client.metadata)
        try:
            for reply in heard(self._stream, SILENT_S):
                self._there.set()
                self._heard(reply)
        finally:
            self._there.clear()
            ended.set()

    def _requests(self, opening: pb.LeaseRequest, ended: threading.Event) -> Iterator[pb.LeaseRequest]:
        yield opening
        # Its end is the stream's: the farm takes the board back.
        while not self._closing.wait(_BEAT_S) and not ended.is_set():
            yield pb.LeaseRequest(beat=pb.Beat())

    def _heard(self, reply: pb.LeaseReply) -> None:
        kind = reply.WhichOneof("kind")
        with self._changed:
            if kind == "waiting":
                self._waiting = reply.waiting
            elif kind == "granted":
                granted = reply.granted
                self._held = GrantedLease(grant_of(granted.grant), card_of(granted.card), granted.key)
            elif kind == "over":
                self._end(FarmError(reply.over or "the farm says no more"))
            self._changed.notify_all()

    def _end(self, error: HilError) -> None:
        with self._changed:
            # What we end ourselves is no news.
            if not self._closing.is_set():
                self._over = self._over or error
            self._changed.notify_all()

    def _dial(self, pieces: Iterator[pb.Piece]) -> Any:
        """A stream to the agent; a gateway that is away for now is waited for."""
        self._there.wait(_DIAL_S)
        held = self.held
        keys = [(LEASE_KEY, str(held.grant.lease)), (LEASE_SECRET_KEY, held.key)]
        try:
            return self._client.stub.Dial(pieces, metadata=[*self._client.metadata, *keys])
        except ValueError as error:
            raise FarmUnreachable("no gateway of the farm answers any more") from error


def _turn(priority: str, submission: int) -> tuple[int, int]:
    """Return a sort key of queued jobs: those of a higher class go first, then those that came first."""
    return list(Priority).index(Priority(priority)), submission


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# As others see it.
_LONGEST_PURPOSE = 200
# A lease that no other time is told for lasts as long as whoever has it beats, but a day at most.
MOST_S = 86400.0


def lease_order(
    selector: str, purpose: str, *, for_s: float = MOST_S, priority: Priority = Priority.NORMAL, project: str = ""
) -> Submission:
    """The order of a lease; others see the purpose."""
    purpose = purpose[:_LONGEST_PURPOSE]
    specs, title = (JobSpec(Kind.LEASE, {"purpose": purpose}),), purpose or "lease"
    return Submission(title, specs, selector=selector, timeout_s=for_s, priority=priority, project=project)


@dataclass(frozen=True)
class GrantedLease:
    """What was granted."""

    grant: Grant
    card: BoardCard
    key: str  # shows that the lease is ours


def leased_config(card: BoardCard, grant: Grant, address: str) -> str:
    """The board config, as TOML, of a board that is leased; whoever reads it reaches the agent at ``address``."""
    try:
        config = tomlkit.parse(card.config)
    except TOMLKitError as error:
        raise FarmError(f"the config that the farm has of {card.name} cannot be read: {error}") from error
    own = config.get("board", {})
    board = {key: own[key] for key in ("description", "runtime", "arithmetic") if key in own}
    board |= {"name": card.name, "hw_type": card.hw_type or own.get("hw_type", card.name)}
    # Only its host can switch its power or reach it otherwise.
    for table in ("connection", "power", "labgrid"):
        config.pop(table, None)
    config["board"] = board
    config["connection"] = {"address": address, "fence": grant.fence, "lease": describe_lease(card, grant)}
    return tomlkit.dumps(config)


def _place(card: BoardCard) -> str:
    return " at ".join(part for part in (card.host, card.site) if part)


def describe_lease(card: BoardCard, grant: Grant) -> str:
    """Which lease it is, for results: ``job 17, lease 5, lab1-host at lab1``."""
    return ", ".join(part for part in (f"job {grant.job}", f"lease {grant.lease}", _place(card)) if part)


def machine_id() -> str:
    """What tells this machine, since it was booted, from any other one."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"{uuid.getnode():012x}"


# So long after an error of the board the farm's reason for it may come.
_REASON_S = 5.0


class FarmProvider:
    """The lab farm as a provider of boards (:class:`hil.controller.devices.links.link.BoardProvider`)."""

    def order(self, selector: str, purpose: str) -> LeaseSession:
        """Queue for a board of the farm."""
        return LeaseSession(farm_address(), lease_order(selector, purpose))

    def connect(self, selector: str, *, runtime: str, purpose: str, wait_s: float, say: TextSink) -> Link:
        """The link to a board of the farm, which it is given back to when the link is closed."""
        lease = self.order(selector, purpose)
        try:
            lease.wait_told(wait_s, say)
            config = lease.config
            if runtime and config.devices and runtime not in config.devices:
                raise NoSuchBoard(
                    f"it has no runtime {runtime!r}",
                    board=config.name,
                    hint=f"its runtimes: {', '.join(config.devices)}; a narrower selector picks another board",
                )

            def renew() -> Target:
                if why := lease.ended(_REASON_S):
                    raise SessionEnded(f"the lease ended: {why}", board=config.name)
                return Target(lease.address)

            over = partial(lease.ended, _REASON_S)
            return Link(Target(lease.address), lease.close, lease.log, renew, config=config, over=over)
        except BaseException:
            lease.close()
            raise
