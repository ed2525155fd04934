"""A board without an agent, with the surface of :class:`hil.controller.devices.board.Board`."""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import tenacity

from hil.controller.devices.agentless import machine, scripts
from hil.controller.devices.agentless.calls import DEVICE_TIME, NOT_MEASURED
from hil.controller.devices.agentless.program import CommandProgram
from hil.controller.devices.agentless.signature import signature_of
from hil.controller.devices.agentless.store import Item, Store, find_program
from hil.controller.devices.agentless.values import check_signature
from hil.controller.devices.board_resolver import BoardChoice, with_target
from hil.controller.devices.counters import CounterWatch
from hil.controller.devices.health.conditions import changed
from hil.controller.devices.iree_tool import PACKAGE, iree_tool
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.controller.storage.versions import version
from hil.core.artifacts import Artifact
from hil.core.digest import digest_file
from hil.core.scratch import temporary_folder
from hil.errors import BoardError, BoardLost, HilError, RunFailed, UsageError
from hil.formats.iree_command import PROFILE_TOOL, RUN_TOOL

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

Say = Callable[[str], None]
Reopen = Callable[[], "Shell"]
_PUSH_TRIES = 4
_CALL_S = 60.0
_FOLDER = re.compile(r"/[^\0]*")
_DEFAULT_DEVICES = {"iree": "local-task"}


class CommandBoard:
    """A board that runs programs by command. A context manager; it closes the shell it was given, also on failure.

    Args:
        choice: which board.
        shell: commands on it.
        runtime: the runtime that is going to be used; "" is the config's.
        wait_s: how long a run waits while another one holds the board.
        say: told what goes on.
        reopen: makes a new shell where the link broke during a push; None: such a break is final.
        why: why it has no agent, in a line.
        cache: where the command for the board's platform is kept; None is the user's.

    Attributes:
        name: how results and errors call it.
        closed: whether the connection was ended.
        config: its config; the target to compile for is filled in from what the board shows, where it named none.
        target: what to compile for, in words, where the board shows it; "" where the config names it.
        info: what the board showed of itself, in the words of an agent's Describe.
        command: how programs are run there.
        folder: hil's folder for this on the board, absolute.
        payload_bytes_sent: bytes of programs sent so far.
        why: why it has no agent.

    Raises:
        UsageError: the config names a runtime that has no command.
        BoardError: the board cannot be used.
    """

    def __init__(
        self,
        choice: BoardChoice,
        shell: Shell,
        *,
        runtime: str = "",
        wait_s: float = 60.0,
        say: Say = lambda text: None,
        reopen: Reopen | None = None,
        why: str = "its config asks for none",
        cache: Cache | None = None,
    ) -> None:
        self.name = choice.name
        self.closed = False
        self.shell = shell
        self.command = choice.config.command
        self.wait_s = wait_s
        self.payload_bytes_sent = 0
        self.why = why
        self._runtime = runtime or choice.config.runtime
        self._say = say
        self._reopen = reopen
        self._cache = cache or Cache()
        self._isolated = Isolated(1)
        self._where = choice.config.path.parent
        try:
            self._open(choice, runtime)
        except BaseException:
            self.close()
            raise
        *first, last = self.not_measured
        say(
            f"no agent on {self.name}: programs are run by the command {posixpath.basename(self.title)}; "
            f"{', '.join(first)} and {last} are not measured"
        )

    def _open(self, choice: BoardChoice, runtime: str) -> None:
        if not self.command.runs(self._runtime):
            raise UsageError(
                f"board {self.name} has no agent, and hil knows no command for the runtime {self._runtime!r}",
                hint="--runtime iree, or a [runtime] table with a program in the board's config",
            )
        with self.located(""):
            self.folder, self.info = self._look(choice.config.connection.folder)
        self.store = Store(self.folder, self.name)
        self.config, self.target = with_target(choice.config, runtime, self.info["machine"])

    @property
    def title(self) -> str:
        """The name of the command."""
        return self.command.program or Path(self.command.file).name or RUN_TOOL

    @property
    def not_measured(self) -> tuple[str, ...]:
        """What results from here lack: of a command that is not IREE's own, the device time too."""
        return NOT_MEASURED if self.command.is_ours else (DEVICE_TIME, *NOT_MEASURED)

    @property
    def version(self) -> str:
        """The runtime's version; "" where it is not known."""
        return version(PACKAGE) if self.command.is_ours else self.command.version

    def device(self, runtime: str) -> str:
        """The device that a runtime uses here."""
        return self.config.devices.get(runtime, _DEFAULT_DEVICES.get(runtime, ""))

    def _look(self, folder: str) -> tuple[str, dict[str, Any]]:
        done = self.shell.run(scripts.probe(folder), timeout=_CALL_S, check=False)
        parts = scripts.parts(done.out.decode(errors="replace"))
        said = {"board_id", "readings", "folder", "end"} <= parts.keys()
        if done.code or not said or not _FOLDER.fullmatch(parts["folder"]):
            raise BoardError(
                f"hil's folder {folder or '.hil'} cannot be made on the board, or is somebody else's"
                if done.code == scripts.NO_FOLDER
                else "the board's shell does not do what a POSIX shell does",
                hint="name another one in the board's config: [connection] folder"
                if done.code == scripts.NO_FOLDER
                else "a login shell and /bin/sh as on Linux are needed, busybox's will do",
                detail=done.err[-4000:],
            )
        shown = machine.machine(parts)
        info = {
            "board_id": parts["board_id"] or shown.get("hostname", ""),
            "name": shown.get("hostname", ""),
            "machine": shown,
            "readings": machine.readings(parts["readings"]),
            "runtimes": [{"name": self._runtime, "version": self.version, "command": self.title}],
            "not_measured": list(self.not_measured),
        }
        return parts["folder"], info

    def look(self) -> list[str]:
        """Read anew in :attr:`info` what may change; what happened to the board since (see :func:`changed`)."""
        done = self.shell.run(scripts.look(), timeout=_CALL_S, check=False)
        parts = scripts.parts(done.out.decode(errors="replace"))
        before = self.info
        shown = {**before["machine"], "boot_id": parts.get("boot_id", "")}
        self.info = {**before, "machine": shown, "readings": machine.readings(parts.get("readings", ""))}
        return changed(before, self.info)

    def take(self) -> None:
        """Nothing: each run by itself waits until the board is free."""

    def push(self, artifact: Artifact, progress: Callable[[int, int], None] = lambda sent, total: None) -> int:
        """Send the files that the board lacks, the command's program among them; returns the bytes sent.

        Pushing is idempotent, so after a break it is done again over a new link, file by file.

        Raises:
            LoadFailed: the board has no room, or there is no program for it.
            BoardLost: the link broke again and again.
        """
        items = [Item(path, artifact.digests[name]) for name, path in artifact.files.items()]
        items += [tool for tool in (self._tool(), self._timer()) if tool]
        return self._send(items, progress)

    def push_profiler(self, runtime: str) -> str:
        """Send the tool that profiles programs, where the board lacks it; returns where it lies there.

        Raises:
            RunFailed: the board runs programs by a command of its own, which cannot profile.
            LoadFailed: the board has no room, or there is no such tool for it.
            BoardLost: the link broke again and again.
        """
        if not self.command.is_ours or runtime != "iree":
            raise RunFailed(
                f"this board's own command {posixpath.basename(self.title)} cannot profile",
                board=self.name,
                hint="only the tool that hil puts on a board can: leave program and file out of [runtime]",
            )
        item = self._timer()
        assert item is not None
        self._send([item], lambda sent, total: None)
        return self.store.place(item)

    def timer(self) -> str:
        """Where the tool that times programs lies on the board, once one was pushed; "" where there is none."""
        item = self._timer()
        return self.store.place(item) if item else ""

    def watch_counters(self, period_s: float = 0.1) -> CounterWatch:
        """Nothing is told: that takes an agent."""
        return CounterWatch(None)

    def _send(self, items: Sequence[Item], progress: Callable[[int, int], None]) -> int:
        sent = 0

        def once() -> None:
            nonlocal sent
            sent += self.store.push(self.shell, items, progress)

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(BoardLost),
            stop=tenacity.stop_after_attempt(_PUSH_TRIES if self._reopen else 1),
            wait=tenacity.wait_exponential(0.1, max=2),
            before_sleep=lambda state: self._mend(state.outcome),
            reraise=True,
        )
        with self.located("push"):
            retrying(once)
        self.payload_bytes_sent += sent
        return sent

    def _mend(self, outcome: Any) -> None:
        self._say(f"the link broke during the upload ({outcome.exception().message}); connecting again")
        assert self._reopen is not None
        with contextlib.suppress(BoardError):
            self.shell.close()
        self.shell = self._reopen()
        self.store.forget()

    @functools.cached_property
    def _tool_path(self) -> Path | None:
        """The command's program on the host, where hil puts it on the board."""
        if self.command.program:
            return None
        if self.command.file:
            path = self._where / os.path.expanduser(self.command.file)  # noqa: PTH111 (it takes unknown users as they are)
            if not path.is_file():
                raise UsageError(f"the program {path} of the board's [runtime] is no file")
            return path
        return self._iree(RUN_TOOL)

    def _iree(self, tool: str) -> Path:
        shown = self.info["machine"]
        return iree_tool(tool, shown.get("arch", ""), shown.get("libc", ""), cache=self._cache, board=self.name)

    def _tool(self) -> Item | None:
        path = self._tool_path
        return Item(path, digest_file(path), executable=True) if path else None

    def _timer(self) -> Item | None:
        """The tool that times and profiles programs: IREE's, so only beside IREE's own command."""
        path = self._timer_path
        return Item(path, digest_file(path), executable=True) if path else None

    @functools.cached_property
    def _timer_path(self) -> Path | None:
        return self._iree(PROFILE_TOOL) if self.command.is_ours else None

    def load(self, artifact: Artifact, *, timeout: float = 60.0, no_fallback: bool = False) -> CommandProgram:
        """Take a pushed program: its signature is read here; that the board can load it shows when it is run.

        Args:
            artifact: the program.
            timeout: nothing takes time here.
            no_fallback: whether a node that runs on another device than it was told to fails a run.

        Raises:
            LoadFailed: it is damaged, or takes or gives what a command cannot pass.
        """
        with self.located("load"), temporary_folder("hil-command-") as place:
            signature = signature_of(artifact, self._isolated, Path(place) / "read.log", needs_own=self.command.is_ours)
            check_signature(signature, self.command)
            places = {
                name: self.store.place(Item(path, artifact.digests[name])) for name, path in artifact.files.items()
            }
            tool = self._tool()
            program = self.store.place(tool) if tool else self.find()
            return CommandProgram(self, artifact, signature, places, program, no_fallback=no_fallback)

    def find(self) -> str:
        """Where the program that the config names lies on the board; "" where hil puts one there.

        Raises:
            LoadFailed: it is not there.
        """
        return find_program(self.shell, self.command.program) if self.command.program else ""

    def close(self) -> None:
        """End the connection."""
        self.closed = True
        self._isolated.close()
        with contextlib.suppress(BoardError):
            self.shell.close()

    @contextlib.contextmanager
    def located(self, stage: str) -> Iterator[None]:
        """Errors raised in here are of this board and, where they do not say otherwise, of that stage."""
        try:
            yield
        except HilError as error:
            raise error.located(stage=stage, board=self.name) from error.__cause__

    def __enter__(self) -> CommandBoard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
