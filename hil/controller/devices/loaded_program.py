"""A program on a board with an agent."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from hil.controller.devices.agentless.values import Signature, check_inputs, fits
from hil.controller.devices.answers import expected_bytes
from hil.controller.devices.client import AgentClient, Loaded
from hil.controller.devices.profile_pass import ProfilePass
from hil.controller.devices.provenance import placed, provenance_of
from hil.controller.devices.streams import Invocation
from hil.core.artifacts import Artifact
from hil.core.clock import ClockFit
from hil.core.placement import Placement, Told
from hil.core.results import RunResult
from hil.core.tensors import Array
from hil.errors import BlobDamaged, BoardError, RunFailed, UsageError

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell


class ProgramBoard(Protocol):
    """What a program needs of the board that it is loaded on; :class:`hil.controller.devices.board.Board` has it."""

    name: str
    info: dict[str, Any]

    @property
    def client(self) -> AgentClient:
        """The connection to the agent."""

    @property
    def shell(self) -> Shell | None:
        """Commands on the board, where it is reached over SSH."""

    def clock_fit(self, since_ns: int | None = None) -> ClockFit:
        """The board's clock against the host's."""

    def note(self, seen: Invocation) -> list[str]:
        """Take what an invocation told of the board; what happened to the board since."""

    def look_again(self, error: BlobDamaged) -> None:
        """Send anew what was damaged on the board."""

    def push_profiler(self, runtime: str) -> str:
        """Send the runtime's profiling tool; its digest, or "" where none is needed."""

    def load(self, artifact: Artifact, *, timeout: float = 60.0, no_fallback: bool = False) -> LoadedProgram:
        """Load a pushed program."""

    def logs(self, program_id: str) -> list[str]:
        """What a program's worker wrote to stderr."""


class LoadedProgram:
    """A program in its worker on the board. A context manager: it is unloaded at the end."""

    def __init__(
        self,
        board: ProgramBoard,
        client: AgentClient,
        artifact: Artifact,
        loaded: Loaded,
        device: str,
        *,
        no_fallback: bool,
    ) -> None:
        self._board = board
        self._client = client
        self._artifact = artifact
        self._device = device
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
            inputs: name -> tensor in the program's order.
            warmup, iterations: untimed and timed runs.
            timeout: seconds for all of them.
            names: output names to use in place of the program's own, where the compiler dropped them.

        Raises:
            UsageError: the program does not take these inputs.
            RanElsewhere: it ran on another device than it was told to.
            RunFailed, RunCrashed, StageTimeout, BoardLost, SessionEnded: as it ends.
        """
        self._check(inputs)
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
        if len(names) == len(outputs):
            outputs = dict(zip(names, outputs.values(), strict=True))
        fit = self._board.clock_fit(invocation.host_ns[0])
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
        peak_memory_bytes = invocation.peak_memory_bytes or None
        cold, self._ran = not (warmup or self._ran), True
        result = RunResult(source, outputs, invocation.iterations_ns, peak_memory_bytes, provenance, cold)
        self._placement = self._placement if invocation.placement is None else invocation.placement
        told = Told.by(self._artifact, device)
        return placed(result, self._placement, told, no_fallback=self._no_fallback), invocation

    def profile(
        self, inputs: Mapping[str, Array], *, warmup: int = 0, iterations: int = 1, timeout: float = 60.0
    ) -> ProfilePass:
        """Run once more, under the runtime's profiler; its tool is sent first where the board lacks it.

        Args:
            inputs: name -> tensor in the program's order.
            warmup, iterations: runs before, and runs that count.
            timeout: seconds for all of them.

        Raises:
            RunFailed: the runtime cannot profile, or its profiler failed; the program can be run on.
            LoadFailed, BoardError: there is no profiling tool for the board.
            RunCrashed, StageTimeout, BoardLost, SessionEnded: as of :meth:`run`.
            BlobDamaged: the tool was altered on the board, and so it was when it had been sent again.
        """
        self._check(inputs)
        try:
            return self._profile(inputs, warmup, iterations, timeout)
        except BlobDamaged as error:
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

    def _check(self, inputs: Mapping[str, Array]) -> None:
        """Refuse inputs that the program does not take; where its model takes them, that is not the user's doing."""
        try:
            check_inputs(Signature(self.loaded.function, self.loaded.inputs, self.loaded.outputs), inputs)
        except UsageError as error:
            known = self._artifact.inputs
            if known is None or not fits(known, inputs):
                raise
            what = f"the program takes other inputs on the board than its model does: {error.message}"
            raise RunFailed(what, stage="run", board=self._board.name) from error

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
