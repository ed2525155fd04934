"""A program on a board without an agent: each run of it is a command of its own."""

from __future__ import annotations

import contextlib
import math
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hil.controller.devices.agentless import scripts
from hil.controller.devices.agentless.calls import DEVICE_TIME, CommandCall, CommandLoaded
from hil.controller.devices.agentless.store import Store
from hil.controller.devices.agentless.values import (
    Signature,
    check_inputs,
    output_arguments,
    output_files,
    read_output,
    write_inputs,
)
from hil.controller.devices.agentless.verdicts import failure
from hil.controller.devices.answers import broken, expected_bytes, most_bytes
from hil.controller.devices.profile_pass import ProfilePass
from hil.controller.devices.provenance import placed, provenance_of
from hil.core.artifacts import Artifact
from hil.core.boards import RuntimeCommand, fill
from hil.core.clock import now_ns
from hil.core.placement import Part, Told
from hil.core.results import RunResult
from hil.core.scratch import temporary_folder
from hil.core.tensors import Array
from hil.core.timeline import Span
from hil.errors import BoardBusy, BoardError, BoardLost, RunFailed, StageError, StageTimeout, StorageError
from hil.formats.iree_command import (
    PARAMETER_SCOPE,
    PROFILE_FILE,
    PROFILE_TOOL,
    TIMES_FILE,
    profile_command,
    times_ns,
    timing_flags,
)

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

# Past its limit the board's side should have answered; then the board itself is given up. It counts seconds by
# sleeping, and a slow board is late at each: 7 % where it is emulated.
_GRACE_S = 15.0
_SLOW = 1.25
_CALL_S = 60.0
_SPARE_BYTES = 1 << 16
_DETAIL = 4000


class ProgramBoard(Protocol):
    """What a program needs of the board that has it; :class:`hil.controller.devices.agentless.board.CommandBoard` has
    it.

    Attributes:
        name, info, why: how it is called, what it showed of itself, why it has no agent.
        command, folder: how programs are run there, and in which folder of hil's.
        shell, store: commands on it, and what it has of ours.
        wait_s: how long a run waits while another one holds the board.
    """

    name: str
    info: dict[str, Any]
    why: str
    command: RuntimeCommand
    folder: str
    shell: Shell
    store: Store
    wait_s: float

    @property
    def title(self) -> str:
        """The name of the command."""

    @property
    def version(self) -> str:
        """The runtime's version."""

    @property
    def not_measured(self) -> tuple[str, ...]:
        """What results from here lack."""

    def device(self, runtime: str) -> str:
        """The device that a runtime uses here."""

    def look(self) -> list[str]:
        """What happened to the board since it was last looked at."""

    def timer(self) -> str:
        """Where the tool that times programs lies on the board; "" where there is none."""

    def push_profiler(self, runtime: str) -> str:
        """Send the tool that profiles programs; where it lies."""

    def located(self, stage: str) -> AbstractContextManager[None]:
        """Errors raised in here are of this board and stage."""


class CommandProgram:
    """A pushed program. A context manager, for the sake of those that are unloaded at the end.

    Args:
        board: the board that has it.
        artifact: the program.
        signature: what it takes and gives.
        files: name of each of its files -> where it lies on the board.
        program: the command's program, on the board.
        no_fallback: whether a node that runs on another device than it was told to fails a run.
    """

    def __init__(
        self,
        board: ProgramBoard,
        artifact: Artifact,
        signature: Signature,
        files: Mapping[str, str],
        program: str,
        *,
        no_fallback: bool,
    ) -> None:
        self._board = board
        self._artifact = artifact
        self._signature = signature
        self._files = files
        self._program = program
        self._no_fallback = no_fallback
        self._log: list[str] = []
        self.loaded = CommandLoaded(signature.function, signature.inputs, signature.outputs)

    def run(
        self,
        inputs: Mapping[str, Array],
        *,
        warmup: int = 0,
        iterations: int = 1,
        timeout: float = 60.0,
        names: tuple[str, ...] = (),
    ) -> tuple[RunResult, CommandCall]:
        """Run on the board, and time it there. No command is ever tried again.

        The outputs are of a command of its own; IREE's timing tool, where the board has it, then makes the warm-ups
        and iterations. Without that tool each of them is a command, and how long it took on the device is not known.

        Args:
            inputs: name -> tensor in the program's order.
            warmup, iterations: runs before, and runs whose last outputs count.
            timeout: seconds for all of them, whole seconds on the board.
            names: output names to use in place of the program's own, where the compiler dropped them.

        Raises:
            UsageError: the program does not take these inputs.
            RanElsewhere: with ``no_fallback``, where the board's own command does not tell where it ran.
            LoadFailed, RunFailed, RunCrashed, StageTimeout, BoardBusy, BoardLost: as it ends.
        """
        board = self._board
        files = output_files(self._signature, board.command)
        with self._place(inputs, board.command) as (local, remote, arguments):
            argv = self._argv(self._program, arguments, output_arguments(files, board.command, remote), remote)
            left = timeout
            walls: list[float] = []
            sizes: tuple[int | None, ...] = ()
            timer = board.timer()
            for _ in range(1 if timer else warmup + iterations):
                wall, sizes = self._once(argv, files, remote, timeout, left)
                walls.append(wall)
                left -= wall
            start = time.monotonic()
            outputs = self._fetch(local, remote, sizes, names)
            fetch_s = time.monotonic() - start
            times: list[int] = []
            problem = ""
            if timer:
                argv_timed = [*self._argv(timer, arguments, [], remote), *timing_flags(warmup + iterations, TIMES_FILE)]
                times, problem = self._times(argv_timed, local, remote, timeout, left)
            cold_ns = sum(times[:warmup]) if timer else round(sum(walls.pop(0) for _ in range(warmup)) * 1e9)
            notes = [*board.look(), *([f"the device time could not be measured: {problem}"] if problem else [])]
        return self._result(outputs, argv, walls, times[warmup:], notes, cold=not warmup), CommandCall(cold_ns, fetch_s)

    def _times(self, argv: list[str], local: Path, remote: str, timeout: float, left: float) -> tuple[list[int], str]:
        """What each run took by the timing tool, in nanoseconds; or why that is not known: the answer is there."""
        try:
            _, (size,) = self._once(argv, [TIMES_FILE], remote, timeout, left)
            if not size:
                return [], f"{PROFILE_TOOL} ended well but wrote nothing"
            return times_ns(self._get(local, remote, TIMES_FILE, size).read_bytes()), ""
        except (StageError, BoardBusy) as error:
            return [], error.message
        except ValueError as error:
            return [], f"what {PROFILE_TOOL} wrote cannot be read: {error}"

    def profile(
        self, inputs: Mapping[str, Array], *, warmup: int = 0, iterations: int = 1, timeout: float = 60.0
    ) -> ProfilePass:
        """Run once more under IREE's profiling tool, which is sent first where the board lacks it.

        Nothing on the board tells its clock with the files: their times are its own.

        Args:
            inputs: name -> tensor in the program's order.
            warmup, iterations: runs before, and runs that count.
            timeout: seconds for all of them, whole seconds on the board.

        Raises:
            UsageError: the program does not take these inputs.
            RunFailed: the board's command is its own and cannot profile, or the tool wrote nothing.
            LoadFailed, RunCrashed, StageTimeout, BoardBusy, BoardLost: as of :meth:`run`.
        """
        tool = self._board.push_profiler(self._artifact.runtime)
        with self._place(inputs, RuntimeCommand(input="{value}")) as (local, remote, values):
            argv = profile_command(
                tool,
                self._files[self._artifact.main],
                device=self._board.device(self._artifact.runtime),
                function=self._signature.function,
                inputs=values,
                weights=self._weights(),
                runs=warmup + iterations,
                output=PROFILE_FILE,
            )
            start = now_ns()
            _, (size,) = self._once(argv, [PROFILE_FILE], remote, timeout, timeout)
            if not size:
                raise RunFailed("the profiling command ended well but wrote nothing")
            if size > (most := most_bytes()):
                raise broken(f"a profile of {size >> 20} MiB, where at most {most >> 20} can be")
            data = self._get(local, remote, PROFILE_FILE, size).read_bytes()
            host = Span("profile", start, now_ns())
        return ProfilePass({PROFILE_FILE: memoryview(data)}, (), host, None, warmup, iterations)

    @contextlib.contextmanager
    def _place(self, inputs: Mapping[str, Array], command: RuntimeCommand) -> Iterator[tuple[Path, str, list[str]]]:
        """A folder here and one on the board that has the inputs, and their arguments; both are gone at the end."""
        check_inputs(self._signature, inputs)
        board = self._board
        remote = f"{board.folder}/runs/{secrets.token_hex(8)}"
        with temporary_folder("hil-command-") as place, board.located("run"):
            local = Path(place)
            try:
                arguments, files = write_inputs(self._signature, inputs, command, local, remote)
            except OSError as error:
                text = f"cannot write the inputs to {local}: {error.strerror or error}"
                raise StorageError(text, hint="make room there, or set TMPDIR to another folder") from error
            try:
                self._send(local, remote, files)
                yield local, remote, arguments
            finally:
                with contextlib.suppress(BoardError):
                    board.shell.run(scripts.remove(remote), timeout=_CALL_S, check=False)

    def log(self) -> list[str]:
        """What the commands wrote to stderr."""
        return list(self._log)

    def unload(self) -> None:
        """Nothing: a command leaves nothing behind."""

    def __enter__(self) -> CommandProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.unload()

    def _argv(self, program: str, inputs: list[str], outputs: list[str], remote: str) -> list[str]:
        board, command = self._board, self._board.command
        weights = [fill(command.parameter, {"scope": PARAMETER_SCOPE, "file": place}) for place in self._weights()]
        several = {"{inputs}": inputs, "{outputs}": outputs, "{parameters}": weights}
        values = {
            "device": board.device(self._artifact.runtime),
            "module": self._files[self._artifact.main],
            "function": self._signature.function,
            "folder": remote,
        }
        argv = [program]
        for flag in command.flags:
            argv += several[flag] if flag in several else [fill(flag, values)]
        return argv

    def _weights(self) -> list[str]:
        """Where the program's files of parameters lie on the board."""
        main = self._artifact.main
        return [place for name, place in sorted(self._files.items()) if name != main and name.endswith(".irpa")]

    def _send(self, local: Path, remote: str, files: list[str]) -> None:
        """Make the run's folder, with the inputs in it."""
        shell, size = self._board.shell, sum((local / name).stat().st_size for name in files)
        try:
            shell.run(["mkdir", "-m", "700", remote], timeout=_CALL_S)
            for name in files:
                shell.put(local / name, f"{remote}/{name}")
        except BoardLost:
            raise
        except BoardError as error:
            free = self._board.store.free_bytes(shell)
            if free is None or free > size + _SPARE_BYTES:
                raise
            raise RunFailed(f"the board has no room for the inputs: {size} bytes, and {free} are free") from error

    def _once(
        self, argv: list[str], files: list[str], remote: str, timeout: float, left: float
    ) -> tuple[float, tuple[int | None, ...]]:
        """One command: its wall time, without that of waiting for another run, and the size of each file it writes."""
        board = self._board
        late = StageTimeout(
            f"run took longer than its limit of {timeout:g} s and was ended",
            hint="raise the limit with --timeout, or see whether the program hangs",
        )
        if left <= 0:
            raise late
        limit, wait_s = math.ceil(left), math.ceil(board.wait_s)
        whole = scripts.run(remote, files, argv, limit_s=limit, wait_s=wait_s, environment=board.command.environment)
        start = time.monotonic()
        try:
            done = board.shell.run(whole, timeout=(limit + wait_s) * _SLOW + _GRACE_S, check=False)
        except BoardLost as error:  # its own message shows the script
            raise BoardLost("the link broke or the board hung during the run", detail=error.message) from error
        wall = time.monotonic() - start
        ended = scripts.ended(done.out.decode(errors="replace"))
        if ended is None or ended.how == "gone":
            raise BoardLost("the board ended the run without an answer", detail=done.err[-_DETAIL:])
        if ended.how == "busy":
            raise BoardBusy(
                f"another run held the board for more than {wait_s} s", hint="wait for it to end, or raise --wait"
            )
        ours = argv[0] == self._program
        if ours:
            self._log += done.err.splitlines()
        if ended.how == "late":
            late.detail = done.err[-_DETAIL:]
            raise late
        if ended.code:
            # A profile is taken of what has been run: the tool does not say how far it came.
            raise failure(ended, done.err, board.title if ours else PROFILE_TOOL, loads=not ours)
        if len(ended.sizes) != len(files):
            raise BoardError("the board's shell does not tell the size of a file", detail=done.err[-_DETAIL:])
        return max(wall - ended.waited_s, 0.0), ended.sizes

    def _fetch(
        self, local: Path, remote: str, sizes: tuple[int | None, ...], names: tuple[str, ...]
    ) -> dict[str, Array]:
        specs = self._signature.outputs
        named = names if len(names) == len(specs) else tuple(spec.name for spec in specs)
        outputs: dict[str, Array] = {}
        files = output_files(self._signature, self._board.command)
        for name, spec, file, size in zip(named, specs, files, sizes, strict=True):
            if size is None:
                raise RunFailed(
                    f"the command ended well but wrote no output {name!r}",
                    hint="see the output pattern of [runtime] in the board's config",
                )
            if size > (most := expected_bytes([spec])):
                raise broken(f"output {name!r} has {size >> 20} MiB, and at most {most >> 20} are expected")
            outputs[name] = read_output(spec, self._get(local, remote, file, size))
        return outputs

    def _get(self, local: Path, remote: str, file: str, size: int) -> Path:
        """Fetch a file that a command wrote."""
        self._board.shell.get(f"{remote}/{file}", local / file, size)
        if (local / file).stat().st_size != size:
            raise BoardLost(f"{file} was damaged on its way from the board")
        return local / file

    def _result(
        self,
        outputs: dict[str, Array],
        argv: list[str],
        walls: list[float],
        times: list[int],
        notes: list[str],
        *,
        cold: bool,
    ) -> RunResult:
        board, runtime = self._board, self._artifact.runtime
        device, version, lacking = board.device(runtime), board.version, board.not_measured
        is_passed = any("{device}" in flag for flag in board.command.flags)
        if device and not is_passed:
            notes = [*notes, f"the command is not told of the device {device}: [runtime] flags has no {{device}}"]
        provenance = {
            **provenance_of(
                board.name, board.info, board.shell, runtime=runtime, version=version, device=device, notes=notes
            ),
            "command": {
                "line": shlex.join(argv),
                "wall_s": walls,
                "why": board.why,
                "not_measured": [*([] if times or DEVICE_TIME in lacking else [DEVICE_TIME]), *lacking],
            },
        }
        source = " ".join(part for part in (f"{board.name}: {runtime}", version, device, "by command") if part)
        # The tool tells how long each took, not when.
        ends = list(accumulate(times))
        result = RunResult(source, outputs, tuple(zip([0, *ends], ends, strict=False)), None, provenance, cold)
        # IREE's own tool opens the device that it is told to, or fails; of another command nothing is known.
        placement = (Part(device.split("://")[0]),) if is_passed and board.command.is_ours else None
        return placed(result, placement, Told.by(self._artifact, device), no_fallback=self._no_fallback)
