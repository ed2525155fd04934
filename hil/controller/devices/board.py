"""A board with an agent, as the controller holds it: connected, then in a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import tenacity
from google.protobuf.json_format import MessageToDict

from hil.controller.devices.board_resolver import BoardChoice, with_target
from hil.controller.devices.client import AgentClient, Loaded
from hil.controller.devices.clocks import BoardClock
from hil.controller.devices.counters import CounterWatch
from hil.controller.devices.health.conditions import changed
from hil.controller.devices.links.factory import open_link
from hil.controller.devices.links.link import Link, Say
from hil.controller.devices.loaded_program import LoadedProgram
from hil.controller.devices.streams import Invocation
from hil.controller.storage.cache import Cache
from hil.core import clock
from hil.core.artifacts import Artifact
from hil.core.digest import algorithm_of, digest_file
from hil.errors import (
    BlobDamaged,
    BoardBusy,
    BoardError,
    BoardLost,
    BoardRefused,
    BoardUnreachable,
    SessionEnded,
    UsageError,
)
from hil.formats.iree_command import PROFILE_TOOL

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

__all__ = ["Board", "LoadedProgram"]

_PUSH_TRIES = 4
_PINGS_LAST_NS = 1_000_000_000


class Board:
    """A connected board. A context manager. It is ours alone from :meth:`take` on.

    Args:
        choice: which board.
        runtime: the runtime that is going to be used, where an agent has to be put on the board; "" is the config's.
        purpose: told to others who wait for it.
        faults: for a simulator: faults to switch on.
        wait_s: how long to wait while somebody else has it.
        say: told what goes on while waiting.

    Attributes:
        name: how results and errors call it.
        closed: whether it was given back.
        config: its config; the target to compile for is filled in from what the board shows, where it named none.
        target: what to compile for, in words, where the board shows it; "" where the config names it.
        info: what Describe said.

    Raises:
        BoardUnreachable: nobody answers.
    """

    def __init__(
        self,
        choice: BoardChoice,
        *,
        runtime: str = "",
        purpose: str = "",
        faults: tuple[str, ...] = (),
        wait_s: float = 60.0,
        say: Say = lambda text: None,
    ) -> None:
        self.closed = False
        self._purpose = purpose
        self._wait_s = wait_s
        self._say = say
        self._ours = False
        self._clock = BoardClock()
        self._there: set[str] = set()
        self._profiler: tuple[Path, str] | None = None
        self._link: Link = open_link(
            choice.address, choice.config, faults=faults, runtime=runtime, purpose=purpose, wait_s=wait_s, say=say
        )
        self.name = self._link.config.name if self._link.config else choice.name
        self.config = self._link.config or choice.config
        self._client = self._connected()
        try:
            self.info: dict[str, Any] = self._describe()
            try:
                self.config, self.target = with_target(self.config, runtime, self.info["machine"])
            except UsageError as error:  # what the board shows of itself is not the user's doing
                raise BoardRefused(error.message, board=self.name, hint=error.hint) from error
        except BoardUnreachable as error:
            if self.shell is not None:
                error.hint = "its process is there but says nothing: `hil board clean --force` ends it"
                error.detail = error.detail or self._link.log()
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    def _connected(self) -> AgentClient:
        return AgentClient(self._link.target, self.name, over=self._link.over)

    def _describe(self) -> dict[str, Any]:
        said = MessageToDict(self._client.describe(), preserving_proto_field_name=True)
        lease = self.config.connection.lease
        return {**said, "lease": lease} if lease else said

    def note(self, seen: Invocation) -> list[str]:
        """Keep in :attr:`info` what a run's answer says of the board; what happened since the last time (see
        :func:`changed`)."""
        before, self.info = self.info, {**self.info, **seen.state}
        return changed(before, self.info)

    @property
    def client(self) -> AgentClient:
        """The agent's calls; another client after the link was mended."""
        return self._client

    @property
    def shell(self) -> Shell | None:
        """Commands on the board, where it is reached over SSH."""
        return self._link.shell

    def take(self) -> None:
        """Take the device, if it is not ours already: wait until nobody else has it.

        Between connecting and this the agent may have left, for idleness, or for one of another version: then the
        link is made anew, and our own agent with it. Nothing has run yet.

        Raises:
            BoardBusy: it was not free in time.
            BoardLost: it answers no more.
        """
        if self._ours:
            return
        for mended in (False, True):
            try:
                fence = self.config.connection.fence
                self._client.open_session(self._purpose, fence=fence, wait_s=self._wait_s, on_wait=self._say)
                if not self._link.build or self._client.describe().build == self._link.build:
                    break
                gone: BoardError = BoardBusy("an agent of another version has taken the place of ours", board=self.name)
            except (BoardLost, BoardUnreachable, SessionEnded) as error:
                gone = error
            if mended or self._link.renew is None:
                raise gone
            self._connect_anew()
        self._ours = True
        self.ping(8)

    def _connect_anew(self) -> None:
        """A new link and client; what the old one had of the board is given up."""
        sent = self._client.payload_bytes_sent
        self._there.clear()
        self._client.close()
        if self._link.renew:
            self._link.renew()
        self._client = self._connected()
        self._client.payload_bytes_sent = sent
        # What happened until now happened to no run.
        self.info = self._describe()
        self._ours = False
        self._clock = BoardClock()

    @property
    def payload_bytes_sent(self) -> int:
        """Blob bytes sent so far, on whatever connection."""
        return self._client.payload_bytes_sent

    def push(self, artifact: Artifact, progress: Callable[[int, int], None] = lambda sent, total: None) -> int:
        """Send the files that the board lacks; returns the bytes sent. Takes the board.

        Raises:
            LoadFailed: the board has no room.
            BoardLost: the link broke again and again.
        """
        return self._send({artifact.digests[name]: path for name, path in artifact.files.items()}, progress)

    def push_profiler(self, runtime: str) -> str:
        """Send the tool that the board's runtime needs for profiling and lacks; its digest, "" where it lacks none.

        A link that is mended on the way costs the session, and with it what is loaded.

        Raises:
            LoadFailed, BoardError: there is no such tool for the board.
            BoardLost: the link broke again and again.
        """
        shown: dict[str, Any] = next((one for one in self.info.get("runtimes", ()) if one["name"] == runtime), {})
        if shown.get("profile_tool") != PROFILE_TOOL:
            return ""  # another's is not ours to bring: the pass itself says what it lacks
        if self._profiler is None:
            from hil.controller.devices.iree_tool import iree_tool

            machine = self.info["machine"]
            path = iree_tool(
                PROFILE_TOOL,
                machine.get("arch", ""),
                machine.get("libc", ""),
                version=shown.get("version", ""),
                cache=Cache(),
                board=self.name,
            )
            self._profiler = path, digest_file(path)
        path, digest = self._profiler
        self._send({digest: path}, lambda sent, total: None)
        return digest

    def _send(self, paths: Mapping[str, Path], progress: Callable[[int, int], None]) -> int:
        """Send blobs, digest -> file; returns the bytes sent.

        What the board was seen to have is not asked for again until something is sent: the board is ours alone, and
        only an upload makes it evict anything.

        Pushing is idempotent, so a broken link is mended and the upload goes on where it was cut.
        """
        self.take()
        before = self.payload_bytes_sent
        if self._there.issuperset(paths):
            return 0

        def once() -> None:
            missing = self._client.missing(list(paths))
            total = sum(paths[name].stat().st_size - have for name, have in missing.items())
            sent = 0

            def count(size: int) -> None:
                nonlocal sent
                sent += size
                progress(sent, total)

            if missing:
                self._there.clear()
                self._client.put({name: (paths[name], have) for name, have in missing.items()}, count)
            self._there.update(paths)

        def once_or_again() -> None:
            try:
                once()
            except BlobDamaged as error:
                for name, path in paths.items():
                    if digest_file(path, algorithm_of(name)) != name:
                        raise UsageError(
                            f"{path} was altered after it was read",
                            hint="run it again, and leave the file alone meanwhile",
                        ) from error
                self.look_again(error)
                once()

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((BoardLost, SessionEnded)),
            stop=tenacity.stop_after_attempt(_PUSH_TRIES),
            wait=tenacity.wait_exponential(0.1, max=2),
            before_sleep=lambda state: self._reconnect(state.outcome),
            reraise=True,
        )
        retrying(once_or_again)
        return self.payload_bytes_sent - before

    def _reconnect(self, outcome: Any) -> None:
        """After a broken upload: a new connection and session. Nothing that ran is lost: nothing has run yet."""
        error = outcome.exception()
        self._say(f"the link broke during the upload ({error.message}); connecting again")
        try:
            self._connect_anew()
            self.take()
        except BoardUnreachable as gone:
            raise BoardLost(
                "the board stopped answering during the upload", stage="push", board=self.name, detail=self._link.log()
            ) from gone

    def load(self, artifact: Artifact, *, timeout: float = 60.0, no_fallback: bool = False) -> LoadedProgram:
        """Load a pushed program in a worker of its own.

        Args:
            artifact: the program.
            timeout: seconds for it.
            no_fallback: whether a node that runs on another device than it was told to fails a run.

        A file that was altered on the board is sent again, once.

        Raises:
            LoadFailed, RunCrashed, StageTimeout: as the board says.
            BlobDamaged: what was sent again was altered, too.
        """
        device = self.config.devices.get(artifact.runtime, "")

        def load() -> Loaded:
            return self._client.load(
                dict(artifact.digests),
                artifact.main,
                runtime=artifact.runtime,
                device=device,
                function=artifact.function,
                timeout=timeout,
            )

        try:
            loaded = load()
        except BlobDamaged as error:
            self.look_again(error)
            self.push(artifact)
            loaded = load()
        return LoadedProgram(self, self._client, artifact, loaded, device, no_fallback=no_fallback)

    def look_again(self, error: BlobDamaged) -> None:
        """What was sent is not what it was: before the next use, ask what the board has."""
        self._say(f"{error.message}; sending it again")
        self._there.clear()

    def logs(self, program_id: str) -> list[str]:
        """What a program's worker wrote to stderr; nothing where the board cannot be asked any more."""
        try:
            return self._client.logs(program_id)
        except BoardError:
            return []

    def ping(self, count: int = 4) -> None:
        """Look at the board's clock now, for :meth:`clock_fit`."""
        self._clock.add(self._client.pings(count))

    def clock_fit(self, since_ns: int | None = None) -> clock.ClockFit:
        """The board's clock beside the host's, until now. Pings of the last second will do: the error allows for it.

        Args:
            since_ns: host time of the earliest stamp that is to be told in the host's time; None is now.
        """
        if self._clock.age_ns() > _PINGS_LAST_NS:
            self.ping()
        now = clock.now_ns()
        return self._clock.fit(now if since_ns is None else since_ns, now)

    def watch_counters(self, period_s: float = 0.1) -> CounterWatch:
        """Read the board's counters beside whatever runs meanwhile: a context manager, see :class:`CounterWatch`."""
        return CounterWatch(lambda: self._client.counters(period_s))

    def close(self) -> None:
        """Give the board back."""
        self.closed = True
        self._client.close()
        self._link.close()

    def __enter__(self) -> Board:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
