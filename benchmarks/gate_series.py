"""Generate series of runs, and simulate a gate that measures suspects again in rounds with the same noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hil.controller.analysis.detection.sequential import SequentialDecision, pool_noise
from hil.controller.analysis.detection.suspects import SeriesPoint, Suspect, find_suspects

# Maximum number of rounds for a decision.
ROUNDS_MOST = 200
# The noise in rounds is pooled from this many decisions.
_NOISE_DECISIONS = 10

# Function that returns the next measurement's noise as a logarithm.
Noise = Callable[[], float]


def make_noise(kind: str, spread: float, rng: np.random.Generator) -> Noise:
    """Return a source of noise with this standard deviation. The noise is logarithmic.

    - ``white``: independent and normal.
    - ``autocorrelated``: contains 0.7 times the noise of the previous measurement.
    - ``outliers``: white, but 5 % of the measurements take 5 to 50 % longer.
    - ``bimodal``: white, but half of the measurements take 5 % longer, as with a different memory layout.
    """
    last = 0.0

    def next_noise() -> float:
        nonlocal last
        fresh = float(rng.normal())
        if kind == "autocorrelated":
            fresh = last = 0.7 * last + math.sqrt(1 - 0.7**2) * fresh
        noise = spread * fresh
        if kind == "outliers" and rng.random() < 0.05:
            noise += math.log1p(float(rng.uniform(0.05, 0.5)))
        if kind == "bimodal" and rng.random() < 0.5:
            noise += math.log1p(0.05)
        return noise

    return next_noise


def draw_series(effects: Sequence[float], noise: Noise) -> list[float]:
    """Return a time for each run. An effect is the logarithm of the program's true time."""
    return [math.exp(effect + noise()) for effect in effects]


@dataclass
class Gate:
    """Gate for the runs of a generated board, with its alarms and costs."""

    noise: Noise
    min_effect: float
    effects: list[float] = field(default_factory=list)
    points: list[SeriesPoint] = field(default_factory=list)
    alarms: list[tuple[int, int]] = field(default_factory=list)  # (newest run, baseline)
    decisions: int = 0
    undecided: int = 0
    rounds: int = 0
    order: random.Random = field(default_factory=lambda: random.Random(1))
    _good: int = 0
    _drift_checked: int | None = None
    _measured: list[list[float]] = field(default_factory=list)

    def add_history(self, effects: Sequence[float]) -> None:
        """Add runs without measuring suspects."""
        self.effects += effects
        self.points += [SeriesPoint(value) for value in draw_series(effects, self.noise)]
        self._good = len(self.points) - 1

    def add_run(self, effect: float) -> None:
        """Add a run, and measure suspects again. After an alarm, the slower program becomes the new normal."""
        self.effects.append(effect)
        self.points.append(SeriesPoint(math.exp(effect + self.noise())))
        newest = len(self.points) - 1
        # To save time, drift is tested only every 26 runs.
        if self._drift_checked is None:
            self._drift_checked = newest
        suspects = find_suspects(
            self.points, min_effect=self.min_effect, good=self._good, drift_checked=self._drift_checked
        )
        if newest >= self._drift_checked + 26:
            self._drift_checked = newest
        for suspect in suspects:
            verdict = self.measure(suspect)
            if verdict == "regressed":
                self.alarms.append((newest, suspect.baseline))
            if verdict != "undecided" and suspect.kind == "step":
                self._good = newest

    def measure(self, suspect: Suspect) -> str:
        """Measure rounds until the verdict is clear."""
        direction = "slower" if suspect.direction == "slower" else "faster"
        decision = SequentialDecision(
            self.min_effect, direction=direction, noise=pool_noise(self._measured[-_NOISE_DECISIONS:])
        )
        change = self.effects[suspect.newest] - self.effects[suspect.baseline]
        while decision.verdict == "undecided" and len(decision.log_ratios) < ROUNDS_MOST:
            first, second = self.noise(), self.noise()
            # The order is random, as in `hil bench`, because a fixed order correlates the rounds.
            is_new_first = self.order.random() < 0.5
            decision.add(change + (first - second if is_new_first else second - first))
        self.decisions += 1
        self.undecided += decision.verdict == "undecided"
        self.rounds += len(decision.log_ratios)
        self._measured.append(decision.log_ratios)
        return decision.verdict


def count_false_alarms(noise: Noise, min_effect: float, decisions: int) -> int:
    """Return how many decisions about an unchanged program end with "regressed"."""
    gate = Gate(noise, min_effect, effects=[0.0, 0.0])
    suspect = Suspect("step", "slower", index=1, baseline=0, newest=1, ratio=None, p_value=None)
    return sum(gate.measure(suspect) == "regressed" for _ in range(decisions))
