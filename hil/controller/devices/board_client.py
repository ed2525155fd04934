"""A board's calls, whoever carries them out, and what they take and give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hil.core import clock
from hil.core.repetition import Repetition
from hil.core.results import Artifact, Placement
from hil.core.tensors import Array, TensorSpec
from hil.core.timeline import Span
from hil.errors import BoardError


@dataclass(frozen=True)
class Target:
    """Where an agent is reached."""

    address: str  # ``unix:PATH`` or ``HOST:PORT``
    token: str = ""  # presented to the agent, "" for none
    # ca, cert, key: PEM files; with ``ca`` the connection is TLS, with all three mutual TLS.
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    # whether it is a simulator that was started here with faults. One that no program could meet is the user's bad
    # usage, and only the agent sees it; no other agent may say so.
    faults: bool = False


@dataclass(frozen=True)
class ProfilePass:
    """What a profiling pass brought."""

    # name -> content, as the runtime wrote it: ``profile.ireeprof`` of IREE, ``onnxruntime.json`` of ONNX Runtime.
    files: Mapping[str, memoryview]
    # (time in the files, board clock) of moments before and after the runs, in nanoseconds. Time in the files is, of
    # IREE, CLOCK_MONOTONIC; of ONNX Runtime its ``ts``, counted from where they begin. Empty where the board could not
    # tell: then nothing is known of when on any other clock it was.
    clock_pairs: tuple[tuple[int, int], ...]
    host: Span  # from sending to the last byte received, host clock
    # from the last input byte to the files being ready, board clock; None where the board has no agent to tell.
    board: Span | None
    warmup: int
    iterations: int
    repetition: Repetition | None = None  # of its runs; None where the profiler gives out no outputs


@dataclass(frozen=True)
class Invocation:
    """One call's answer. Stamps are of the board's clock, seconds of the host's."""

    outputs: dict[str, Array]
    iterations_ns: tuple[tuple[int, int], ...]
    warmup_ns: int
    host_ns: tuple[int, int]  # from sending to the last byte received, host clock
    # from the last input byte to the outputs being ready to send; None where the board tells no times.
    board_ns: tuple[int, int] | None = None
    peak_memory_bytes: int = 0
    # what the worker's threads together computed during the iterations, 0 where nothing is known of that.
    cpu_ns: int = 0
    fetch_s: float = 0.0  # for the outputs
    state: dict[str, Any] = field(default_factory=dict)  # what Describe says of what changes, where it was asked for
    placement: Placement | None = None  # where the program ran; None where the board does not tell, or has told before
    repetition: Repetition | None = None  # of all runs of the call; None where the board did not compare them
    notes: tuple[str, ...] = ()  # what the board could not do, or did otherwise, a sentence each
    # of a board without an agent: the command ``line``, ``wall_s`` of each one on the host's clock, ``why`` there is no
    # agent, and what is ``not_measured``; None of one with an agent.
    command: dict[str, Any] | None = None


@dataclass(frozen=True)
class Loaded:
    """A program that is loaded on the board."""

    program_id: str
    function: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    load_ns: int = 0  # how long loading took, by the board's clock; 0 where that is not known
    worker_pid: int = 0  # the process that has it; 0 where none does
    device: str = ""  # the device that it runs on; "" is the runtime's default
    version: str = ""  # the runtime's, where it is another than Describe says; else ""


class BoardClient(Protocol):
    """The calls that a board answers: an agent's, over gRPC, or commands in its shell where it has no agent.

    Every call raises BoardError and its kinds where the board or the link fails: BoardLost, or SessionEnded where
    somebody ended ours, and a run may have happened then. What only an agent can do is nothing here.
    """

    payload_bytes_sent: int

    def info(self) -> dict[str, Any]:
        """What the board says of itself: hil.v1's DescribeReply as JSON. ``not_measured`` lists what it lacks."""

    def open_session(self, purpose: str, *, fence: int, wait_s: float, on_wait: Callable[[str], None]) -> int:
        """Take the board, unless we have it; returns the session's fence.

        Without an agent each run waits until the board is free.
        """
        return 0

    def pings(self, count: int = 8) -> list[clock.Ping]:
        """Ping the board's clock; empty where it has none that can be asked."""
        return []

    def counters(self, period_s: float) -> Any:
        """The board's counters, a ``pb.CounterSample`` each period, until the stream is cancelled."""
        raise BoardError("it has no agent that would tell them")

    def tools(self) -> dict[str, Path]:
        """Files that running any program needs beside it: digest -> file on the host."""
        return {}

    def missing(self, files: Mapping[str, Path], /) -> dict[str, int]:
        """The files (digest -> file on the host) that the board lacks, with the bytes of each that it has already."""

    def put(self, blobs: Mapping[str, tuple[Path, int]], progress: Callable[[int], None] | None = None) -> None:
        """Send files: digest -> (file on the host, offset to go on from). Raises LoadFailed: the board has no room."""

    def load_program(self, artifact: Artifact, *, device: str, timeout: float) -> Loaded:
        """Load a program whose files were sent. Raises LoadFailed, RunCrashed or StageTimeout."""

    def unload(self, program_id: str) -> None:
        """End a program."""

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
        """Run a program and fetch the last outputs.

        Args:
            state: whether the answer is to say what Describe says of what changes.
            most_bytes: the most that the outputs can take; None where nothing is known of them.

        Raises:
            UsageError: the program does not take these inputs.
            LoadFailed, RunFailed, RunCrashed, StageTimeout: as the board says.
        """

    def profile(
        self, program_id: str, inputs: Mapping[str, Array], *, tool: str, warmup: int, iterations: int, timeout: float
    ) -> ProfilePass:
        """Run a program under its runtime's profiler: a pass of its own, whose outputs nobody gets. Raises as a run.

        ``tool`` is the digest of what the board's runtime lacks (``profile_tool`` in Describe), "" where it has it.
        """

    def logs(self, program_id: str = "") -> list[str]:
        """What programs wrote to stderr so far."""

    def follow_logs(self) -> Iterable[Any]:
        """What programs write to stderr, a ``pb.LogLine`` each, as it comes, until the stream is cancelled.

        Without an agent nothing comes before a program has ended.
        """
        return ()

    def close(self) -> None:
        """End session and connection."""
