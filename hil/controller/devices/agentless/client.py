"""Client for a board without an agent. Each call runs shell commands on the board.

The board needs a POSIX shell, SFTP or ``cat``, and the runtime's command. If the config names no command, hil installs
``iree-run-module``. Values that such a board cannot measure are missing in the results.
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
from hil.controller.devices.agent_client.answers import make_protocol_error, max_expected_bytes, max_output_bytes
from hil.controller.devices.agentless import scripts, signature
from hil.controller.devices.agentless.scripts import DETAIL, BoardStore, Item, RunFolder
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import BoardClient, Invocation, ProfilePass, ProgramHandle
from hil.controller.devices.deploy.wheels import PACKAGE, fetch_iree_tool
from hil.controller.devices.program_inputs import check_inputs
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.core.board_config import RuntimeCommand, fill
from hil.core.clock import get_time_ns
from hil.core.files import digest_file, read_file
from hil.core.installed import get_version
from hil.core.results import Artifact, Part
from hil.core.scratch import make_temporary_folder
from hil.core.steps import StepsPlan
from hil.core.tensors import Array
from hil.core.timeline import Span
from hil.formats import iree_command
from hil.formats.iree_command import PROFILE_FILE, PROFILE_TOOL, TIMES_FILE

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

# Values that are not measured on a board without an agent. Commands other than IREE's do not measure the device time
# either.
NOT_MEASURED = ("peak memory", "clock")
DEVICE_TIME = "device time"
_DEFAULT_DEVICES = {"iree": "local-task"}


@dataclass
class _Program:
    """Program on the board, with the remote paths of the files and the command. Every command loads the program."""

    program_id: str
    artifact: Artifact
    signature: signature.CommandSignature
    files: Mapping[str, str]
    command: str
    device: str

    @property
    def weights(self) -> list[str]:
        """Remote paths of the parameter files."""
        main = self.artifact.main
        return [place for name, place in sorted(self.files.items()) if name != main and name.endswith(".irpa")]


class CommandClient(BoardClient):
    """Client that implements a board's calls over an open shell.

    Attributes:
        store: hil's directory on the board, created by :meth:`info`.
    """

    def __init__(self, shell: Shell, choice: BoardChoice, *, board: str) -> None:
        self.payload_bytes_sent = 0
        self.store = BoardStore(shell)
        self._config = choice.config
        self._command = command = choice.config.command
        # Description of the command: name, version if known, and values that it does not measure.
        self._title = command.program or Path(command.file).name or iree_command.RUN_TOOL
        self._version = get_version(PACKAGE) if command.is_ours else command.version
        self._not_measured = NOT_MEASURED if command.is_ours else (DEVICE_TIME, *NOT_MEASURED)
        self._board = board
        self._runtime = choice.runtime or choice.config.runtime
        self._why = choice.without_agent or "disabled in the board's config"
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

    def close_session(self) -> None:
        """Do nothing, because a board without an agent is reserved only while a command runs."""

    # ---- the board

    def info(self) -> dict[str, Any]:
        """Create hil's directory on the board. Return the board's description with the keys of an agent's Describe.

        Raises UsageError if hil knows no command for the runtime.
        """
        if not self._command.can_run(self._runtime):
            raise errors.UsageError(
                f"board {self._board} has no agent, and no command for the runtime {self._runtime!r}",
                hint="use --runtime iree, or set a program in the [runtime] table of the board's config",
                option="--runtime",
            )
        with errors.locate_errors(board=self._board):
            parts = self.store.open(self._config.connection.folder)
        self._machine = scripts.parse_machine(parts)
        shown: dict[str, Any] = {"name": self._runtime, "version": self._version, "command": self._title}
        if self._command.is_ours:
            shown["profile_tool"] = PROFILE_TOOL
        return {
            "board_id": parts["board_id"] or self._machine.get("hostname", ""),
            "name": self._machine.get("hostname", ""),
            "machine": self._machine,
            "readings": scripts.parse_readings(parts["readings"]),
            "runtimes": [shown],
            "not_measured": list(self._not_measured),
        }

    def notice(self) -> str:
        """Return a note about the command that runs the programs, and the values that it does not measure."""
        *first, last = self._not_measured
        return (
            f"no agent on {self._board}: using the command {posixpath.basename(self._title)} to run programs; "
            f"{', '.join(first)} and {last} are not measured"
        )

    def state(self) -> dict[str, Any]:
        """Return the board state that may have changed since :meth:`info`."""
        parts = self.store.read_state()
        self._machine = {**self._machine, "boot_id": parts.get("boot_id", "")}
        return {"machine": self._machine, "readings": scripts.parse_readings(parts.get("readings", ""))}

    # ---- files

    def tools(self) -> dict[str, Path]:
        """Return the command's program and, for IREE's command, the timing tool."""
        return dict(self._tools)

    def missing(self, files: Mapping[str, Path], /) -> dict[str, int]:
        """Return the missing files. Uploads cannot be resumed, so each has 0 bytes on the board."""
        with errors.locate_errors(stage="push", board=self._board):
            return {item.digest: 0 for item in self.store.missing(self._list_items(files))}

    def put(self, blobs: Mapping[str, tuple[Path, int]], progress: Callable[[int], None] | None = None) -> None:
        """Send complete files (digest -> (file, 0)) and verify them."""

        def count(size: int) -> None:
            self.payload_bytes_sent += size
            if progress:
                progress(size)

        with errors.locate_errors(stage="push", board=self._board):
            self.store.put(self._list_items({name: path for name, (path, _) in blobs.items()}), count)

    def _list_items(self, files: Mapping[str, Path]) -> list[Item]:
        return [Item(path, name, executable=name in self._tools) for name, path in files.items()]

    def _place(self, tool: Path) -> str:
        """Return the remote path of a tool."""
        return next(self.store.place(item) for item in self._list_items(self._tools) if item.path == tool)

    @functools.cached_property
    def _tools(self) -> dict[str, Path]:
        return {digest_file(path): path for path in (self._program_path, self._timer_path) if path}

    @functools.cached_property
    def _program_path(self) -> Path | None:
        """The command's program on the host, or None if the board provides it."""
        if self._command.program:
            return None
        if self._command.file:
            file = os.path.expanduser(self._command.file)  # noqa: PTH111 (it takes unknown users as they are)
            path = self._config.path.parent / file
            if not path.is_file():
                raise errors.UsageError(f"[runtime] program of the board not found: {path}")
            return path
        return self._find_iree_tool(iree_command.RUN_TOOL)

    @functools.cached_property
    def _timer_path(self) -> Path | None:
        """IREE's timing and profiling tool, which works only with IREE's command."""
        return self._find_iree_tool(PROFILE_TOOL) if self._command.is_ours else None

    def _find_iree_tool(self, tool: str) -> Path:
        machine = self._machine
        return fetch_iree_tool(
            tool, machine.get("arch", ""), machine.get("libc", ""), cache=self._cache, board=self._board
        )

    # ---- programs

    def load_program(self, artifact: Artifact, *, device: str, timeout: float) -> ProgramHandle:
        """Register a pushed program and read the signature on the host.

        Load errors on the board appear at the first run.
        """
        with errors.locate_errors(stage="load", board=self._board), make_temporary_folder("hil-command-") as place:
            log = Path(place) / "read.log"
            taken = signature.read_signature(artifact, self._isolated, log, needs_own=self._command.is_ours)
            signature.check_signature(taken, self._command)
            paths = {artifact.digests[name]: path for name, path in artifact.files.items()}
            places = {item.digest: self.store.place(item) for item in self._list_items(paths)}
            files = {name: places[artifact.digests[name]] for name in artifact.files}
            command = self._place(self._program_path) if self._program_path else self.find_command()
        device = device or _DEFAULT_DEVICES.get(artifact.runtime, "")
        program_id = str(next(self._numbers))
        self._programs[program_id] = _Program(program_id, artifact, taken, files, command, device)
        return ProgramHandle(
            program_id,
            taken.function,
            taken.inputs,
            taken.outputs,
            device=device,
            version=self._version,
            how="by command",
            is_resident=False,
        )

    def find_command(self) -> str:
        """Return the board's path of the config's program, or "" if hil installs the program.

        Raises BoardUnfit if the board does not have the program.
        """
        return self.store.find(self._command.program) if self._command.program else ""

    def unload(self, program_id: str) -> None:
        """Forget a program. The board needs no action, since no process remains after a command."""
        self._programs.pop(program_id, None)

    def logs(self, program_id: str = "") -> list[str]:
        """Return the stderr lines of a program's commands. They remain available after unloading."""
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
        steps: StepsPlan | None,
    ) -> Invocation:
        """Run and time a program on the board. No command is ever retried.

        The first command computes the outputs. If the board has IREE's timing tool, a second command with this tool
        runs the warm-ups and iterations. Otherwise each warm-up and each iteration is a separate command, and the
        device time is unknown.

        ``timeout`` is rounded up to whole seconds on the board. Each output is limited by the size of its
        spec; ``max_output_bytes`` is ignored.
        """
        if steps is not None:
            raise errors.NotRun(
                "generating tokens requires an agent on the board",
                stage="run",
                hint="use a board with Python, or run single steps without --generate",
            )
        program, command = self._programs[program_id], self._command
        files = signature.name_output_files(program.signature, command)
        begin = get_time_ns()
        with self._run_folder(program, inputs, command) as (run, arguments):
            outputs_at = [fill(command.output, {"file": f"{run.remote}/{file}"}) for file in files]
            argv = self._build_argv(program, program.command, run, arguments, outputs_at)
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
                flags = iree_command.make_timing_flags(warmup + iterations, TIMES_FILE)
                times, problem = self._measure_times(
                    program, [*self._build_argv(program, timer, run, arguments, []), *flags], run, timeout, left
                )
                notes += [f"device time not measured: {problem}"] if problem else []
            cold_ns = sum(times[:warmup]) if timer else round(sum(walls.pop(0) for _ in range(warmup)) * 1e9)
            seen = self.state() if state else {}
        takes_device = any("{device}" in flag for flag in command.flags)
        if program.device and not takes_device:
            notes.append(f"device {program.device} is not passed to the command: [runtime] flags has no {{device}}")
        # The tool reports durations but no start times, so place the runs one after the other.
        ends = list(accumulate(times[warmup:]))
        lacking = self._not_measured
        return Invocation(
            outputs,
            iterations_ns=tuple(zip([0, *ends], ends, strict=False)),
            warmup_ns=cold_ns,
            host_ns=(begin, get_time_ns()),
            fetch_s=fetch_s,
            state=seen,
            # IREE's tool uses the given device or fails. The placement of other commands is unknown.
            placement=(Part(program.device.split("://")[0]),) if takes_device and command.is_ours else None,
            unchecked="the board has no agent",
            notes=tuple(notes),
            provenance={
                "command": {
                    "line": shlex.join(argv),
                    "wall_s": walls,
                    "why": self._why,
                    "not_measured": [*([] if ends or DEVICE_TIME in lacking else [DEVICE_TIME]), *lacking],
                }
            },
        )

    def profile(
        self, program_id: str, inputs: Mapping[str, Array], *, tool: str, warmup: int, iterations: int, timeout: float
    ) -> ProfilePass:
        """Run once under IREE's profiling tool, which records times of the tool's clock."""
        if not tool:
            raise errors.RunFailed(
                f"the board's custom command {posixpath.basename(self._title)} does not support profiling",
                board=self._board,
                hint="remove program and file from [runtime]: only the tool that hil installs supports profiling",
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
            start = get_time_ns()
            _, (size,) = self._once(program, argv, [PROFILE_FILE], run, timeout, timeout)
            if not size:
                raise errors.RunFailed("the profiling command succeeded but wrote no profile")
            if size > (most := max_output_bytes()):
                raise make_protocol_error(f"profile size {size >> 20} MiB exceeds the limit of {most >> 20} MiB")
            data = read_file(run.get(PROFILE_FILE, size), size)
            host = Span("profile", start, get_time_ns())
        return ProfilePass({PROFILE_FILE: memoryview(data)}, (), host, None, warmup, iterations)

    # ---- commands

    @contextlib.contextmanager
    def _run_folder(
        self, program: _Program, inputs: Mapping[str, Array], command: RuntimeCommand
    ) -> Iterator[tuple[RunFolder, list[str]]]:
        """Provide a run's directory with the inputs, and the arguments for them.

        The directory is removed at the end.
        """
        check_inputs(program.signature.function, program.signature.inputs, inputs)
        with errors.locate_errors(stage="run", board=self._board), self.store.run_folder() as run:
            try:
                arguments, files = signature.write_inputs(program.signature, inputs, command, run.local, run.remote)
            except OSError as error:
                text = f"cannot write the inputs to {run.local}: {error.strerror or error}"
                raise errors.StorageError(
                    text, hint="free disk space, or set TMPDIR to a different directory"
                ) from error
            run.send(files)
            yield run, arguments

    def _build_argv(
        self, program: _Program, command: str, run: RunFolder, inputs: list[str], outputs: list[str]
    ) -> list[str]:
        """Build the command line of a run from the config's flags."""
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
        """Run one command. Return its wall time, without waiting for other runs, and the size of every output file."""
        late = errors.StageTimeout(
            f"run exceeded the limit of {timeout:g} s and was stopped",
            hint="raise the limit with --timeout, or check the program for a hang",
        )
        if left <= 0:
            raise late
        limit_s, wait_s = math.ceil(left), math.ceil(self._wait_s)
        ended, err, wall = run.command(
            argv, files, limit_s=limit_s, wait_s=wait_s, environment=self._command.environment
        )
        if ended.how == "busy":
            what = f"timed out after {wait_s} s: a different run is using the board"
            raise errors.BoardBusy(what, hint="wait until the other run ends, or increase --wait")
        is_answer = argv[0] == program.command
        if is_answer:
            self._logs.setdefault(program.program_id, []).extend(err.splitlines())
        if ended.how == "late":
            late.detail = err[-DETAIL:]
            raise late
        if ended.code:
            # The profiling tool does not report whether the program was loaded. The program has run before, so loading
            # works.
            raise scripts.make_failure(ended, err, self._title if is_answer else PROFILE_TOOL, loads=not is_answer)
        if len(ended.sizes) != len(files):
            raise errors.BoardError("the board's shell did not report a file's size", detail=err[-DETAIL:])
        return max(wall - ended.waited_s, 0.0), ended.sizes

    def _measure_times(
        self, program: _Program, argv: list[str], run: RunFolder, timeout: float, left: float
    ) -> tuple[list[int], str]:
        """Return the duration of every run in nanoseconds, or the reason why timing failed.

        A timing error does not discard the outputs.
        """
        try:
            _, (size,) = self._once(program, argv, [TIMES_FILE], run, timeout, left)
            if not size:
                return [], f"{PROFILE_TOOL} succeeded but wrote no profile"
            return iree_command.read_times_ns(read_file(run.get(TIMES_FILE, size))), ""
        except (errors.StageError, errors.BoardBusy, errors.BoardUnfit) as error:
            return [], error.message
        except ValueError as error:
            return [], f"cannot read the profile of {PROFILE_TOOL}: {error}"

    def _fetch(
        self, program: _Program, run: RunFolder, files: Sequence[str], sizes: Sequence[int | None]
    ) -> dict[str, Array]:
        """Fetch the outputs by name."""
        outputs: dict[str, Array] = {}
        for spec, file, size in zip(program.signature.outputs, files, sizes, strict=True):
            if size is None:
                raise errors.RunFailed(
                    f"the command succeeded but did not write output {spec.name!r}",
                    hint="check the output pattern of [runtime] in the board's config",
                )
            if size > (most := max_expected_bytes([spec])):
                raise make_protocol_error(
                    f"output {spec.name!r} has {size >> 20} MiB, expected at most {most >> 20} MiB"
                )
            outputs[spec.name] = signature.read_output(spec, run.get(file, size))
        return outputs
