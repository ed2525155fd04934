"""Lease a farm board: wait in the queue, keep the lease with heartbeats, and return the board.

``--board farm:SELECTOR``.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import grpc
import tomlkit

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.choosing.board_resolver import read_capabilities
from hil.controller.devices.links.link import Link
from hil.controller.devices.power_control.provisioned_image import format_image
from hil.controller.farm.client.client import (
    RESTART_SECONDS,
    SILENT_S,
    FarmClient,
    FarmTunnel,
    is_away,
    iter_with_timeout,
    make_boards_mismatch,
    translate_grpc_error,
)
from hil.controller.farm.client.console_source import FarmLineSource
from hil.controller.farm.client.leased_meter import add_meter
from hil.controller.farm.client.machine import get_machine_id
from hil.controller.farm.messages import (
    LONGEST,
    BoardCard,
    BoardRequest,
    Grant,
    GrantedLease,
    JobSpec,
    JobState,
    Kind,
    Priority,
    Submission,
)
from hil.controller.farm.paths import FarmAddress, choose_farm_address
from hil.controller.farm.rpc import LEASE_KEY, LEASE_SECRET_KEY, decode_lease, encode_submission
from hil.core.board_config import BoardConfig
from hil.core.board_parser import parse_board
from hil.core.compile_flags import is_safe_flag
from hil.core.config_files import list_trusted_settings, parse_toml
from hil.core.console_config import parse_console
from hil.core.text import TextSink
from hil.errors import (
    BoardBusy,
    FarmError,
    FarmUnreachable,
    HilError,
    NoSuchBoard,
    SessionEnded,
    UsageError,
    did_you_mean,
)
from hil.protocol.v1 import farm_pb2 as pb

_BEAT_SECONDS = 1.5
_PAUSE_SECONDS = (0.1, 2.0)
_CLOSE_SECONDS = 5.0
_DIAL_SECONDS = 10.0
_SLICE_SECONDS = 0.2
# Timeout in seconds for the farm's first reply: a grant or a queue position.
_ANSWER_SECONDS = 10.0
# Report that the lease is waiting only after this many seconds.
_QUIET_SECONDS = 0.5
_LOOK_SECONDS = 3.0
_MAX_QUEUE = 10_000
_PATIENCE_SECONDS = 1.0


class _NoToken(Exception):
    """The token of a login cannot be read or refreshed."""

    def __init__(self, cause: HilError) -> None:
        super().__init__(cause.message)
        self.cause = cause


class LeaseSession:
    """A lease, from submission to end. As a context manager, returns the board at exit.

    A stream to the farm keeps the lease. If the stream breaks, this object resumes the lease at any gateway.
    :meth:`close` is thread-safe and can be called at any time. The client waits up to ``wait_s`` for a restarting
    gateway.
    """

    def __init__(
        self,
        address: FarmAddress,
        order: Submission,
        *,
        wait_s: float = RESTART_SECONDS,
        say: TextSink = lambda text: None,
    ) -> None:
        self._order = order
        restart_s = min(wait_s, RESTART_SECONDS)
        self._client = FarmClient(
            address, patience_s=_PATIENCE_SECONDS, call_s=_LOOK_SECONDS, restart_s=restart_s, say=say
        )
        self._closing = threading.Event()
        self._there = threading.Event()
        self._changed = threading.Condition()
        self._waiting = pb.JobStatus()
        self._held: GrantedLease | None = None
        self._over: HilError | None = None
        self._stream: Any = None
        self._tunnels: dict[int, FarmTunnel] = {}  # lease -> tunnel
        self._thread = threading.Thread(target=self._keep_stream, daemon=True, name="hil-farm-lease")
        self._thread.start()

    @property
    def held(self) -> GrantedLease:
        """The granted lease. Raises FarmError before :meth:`wait` returned True."""
        if self._held is None:
            raise FarmError("no board is leased yet")
        return self._held

    @property
    def name(self) -> str:
        """Name of the granted board."""
        return self.held.card.name

    @property
    def over(self) -> str:
        """Reason why the farm ended the lease; "" while the lease lasts, or if this object closed the lease."""
        return self._over.message if self._over else ""

    def queue_text(self) -> str:
        """Return the number of jobs ahead, or why no board is available; "" if unknown."""
        mine = self._waiting
        if not mine.name or mine.blocked:
            return mine.blocked
        try:
            queued = self._client.ask("jobs", state=[JobState.QUEUED.value], limit=_MAX_QUEUE)
        except HilError:
            return f"job {mine.name} is queued"
        own = _make_sort_key(mine.priority, mine.submission)
        ahead = sum(_make_sort_key(job.priority, job.submission) < own for job in queued)
        return f"{ahead} ahead of you" if ahead else "you are next"

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a board.

        Returns True if a board was granted. Repeated calls keep the queue position.

        Raises:
            HilError: the farm refused the lease.
            FarmError: the farm ended the lease, or no board can ever match.
        """
        return self._wait_for(lambda: self._held is not None, seconds)

    def wait_with_progress(self, seconds: float, say: TextSink) -> None:
        """Wait for a board and report the progress.

        Args:
            seconds: limit, counted from the time when the farm queued the lease.

        Raises:
            BoardBusy: no board became available in time.
            FarmUnreachable: the farm did not reply in that time.
            FarmError: see :meth:`wait`; or another thread closed the lease.
        """
        begin, last, look = time.monotonic(), "", _QUIET_SECONDS
        if self._wait_for(lambda: self._held is not None or self._is_queued, _ANSWER_SECONDS):
            begin = time.monotonic()
        elif not self._waiting.name and seconds <= _ANSWER_SECONDS:
            raise FarmUnreachable(f"no response from the farm within {_ANSWER_SECONDS:g} s")
        while not self.wait(min(look, max(begin + seconds - time.monotonic(), 0.0))):
            if self._closing.is_set():
                raise FarmError("the lease was released")
            text = self.queue_text()
            if time.monotonic() - begin >= seconds:
                raise BoardBusy(
                    f"no farm board became available within {seconds:g} s" + (f": {text}" if text else ""),
                    hint="use --wait S to wait longer; `hil farm boards` shows the current users",
                )
            if text and text != last:
                say(f"waiting for a farm board: {text}")
            last, look = text, _LOOK_SECONDS
        place = _format_location(self.held.card)
        say(f"farm board {self.name}" + (f" ({place})" if place else ""))
        for other in self.held.grant.more:
            place = _format_location(other.card)
            say(f"farm board {other.card.name}" + (f" ({place})" if place else ""))

    def ended(self, seconds: float) -> str:
        """Wait up to ``seconds`` for the lease to end, and return the reason; "" if the lease lasts."""
        with self._changed:
            self._changed.wait_for(lambda: self._over is not None or self._closing.is_set(), seconds)
            return self.over

    @cached_property
    def address(self) -> str:
        """Address of the board's agent: direct on the same machine, otherwise a tunnel through the farm."""
        return self._open_address(self.held)

    def _open_address(self, lease: GrantedLease) -> str:
        card = lease.card
        # Only the host's user can open the host's sockets.
        path = card.direct.removeprefix("unix:")
        if path != card.direct and card.machine == get_machine_id() and os.access(path, os.W_OK):
            return card.direct
        tunnel = self._tunnels[lease.grant.lease] = FarmTunnel(partial(self._dial_agent, lease))
        return tunnel.address

    @property
    def config(self) -> BoardConfig:
        """Config of the leased board, valid during the lease. Raises NoSuchBoard if the board has no sessions."""
        return self._make_config(self.held, self.address)

    @cached_property
    def configs(self) -> list[BoardConfig]:
        """Configs of all boards of the lease, in the order of the requests."""
        return [self.config, *(self._make_config(one, self._open_address(one)) for one in self.held.grant.more)]

    def _make_config(self, lease: GrantedLease, address: str) -> BoardConfig:
        text = make_leased_config(lease.card, lease.grant, address)
        config = parse_board(text, Path(f"{lease.card.name}.toml"))
        if not read_capabilities(BoardChoice(config)).sessions:
            raise NoSuchBoard(
                "boards without an agent cannot be leased",
                board=lease.card.name,
                hint="`hil farm submit` runs models on such boards; the selector !agentless excludes them",
            )
        return config

    def log(self) -> str:
        """Return the tunnel's log."""
        return "".join(tunnel.log() for tunnel in list(self._tunnels.values()))

    def close(self) -> None:
        """Return the board or leave the queue, and wait for the farm. Idempotent."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        for tunnel in list(self._tunnels.values()):
            tunnel.close()
        self._thread.join(_CLOSE_SECONDS)
        if self._stream is not None:
            self._stream.cancel()
        self._client.close()

    def __enter__(self) -> LeaseSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _is_queued(self) -> bool:
        """Whether the lease waits in the queue.

        While the farm prepares a board for the lease, the lease does not count as waiting.
        """
        return self._waiting.state == JobState.QUEUED.value

    def _wait_for(self, come: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            deadline = time.monotonic() + seconds
            while not (come() or self._over or self._closing.is_set()) and (left := deadline - time.monotonic()) > 0:
                # Wait in short slices, so that Ctrl-C works on every platform.
                self._changed.wait(min(left, _SLICE_SECONDS))
            if self._over is not None:
                raise self._over
            return come()

    def _keep_stream(self) -> None:
        """Keep a stream to the farm while the lease lasts."""
        pause, longest = _PAUSE_SECONDS
        while True:
            began = time.monotonic()
            try:
                self._run_stream()
                self._record_end(FarmError("the farm ended the lease"))
            except _NoToken as error:
                # The lease continues while the login provider does not respond.
                if not isinstance(error.cause, FarmUnreachable):
                    self._record_end(error.cause)
            except Exception as error:
                if isinstance(error, grpc.RpcError) and not is_away(error):
                    self._record_end(translate_grpc_error(error))
                elif not is_away(error):
                    self._record_end(FarmError(f"invalid response from the farm: {error}"))
            if self._over is not None or self._closing.is_set():
                return
            pause = _PAUSE_SECONDS[0] if time.monotonic() - began > longest else min(pause * 2, longest)
            self._closing.wait(pause)
            with contextlib.suppress(HilError):
                self._client.connect()

    def _run_stream(self) -> None:
        """Open or resume the lease on a stream, and process the replies."""
        if self._held is None:
            opening = pb.LeaseRequest(open=encode_submission(self._order))
        else:
            opening = pb.LeaseRequest(resume=pb.ResumeLease(lease=self._held.grant.lease, key=self._held.key))
        ended = threading.Event()
        try:
            metadata = self._client.metadata
        except HilError as error:
            raise _NoToken(error) from error
        self._stream = self._client.stub.Lease(self._yield_requests(opening, ended), metadata=metadata)
        try:
            for reply in iter_with_timeout(self._stream, SILENT_S):
                self._there.set()
                self._handle_reply(reply)
        finally:
            self._there.clear()
            ended.set()

    def _yield_requests(self, opening: pb.LeaseRequest, ended: threading.Event) -> Iterator[pb.LeaseRequest]:
        yield opening
        # Ending the requests ends the stream: the farm takes the board back.
        while not self._closing.wait(_BEAT_SECONDS) and not ended.is_set():
            yield pb.LeaseRequest(beat=pb.Beat())

    def _handle_reply(self, reply: pb.LeaseReply) -> None:
        kind = reply.WhichOneof("kind")
        with self._changed:
            if kind == "waiting":
                self._waiting = reply.waiting
            elif kind == "granted":
                held = decode_lease(reply.granted)
                if len(held.grant.more) < len(self._order.more):
                    self._record_end(make_boards_mismatch())
                else:
                    self._held = held
            elif kind == "over":
                self._record_end(FarmError(reply.over or "the lease has ended"))
            self._changed.notify_all()

    def _record_end(self, error: HilError) -> None:
        with self._changed:
            # Ignore errors after a local close.
            if not self._closing.is_set():
                self._over = self._over or error
            self._changed.notify_all()

    def _dial_agent(self, held: GrantedLease, pieces: Iterator[pb.Piece]) -> Any:
        """Open a stream to the agent. Waits for a gateway that is temporarily unavailable."""
        self._there.wait(_DIAL_SECONDS)
        keys = [(LEASE_KEY, str(held.grant.lease)), (LEASE_SECRET_KEY, held.key)]
        try:
            return self._client.stub.Dial(pieces, metadata=[*self._client.metadata, *keys])
        except ValueError as error:
            raise FarmUnreachable("no farm gateway responds") from error


def _make_sort_key(priority: str, submission: int) -> tuple[int, int]:
    """Return a sort key for queued jobs: by priority class, then by submission."""
    classes = [one.value for one in Priority]
    # A gateway of a newer release may have more priority classes.
    return classes.index(priority) if priority in classes else len(classes), submission


# Maximum length in characters, because other users see the purpose.
_MAX_PURPOSE_LENGTH = 200
# Maximum bytes in a board config. Real configs are smaller, and parsing a megabyte of TOML takes minutes.
_MAX_CONFIG = 1 << 16
# Default limit of a lease in seconds: a day. A lease also needs the holder's heartbeats.
MAX_LEASE_SECONDS = 86400.0


def lease_order(
    selector: str,
    purpose: str,
    *,
    for_s: float | None = None,
    priority: Priority = Priority.NORMAL,
    project: str = "",
    requests: Sequence[BoardRequest] = (),
) -> Submission:
    """Return the submission for a lease. Other users see ``purpose``.

    Args:
        requests: the boards of a lease with multiple boards, instead of ``selector``.
        for_s: lease time in seconds; None for the longest possible time.
    """
    purpose = purpose[:_MAX_PURPOSE_LENGTH]
    options = {"purpose": purpose, **({LONGEST: True} if for_s is None else {})}
    specs, title = (JobSpec(Kind.LEASE, options),), purpose or "lease"
    timeout_s = MAX_LEASE_SECONDS if for_s is None else for_s
    first, *more = requests or (BoardRequest(selector),)
    return Submission(
        title,
        specs,
        selector=first.selector,
        board=first.board,
        more=tuple(more),
        timeout_s=timeout_s,
        priority=priority,
        project=project,
    )


def make_leased_config(card: BoardCard, grant: Grant, address: str, *, has_console: bool = True) -> str:
    """Return the config of a leased board as TOML, with the agent at ``address``.

    Args:
        has_console: True if the user of the config can read the console through the farm.

    Raises:
        FarmError: the farm's config is invalid, or contains settings with side effects on this machine.
    """
    if len(card.config) > _MAX_CONFIG:
        raise FarmError(
            f"the farm's config of {card.name} has {len(card.config)} characters; the limit is {_MAX_CONFIG}"
        )
    path = Path(f"{card.name}.toml")
    try:
        config = parse_toml(card.config, path)
        parse_board(card.config, path)
        console = _make_console_table(card) if has_console else {}
    except UsageError as error:
        raise FarmError(f"cannot read the farm's config of {card.name}: {error.message}") from error
    own = config.get("board", {})
    board = {key: own[key] for key in ("description", "runtime", "arithmetic") if key in own}
    board |= {"name": card.name, "hw_type": card.hw_type or own.get("hw_type", card.name)}
    # Only the board's host can switch the power, read the console, or connect without the farm.
    for table in ("connection", "power", "recover", "console", "provision", "labgrid"):
        config.pop(table, None)
    if refused := [
        *list_trusted_settings({**config, "compile_flags": {}}),
        *list_unsafe_flags(config.get("compile_flags", {})),
    ]:
        raise FarmError(
            f"the farm's config of {card.name} has settings that are forbidden for leased boards: {', '.join(refused)}",
            hint="set your flags with --compile-flag, or use `hil farm submit`, which compiles on the board's host",
        )
    config["board"] = board
    config["connection"] = {
        "address": address,
        "fence": grant.fence,
        "lease": describe_lease(card, grant),
        "image": format_image(card.image),
    }
    if console:
        config["console"] = console
    add_meter(config, card)
    return tomlkit.dumps(config)


def _make_console_table(card: BoardCard) -> dict[str, Any]:
    """Return the table ``[console]`` for a leased board; {} if the host cannot read a console. Raises UsageError."""
    if not card.console:
        return {}
    path = Path(f"{card.name}.toml")
    table = {"farm": card.name, "patterns": parse_toml(card.console, path).get("patterns", [])}
    parse_console(table, path)
    return table


def list_unsafe_flags(flags: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the compiler flags that may write files or start programs.

    The config comes from the farm, not from the user.
    """
    return [f"{name} {flag}" for name, some in flags.items() for flag in some if not is_safe_flag(flag)]


def _format_location(card: BoardCard) -> str:
    return " at ".join(part for part in (card.host, card.site) if part)


def describe_lease(card: BoardCard, grant: Grant) -> str:
    """Identify the lease for stored results: ``job 17, lease 5, lab1-host at lab1``."""
    return ", ".join(part for part in (f"job {grant.job}", f"lease {grant.lease}", _format_location(card)) if part)


# After a board error, wait this long for the farm's reason.
_REASON_SECONDS = 5.0


class FarmProvider:
    """Lab farm as a board provider (:class:`hil.controller.devices.links.link.BoardProvider`)."""

    def order(self, selector: str, purpose: str) -> LeaseSession:
        """Queue for a board of the farm."""
        return LeaseSession(choose_farm_address(), lease_order(selector, purpose))

    def open_console(self, board: str, since_s: float) -> FarmLineSource:
        """Open the console of a board: see :class:`hil.controller.devices.console.sources.ConsoleProvider`."""
        return FarmLineSource(FarmClient(choose_farm_address(), patience_s=_PATIENCE_SECONDS), board, since_s)

    def connect(self, selector: str, *, runtime: str, purpose: str, wait_s: float, say: TextSink) -> Link:
        """Lease a board and return the link to the board. Closing the link returns the board."""
        lease = LeaseSession(choose_farm_address(), lease_order(selector, purpose), wait_s=wait_s, say=say)
        try:
            lease.wait_with_progress(wait_s, say)
            config = lease.config
            if runtime and not config.has_runtime(runtime):
                raise NoSuchBoard(
                    f"runtime {runtime!r} not found on this board",
                    board=config.name,
                    hint=f"{did_you_mean(runtime, config.devices)}available runtimes: "
                    f"{', '.join(config.devices) or config.runtime}; "
                    "use a narrower selector",
                )

            def renew() -> AgentEndpoint:
                if why := lease.ended(_REASON_SECONDS):
                    raise SessionEnded(f"the lease ended: {why}", board=config.name)
                return AgentEndpoint(lease.address)

            over = partial(lease.ended, _REASON_SECONDS)
            target = AgentEndpoint(lease.address)
            return Link(target, lease.close, lease.log, renew, config=config, over=over)
        except BaseException:
            lease.close()
            raise
