"""Records of a gate: gate.json of `hil gate`."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta

from hil.controller.records.base import Count, Interval, Number, Record, Timestamp, note
from hil.controller.records.decisions.triage import TriageResult
from hil.controller.records.measurements.energy import EnergyComparison
from hil.controller.records.measurements.history import SeriesKey
from hil.controller.records.measurements.instructions import InstructionComparison
from hil.controller.records.outputs import Origin

GateVerdictName = Literal[
    "broken", "regressed", "toolchain", "undecided", "board fault", "improved", "no change", "new"
]
# Most serious first.
GATE_VERDICTS: tuple[GateVerdictName, ...] = get_args(GateVerdictName)
TrialOutcome = Literal["good", "bad", "skipped"]
AxisName = Literal["commit", "flag", "compiler", "driver"]


class GateSide(Record, kw_only=True):
    """A stored measurement that a verdict compares."""

    commit: Annotated[str, note("commit, or empty")]
    run: Annotated[str, note("ID of the run, bench or suite run")]
    outcome: str
    reason: str
    p50_ns: Annotated[float | None, note("stored median time of an iteration; null without times")]
    compiler: str
    runtime: Annotated[str, note("name and version")]
    program: Annotated[str, note("digest of the program, or empty")]
    again: Annotated[str, note("outcome when the gate ran the program again; empty if it did not")] = ""
    instructions: Annotated[float | None, note("stored median; null if not counted")] = None
    again_p50_ns: Annotated[float | None, note("median of the new measurement; null without one")] = None


class GateScore(Record, kw_only=True):
    """Scores of two evaluations on the board, for the samples that both contain."""

    old: Number
    new: Number
    difference: Annotated[Number, note("new score - old score")]
    interval: Annotated[Interval | None, note("of the difference, paired by sample; null if there is none")]
    samples: Count
    is_higher_better: bool
    is_share: Annotated[bool, note("true if the score 1 is 100 %")]


class GateCandidate(Record, kw_only=True):
    """A candidate of a search: a commit, a change of a compiler flag, or a version of a compiler or driver."""

    commit: Annotated[str, note("hash of the commit; empty on other axes")] = ""
    subject: Annotated[str, note("first line of the commit message; empty on other axes")] = ""
    value: Annotated[str, note("changed flag, or version of the compiler or driver; empty for a commit")] = ""

    @property
    def label(self) -> str:
        """Text that identifies the candidate on its axis."""
        return self.value or self.commit


class TriedCandidate(Record, kw_only=True):
    """A candidate that `hil gate` tested."""

    commit: Annotated[str, note("hash of the commit; empty on other axes")] = ""
    value: Annotated[str, note("changed flag, or version of the compiler or driver; empty for a commit")] = ""
    outcome: Annotated[TrialOutcome, note("`skipped` if the candidate cannot be tested, or the result is not clear")]
    reason: str
    is_board_error: Annotated[bool, note("true if the candidate was skipped because of the board")] = False
    board_s: Annotated[float, note("duration of the test without the build, in seconds", ge=0)] = 0.0

    @property
    def label(self) -> str:
        """Text that identifies the candidate on its axis."""
        return self.value or self.commit


class CandidateTrial(Record, kw_only=True):
    """Test of a candidate for a series: a line of bisect.jsonl."""

    series: Annotated[str, note("ID of the series in the history")]
    run: Annotated[str, note("run of the judged measurement")]
    axis: Annotated[AxisName, note("what the candidate is: versions on different axes may be equal")] = "commit"
    command: Annotated[str, note("digest of the command of --bisect; empty without a command")] = ""
    tried: TriedCandidate


class GateCause(Record, kw_only=True):
    """Result of `hil gate --bisect` or `--over` for a series."""

    axis: Annotated[AxisName, note("what the candidates are")] = "commit"
    good: Annotated[str, note("candidate before the searched candidates, or empty")] = ""
    commits: Annotated[Count, note("number of searched commits, or of candidates on another axis")] = 0
    candidates: Annotated[
        list[GateCandidate],
        note("the first bad candidate; several, oldest first, if skipped candidates hide it; empty if not found"),
    ] = []
    reason: Annotated[str, note("why the first bad candidate is not known; empty if it is")] = ""
    tried: Annotated[list[TriedCandidate], note("in the order of the tests")] = []


GateSuspect = Literal["", "step", "drift", "outcome", "instructions", "energy", "grade"]


class SlowerLayer(Record, kw_only=True):
    """A layer that takes more time in the new program."""

    name: Annotated[str, note("nodes of the model, or an operation of the runtime")]
    change_ns: Annotated[float, note("change of the median time per iteration")]
    is_new: Annotated[bool, note("true if only the new program has the layer")] = False


class GateVerdict(Record, kw_only=True):
    """Verdict on a series."""

    series: Annotated[str, note("ID of the series in the history")]
    key: SeriesKey
    verdict: GateVerdictName
    reason: Annotated[str, note("cause of the verdict in one line")]
    suspect: Annotated[
        GateSuspect,
        note("what the history showed; `grade`: the time is not comparable; empty if nothing was suspect"),
    ]
    new: GateSide
    old: Annotated[GateSide | None, note("the baseline's measurement; null without a baseline")]
    ratio: Annotated[float | None, note("new time divided by old time, measured in turns; null if not measured")] = None
    interval: Annotated[Interval | None, note("of the ratio")] = None
    score: Annotated[GateScore | None, note("null if the series is not an evaluation")] = None
    energy: Annotated[
        EnergyComparison | None, note("stored energies; null unless both were measured with the same kind of meter")
    ] = None
    instructions: Annotated[
        InstructionComparison | None,
        note("compared with the baseline; from a new run if the gate ran both programs; null if not counted"),
    ] = None
    rounds: Annotated[Count, note("rounds in which both programs ran in turns")] = 0
    rounds_needed: Annotated[Count, note("estimated further rounds until a verdict; 0 if decided")] = 0
    board_s: Annotated[float, note("time that the gate used the board, in seconds", ge=0)] = 0.0
    second_board: Annotated[
        str, note("board that decided, because the board of the measurement was suspect; empty otherwise")
    ] = ""
    board_problem: Annotated[str, note("why the board of the measurement was suspect; empty without second_board")] = ""
    changes: Annotated[list[str], note("differences between the tools and boards of both measurements")] = []
    slower_layers: Annotated[list[SlowerLayer], note("of a slower program, largest change first")] = []
    layers_reason: Annotated[str, note("why no slower layers are known; empty if not searched, or found")] = ""
    cause: Annotated[GateCause | None, note("null without a search")] = None
    triage: Annotated[
        TriageResult, note("result of --known: `known` and `wontfix` do not count as failures; empty without an entry")
    ] = ""


class GateRecord(Record, kw_only=True):
    """Record of a gate."""

    schema: Literal[1]
    id: str
    folder: Annotated[str, note("directory of gate.json, rounds.csv, bisect.jsonl, profiles and logs of builds")]
    created: Timestamp
    origin: Origin | None = None
    finished: Annotated[bool, note("false if the gate still runs, was killed, or was interrupted with Ctrl-C")]
    history: Annotated[str, note("directory of the history, or URL without login")]
    baseline: Annotated[str, note("branch of the baseline")]
    commit: Annotated[str, note("judged commit; empty for the newest measurement of each series")]
    min_effect: Annotated[float, note("the smallest relative change that must be found")]
    budget_s: Annotated[float, note("maximum board time, in seconds"), Meta(ge=0)]
    fail_on: Annotated[list[str], note("verdicts with exit code 1")]
    bisect: Annotated[str | None, note("command of --bisect; null without the option")] = None
    over: Annotated[str, note("axis and values of --over: `commit`, `flag`, `compiler=V1,V2`, `driver=V1,V2`")] = (
        "commit"
    )
    unmeasured: Annotated[list[SeriesKey], note("series of the baseline that this commit did not measure")]
    verdicts: Annotated[list[GateVerdict], note("most serious first")]
    exit_code: int
