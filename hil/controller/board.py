"""A board with an agent, as the controller holds it: connected, then in a session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import tenacity
from google.protobuf.json_format import MessageToDict

from hil import clock
from hil.bundle import Artifact
from hil.controller.care.conditions import changed
from hil.controller.choice import BoardChoice, with_target
from hil.controller.client import AgentClient, Loaded
from hil.controller.links import Link, Say, open_link
from hil.controller.provenance import provenance_of
from hil.controller.streams import Invocation
from hil.errors import BoardBusy, BoardError, BoardLost, BoardUnreachable, SessionEnded
from hil.results import RunResult
from hil.tensors import Array

if TYPE_CHECKING:
    from hil.controller.ssh.shell import Shell

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
        self.name = choice.name
        self.closed = False
        self._purpose = purpose
        self._wait_s = wait_s
        self._say = say
        self._pings: list[clock.Ping] = []
        self._last_pings: list[clock.Ping] = []
        self._there: set[str] = set()
        self._link: Link = open_link(choice.address, choice.config, faults=faults, runtime=runtime, say=say)
        self._client = AgentClient(self._link.target, self.name)
        try:
            self.info: dict[str, Any] = self._describe()
            self.config, self.target = with_target(choice.config, runtime, self.info["machine"])
        except BoardUnreachable as error:
            if self.shell is not None:
                error.hint = "its process is there but says nothing: `hil board clean --force` ends it"
                error.detail = error.detail or self._link.log()
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    def _describe(self) -> dict[str, Any]:
        return MessageToDict(self._client.describe(), preserving_proto_field_name=True)

    def note(self, seen: Invocation) -> list[str]:
        """Keep in :attr:`info` what a run's answer says of the board; what happened since the last time (see
        :func:`changed`)."""
        before, self.info = self.info, {**self.info, **seen.state}
        return changed(before, self.info)

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
        if self._pings:
            return
        for mended in (False, True):
            try:
                self._client.open_session(self._purpose, wait_s=self._wait_s, on_wait=self._say)
                if not self._link.build or self._client.describe().build == self._link.build:
                    break
                gone: BoardError = BoardBusy("an agent of another version has taken the place of ours", board=self.name)
            except (BoardLost, BoardUnreachable, SessionEnded) as error:
                gone = error
            if mended or self._link.renew is None:
                raise gone
            self._connect_anew()
        self._pings = self._last_pings = self._client.pings()

    def _connect_anew(self) -> None:
        """A new link and client; what the old one had of the board is given up."""
        sent = self._client.payload_bytes_sent
        self._there.clear()
        self._client.close()
        if self._link.renew:
            self._link.renew()
        self._client = AgentClient(self._link.target, self.name)
        self._client.payload_bytes_sent = sent
        # What happened until now happened to no run.
        self.info = self._describe()
        self._pings = self._last_pings = []

    @property
    def payload_bytes_sent(self) -> int:
        """Blob bytes sent so far, on whatever connection."""
        return self._client.payload_bytes_sent

    def push(self, artifact: Artifact, progress: Callable[[int, int], None] = lambda sent, total: None) -> int:
        """Send the files that the board lacks; returns the bytes sent. Takes the board.

        What the board was seen to have is not asked for again until something is sent: the board is ours alone, and
        only an upload makes it evict anything.

        Pushing is idempotent, so a broken link is mended and the upload goes on where it was cut.

        Raises:
            LoadFailed: the board has no room.
            BoardLost: the link broke again and again.
        """
        self.take()
        paths = {artifact.digests[name]: path for name, path in artifact.files.items()}
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

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((BoardLost, SessionEnded)),
            stop=tenacity.stop_after_attempt(_PUSH_TRIES),
            wait=tenacity.wait_exponential(0.1, max=2),
            before_sleep=lambda state: self._reconnect(state.outcome),
            reraise=True,
        )
        retrying(once)
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

    def load(self, artifact: Artifact, *, timeout: float = 60.0) -> LoadedProgram:
        """Load a pushed program in a worker of its own.

        Raises:
            LoadFailed, RunCrashed, StageTimeout: as the board says.
        """
        device = self.config.devices.get(artifact.runtime, "")
        loaded = self._client.load(
            dict(artifact.digests),
            artifact.main,
            runtime=artifact.runtime,
            device=device,
            function=artifact.function,
            timeout=timeout,
        )
        return LoadedProgram(self, self._client, artifact, loaded, device)

    def logs(self, program_id: str) -> list[str]:
        """What a program's worker wrote to stderr; nothing where the board cannot be asked any more."""
        try:
            return self._client.logs(program_id)
        except BoardError:
            return []

    def clock_fit(self) -> clock.ClockFit:
        """The board's clock beside the host's, from pings at the session's start, where we have one, and now.

        Pings of the last second will do: clocks drift less in it than a ping is off.
        """
        if not self._last_pings or clock.now_ns() - self._last_pings[-1].received_ns > _PINGS_LAST_NS:
            self._last_pings = self._client.pings(4)
        return clock.fit(self._pings or self._last_pings, self._last_pings)

    def close(self) -> None:
        """Give the board back."""
        self.closed = True
        self._client.close()
        self._link.close()

    def __enter__(self) -> Board:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class LoadedProgram:
    """A program in its worker on the board. A context manager: it is unloaded at the end."""

    def __init__(self, board: Board, client: AgentClient, artifact: Artifact, loaded: Loaded, device: str) -> None:
        self._board = board
        self._client = client
        self._artifact = artifact
        self._device = device
        self.loaded = loaded

    def run(
        self,
        inputs: Mapping[str, Array],
        *,
        warmup: int = 0,
        iterations: int = 1,
        timeout: float = 60.0,
        names: tuple[str, ...] = (),
    ) -> tuple[RunResult, Invocation]:
        """Run on the board. A run is never tried again: that could hide a wrong answer.

        Args:
            inputs: name -> tensor in the program's order.
            warmup, iterations: untimed and timed runs.
            timeout: seconds for all of them.
            names: output names to use in place of the program's own, where the compiler dropped them.

        Raises:
            RunFailed, RunCrashed, StageTimeout, BoardLost, SessionEnded: as it ends.
        """
        invocation = self._client.invoke(
            self.loaded.program_id, inputs, warmup=warmup, iterations=iterations, timeout=timeout, state=True
        )
        outputs = invocation.outputs
        if len(names) == len(outputs):
            outputs = dict(zip(names, outputs.values(), strict=True))
        fit = self._board.clock_fit()
        notes = self._board.note(invocation)
        name, device = self._artifact.runtime, self._device
        versions = {one["name"]: one.get("version", "") for one in self._board.info.get("runtimes", ())}
        version = versions.get(name, "")
        provenance = {
            **provenance_of(
                self._board.name,
                self._board.info,
                self._board.shell,
                runtime=name,
                version=version,
                device=device,
                notes=notes,
            ),
            "clock": {"offset_ns": fit.offset_ns, "drift": fit.drift, "error_ns": fit.error_ns},
        }
        source = f"{self._board.name}: {name} {version} {device}".strip()
        result = RunResult(source, outputs, invocation.iterations_ns, invocation.peak_memory_bytes or None, provenance)
        return result, invocation

    def log(self) -> list[str]:
        """What the worker wrote to stderr."""
        return self._board.logs(self.loaded.program_id)

    def unload(self) -> None:
        """End the worker; a board that is gone has none."""
        with contextlib.suppress(BoardError):
            self._client.unload(self.loaded.program_id)

    def __enter__(self) -> LoadedProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.unload()
