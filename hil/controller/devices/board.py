"""A connected board with a session and loaded programs."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hil import errors
from hil.controller.devices.agent_client.measurement import BoardClock, CounterWatch
from hil.controller.devices.board_choice import BoardChoice, fill_target
from hil.controller.devices.board_client import BoardClient, Invocation, ProgramHandle
from hil.controller.devices.health import list_changes
from hil.controller.devices.links.link import Link
from hil.controller.devices.loaded_program import LoadedProgram
from hil.controller.devices.measuring.board_stack import StackReader
from hil.controller.devices.measuring.measure_commands import prepare_board
from hil.controller.devices.power_control.provisioned_image import parse_image, read_image
from hil.controller.devices.worker_log import WorkerLog
from hil.controller.storage.cache import Cache
from hil.controller.storage.screen import live
from hil.core import clock
from hil.core.digest import get_algorithm
from hil.core.files import digest_file
from hil.core.results import Artifact
from hil.formats.iree_command import PROFILE_TOOL

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

_PUSH_TRIES = 4
_PUSH_PAUSE_SECONDS = 0.1
_MAX_CHANGES = 1000
_PINGS_LAST_NS = 1_000_000_000


def make_client(link: Link, board: str) -> BoardClient:
    """Return a new client for a board over a link. ``board`` is the name for errors."""
    if link.connect is not None:
        return link.connect(board)
    from hil.controller.devices.agent_client.client import AgentClient

    return AgentClient(link.target, board, over=link.over)


class Board:
    """Connected board. The board owns its link and closes it.

    From :meth:`take` on, the device is reserved for this process.

    Use the board as a context manager.

    Attributes:
        config: The board's config. Without a compile target in the config, hil fills in the target from the board's
            description.
        target: Description of the compile target, if detected from the board; "" if the config names the target.
        info: The client's description of the board, with the keys of Describe.
        client: Client for the board's calls. Reconnecting replaces the client.
        changes: The latest changes of the board since the queue was last cleared, as from :func:`list_changes`.

    Raises:
        UsageError: The address or the config is invalid, or the runtime needs an agent.
        BoardUnreachable: The board does not respond.
        BoardError: The board refuses the connection or cannot be used.
    """

    def __init__(self, choice: BoardChoice, link: Link) -> None:
        self.closed = False
        self.changes: deque[str] = deque(maxlen=_MAX_CHANGES)
        self._purpose = choice.purpose
        self._wait_s = choice.wait_s
        self._say = choice.say
        self._timeout_s = choice.timeout_s
        self.target = ""
        self._ours = False
        self._clock = BoardClock()
        self._there: set[str] = set()
        self._profiler: tuple[Path, str] | None = None
        self._log: WorkerLog | None = None
        self._preparation = contextlib.ExitStack()
        self._is_prepared = False
        self._unprepared: errors.HilError | None = None
        self._link = link
        self.name = self._link.config.name if self._link.config else choice.name
        self.config = self._link.config or choice.config
        # Never use the link's config here: a provider's config must not run commands on this machine.
        self.measure = choice.config.measure
        self.meter = choice.config.meter
        # The board's agent reads this meter, so it is safe.
        if self._link.config is not None and self._link.config.has_board_meter:
            self.meter = self._link.config.meter
        self.config_path = choice.config.path
        self._stack_values = choice.config.stack
        self.client = make_client(self._link, self.name)
        try:
            self.info: dict[str, Any] = self._describe()
            self.add_target(choice.runtime)
        except errors.BoardUnreachable as error:
            if self.shell is not None:
                error.hint = "the agent's process runs but does not respond: `hil board clean --force` stops it"
                error.detail = error.detail or self._link.log()
            self.close()
            raise
        except BaseException:
            self.close()
            raise
        if notice := self.client.notice():
            self._say(notice)

    def _describe(self) -> dict[str, Any]:
        found = self.client.info()
        lease, lent_image = self.config.connection.lease, parse_image(self.config.connection.image)
        own_image = read_image(self.name, self.config_path, str(found.get("board_id", "")))
        image = lent_image or own_image
        is_simulator = self.config.simulator is not None
        stack = StackReader(
            self.name, self._stack_values, self.config.stack, self.shell, is_simulator=is_simulator
        ).read(found)
        more: dict[str, Any] = {"lease": lease, "image": image.to_json() if image else None}
        more["stack"] = [one.to_json() for one in stack]
        return {**found, **{name: value for name, value in more.items() if value}}

    def add_target(self, runtime: str) -> None:
        """Fill in the compile target of a runtime from the board's description, unless the config has the target.

        Args:
            runtime: "" means the config's runtime.

        Raises:
            BoardRefused: there is no target for this board.
        """
        try:
            self.config, target = fill_target(self.config, runtime, self.info, self._timeout_s)
        except errors.UsageError as error:  # the board's description is wrong, not the user's input
            raise errors.BoardRefused(error.message, board=self.name, hint=error.hint) from error
        self.target = ", ".join(filter(None, (self.target, target)))

    def runtime_version(self, runtime: str) -> str:
        """Return the version of one of the board's runtimes, or "" if unknown."""
        versions = {one["name"]: one.get("version", "") for one in self.info.get("runtimes", ())}
        return str(versions.get(runtime, ""))

    def note(self, seen: Invocation) -> list[str]:
        """Update :attr:`info` with the board state after a run. Return the changes, as from :func:`list_changes`."""
        return self._update(seen.state)

    def refresh(self) -> None:
        """Read the board's state now, so that earlier changes are not attributed to the next run."""
        self._update(self.client.state())

    def _update(self, state: Mapping[str, Any]) -> list[str]:
        before, self.info = self.info, {**self.info, **state}
        found = list_changes(before, self.info)
        self.changes += found
        return found

    @property
    def shell(self) -> Shell | None:
        """Shell on the board, or None if the board is not reached over SSH."""
        return self._link.shell

    def take(self) -> None:
        """Reserve the device, unless this process has already reserved it. Wait while another session uses the device.

        After connecting, the agent may exit because it is idle or because an agent of a different version replaces it.
        In that case, renew the link and the agent once. Programs have not run at this point.

        Raises:
            BoardBusy: The device was not free in time.
            BoardLost: The board stopped responding.
        """
        if self._ours:
            return
        for renewed in (False, True):
            try:
                fence = self.config.connection.fence
                self.client.open_session(self._purpose, fence=fence, wait_s=self._wait_s, on_wait=self._say)
                if not self._link.build or self.client.info().get("build") == self._link.build:
                    break
                gone: errors.BoardError = errors.BoardBusy(
                    "an agent of a different version replaced this agent", board=self.name
                )
            except (errors.BoardLost, errors.BoardUnreachable, errors.SessionEnded) as error:
                gone = error
            if renewed or self._link.renew is None:
                raise gone
            self._open_new_link()
        self._ours = True
        self.ping(8)

    def _open_new_link(self) -> None:
        """Open a new link and client. Drop the session and the cached state of the old link and client."""
        sent = self.client.payload_bytes_sent
        self._there.clear()
        self.client.close()
        if self._link.renew:
            self._link.renew()
        self.client = make_client(self._link, self.name)
        self.client.payload_bytes_sent = sent
        # Read the board's state again. Earlier changes do not matter, because programs have not run yet.
        self.info = self._describe()
        self._ours = False
        self._clock = BoardClock()

    @property
    def payload_bytes_sent(self) -> int:
        """Blob bytes sent so far, over all connections."""
        return self.client.payload_bytes_sent

    def push(self, artifact: Artifact, progress: Callable[[int, int], None] = lambda sent, total: None) -> int:
        """Send missing program files and tools to the board. Return the bytes sent. Reserves the device.

        Raises:
            LoadFailed: The board is out of space, or the required tool does not exist for the board.
            BoardLost: The link broke in each of several attempts.
        """
        files = {artifact.digests[name]: path for name, path in artifact.files.items()}
        return self._send({**files, **self.client.tools()}, progress)

    def push_profiler(self, runtime: str) -> str:
        """Send the profiling tool if the board's runtime needs it. Return the digest, or "" if the tool is not needed.

        If the link breaks and is renewed, the session and all loaded programs are lost.

        Raises:
            LoadFailed, BoardError: The tool does not exist for the board, or sending it failed.
        """
        shown: dict[str, Any] = next((one for one in self.info.get("runtimes", ()) if one["name"] == runtime), {})
        if shown.get("profile_tool") != PROFILE_TOOL:
            return ""  # hil does not provide other tools; the profile pass reports them as missing
        if self._profiler is None:
            from hil.controller.devices.deploy.wheels import fetch_iree_tool

            arch, libc = (self.info["machine"].get(name, "") for name in ("arch", "libc"))
            version = shown.get("version", "")
            path = fetch_iree_tool(PROFILE_TOOL, arch, libc, version=version, cache=Cache(), board=self.name)
            self._profiler = path, digest_file(path)
        path, digest = self._profiler
        self._send({digest: path}, lambda sent, total: None)
        return digest

    def _send(self, paths: Mapping[str, Path], progress: Callable[[int, int], None]) -> int:
        """Send blobs (digest -> file) and return the bytes sent. After a broken link, reconnect and resume the upload.

        hil remembers the blobs on the board and does not query them again before the next upload. This is safe: only
        uploads make the board evict blobs, and other sessions cannot upload while the device is reserved.
        """
        self.take()
        before = self.payload_bytes_sent
        if self._there.issuperset(paths):
            return 0

        def send_once() -> None:
            missing = self.client.missing(paths)
            total = sum(paths[name].stat().st_size - have for name, have in missing.items())
            if missing:
                self._there.clear()
                blobs = {name: (paths[name], have) for name, have in missing.items()}
                begin = self.payload_bytes_sent
                self.client.put(blobs, lambda size: progress(self.payload_bytes_sent - begin, total))
            self._there.update(paths)

        def send_with_retry() -> None:
            try:
                send_once()
            except errors.BlobDamaged as error:
                for name, path in paths.items():
                    if digest_file(path, get_algorithm(name)) != name:
                        raise errors.UsageError(
                            f"{path} changed after hil read it",
                            hint="rerun, and do not change the file during the run",
                        ) from error
                self.forget_blobs(error)
                send_once()

        broken = (errors.BoardLost, errors.SessionEnded)
        try:
            send_with_retry()
        except broken as error:
            import tenacity  # importing takes 3 ms, and links rarely break

            self._reconnect(error)
            time.sleep(_PUSH_PAUSE_SECONDS)
            retrying = tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(broken),
                stop=tenacity.stop_after_attempt(_PUSH_TRIES - 1),
                wait=tenacity.wait_exponential(2 * _PUSH_PAUSE_SECONDS, max=2),
                before_sleep=lambda state: self._reconnect(cast(tenacity.Future, state.outcome).exception()),
                reraise=True,
            )
            retrying(send_with_retry)
        return self.payload_bytes_sent - before

    def _reconnect(self, error: Any) -> None:
        """Open a new connection and session after a broken upload.

        Programs have not run yet, so results are not lost.
        """
        self._say(f"connection lost during the upload ({error.message}); reconnecting")
        try:
            self._open_new_link()
            self.take()
        except errors.BoardUnreachable as gone:
            raise errors.BoardLost(
                "the board stopped responding during the upload", stage="push", board=self.name, detail=self._link.log()
            ) from gone

    def load(
        self, artifact: Artifact, *, timeout: float = 60.0, no_fallback: bool = False, instructions: bool = False
    ) -> LoadedProgram:
        """Load a pushed program in a separate worker. If a file was altered on the board, send it once more.

        Args:
            instructions: Count the instructions of all iterations, if the board can.

        Raises:
            LoadFailed, RunCrashed, StageTimeout: Loading failed.
            NotRun: The board lacks a part that the program was compiled for.
            BlobDamaged: A file was altered on the board twice.
        """
        device = self.config.devices.get(artifact.runtime, "")
        counting = {"instructions": True} if instructions and self.client.counts_instructions else {}

        def load() -> ProgramHandle:
            try:
                return self.client.load_program(artifact, device=device, timeout=timeout, **counting)
            except errors.PartMissing as error:
                if error.code is errors.ErrorCode.BACKEND_MISSING and artifact.notes.get("needs"):
                    raise errors.NotRun(
                        f"the program was compiled, but not run: {error.message}",
                        stage=error.stage,
                        hint="select a board with this backend: --board",
                    ) from error
                raise

        try:
            loaded = load()
        except errors.BlobDamaged as error:
            self.forget_blobs(error)
            self.push(artifact)
            loaded = load()
        self.show_log(loaded.program_id)
        return LoadedProgram(self, self.client, artifact, loaded, no_fallback=no_fallback, instructions=instructions)

    def show_log(self, program_id: str) -> None:
        """Show the stderr of a program's worker live, if live output is enabled."""
        if not live.is_shown():
            return
        if self._log is None or self._log.client is not self.client:
            self._end_log()
            # The live log is optional. The calls of the program report the same errors.
            with contextlib.suppress(errors.BoardError):
                self._log = WorkerLog(self.name, self.client)
        if self._log is not None:
            self._log.add(program_id)

    def finish_log(self, program_id: str) -> None:
        """Show the remaining stderr lines of a program."""
        if self._log is not None:
            self._log.finish(program_id)

    def _end_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def forget_blobs(self, error: errors.BlobDamaged) -> None:
        """Forget the known blobs after damage, so that the next upload queries the board."""
        self._say(f"{error.message}; uploading a new copy")
        self._there.clear()

    def logs(self, program_id: str) -> list[str]:
        """Return the stderr lines of a program's worker, or an empty list if the board does not respond."""
        try:
            return self.client.logs(program_id)
        except errors.BoardError:
            return []

    def ping(self, count: int = 4) -> None:
        """Ping the board's clock now, for :meth:`clock_fit`."""
        self._clock.add(self.client.pings(count))

    def clock_fit(self, since_ns: int | None = None) -> clock.ClockFit | None:
        """Return the fit of the board's clock to the host's clock, or None if the board's clock is not available.

        Pings of the last second are reused; the fit's error accounts for their age. ``since_ns`` is the earliest host
        time to convert; None means now.
        """
        if "clock" in self.info.get("not_measured", ()) or not self.config.has_time:
            return None
        if self._clock.get_age_ns() > _PINGS_LAST_NS:
            self.ping()
        now = clock.get_time_ns()
        return self._clock.fit(now if since_ns is None else since_ns, now)

    def get_clock_fit(self) -> clock.ClockFit | None:
        """Return the fit of the clock from the pings so far, without a call to the board; None without pings."""
        if "clock" in self.info.get("not_measured", ()) or not self.config.has_time:
            return None
        now = clock.get_time_ns()
        return self._clock.fit(now, now) if self._clock.get_age_ns() < float("inf") else None

    def watch_counters(self, period_s: float = 0.1) -> CounterWatch:
        """Return a context manager that reads the board's counters during the block; see :class:`CounterWatch`."""
        return CounterWatch(lambda: self.client.counters(period_s))

    def prepare(self) -> None:
        """Run the commands of ``[measure] before`` in the board's config, unless they already ran.

        If a command failed, later calls raise the same error and run no command. :meth:`close` runs the commands of
        ``[measure] after``. Raises the errors of :func:`prepare_board`.
        """
        if self._unprepared is not None:
            raise self._unprepared.as_kind(type(self._unprepared)) from self._unprepared
        if not self._is_prepared:
            try:
                self._preparation.enter_context(prepare_board(self, self._say, self._wait_s))
            except errors.HilError as error:
                self._unprepared = error
                raise
            self._is_prepared = True

    def close(self) -> None:
        """Restore the board after :meth:`prepare`, release the device and close the connection."""
        self.closed = True
        try:
            self._preparation.close()
        finally:
            self._end_log()
            self.client.close()
            self._link.close()

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
