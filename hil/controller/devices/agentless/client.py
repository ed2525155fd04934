"""The calls of a board without an agent: each is made of shell commands on it.

The board needs a POSIX shell, SFTP or ``cat``, and the runtime's command; ``iree-run-module`` is put there where the
config names no other. What such a board cannot measure is absent from its answers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import posixpath
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil import errors
from hil.controller.devices.agentless import scripts, signature
from hil.controller.devices.agentless.scripts import DETAIL, Item, RunFolder, Store
from hil.controller.devices.answers import broken, expected_bytes, most_bytes
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import BoardClient, Invocation, Loaded, ProfilePass
from hil.controller.devices.deploy.wheels import PACKAGE, iree_tool
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.core.board_config import RuntimeCommand, fill
from hil.core.clock import now_ns
from hil.core.digest import digest_file
from hil.core.installed import version
from hil.core.results import Artifact, Part
from hil.core.scratch import temporary_folder
from hil.core.tensors import Array
from hil.core.timeline import Span
from hil.formats import iree_command
from hil.formats.iree_command import PROFILE_FILE, PROFILE_TOOL, TIMES_FILE

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

# What a run by command cannot tell, and what it tells only where IREE's timing tool can be put beside it.
NOT_MEASURED = ("peak memory", "clock")
DEVICE_TIME = "device time"
_DEFAULT_DEVICES = {"iree": "local-task"}


@dataclass
class _Program:
    """A program on the board, its files and the command's as they lie there. A command loads it anew each time."""

    program_id: str
    artifact: Artifact
    signature: signature.Signature
    files: Mapping[str, str]
    command: str
    device: str

    @property
    def weights(self) -> list[str]:
        """Where its files of parameters lie on the board."""
        main = self.artifact.main
        return [place for name, place in sorted(self.files.items()) if name != main and name.endswith(".irpa")]


class CommandClient(BoardClient):
    """Carry out the calls of a board over a shell, which stays open.

    Attributes:
        store: hil's folder on the board; it is made by :meth:`info`.
    """

    def __init__(self, shell: Shell, choice: BoardChoice, *, board: str) -> None:
        self.payload_bytes_sent = 0
        self.store = Store(shell)
        self._config = choice.config
        self._command = command = choice.config.command
        # Its name; its version where it is known; what answers lack, of one that is not IREE's own the device time too.
        self._title = command.program or Path(command.file).name or iree_command.RUN_TOOL
        self._version = version(PACKAGE) if command.is_ours else command.version
        self._not_measured = NOT_MEASURED if command.is_ours else (DEVICE_TIME, *NOT_MEASURED)
        self._board = board
        self._runtime = choice.runtime or choice.config.runtime
        self._why = choice.without_agent or "its config asks for none"
        self._wait_s = choice.wait_s
        self._cache = Cache()
        self._isolated = Isolated(1)
        self._programs: dict[str, _Program] = {}
        self._logs: dict[str, list[str]] = {}
        self._numbers = itertools.count(1)
        self._machine: dict[str, Any] = {}

    def close(self) -> None:
        """End the process that reads programs."""
        self._isolated.close()

    # ---- the board

    def info(self) -> dict[str, Any]:
        """Make hil's folder on the board and read what it shows of itself, with the keys of an agent's Describe.

        Raises UsageError where the runtime has no command.
        """
        if not self._command.runs(self._runtime):
            raise errors.UsageError(
                f"board {self._board} has no agent, and hil knows no command for the runtime {self._runtime!r}",
                hint="--runtime iree, or a [runtime] table with a program in the board's config",
            )
        with errors.locating(board=self._board):
            parts = self.store.open(self._config.connection.folder)
        self._machine = scripts.machine(parts)
        shown: dict[str, Any] = {"name": self._runtime, "version": self._version, "command": self._title}
        if self._command.is_ours:
            shown["profile_tool"] = PROFILE_TOOL
        return {
            "board_id": parts["board_id"] or self._machine.get("hostname", ""),
            "name": self._machine.get("hostname", ""),
            "machine": self._machine,
            "readings": scripts.readings(parts["readings"]),
            "runtimes": [shown],
            "not_measured": list(self._not_measured),
        }

    def _state(self) -> dict[str, Any]:
        """What may have changed since :meth:`info`."""
        parts = self.store.look()
        self._machine = {**self._machine, "boot_id": parts.get("boot_id", "")}
        return {"machine": self._machine, "readings": scripts.readings(parts.get("readings", ""))}

    # ---- files

    def tools(self) -> dict[str, Path]:
        """The command's program and, beside IREE's own, the tool that times programs."""
        return dict(self._tools)

    def missing(self, files: Mapping[str, Path], /) -> dict[str, int]:
        """Those of the files that the board lacks, each with 0 bytes already there."""
        with errors.locating(stage="push", board=self._board):
            return {item.digest: 0 for item in self.store.missing(self._items(files))}

    def put(self, blobs: Mapping[str, tuple[Path, int]], progress: Callable[[int], None] | None = None) -> None:
        """Send files, digest -> (file, 0), whole and verified."""

        def count(size: int) -> None:
            self.payload_bytes_sent += size
            if progress:
                progress(size)

        with errors.locating(stage="push", board=self._board):
            self.store.put(self._items({name: path for name, (path, _) in blobs.items()}), count)

    def _items(self, files: Mapping[str, Path]) -> list[Item]:
        return [Item(path, name, executable=name in self._tools) for name, path in files.items()]

    def _place(self, tool: Path) -> str:
        """Where a tool lies on the board."""
        return next(self.store.place(item) for item in self._items(self._tools) if item.path == tool)

    @functools.cached_property
    def _tools(self) -> dict[str, Path]:
        return {digest_file(path): path for path in (self._program_path, self._timer_path) if path}

    @functools.cached_property
    def _program_path(self) -> Path | None:
        """The command's program on the host, where hil puts it on the board."""
        if self._command.program:
            return None
        if self._command.file:
            file = os.path.expanduser(self._command.file)  # noqa: PTH111 (it takes unknown users as they are)
            path = self._config.path.parent / file
            if not path.is_file():
                raise errors.UsageError(f"the program {path} of the board's [runtime] is no file")
            return path
        return self._iree(iree_command.RUN_TOOL)

    @functools.cached_property
    def _timer_path(self) -> Path | None:
        """The tool that times and profiles programs: IREE's, so only beside IREE's own command."""
        return self._iree(PROFILE_TOOL) if self._command.is_ours else None

    def _iree(self, tool: str) -> Path:
        machine = self._machine
        return iree_tool(tool, machine.get("arch", ""), machine.get("libc", ""), cache=self._cache, board=self._board)

    # ---- programs

    def load_program(self, artifact: Artifact, *, device: str, timeout: float) -> Loaded:
        """Take a pushed program: its signature is read here; that the board can load it shows when it is run."""
        with errors.locating(stage="load", board=self._board), temporary_folder("hil-command-") as place:
            log = Path(place) / "read.log"
            taken = signature.signature_of(artifact, self._isolated, log, needs_own=self._command.is_ours)
            signature.check_signature(taken, self._command)
            paths = {artifact.digests[name]: path for name, path in artifact.files.items()}
            places = {item.digest: self.store.place(item) for item in self._items(paths)}
            files = {name: places[artifact.digests[name]] for name in artifact.files}
            command = self._place(self._program_path) if self._program_path else self.find()
        device = device or _DEFAULT_DEVICES.get(artifact.runtime, "")
        program_id = str(next(self._numbers))
        self._programs[program_id] = _Program(program_id, artifact, taken, files, command, device)
        return Loaded(program_id, taken.function, taken.inputs, taken.outputs, device=device, version=self._version)

    def find(self) -> str:
        """Where the program that the config names lies on the board (LoadFailed); "" where hil puts one there."""
        return self.store.find(self._command.program) if self._command.program else ""

    def unload(self, program_id: str) -> None:
        """Forget a program: a command leaves nothing behind."""
        self._programs.pop(program_id, None)

    def logs(self, program_id: str = "") -> list[str]:
        """What a program's commands wrote to stderr, also after it was unloaded."""
        return list(self._logs.get(program_id, ()))

    def invoke(
        self,
        program_id: str,
        inputs: Mapping[str, Array],
        *,
        warmup: int,
        iterations: int,
        timeout: float,
        state: bool,
        most_bytes: int | None,
    ) -> Invocation:
        """Run on the board, and time it there. No command is ever tried again.

        The outputs are of a command of its own; IREE's timing tool, where the board has it, then makes the warm-ups
        and iterations. Without that tool each of them is a command, and how long it took on the device is not known.
        ``timeout`` is in whole seconds on the board. Each output is bounded by its own shape, not by ``most_bytes``.
        """
        program, command = self._programs[program_id], self._command
        files = signature.output_files(program.signature, command)
        begin = now_ns()
        with self._run_folder(program, inputs, command) as (run, arguments):
            outputs_at = [fill(command.output, {"file": f"{run.remote}/{file}"}) for file in files]
            argv = self._argv(program, program.command, run, arguments, outputs_at)
            left = timeout
            walls: list[float] = []
            sizes: tuple[int | None, ...] = ()
            timer = self._place(self._timer_path) if self._timer_path else ""
            for _ in range(1 if timer else warmup + iterations):
                wall, sizes = self._once(program, argv, files, run, timeout, left)
                walls.append(wall)
                left -= wall
            start = time.monotonic()
            outputs = self._fetch(program, run, files, sizes)
            fetch_s = time.monotonic() - start
            times: list[int] = []
            notes: list[str] = []
            if timer:
                flags = iree_command.timing_flags(warmup + iterations, TIMES_FILE)
                times, problem = self._times(
                    program, [*self._argv(program, timer, run, arguments, []), *flags], run, timeout, left
                )
                notes += [f"the device time could not be measured: {problem}"] if problem else []
            cold_ns = sum(times[:warmup]) if timer else round(sum(walls.pop(0) for _ in range(warmup)) * 1e9)
            seen = self._state() if state else {}
        takes_device = any("{device}" in flag for flag in command.flags)
        if program.device and not takes_device:
            notes.append(f"the command is not told of the device {program.device}: [runtime] flags has no {{device}}")
        # The tool tells how long each took, not when.
        ends = list(accumulate(times[warmup:]))
        lacking = self._not_measured
        return Invocation(
            outputs,
            iterations_ns=tuple(zip([0, *ends], ends, strict=False)),
            warmup_ns=cold_ns,
            host_ns=(begin, now_ns()),
            fetch_s=fetch_s,
            state=seen,
            # IREE's own tool opens the device that it is told to, or fails; of another command nothing is known.
            placement=(Part(program.device.split("://")[0]),) if takes_device and command.is_ours else None,
            notes=tuple(notes),
            command={
                "line": shlex.join(argv),
                "wall_s": walls,
                "why": self._why,
                "not_measured": [*([] if ends or DEVICE_TIME in lacking else [DEVICE_TIME]), *lacking],
            },
        )

    def profile(
        self, program_id: str, inputs: Mapping[str, Array], *, tool: str, warmup: int, iterations: int, timeout: float
    ) -> ProfilePass:
        """Run once more under IREE's profiling tool, which tells the times of its own clock."""
        if not tool:
            raise errors.RunFailed(
                f"this board's own command {posixpath.basename(self._title)} cannot profile",
                board=self._board,
                hint="only the tool that hil puts on a board can: leave program and file out of [runtime]",
            )
        program = self._programs[program_id]
        with self._run_folder(program, inputs, RuntimeCommand(input="{value}")) as (run, arguments):
            argv = iree_command.profile_command(
                self._place(self._tools[tool]),
                program.files[program.artifact.main],
                device=program.device,
                function=program.signature.function,
                inputs=arguments,
                weights=program.weights,
                runs=warmup + iterations,
                output=PROFILE_FILE,
            )
            start = now_ns()
            _, (size,) = self._once(program, argv, [PROFILE_FILE], run, timeout, timeout)
            if not size:
                raise errors.RunFailed("the profiling command ended well but wrote nothing")
            if size > (most := most_bytes()):
                raise broken(f"a profile of {size >> 20} MiB, where at most {most >> 20} can be")
            data = run.get(PROFILE_FILE, size).read_bytes()
            host = Span("profile", start, now_ns())
        return ProfilePass({PROFILE_FILE: memoryview(data)}, (), host, None, warmup, iterations)

    # ---- commands

    @contextlib.contextmanager
    def _run_folder(
        self, program: _Program, inputs: Mapping[str, Array], command: RuntimeCommand
    ) -> Iterator[tuple[RunFolder, list[str]]]:
        """A run's folder that has the inputs, and their arguments; it is gone at the end."""
        signature.check_inputs(program.signature.function, program.signature.inputs, inputs)
        with errors.locating(stage="run", board=self._board), self.store.run_folder() as run:
            try:
                arguments, files = signature.write_inputs(program.signature, inputs, command, run.local, run.remote)
            except OSError as error:
                text = f"cannot write the inputs to {run.local}: {error.strerror or error}"
                raise errors.StorageError(text, hint="make room there, or set TMPDIR to another folder") from error
            run.send(files)
            yield run, arguments

    def _argv(
        self, program: _Program, command: str, run: RunFolder, inputs: list[str], outputs: list[str]
    ) -> list[str]:
        """The command line of a run, as the config's flags make it."""
        parameter = self._command.parameter
        weights = [fill(parameter, {"scope": iree_command.PARAMETER_SCOPE, "file": place}) for place in program.weights]
        several = {"{inputs}": inputs, "{outputs}": outputs, "{parameters}": weights}
        values = {
            "device": program.device,
            "module": program.files[program.artifact.main],
            "function": program.signature.function,
            "folder": run.remote,
        }
        argv = [command]
        for flag in self._command.flags:
            argv += several[flag] if flag in several else [fill(flag, values)]
        return argv

    def _once(
        self, program: _Program, argv: list[str], files: list[str], run: RunFolder, timeout: float, left: float
    ) -> tuple[float, tuple[int | None, ...]]:
        """One command: its wall time, without that of waiting for another run, and the size of each file it writes."""
        late = errors.StageTimeout(
            f"run took longer than its limit of {timeout:g} s and was ended",
            hint="raise the limit with --timeout, or see whether the program hangs",
        )
        if left <= 0:
            raise late
        limit_s, wait_s = math.ceil(left), math.ceil(self._wait_s)
        ended, err, wall = run.command(
            argv, files, limit_s=limit_s, wait_s=wait_s, environment=self._command.environment
        )
        if ended.how == "busy":
            what = f"another run held the board for more than {wait_s} s"
            raise errors.BoardBusy(what, hint="wait for it to end, or raise --wait")
        is_answer = argv[0] == program.command
        if is_answer:
            self._logs.setdefault(program.program_id, []).extend(err.splitlines())
        if ended.how == "late":
            late.detail = err[-DETAIL:]
            raise late
        if ended.code:
            # A profile is taken of what has been run: the tool does not say how far it came.
            raise scripts.failure(ended, err, self._title if is_answer else PROFILE_TOOL, loads=not is_answer)
        if len(ended.sizes) != len(files):
            raise errors.BoardError("the board's shell does not tell the size of a file", detail=err[-DETAIL:])
        return max(wall - ended.waited_s, 0.0), ended.sizes

    def _times(
        self, program: _Program, argv: list[str], run: RunFolder, timeout: float, left: float
    ) -> tuple[list[int], str]:
        """What each run took by the timing tool, in nanoseconds; or why that is not known: the answer is there."""
        try:
            _, (size,) = self._once(program, argv, [TIMES_FILE], run, timeout, left)
            if not size:
                return [], f"{PROFILE_TOOL} ended well but wrote nothing"
            return iree_command.times_ns(run.get(TIMES_FILE, size).read_bytes()), ""
        except (errors.StageError, errors.BoardBusy) as error:
            return [], error.message
        except ValueError as error:
            return [], f"what {PROFILE_TOOL} wrote cannot be read: {error}"

    def _fetch(
        self, program: _Program, run: RunFolder, files: Sequence[str], sizes: Sequence[int | None]
    ) -> dict[str, Array]:
        """The outputs, by name."""
        outputs: dict[str, Array] = {}
        for spec, file, size in zip(program.signature.outputs, files, sizes, strict=True):
            if size is None:
                raise errors.RunFailed(
                    f"the command ended well but wrote no output {spec.name!r}",
                    hint="see the output pattern of [runtime] in the board's config",
                )
            if size > (most := expected_bytes([spec])):
                raise broken(f"output {spec.name!r} has {size >> 20} MiB, and at most {most >> 20} are expected")
            outputs[spec.name] = signature.read_output(spec, run.get(file, size))
        return outputs
