"""Measure suspects again on simulated boards. The fault ``pace`` gives a known effect with real noise."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import common
from hil.controller.analysis.bench.stats import Batch, round_log_ratios
from hil.controller.analysis.detection.sequential import ChangeVerdict, SequentialDecision, pool_noise
from hil.controller.analysis.detection.suspects import SeriesPoint, find_suspects
from hil.controller.devices.agent_client.client import AgentClient

PACE_S = 0.005
HISTORY = 30
_BATCH = 10
_ROUNDS_MOST = 60
_PROGRAM = """
func.func @main(%x: tensor<16xf32>) -> tensor<16xf32> {
  %y = arith.addf %x, %x : tensor<16xf32>
  return %y : tensor<16xf32>
}
"""


@contextlib.contextmanager
def open_board(pace_s: float) -> Iterator[tuple[AgentClient, Path]]:
    """Start a simulated board on which each iteration takes ``pace_s`` seconds. Yield its client and the program."""
    fault = ["--fault", f"pace:seconds={pace_s}"]
    with common.session("hil.sim", fault) as (client, _, folder):
        (folder / "add.mlir").write_text(_PROGRAM)
        yield client, common.compile_mlir(folder / "add.mlir")


@contextlib.contextmanager
def _load(client: AgentClient, path: Path, label: str, number: int) -> Iterator[Callable[[], Batch]]:
    """Load the program for a round. Yield a function that measures a batch."""
    handle = common.load(client, path, device="local-sync")
    inputs = {handle.inputs[0].name: np.ones(16, np.float32)}

    def measure() -> Batch:
        done = client.invoke(handle.program_id, inputs, warmup=1, iterations=_BATCH)
        stamps = np.array(done.iterations_ns, np.int64)
        return Batch(label, number, 0, stamps[:, 0], stamps[:, 1] - stamps[:, 0])

    yield measure
    client.unload(handle.program_id)


@dataclass
class BoardGate:
    """Runs and rounds of an old and a new program, each on a separate board on this machine."""

    old: tuple[AgentClient, Path]
    new: tuple[AgentClient, Path]
    order: random.Random
    measured: list[list[float]] = field(default_factory=list)
    rounds: int = 0
    decisions: int = 0

    def measure_run(self, side: tuple[AgentClient, Path]) -> SeriesPoint:
        """Measure a run for the history: the undisturbed time of a few iterations, as in a round."""
        with _load(*side, "A", 0) as measure:
            times = np.concatenate([measure().duration_ns for _ in range(2)])
            return SeriesPoint(float(np.quantile(times, 0.05, method="lower")))

    def measure_round(self) -> float:
        """Return the log ratio of a round, in the order A B B A or B A A B."""
        with _load(*self.old, "A", 0) as old, _load(*self.new, "B", 0) as new:
            first, second = self.order.sample((old, new), 2)
            return float(round_log_ratios([first(), second(), second(), first()])[0])

    def judge_run(self, history: list[SeriesPoint]) -> ChangeVerdict:
        """Add a run of the new program to the history, and measure it again if it is suspect."""
        suspects = find_suspects([*history, self.measure_run(self.new)])
        if not any(suspect.kind == "step" for suspect in suspects):
            return "no change"
        return self.measure_again()

    def measure_again(self) -> ChangeVerdict:
        """Measure rounds until the verdict is clear."""
        decision = SequentialDecision(direction="slower", noise=pool_noise(self.measured[-10:]))
        while decision.verdict == "undecided" and len(decision.log_ratios) < _ROUNDS_MOST:
            decision.add(self.measure_round())
        self.measured.append(decision.log_ratios)
        self.rounds += len(decision.log_ratios)
        self.decisions += 1
        return decision.verdict


def measure_board(step: float, repeats: int) -> tuple[int, BoardGate]:
    """Return how often the verdict after one run is right for a step of this size, and the gate."""
    with open_board(PACE_S) as old, open_board(PACE_S * (1 + step)) as new:
        gate = BoardGate(old, new, random.Random(1))
        history = [gate.measure_run(old) for _ in range(HISTORY)]
        verdicts = [gate.judge_run(history) for _ in range(repeats)]
    return verdicts.count("regressed" if step else "no change"), gate
