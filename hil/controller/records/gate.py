"""Records of a gate: gate.json of `hil gate`."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta

from hil.controller.records.base import Count, Record, Timestamp, note
from hil.controller.records.bench import Interval
from hil.controller.records.history import SeriesKey
from hil.controller.records.outputs import Origin

GateVerdictName = Literal[
    "broken", "regressed", "toolchain", "undecided", "board fault", "improved", "no change", "new"
]
# Most serious first.
GATE_VERDICTS: tuple[GateVerdictName, ...] = get_args(GateVerdictName)


class GateSide(Record, kw_only=True):
    """A stored measurement that a verdict is about."""

    commit: Annotated[str, note("commit, or empty")]
    run: Annotated[str, note("ID of the run, bench or suite run")]
    outcome: str
    reason: str
    p50_ns: Annotated[float | None, note("stored median time of an iteration; null without times")]
    compiler: str
    runtime: Annotated[str, note("name and version")]
    program: Annotated[str, note("digest of the program, or empty")]
    again: Annotated[str, note("outcome when the gate ran the program again; empty if it did not")] = ""
    again_p50_ns: Annotated[float | None, note("median of the new measurement; null without one")] = None


class GateVerdict(Record, kw_only=True):
    """Verdict on a series."""

    series: Annotated[str, note("ID of the series in the history")]
    key: SeriesKey
    verdict: GateVerdictName
    reason: Annotated[str, note("cause of the verdict in one line")]
    suspect: Annotated[
        Literal["", "step", "drift", "outcome"], note("what the history showed; empty if nothing was suspect")
    ]
    new: GateSide
    old: Annotated[GateSide | None, note("the baseline's measurement; null without a baseline")]
    ratio: Annotated[float | None, note("new time divided by old time, measured in turns; null if not measured")] = None
    interval: Annotated[Interval | None, note("of the ratio")] = None
    rounds: Annotated[Count, note("rounds in which both programs ran in turns")] = 0
    rounds_needed: Annotated[Count, note("estimated further rounds until a verdict; 0 if decided")] = 0
    board_s: Annotated[float, note("time that the gate used the board, in seconds", ge=0)] = 0.0
    changes: Annotated[list[str], note("differences between the tools and boards of both measurements")] = []


class GateRecord(Record, kw_only=True):
    """Record of a gate."""

    schema: Literal[1]
    id: str
    folder: Annotated[str, note("directory of gate.json and rounds.csv")]
    created: Timestamp
    origin: Origin | None = None
    finished: Annotated[bool, note("false if the gate still runs, was killed, or was interrupted with Ctrl-C")]
    history: Annotated[str, note("directory of the history")]
    baseline: Annotated[str, note("branch of the baseline")]
    commit: Annotated[str, note("judged commit; empty for the newest measurement of each series")]
    min_effect: Annotated[float, note("the smallest relative change that must be found")]
    budget_s: Annotated[float, note("maximum board time, in seconds"), Meta(ge=0)]
    fail_on: Annotated[list[str], note("verdicts with exit code 1")]
    unmeasured: Annotated[list[SeriesKey], note("series of the baseline that this commit did not measure")]
    verdicts: Annotated[list[GateVerdict], note("most serious first")]
    exit_code: int
