"""Boards that are objects in this process. Their behaviour is scripted, so a test of the runner takes milliseconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_resolver import choose
from hil.controller.devices.measuring.measure_commands import prepare_board
from hil.controller.pipeline.boards import board_pool
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.options import Options
from hil.core.board_config import MeasureCommands
from hil.core.meter_config import MeterConfig
from hil.core.results import Artifact, RunResult
from hil.core.steps import StepsPlan
from hil.core.tensors import Array, TensorSpec
from hil.errors import BoardLost
from support.step_programs import run_summing

X = TensorSpec("x", "float32", (2,))
Y = TensorSpec("y", "float32", (2,))


@dataclass
class FakeBoard:
    """Board that doubles its input, unless its script contains an event for the call.

    Attributes:
        name: name of the board.
        script: (stage, name of the case's program) -> error to raise, once.
        did: all events, in order: ``push a``, ``load a``, ``run a``, ``unload a``, ``close``.
        counts: number of timed and of untimed iterations of every run.
    """

    name: str
    config: Any
    script: dict[tuple[str, str], BaseException] = field(default_factory=dict)
    did: list[str] = field(default_factory=list)
    counts: list[tuple[int, int]] = field(default_factory=list)
    shell: Any = None
    target: str = ""
    measure: MeasureCommands = field(default_factory=MeasureCommands)
    meter: MeterConfig = field(default_factory=MeterConfig)
    config_path: Path = Path()
    info: dict[str, Any] = field(
        default_factory=lambda: {
            "machine": {},
            "simulated": ["cpu"],
            "runtimes": [{"name": "onnxruntime", "version": "1", "devices": ["cpu"]}],
        }
    )
    client: Any = field(default_factory=lambda: SimpleNamespace(find_command=lambda: ""))
    closed: bool = False
    changes: deque[str] = field(default_factory=deque)
    targets: list[str] = field(default_factory=list)  # runtimes whose targets were wanted
    prepared: int = 0  # how often it was to be prepared for a measurement

    def prepare(self) -> None:
        """Count, and run the commands before and after a measurement at once."""
        self.prepared += 1
        with prepare_board(self, print):
            pass

    def add_target(self, runtime: str) -> None:
        """Remember the runtime: the config has all targets."""
        self.targets.append(runtime)

    def refresh(self) -> None:
        """Read nothing: the state never changes."""

    def watch_counters(self, period_s: float) -> FakeWatch:
        """Return a watch without samples, as for a board without counters."""
        return FakeWatch(samples=[], problem="no counters")

    def note(self, stage: str, program: str) -> None:
        """Record an event, and raise the error that the script defines for it."""
        self.did.append(f"{stage} {program}")
        if error := self.script.pop((stage, program), None):
            raise error

    def take(self) -> None:
        """Take the board. It is always free."""

    def push(self, artifact: Artifact, progress: Callable[[int, int], None] = lambda sent, total: None) -> int:
        """Upload 8 bytes."""
        self.note("push", artifact.function)
        progress(8, 8)
        return 8

    def load(self, artifact: Artifact, *, timeout: float = 60.0, **_: Any) -> FakeProgram:
        """Load a program."""
        self.note("load", artifact.function)
        return FakeProgram(self, artifact)

    def close(self) -> None:
        """Release the board. A second call has no effect."""
        if not self.closed:
            self.did.append("close")
        self.closed = True


class FakeWatch(SimpleNamespace):
    """Counters of a fake board during a block."""

    def __enter__(self) -> FakeWatch:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass
class FakeProgram:
    """Loaded program."""

    board: FakeBoard
    artifact: Artifact
    factor: ClassVar[int] = 2  # Factor for the input. Other factors give a wrong output.

    @property
    def loaded(self) -> SimpleNamespace:
        """Return the signature of the program."""
        return SimpleNamespace(function=self.artifact.function, inputs=(X,), outputs=(Y,))

    def run(
        self,
        inputs: Mapping[str, Array],
        *,
        iterations: int = 1,
        warmup: int = 0,
        steps: StepsPlan | None = None,
        names: Sequence[str] = ("y",),
        **_: Any,
    ) -> tuple[RunResult, SimpleNamespace]:
        """Double the input, or generate tokens like :class:`SummingProgram`. Each iteration takes 5 ns."""
        if steps is None or steps.steps:  # Not the run of all tokens as a single prompt.
            self.board.note("run", self.artifact.function)
            self.board.counts.append((iterations, warmup))
        arrays = [inputs["x"] * self.factor] if steps is None else run_summing(steps, inputs)
        told = {"board": self.board.name, "placement": None}
        times = tuple((10 * number, 10 * number + 5) for number in range(iterations))
        outputs = dict(zip(names or ("y",), arrays, strict=True))
        result = RunResult(self.board.name, outputs, times, provenance=told, cold=not warmup)
        return result, SimpleNamespace(
            warmup_ns=0, fetch_s=0.0, calls=(), link_ns=0, iterations_ns=times, board_ns=None, cpu_ns=0
        )

    def log(self) -> list[str]:
        """Return a log of one line."""
        return ["ran"]

    def unload(self) -> None:
        """Unload the program."""
        self.board.did.append(f"unload {self.artifact.function}")


class FakeBoards:
    """Replacement for :func:`open_board`. Each call opens a new board with the script of its address.

    Attributes:
        opened: all opened boards, in order.
        scripts: address -> events of its boards. Each event occurs only once.
        refuse: address -> errors of opening the board, one per call.
    """

    def __init__(self) -> None:
        self.opened: list[FakeBoard] = []
        self.scripts: dict[str, dict[tuple[str, str], BaseException]] = {}
        self.refuse: dict[str, list[BaseException]] = {}

    def __call__(self, choice: BoardChoice, **_: Any) -> FakeBoard:
        """Open a board."""
        if errors := self.refuse.get(choice.name):
            raise errors.pop(0)
        board = FakeBoard(choice.name, choice.config, self.scripts.setdefault(choice.name, {}))
        self.opened.append(board)
        return board

    @property
    def did(self) -> list[str]:
        """Return the events of all boards, in the order in which they were opened."""
        return [one for board in self.opened for one in board.did]


@pytest.fixture
def fake_boards(monkeypatch: pytest.MonkeyPatch) -> FakeBoards:
    """Replace real boards."""
    boards = FakeBoards()
    monkeypatch.setattr(board_pool, "open_board", boards)
    # hil finds a lost board again at once, if the script allows it.
    monkeypatch.setattr(board_pool, "reconnect", lambda lost, error, reopen: lost.close())
    return boards


def fake_case(name: str, **options: Any) -> Case:
    """Return a case with a program and expected outputs, so that no compilation and no reference is necessary."""
    artifact = Artifact("onnxruntime", "p", {}, {"p": f"blake3:{name}"}, name, "none", inputs=(X,), outputs=(Y,))
    x = np.array([1, 2], np.float32)
    reference = RunResult("expected", {"y": x * 2})
    path = SimpleNamespace(stem=name)
    return Case(
        name,
        path,  # type: ignore[arg-type]
        Options(runtime="onnxruntime", **options),
        SimpleNamespace(),  # type: ignore[arg-type]
        artifact=artifact,
        inputs={"x": x},
        references=(reference,),
    )


def fake_choice(name: str = "a") -> BoardChoice:
    """Return a board with an address and an ordinary config."""
    choice = choose(f"unix:/fake/{name}")
    return replace(choice, address=f"unix:/fake/{name}")


def lost(message: str = "the link broke") -> BoardLost:
    """Return the error of a lost board."""
    return BoardLost(message)
