"""A program loaded on a connected board."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from hil import errors
from hil.controller.devices.agent_client.answers import max_expected_bytes
from hil.controller.devices.board_client import BoardClient, Invocation, ProfilePass, ProgramHandle
from hil.controller.devices.program_inputs import check_inputs, fits
from hil.core import clock
from hil.core.board_config import BoardConfig
from hil.core.instructions import InstructionCounts, count_clock
from hil.core.mcu_config import MCU_RUNTIME
from hil.core.narrow_integers import Narrowing
from hil.core.placement_reasons import match_compiler_reasons
from hil.core.repetition import Answer, Repetition
from hil.core.results import Artifact, Part, Placement, RequestedDevice, RunResult
from hil.core.steps import StepsPlan
from hil.core.tensors import Array
from hil.formats.iree_devices import find_device, get_driver, is_software_gpu, rejects_empty_tensors

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell


class ProgramBoard(Protocol):
    """Part of a board (:class:`hil.controller.devices.board.Board`) that its programs need."""

    name: str
    config: BoardConfig
    info: dict[str, Any]
    client: BoardClient

    @property
    def shell(self) -> Shell | None:
        """Shell on the board, or None if the board is not reached over SSH."""

    def runtime_version(self, runtime: str) -> str:
        """Return the version of one of the board's runtimes, or "" if unknown."""

    def note(self, seen: Invocation) -> list[str]:
        """Update :attr:`info` with the board state after a run. Return the changes."""

    def clock_fit(self, since_ns: int | None = None) -> clock.ClockFit | None:
        """Return the fit of the board's clock to the host's clock, or None if the board's clock is not available."""

    def push_profiler(self, runtime: str) -> str:
        """Send the profiling tool if the board's runtime needs it. Return its digest, or ""."""

    def load(
        self, artifact: Artifact, *, timeout: float = 60.0, no_fallback: bool = False, instructions: bool = False
    ) -> LoadedProgram:
        """Load a pushed program in a separate worker."""

    def forget_blobs(self, error: errors.BlobDamaged) -> None:
        """Forget the known blobs after damage, so that the next upload queries the board."""

    def logs(self, program_id: str) -> list[str]:
        """Return the stderr lines of a program's worker, or an empty list if the board does not respond."""

    def finish_log(self, program_id: str) -> None:
        """Show the remaining stderr lines of a program."""


class LoadedProgram:
    """Program loaded on the board. Used as a context manager, the program is unloaded at the end."""

    def __init__(
        self,
        board: ProgramBoard,
        client: BoardClient,
        artifact: Artifact,
        loaded: ProgramHandle,
        *,
        no_fallback: bool,
        instructions: bool = False,
    ) -> None:
        self.wants_instructions = instructions
        self._board = board
        self._client = client
        self._artifact = artifact
        self._no_fallback = no_fallback
        self._placement: Placement | None = None
        self._narrowing = Narrowing.of(artifact, loaded.inputs, loaded.outputs)
        self.loaded = self._widen_handle(loaded)
        self._ran = False

    def run(
        self,
        inputs: Mapping[str, Array],
        *,
        warmup: int = 0,
        iterations: int = 1,
        timeout: float = 60.0,
        names: tuple[str, ...] = (),
        steps: StepsPlan | None = None,
    ) -> tuple[RunResult, Invocation]:
        """Run on the board. A run is never retried, since a retry could hide a wrong result.

        Args:
            names: Output names that replace the names of the program, for compilers that drop them.
            steps: Run the stepped form of the program, with its inputs
                (:class:`hil.core.stepped_program.SteppedProgram`).

        Raises:
            UsageError: The program does not take these inputs.
            RanElsewhere: The program ran on another device than requested.
            RunFailed, RunCrashed, StageTimeout, BoardLost, SessionEnded: The run failed.
        """
        if steps is None:
            inputs = self._complete_inputs(inputs)
        invocation = self._client.invoke(
            self.loaded.program_id,
            self._narrowing.narrow_inputs(inputs, steps),
            warmup=warmup,
            iterations=iterations,
            timeout=timeout,
            state=True,
            most_bytes=None if steps else max_expected_bytes(self._artifact.outputs or self.loaded.outputs),
            steps=steps,
        )
        invocation = self._widen_outputs(invocation, steps)
        outputs = invocation.outputs
        repetition, unchecked = invocation.repetition, ""
        if repetition is None and warmup + iterations == 1:
            repetition = Repetition((Answer(1, 0, outputs),))
        elif repetition is None:
            why = invocation.unchecked or "the agent is older than this hil"
            unchecked = f"outputs of the iterations were not compared with each other: {why}"
        if len(names) == len(outputs):
            renamed = dict(zip(outputs, names, strict=True))
            outputs = dict(zip(names, outputs.values(), strict=True))
            repetition = repetition and repetition.rename(renamed)
        cold = not warmup and not (self._ran and self.loaded.is_resident)
        self._ran = True
        self._placement = self._placement if invocation.placement is None else invocation.placement
        name, device = self._artifact.runtime, self.loaded.device
        version = self.loaded.version or self._board.runtime_version(name)
        provenance = self._build_provenance(invocation, version)
        provenance["notes"] += filter(None, [unchecked])
        provenance["notes"] += self._narrowing.describe(self._artifact.inputs or (), self._artifact.outputs or ())
        provenance["notes"] += self._describe_cache(steps)
        source = f"{self._board.name}: {' '.join(filter(None, (name, version, device, self.loaded.how)))}"
        peak_bytes = invocation.peak_memory_bytes or None
        instructions, invocation = self._count(invocation)
        result = RunResult(
            source,
            outputs,
            invocation.iterations_ns,
            peak_bytes,
            provenance,
            cold,
            repetition=repetition,
            instructions=instructions,
            peak_device_memory_bytes=invocation.peak_device_memory_bytes or None,
        )
        asked = RequestedDevice.of(name, self._artifact.flags, device)
        return self._add_placement(result, asked), invocation

    def _count(self, invocation: Invocation) -> tuple[InstructionCounts | None, Invocation]:
        """Return the instructions of the iterations, and the call without times if the board's clock counts them."""
        if not self._board.config.has_time:
            found = invocation.instructions
            if found is None or found.problem:  # a counter of the program alone is more exact than the board's clock
                found = count_clock(invocation.iterations_ns, self._board.config.icount_shift)
            timeless = replace(invocation, iterations_ns=(), warmup_ns=0, board_ns=None, cpu_ns=0, calls=(), link_ns=0)
            return found, timeless
        if not self.wants_instructions or invocation.instructions is not None:
            return invocation.instructions, invocation
        has_agent = self._client.counts_instructions
        why = "the agent is older than this hil" if has_agent else "counting requires an agent on the board"
        return InstructionCounts(problem=why), invocation

    def _add_placement(self, result: RunResult, asked: RequestedDevice) -> RunResult:
        """Add the placement of the program to the result's provenance, and mark parts that ran on other devices."""
        marked = None if self._placement is None else self._add_compiler_reasons(asked.mark(self._placement))
        parts = None if marked is None else [{**part.to_json(), **self._describe_software(part)} for part in marked]
        provenance = {**result.provenance, "placement": parts, "elsewhere": ""}
        try:
            provenance["elsewhere"] = asked.check(marked, no_fallback=self._no_fallback)
        except errors.RanElsewhere as error:
            # Drop the times, because they are times of another device.
            error.result = replace(result, provenance=provenance, iterations_ns=())
            raise
        return replace(result, provenance=provenance)

    def _add_compiler_reasons(self, placement: Placement) -> Placement:
        """Add why the compiler did not delegate nodes, if the compiler decided where they run."""
        reasons = self._artifact.notes.get("delegation", {}).get("reasons", {})
        return tuple(
            replace(part, reasons=match_compiler_reasons(part.names, part.nodes, reasons))
            if reasons and part.elsewhere and not part.reasons
            else part
            for part in placement
        )

    def _describe_software(self, part: Part) -> dict[str, str]:
        """Return the name of a part's device if it is a GPU in software."""
        wanted = self.loaded.device if part.device == get_driver(self.loaded.device) else part.device
        found = find_device(self._board.info.get("runtimes", ()), self._artifact.runtime, wanted)
        return {"software": str(found.get("name", ""))} if found and is_software_gpu(found) else {}

    def _build_provenance(self, invocation: Invocation, version: str) -> dict[str, Any]:
        """Return the provenance of a call: the board's state, and the clock if available."""
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
            "stack": info.get("stack", []),
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
        return {**found, **invocation.provenance}

    def profile(
        self, inputs: Mapping[str, Array], *, warmup: int = 0, iterations: int = 1, timeout: float = 60.0
    ) -> ProfilePass:
        """Run once more under the runtime's profiler. Send the profiling tool first if the board lacks it.

        Raises:
            RunFailed: The runtime cannot profile, or the profiler failed. The program can still be run.
            LoadFailed, BoardError: The profiling tool does not exist for the board.
            RunCrashed, StageTimeout, BoardLost, SessionEnded: As for :meth:`run`.
            BlobDamaged: The tool was altered on the board twice.
        """
        if not self._board.config.has_time and self._artifact.runtime != MCU_RUNTIME:  # firmware counts ticks
            raise errors.RunFailed("the board's clock counts instructions, so a profile would not contain times")
        inputs = self._complete_inputs(inputs)
        try:
            return self._profile(inputs, warmup, iterations, timeout)
        except errors.BlobDamaged as error:
            self._board.forget_blobs(error)
            return self._profile(inputs, warmup, iterations, timeout)

    def _profile(self, inputs: Mapping[str, Array], warmup: int, iterations: int, timeout: float) -> ProfilePass:
        tool = self._board.push_profiler(self._artifact.runtime)
        if self._client is not self._board.client:
            # The upload renewed the link, which ended the session with this program.
            again = self._board.load(self._artifact, timeout=timeout, instructions=self.wants_instructions)
            self._client, self.loaded = self._board.client, again.loaded
        given = self._narrowing.narrow_inputs(inputs)
        made = self._client.profile(
            self.loaded.program_id, given, tool=tool, warmup=warmup, iterations=iterations, timeout=timeout
        )
        repetition = made.repetition and made.repetition.convert(self._narrowing.widen_outputs)
        return replace(made, repetition=repetition)

    def _describe_cache(self, steps: StepsPlan | None) -> list[str]:
        """Return a note if the cache starts with a hidden entry. The board's agent applies the same rule."""
        is_iree_gpu = self._artifact.runtime == "iree" and rejects_empty_tensors(self.loaded.device)
        if steps is None or not is_iree_gpu or not steps.can_hide_entry(self.loaded.inputs):
            return []
        return ["the cache starts with an entry that the mask hides, because IREE rejects empty tensors on Vulkan"]

    def _widen_handle(self, loaded: ProgramHandle) -> ProgramHandle:
        """Return the handle with the model's dtypes, which hil converts to the program's dtypes."""
        inputs, outputs = self._narrowing.widen_specs(loaded.inputs, loaded.outputs)
        return replace(loaded, inputs=inputs, outputs=outputs)

    def _widen_outputs(self, invocation: Invocation, steps: StepsPlan | None) -> Invocation:
        """Return the call with outputs in the model's dtypes."""

        def widen(outputs: Mapping[str, Array]) -> dict[str, Array]:
            return self._narrowing.widen_outputs(outputs, steps)

        repetition = invocation.repetition and invocation.repetition.convert(widen)
        return replace(invocation, outputs=widen(invocation.outputs), repetition=repetition)

    def _complete_inputs(self, given: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the inputs, completed with the carried inputs of the program that are missing in ``given``.

        Raises:
            UsageError: The inputs match neither the program nor the model.
            RunFailed: The inputs match the model but not the program on the board.
        """
        inputs = {**given, **{name: value for name, value in self._artifact.carried.items() if name not in given}}
        try:
            check_inputs(self.loaded.function, self.loaded.inputs, inputs)
        except errors.UsageError as error:
            known = self._artifact.inputs
            if known is None or not fits(known, inputs):
                raise
            what = f"the program on the board and the model have different inputs: {error.message}"
            raise errors.RunFailed(what, stage="run", board=self._board.name) from error
        return inputs

    def log(self) -> list[str]:
        """Return the stderr lines of the worker."""
        return self._board.logs(self.loaded.program_id)

    def unload(self) -> None:
        """End the worker. Errors of the board are ignored: a lost board has no worker."""
        self._board.finish_log(self.loaded.program_id)
        with contextlib.suppress(errors.BoardError):
            self._client.unload(self.loaded.program_id)

    def __enter__(self) -> LoadedProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.unload()
