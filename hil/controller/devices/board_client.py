"""Interface for a board's calls, their arguments and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hil.core import clock
from hil.core.instructions import InstructionCounts
from hil.core.repetition import Repetition
from hil.core.results import Artifact, Placement
from hil.core.steps import StepCall, StepsPlan
from hil.core.tensors import Array, TensorSpec
from hil.core.timeline import Span
from hil.errors import BoardError, BoardUnfit


@dataclass(frozen=True)
class AgentEndpoint:
    """Address and credentials of an agent."""

    address: str  # ``unix:PATH`` or ``HOST:PORT``
    token: str = ""  # sent to the agent; "" for none
    # PEM files ca, cert and key: with ``ca`` the connection uses TLS, with all three mutual TLS.
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    # Whether hil started this simulator with faults. If no program can trigger a fault, the agent reports a usage
    # error, which hil passes on. Usage errors of other agents are not passed on.
    faults: bool = False


@dataclass(frozen=True)
class ProfilePass:
    """Result of a profiling pass."""

    # Name -> content, as the runtime wrote it: ``profile.ireeprof`` for IREE, ``onnxruntime.json`` for ONNX Runtime.
    files: Mapping[str, memoryview]
    # Pairs (time in the files, board clock) in nanoseconds, taken before and after the runs. File time is
    # CLOCK_MONOTONIC for IREE. For ONNX Runtime it is ``ts``, counted from the file's start. Empty if the board cannot
    # report the pairs. File times then cannot be converted to another clock.
    clock_pairs: tuple[tuple[int, int], ...]
    host: Span  # from sending to the last byte received, host clock
    # From the last input byte to the files being ready, board clock. None without an agent.
    board: Span | None
    warmup: int
    iterations: int
    repetition: Repetition | None = None  # comparison of the runs; None if the profiler returns no outputs


@dataclass(frozen=True)
class Invocation:
    """Result of one call. Timestamps use the board's clock; durations in seconds use the host's clock."""

    outputs: dict[str, Array]
    iterations_ns: tuple[tuple[int, int], ...]
    warmup_ns: int
    host_ns: tuple[int, int]  # from sending to the last byte received, host clock
    # From the last input byte to the outputs being ready to send; None if the board reports no times.
    board_ns: tuple[int, int] | None = None
    peak_memory_bytes: int = 0
    # CPU time of all worker threads during the iterations; 0 if unknown.
    cpu_ns: int = 0
    fetch_s: float = 0.0  # time to fetch the outputs
    state: dict[str, Any] = field(default_factory=dict)  # changing fields of Describe, if requested
    placement: Placement | None = (
        None  # devices of the program's parts; None if not reported, or unchanged since the last report
    )
    repetition: Repetition | None = None  # comparison of all runs of the call; None if the board did not compare them
    unchecked: str = ""  # why the board did not compare the runs; "" for an agent that never compares runs
    notes: tuple[str, ...] = ()  # limitations and deviations of the board, one sentence each
    # Provenance that only some boards report. A board without an agent reports ``command``: the command ``line``, the
    # time ``wall_s`` of each command on the host's clock, the reason ``why`` the board has no agent, and
    # ``not_measured``.
    provenance: Mapping[str, Any] = field(default_factory=dict)
    calls: tuple[StepCall, ...] = ()  # calls of a stepped program in all iterations
    instructions: InstructionCounts | None = None  # if requested by load_program; None for an older agent
    # Time on the link: from sending the inputs to the response, without the time on the board and for the outputs; 0 if
    # unknown.
    link_ns: int = 0
    peak_device_memory_bytes: int = 0  # memory of the device, from its runtime or driver; 0 if unknown


@dataclass(frozen=True)
class ProgramHandle:
    """Program loaded on the board."""

    program_id: str
    function: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    load_ns: int = 0  # loading time on the board's clock; 0 if unknown
    worker_pid: int = 0  # worker process of the program; 0 if it has none
    device: str = ""  # device of the program; "" for the runtime's default
    version: str = ""  # runtime version, if it differs from Describe; else ""
    how: str = ""  # how the board runs the program, for the source field of results; "" in a worker
    is_resident: bool = True  # whether the program stays loaded between runs; False: every run loads it


class BoardClient(Protocol):
    """Calls of a board: over gRPC to an agent, or as shell commands on a board without an agent.

    Every call raises BoardError or a subclass if the board or the link fails. If a call raises BoardLost or
    SessionEnded, the program may have run. Without an agent, calls that need an agent do nothing.
    """

    payload_bytes_sent: int
    counts_instructions: bool = False  # whether load_program takes ``instructions``, which counts in all runs

    def info(self) -> dict[str, Any]:
        """Return the board's description: DescribeReply of hil.v1 as JSON.

        ``not_measured`` lists missing measurements.
        """

    def state(self) -> dict[str, Any]:
        """Return the fields of :meth:`info` that may change while the board runs. Call :meth:`info` first."""
        return {}

    def notice(self) -> str:
        """Return a note for the user on what the board cannot measure, or "". Call :meth:`info` first."""
        return ""

    def find_command(self) -> str:
        """Return the path of the program on the board that runs models, or "" if hil provides it.

        Raises BoardUnfit if the board does not have the program.
        """
        return ""

    @property
    def has_session(self) -> bool:
        """Whether this client is known to hold the board."""
        return False

    def open_session(self, purpose: str, *, fence: int, wait_s: float, on_wait: Callable[[str], None]) -> int:
        """Reserve the board unless this client already holds the board. Return the session's fence.

        Without an agent, there is no session: each run waits until the board is free.
        """
        return 0

    def close_session(self) -> None:
        """Release the board."""

    def pings(self, count: int = 8) -> list[clock.Ping]:
        """Ping the board's clock. Return an empty list if the clock is not available."""
        return []

    def counters(self, period_s: float) -> Any:
        """Return a stream of the board's counters: a ``pb.CounterSample`` per period, until cancelled."""
        raise BoardError("reading counters requires an agent on the board")

    def open_power(self, kind: str, path: str, channel: int, rate_hz: float) -> tuple[Any, Any]:
        """Return a stream of ``pb.PowerSamples`` of a sensor on the board, until cancelled, and the first message.

        Raises BoardUnfit if the sensor is missing or unreadable.
        """
        raise BoardUnfit("reading a meter requires an agent on the board")

    def tools(self) -> dict[str, Path]:
        """Return the files that every program needs on the board: digest -> file on the host."""
        return {}

    def missing(self, files: Mapping[str, Path], /) -> dict[str, int]:
        """Return the digests of the missing files, each with the number of bytes that the board already has."""

    def put(self, blobs: Mapping[str, tuple[Path, int]], progress: Callable[[int], None] | None = None) -> None:
        """Send files: digest -> (file on the host, offset to resume at).

        Raises LoadFailed if the board is out of space.
        """

    def load_program(self, artifact: Artifact, *, device: str, timeout: float) -> ProgramHandle:
        """Load a program that was sent. Raises LoadFailed, RunCrashed or StageTimeout."""

    def unload(self, program_id: str) -> None:
        """Unload a program."""

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
        """Run a program and fetch the last outputs.

        Args:
            steps: Run the stepped form of the program (:class:`hil.core.stepped_program.SteppedProgram`).
            state: Whether to return the changing fields of Describe.
            most_bytes: Maximum total size of the outputs; None if unknown.

        Raises:
            UsageError: The program does not take these inputs.
            LoadFailed, RunFailed, RunCrashed, StageTimeout: The run failed on the board.
        """

    def profile(
        self, program_id: str, inputs: Mapping[str, Array], *, tool: str, warmup: int, iterations: int, timeout: float
    ) -> ProfilePass:
        """Run a program under the runtime's profiler, in a separate pass without outputs.

        Raises the errors of :meth:`invoke`.

        ``tool`` is the digest of the tool that the runtime lacks (``profile_tool`` in Describe); "" if the runtime
        lacks no tool.
        """

    def logs(self, program_id: str = "") -> list[str]:
        """Return the stderr lines of programs so far."""

    def follow_logs(self) -> Iterable[Any]:
        """Return a live stream of the programs' stderr: a ``pb.LogLine`` per line, until cancelled.

        Without an agent, lines arrive only after a program has ended.
        """
        return ()

    def close(self) -> None:
        """Close the session and the connection."""
