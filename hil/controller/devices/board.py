"""A board as the controller holds it: connected, then in a session; and a program that is loaded on it."""

from __future__ import annotations

import contextlib
import posixpath
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hil import errors
from hil.controller.devices.agentless.signature import check_inputs, fits
from hil.controller.devices.answers import expected_bytes
from hil.controller.devices.board_choice import BoardChoice, with_target
from hil.controller.devices.board_client import BoardClient, Invocation, Loaded, ProfilePass
from hil.controller.devices.client import AgentClient
from hil.controller.devices.health import changed
from hil.controller.devices.links.link import Link
from hil.controller.devices.measurement import BoardClock, CounterWatch
from hil.controller.devices.worker_log import WorkerLog
from hil.controller.storage import live
from hil.controller.storage.cache import Cache
from hil.core import clock
from hil.core.digest import algorithm_of, digest_file
from hil.core.repetition import Answer, Repetition
from hil.core.results import Artifact, Placement, RequestedDevice, RunResult
from hil.core.tensors import Array
from hil.formats.iree_command import PROFILE_TOOL

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

_PUSH_TRIES = 4
_PUSH_PAUSE_S = 0.1
_PINGS_LAST_NS = 1_000_000_000


class Board:
    """A connected board, which takes over the link. A context manager. It is ours alone from :meth:`take` on.

    Attributes:
        config: its config; the target to compile for is filled in from what the board shows, where it named none.
        target: what to compile for, in words, where the board shows it; "" where the config names it.
        info: what Describe said; of a board without an agent what its shell shows, with the same keys.
        client: the board's calls; another client after the link was made anew.

    Raises:
        UsageError: the address or the config is wrong, or the runtime needs an agent.
        BoardUnreachable: nobody answers.
        BoardError: the board refuses us, or cannot be used.
    """

    def __init__(self, choice: BoardChoice, link: Link) -> None:
        self.closed = False
        self._purpose = choice.purpose
        self._wait_s = choice.wait_s
        self._say = choice.say
        self._ours = False
        self._clock = BoardClock()
        self._there: set[str] = set()
        self._profiler: tuple[Path, str] | None = None
        self._log: WorkerLog | None = None
        self._link = link
        self.name = self._link.config.name if self._link.config else choice.name
        self.config = self._link.config or choice.config
        self.client = self._connected()
        try:
            self.info: dict[str, Any] = self._describe()
            try:
                self.config, self.target = with_target(self.config, choice.runtime, self.info["machine"])
            except errors.UsageError as error:  # what the board shows of itself is not the user's doing
                raise errors.BoardRefused(error.message, board=self.name, hint=error.hint) from error
        except errors.BoardUnreachable as error:
            if self.shell is not None:
                error.hint = "its process is there but says nothing: `hil board clean --force` ends it"
                error.detail = error.detail or self._link.log()
            self.close()
            raise
        except BaseException:
            self.close()
            raise
        if lacking := self.info.get("not_measured"):
            command = posixpath.basename(self.info["runtimes"][0]["command"])
            *first, last = lacking
            self._say(
                f"no agent on {self.name}: programs are run by the command {command}; "
                f"{', '.join(first)} and {last} are not measured"
            )

    def _connected(self) -> BoardClient:
        link = self._link
        return link.connect(self.name) if link.connect else AgentClient(link.target, self.name, over=link.over)

    def _describe(self) -> dict[str, Any]:
        found = self.client.info()
        lease = self.config.connection.lease
        return {**found, "lease": lease} if lease else found

    def runtime_version(self, runtime: str) -> str:
        """The version of one of the board's runtimes; "" where it is not known."""
        versions = {one["name"]: one.get("version", "") for one in self.info.get("runtimes", ())}
        return str(versions.get(runtime, ""))

    def note(self, seen: Invocation) -> list[str]:
        """Keep in :attr:`info` what a run's answer says of the board; what :func:`changed` since the last time."""
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
        if self._ours:
            return
        for mended in (False, True):
            try:
                fence = self.config.connection.fence
                self.client.open_session(self._purpose, fence=fence, wait_s=self._wait_s, on_wait=self._say)
                if not self._link.build or self.client.info().get("build") == self._link.build:
                    break
                gone: errors.BoardError = errors.BoardBusy(
                    "an agent of another version has taken the place of ours", board=self.name
                )
            except (errors.BoardLost, errors.BoardUnreachable, errors.SessionEnded) as error:
                gone = error
            if mended or self._link.renew is None:
                raise gone
            self._connect_anew()
        self._ours = True
        self.ping(8)

    def _connect_anew(self) -> None:
        """A new link and client; what the old one had of the board is given up."""
        sent = self.client.payload_bytes_sent
        self._there.clear()
        self.client.close()
        if self._link.renew:
            self._link.renew()
        self.client = self._connected()
        self.client.payload_bytes_sent = sent
        # What happened until now happened to no run.
        self.info = self._describe()
        self._ours = False
        self._clock = BoardClock()

    @property
    def payload_bytes_sent(self) -> int:
        """Blob bytes sent so far, on whatever connection."""
        return self.client.payload_bytes_sent

    def push(self, artifact: Artifact, progress: Callable[[int, int], None] = lambda sent, total: None) -> int:
        """Send the files that the board lacks, and the tools that run them; returns the bytes sent. Takes the board.

        Raises:
            LoadFailed: the board has no room, or there is no tool for it.
            BoardLost: the link broke in each of several tries.
        """
        files = {artifact.digests[name]: path for name, path in artifact.files.items()}
        return self._send({**files, **self.client.tools()}, progress)

    def push_profiler(self, runtime: str) -> str:
        """Send the tool that the board's runtime needs for profiling and lacks; its digest, "" where it lacks none.

        A link that is mended on the way costs the session, and with it what is loaded.

        Raises:
            LoadFailed, BoardError: there is no such tool for the board, or it could not be sent.
        """
        shown: dict[str, Any] = next((one for one in self.info.get("runtimes", ()) if one["name"] == runtime), {})
        if shown.get("profile_tool") != PROFILE_TOOL:
            return ""  # another's is not ours to bring: the pass itself says what it lacks
        if self._profiler is None:
            from hil.controller.devices.deploy.wheels import iree_tool

            arch, libc = (self.info["machine"].get(name, "") for name in ("arch", "libc"))
            version = shown.get("version", "")
            path = iree_tool(PROFILE_TOOL, arch, libc, version=version, cache=Cache(), board=self.name)
            self._profiler = path, digest_file(path)
        path, digest = self._profiler
        self._send({digest: path}, lambda sent, total: None)
        return digest

    def _send(self, paths: Mapping[str, Path], progress: Callable[[int, int], None]) -> int:
        """Send blobs, digest -> file; returns the bytes sent. A broken link is mended, and the upload goes on.

        What the board was seen to have is not asked for again until something is sent: the board is ours alone, and
        only an upload makes it evict anything.
        """
        self.take()
        before = self.payload_bytes_sent
        if self._there.issuperset(paths):
            return 0

        def once() -> None:
            missing = self.client.missing(paths)
            total = sum(paths[name].stat().st_size - have for name, have in missing.items())
            if missing:
                self._there.clear()
                blobs = {name: (paths[name], have) for name, have in missing.items()}
                begin = self.payload_bytes_sent
                self.client.put(blobs, lambda size: progress(self.payload_bytes_sent - begin, total))
            self._there.update(paths)

        def once_or_again() -> None:
            try:
                once()
            except errors.BlobDamaged as error:
                for name, path in paths.items():
                    if digest_file(path, algorithm_of(name)) != name:
                        raise errors.UsageError(
                            f"{path} was altered after it was read",
                            hint="run it again, and leave the file alone meanwhile",
                        ) from error
                self.look_again(error)
                once()

        broken = (errors.BoardLost, errors.SessionEnded)
        try:
            once_or_again()
        except broken as error:
            import tenacity  # 3 ms, and links break seldom

            self._reconnect(error)
            time.sleep(_PUSH_PAUSE_S)
            retrying = tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(broken),
                stop=tenacity.stop_after_attempt(_PUSH_TRIES - 1),
                wait=tenacity.wait_exponential(2 * _PUSH_PAUSE_S, max=2),
                before_sleep=lambda state: self._reconnect(cast(tenacity.Future, state.outcome).exception()),
                reraise=True,
            )
            retrying(once_or_again)
        return self.payload_bytes_sent - before

    def _reconnect(self, error: Any) -> None:
        """After a broken upload: a new connection and session. Nothing that ran is lost: nothing has run yet."""
        self._say(f"the link broke during the upload ({error.message}); connecting again")
        try:
            self._connect_anew()
            self.take()
        except errors.BoardUnreachable as gone:
            raise errors.BoardLost(
                "the board stopped answering during the upload", stage="push", board=self.name, detail=self._link.log()
            ) from gone

    def load(self, artifact: Artifact, *, timeout: float = 60.0, no_fallback: bool = False) -> LoadedProgram:
        """Load a pushed program in a worker of its own. A file that was altered on the board is sent again, once.

        Raises:
            LoadFailed, RunCrashed, StageTimeout: as the board says.
            NotRun: the board lacks what the program was compiled for.
            BlobDamaged: what was sent again was altered, too.
        """
        device = self.config.devices.get(artifact.runtime, "")

        def load() -> Loaded:
            try:
                return self.client.load_program(artifact, device=device, timeout=timeout)
            except errors.PartMissing as error:
                if any(need in error.message for need in artifact.notes.get("needs", ())):
                    raise errors.NotRun(
                        f"it was compiled, and not run: {error.message}",
                        stage=error.stage,
                        hint="--board with one that has it",
                    ) from error
                raise

        try:
            loaded = load()
        except errors.BlobDamaged as error:
            self.look_again(error)
            self.push(artifact)
            loaded = load()
        self.show_log(loaded.program_id)
        return LoadedProgram(self, self.client, artifact, loaded, no_fallback=no_fallback)

    def show_log(self, program_id: str) -> None:
        """Show what a program's worker writes to stderr as it comes, if anybody wants to see it."""
        if not live.is_shown():
            return
        if self._log is None or self._log.client is not self.client:
            self._end_log()
            # It is beside the run: what it cannot have, the program's own calls tell, or its end.
            with contextlib.suppress(errors.BoardError):
                self._log = WorkerLog(self.name, self.client)
        if self._log is not None:
            self._log.add(program_id)

    def finish_log(self, program_id: str) -> None:
        """Show what is left of that."""
        if self._log is not None:
            self._log.finish(program_id)

    def _end_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def look_again(self, error: errors.BlobDamaged) -> None:
        """What was sent is not what it was: before the next use, ask what the board has."""
        self._say(f"{error.message}; sending it again")
        self._there.clear()

    def logs(self, program_id: str) -> list[str]:
        """What a program's worker wrote to stderr; nothing where the board cannot be asked any more."""
        try:
            return self.client.logs(program_id)
        except errors.BoardError:
            return []

    def ping(self, count: int = 4) -> None:
        """Look at the board's clock now, for :meth:`clock_fit`."""
        self._clock.add(self.client.pings(count))

    def clock_fit(self, since_ns: int | None = None) -> clock.ClockFit | None:
        """The board's clock beside the host's, until now; None where it has none that can be asked.

        Pings of the last second will do: the error allows for it. ``since_ns`` is the host time of the earliest stamp
        that is to be told in the host's time; None is now.
        """
        if "clock" in self.info.get("not_measured", ()):
            return None
        if self._clock.age_ns() > _PINGS_LAST_NS:
            self.ping()
        now = clock.now_ns()
        return self._clock.fit(now if since_ns is None else since_ns, now)

    def watch_counters(self, period_s: float = 0.1) -> CounterWatch:
        """Read the board's counters beside whatever runs meanwhile: a context manager, see :class:`CounterWatch`."""
        return CounterWatch(lambda: self.client.counters(period_s))

    def close(self) -> None:
        """Give the board back."""
        self.closed = True
        self._end_log()
        self.client.close()
        self._link.close()

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LoadedProgram:
    """A program on the board, ready to run. A context manager: it is unloaded at the end."""

    def __init__(
        self, board: Board, client: BoardClient, artifact: Artifact, loaded: Loaded, *, no_fallback: bool
    ) -> None:
        self._board = board
        self._client = client
        self._artifact = artifact
        self._no_fallback = no_fallback
        self._placement: Placement | None = None
        self.loaded = loaded
        self._ran = False

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
            names: output names to use in place of the program's own, where the compiler dropped them.

        Raises:
            UsageError: the program does not take these inputs.
            RanElsewhere: it ran on another device than it was told to.
            RunFailed, RunCrashed, StageTimeout, BoardLost, SessionEnded: as it ends.
        """
        inputs = self._whole(inputs)
        invocation = self._client.invoke(
            self.loaded.program_id,
            inputs,
            warmup=warmup,
            iterations=iterations,
            timeout=timeout,
            state=True,
            most_bytes=expected_bytes(self._artifact.outputs or self.loaded.outputs),
        )
        outputs = invocation.outputs
        repetition, unchecked = invocation.repetition, ""
        if repetition is None and warmup + iterations == 1:
            repetition = Repetition((Answer(1, 0, outputs),))
        elif repetition is None:
            why = "the agent is older than this hil" if invocation.command is None else "the board has no agent"
            unchecked = f"the answers of the iterations were not compared with each other: {why}"
        if len(names) == len(outputs):
            renamed = dict(zip(outputs, names, strict=True))
            outputs = dict(zip(names, outputs.values(), strict=True))
            repetition = repetition and repetition.renamed(renamed)
        # A command loads the program anew each time.
        cold = not warmup and (invocation.command is not None or not self._ran)
        self._ran = True
        self._placement = self._placement if invocation.placement is None else invocation.placement
        name, device = self._artifact.runtime, self.loaded.device
        version = self.loaded.version or self._board.runtime_version(name)
        provenance = self._provenance(invocation, version)
        provenance["notes"] += filter(None, [unchecked])
        how = "by command" if invocation.command is not None else ""
        source = f"{self._board.name}: {' '.join(filter(None, (name, version, device, how)))}"
        peak_bytes = invocation.peak_memory_bytes or None
        result = RunResult(
            source, outputs, invocation.iterations_ns, peak_bytes, provenance, cold, repetition=repetition
        )
        asked = RequestedDevice.of(name, self._artifact.flags, device)
        return self._placed(result, asked), invocation

    def _placed(self, result: RunResult, asked: RequestedDevice) -> RunResult:
        """The result with where the program ran in its provenance, and a note on what ran ``elsewhere``."""
        marked = None if self._placement is None else asked.mark(self._placement)
        parts = None if marked is None else [part.to_json() for part in marked]
        provenance = {**result.provenance, "placement": parts, "elsewhere": ""}
        try:
            provenance["elsewhere"] = asked.check(marked, no_fallback=self._no_fallback)
        except errors.RanElsewhere as error:
            # Its times are another device's.
            error.result = replace(result, provenance=provenance, iterations_ns=())
            raise
        return replace(result, provenance=provenance)

    def _provenance(self, invocation: Invocation, version: str) -> dict[str, Any]:
        """On what a call was measured: what every board tells, with its clock or its command where it has one."""
        board = self._board
        fit = board.clock_fit(invocation.host_ns[0])
        notes = [*board.note(invocation), *invocation.notes]
        info = board.info
        found: dict[str, Any] = {
            "board": board.name,
            "board_id": info.get("board_id", ""),
            "machine": info.get("machine", {}),
            "readings": info.get("readings", []),
            "simulated": info.get("simulated", []),
            "agent_version": info.get("agent_version", ""),
            "runtime": self._artifact.runtime,
            "runtime_version": version,
            "device": self.loaded.device,
            "notes": notes,
            "finished_at": time.time(),
        }
        if board.shell is not None:
            found["host_key"] = board.shell.fingerprint
        if fit is not None:
            found["clock"] = {"offset_ns": fit.offset_ns, "drift": fit.drift, "error_ns": fit.error_ns}
        if invocation.command is not None:
            found["command"] = invocation.command
        return found

    def profile(
        self, inputs: Mapping[str, Array], *, warmup: int = 0, iterations: int = 1, timeout: float = 60.0
    ) -> ProfilePass:
        """Run once more, under the runtime's profiler; its tool is sent first where the board lacks it.

        Raises:
            RunFailed: the runtime cannot profile, or its profiler failed; the program can be run on.
            LoadFailed, BoardError: there is no profiling tool for the board.
            RunCrashed, StageTimeout, BoardLost, SessionEnded: as of :meth:`run`.
            BlobDamaged: the tool was altered on the board, and so it was when it had been sent again.
        """
        inputs = self._whole(inputs)
        try:
            return self._profile(inputs, warmup, iterations, timeout)
        except errors.BlobDamaged as error:
            self._board.look_again(error)
            return self._profile(inputs, warmup, iterations, timeout)

    def _profile(self, inputs: Mapping[str, Array], warmup: int, iterations: int, timeout: float) -> ProfilePass:
        tool = self._board.push_profiler(self._artifact.runtime)
        if self._client is not self._board.client:
            # The upload cost the link, and with it the session that had this program.
            again = self._board.load(self._artifact, timeout=timeout)
            self._client, self.loaded = self._board.client, again.loaded
        return self._client.profile(
            self.loaded.program_id, inputs, tool=tool, warmup=warmup, iterations=iterations, timeout=timeout
        )

    def _whole(self, given: Mapping[str, Array]) -> Mapping[str, Array]:
        """The inputs with those that the program takes beyond its model's, unless they are given as well.

        Inputs that the program does not take are refused; where its model takes them, that is not the user's doing.
        """
        inputs = {**given, **{name: value for name, value in self._artifact.carried.items() if name not in given}}
        try:
            check_inputs(self.loaded.function, self.loaded.inputs, inputs)
        except errors.UsageError as error:
            known = self._artifact.inputs
            if known is None or not fits(known, inputs):
                raise
            what = f"the program takes other inputs on the board than its model does: {error.message}"
            raise errors.RunFailed(what, stage="run", board=self._board.name) from error
        return inputs

    def log(self) -> list[str]:
        """What the worker wrote to stderr."""
        return self._board.logs(self.loaded.program_id)

    def unload(self) -> None:
        """End the worker; a board that is gone has none."""
        self._board.finish_log(self.loaded.program_id)
        with contextlib.suppress(errors.BoardError):
            self._client.unload(self.loaded.program_id)

    def __enter__(self) -> LoadedProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.unload()
