"""Measure the detection of slower programs, and compare hil with Otava, asv and a t-test.

Series are generated: 100 runs, then a step; 520 runs without a change; 520 runs with a drift of 2.3 %. hil's detection
checks each new run. If a run is suspect, hil measures again: each round measures the old and the new program with the
noise of the series. The rivals see the same runs, but cannot measure again. In series of 520 runs, the gate judges each
run, and Otava and asv judge the complete series once. The t-test compares each new run with the 50 previous runs, at a
level of 0.1 %.

In the last part, simulated boards run a program with the fault ``pace``, so that the effect is known and the noise is
real.

The seeds differ from those used to tune the detection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks import common
from benchmarks.gate_board import measure_board
from benchmarks.gate_series import Gate, count_false_alarms, make_noise
from hil.controller.analysis.bench.stats import compare_samples

SEED = 2026
PACKAGES = ("apache-otava==0.8.0", "asv==0.6.6")
HISTORY, WARMED, LENGTH = 80, 20, 520
AFTER = (1, 3, 10)
DRIFT = 0.023
# Suspects in a series of 520 runs without a change, as measured.
SUSPECTS = 300
T_LEVEL, T_RUNS = 0.999, 50
TARGET = ">= 0.95"
# Noise kind, noise standard deviation, step, smallest effect.
STEPS = (
    ("white", 0.01, 0.02, 0.02),
    ("white", 0.01, 0.05, 0.02),
    ("white", 0.01, 0.01, 0.01),
    ("white", 0.02, 0.02, 0.02),
    ("white", 0.02, 0.05, 0.02),
    ("autocorrelated", 0.01, 0.02, 0.02),
    ("outliers", 0.01, 0.02, 0.02),
    ("bimodal", 0.01, 0.02, 0.02),
)
FLAT = (("white", 0.01), ("white", 0.02), ("autocorrelated", 0.01), ("outliers", 0.01), ("bimodal", 0.01))

# Function that returns tool -> indices at which the tool finds a slower level, for tools other than hil.
FindRivals = Callable[[Sequence[float]], dict[str, list[int]]]


@dataclass
class Tally:
    """Counts of a case for each tool."""

    repeats: int = 0
    found: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    suspects: int = 0
    undecided: int = 0

    def add(self, tool: str, found: bool) -> None:
        """Count a series."""
        self.found[tool] = self.found.get(tool, 0) + found

    def build_rows(self, case: str, bar: str = "") -> list[common.Row]:
        """Return a row for each rival, with shares in percent. The limit applies to hil's share."""
        shares = {tool: 100 * count / self.repeats for tool, count in self.found.items()}
        mine = shares.pop("hil")
        rows = [common.Row(case, mine, "%", "all series", 100.0, mine / 100, bar)] if bar else []
        return rows + [common.Row(case, mine, "%", rival, share) for rival, share in shares.items()]


def find_with_t_test(values: Sequence[float]) -> list[int]:
    """Return the index of the newest run if it is slower than the previous runs."""
    logs = np.array(values)
    found = compare_samples(logs[-T_RUNS - 1 : -1], logs[-1:], min_effect=0.0, level=T_LEVEL)
    return [len(values) - 1] if found is not None and found.verdict == "slower" else []


def measure_steps(index: int, repeats: int, find_rivals: FindRivals) -> tuple[dict[int, Tally], Tally]:
    """Return the shares of steps found after some runs, and the cost of the first run with the step."""
    kind, spread, step, effect = STEPS[index]
    tallies, cost = {runs: Tally(repeats) for runs in AFTER}, Tally(repeats)
    for repeat in range(repeats):
        gate = Gate(make_noise(kind, spread, np.random.default_rng([SEED, index, repeat])), effect)
        gate.add_history([0.0] * HISTORY)
        for _ in range(WARMED):
            gate.add_run(0.0)
        before = len(gate.alarms), gate.decisions, gate.rounds
        for runs in range(1, max(AFTER) + 1):
            gate.add_run(math.log1p(step))
            if runs == 1:
                cost.suspects += gate.decisions - before[1]
                cost.rounds += gate.rounds - before[2]
            if runs in AFTER:
                tallies[runs].add("hil", len(gate.alarms) > before[0])
                rivals = find_rivals([point.value or 0.0 for point in gate.points])
                for rival, found in rivals.items():
                    tallies[runs].add(rival, any(place >= HISTORY + WARMED - 5 for place in found))
    return tallies, cost


def measure_long(kind: str, spread: float, drift: float, repeats: int, find_rivals: FindRivals) -> Tally:
    """Return the shares of series with an alarm, and the board time spent."""
    tally = Tally(repeats)
    for repeat in range(repeats):
        seed = [SEED, len(STEPS), sum(map(ord, kind)), round(spread * 1e4), round(drift * 1e4), repeat]
        gate = Gate(make_noise(kind, spread, np.random.default_rng(seed)), 0.02)
        for run in range(LENGTH):
            gate.add_run(math.log1p(drift) * run / (LENGTH - 1))
        tally.add("hil", bool(gate.alarms))
        values = [point.value or 0.0 for point in gate.points]
        rivals = find_rivals(values)
        rivals["t-test"] = [run for run in range(T_RUNS, LENGTH) if find_with_t_test(values[: run + 1])]
        for rival, found in rivals.items():
            tally.add(rival, bool(found))
        tally.rounds += gate.rounds
        tally.suspects += gate.decisions
        tally.undecided += gate.undecided
    return tally


def measure_generated(steps: int, series: int, find_rivals: FindRivals, notes: list[str]) -> list[common.Row]:
    """Return the rows for generated series. Add the board time to the notes."""
    rows = []
    for index, (kind, spread, step, effect) in enumerate(STEPS if steps else ()):
        tallies, cost = measure_steps(index, steps, find_rivals)
        case = f"{step:.0%} step, {spread:.0%} noise, {kind}"
        for runs, tally in tallies.items():
            main = index == 0 and runs == 1
            rows += tally.build_rows(f"{case}: found after {runs}", TARGET if main else "")
        notes.append(
            f"{case}, smallest effect {effect:.0%}: {cost.suspects} of {steps} suspect after 1 run, "
            f"{cost.rounds / max(cost.suspects, 1):.1f} rounds each"
        )
    for kind, spread, drift in ([*((*flat, 0.0) for flat in FLAT), ("white", 0.01, DRIFT)]) if series else ():
        repeats = series if (kind, spread) == ("white", 0.01) else max(series // 4, 1)
        tally = measure_long(kind, spread, drift, repeats, find_rivals)
        case = f"{f'{drift:.1%} drift' if drift else 'no change'} in {LENGTH} runs, {spread:.0%} noise, {kind}"
        rows += tally.build_rows(f"{case}: alarm", TARGET if drift else "")
        notes.append(
            f"{case}: {tally.suspects / repeats:.0f} suspects and {tally.rounds / repeats:.0f} rounds per series "
            f"({2 * tally.rounds / repeats / LENGTH:.1f} extra measurements per run), "
            f"{tally.undecided} of {tally.suspects} suspects undecided, {repeats} series"
        )
    return rows


def measure_false_alarms(decisions: int, notes: list[str]) -> list[common.Row]:
    """Return rows with the false alarms per series, computed from single decisions.

    Whole series have too few suspects to measure a rare event.
    """
    rows = []
    for number, (kind, spread) in enumerate(FLAT[:1] + FLAT[2:4] if decisions else ()):
        noise = make_noise(kind, spread, np.random.default_rng([SEED, 99, number]))
        alarms = count_false_alarms(noise, 0.02, decisions)
        # Upper bound at 95 % confidence: the rule of three without alarms, otherwise about two standard deviations
        # above.
        most = (alarms + (3.0 if alarms == 0 else 2 * math.sqrt(alarms) + 2)) / decisions * SUSPECTS
        case = f"series with a false alarm, {spread:.0%} noise, {kind}: at most"
        rows.append(common.Row(case, 100 * most, "%", "the bar", 1.0, 100 * most, "<= 1.0"))
        notes.append(f"{case}: {alarms} false alarms in {decisions} decisions, {SUSPECTS} suspects per series")
    return rows


def main() -> None:
    """Measure and print."""
    asked = common.options(__doc__, steps=200, series=40, boards=20, decisions=100_000)
    notes = [f"{asked.steps} series per step"]
    with common.rival_peer("Otava and asv", "gate", PACKAGES, ["gate_peer.py"], notes) as peer:

        def find_rivals(values: Sequence[float]) -> dict[str, list[int]]:
            found: dict[str, list[int]] = dict(peer(series=list(values))) if peer else {}
            return {**found, "t-test": find_with_t_test(values)}

        rows = measure_generated(asked.steps, asked.series, find_rivals, notes)
    rows += measure_false_alarms(asked.decisions, notes)
    for step in (0.0, 0.02, 0.05) if asked.boards else ():
        right, gate = measure_board(step, asked.boards)
        share, case = right / asked.boards, f"{step:.0%} step on simulated boards: right after 1 run"
        rows.append(common.Row(case, 100 * share, "%", "all runs", 100.0, share, TARGET))
        noise = 100 * float(np.std([value for rounds in gate.measured for value in rounds] or [0.0]))
        notes.append(
            f"{case}: {gate.decisions} of {asked.boards} suspect, {gate.rounds / max(gate.decisions, 1):.1f} rounds "
            f"each, noise of a round {noise:.2f} %"
        )
    common.show("gate", rows, notes, as_json=asked.json)


if __name__ == "__main__":
    main()
