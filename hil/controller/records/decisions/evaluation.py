"""Records of an evaluation: eval.json and samples.jsonl of `hil eval`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from hil.controller.records.base import Count, Number, Record, note
from hil.controller.records.outputs import Origin
from hil.core.results import Outcome

IntervalMethod = Literal["tango", "bootstrap", "betting"]


class SampleSide(Record, kw_only=True):
    """Score of a sample on the board or on the reference."""

    value: Annotated[Number, note("the sample's score")]
    evidence: Annotated[Any, note("values from which the score of all samples is computed")]
    answer: Annotated[Any, note("the answer, such as the chosen class; null if the metric has none")] = None


class EvaluatedSample(Record, kw_only=True):
    """A sample that ran on the board and on the reference. samples.jsonl has one per line."""

    name: str
    board: SampleSide
    reference: SampleSide


class WorstSample(Record, kw_only=True):
    """A sample whose score is worse on the board than on the reference."""

    name: str
    board: Number
    reference: Number
    board_answer: Annotated[Any, note("null if the metric has no answers")] = None
    reference_answer: Any = None


class EvaluationSettings(Record, kw_only=True):
    """Settings of an evaluation, in addition to those of the run."""

    dataset: Annotated[str, note("path of the dataset")]
    metric: Annotated[str, note("value of --metric")]
    output: Annotated[str, note("output to score; empty for the only output")] = ""
    reference_model: Annotated[str, note("model of the reference; empty for the evaluated model")] = ""
    max_drop: Annotated[float | None, note("value of --max-drop, in percent; null without a limit")] = None


class DatasetIdentity(Record, kw_only=True):
    """Data that must not change when an evaluation resumes."""

    samples: Annotated[Count, note("number of samples in the dataset")]
    names: Annotated[str, note("digest of the samples' names")]
    model: Annotated[str, note("digest of the model; empty if it was not imported")]
    reference_model: Annotated[str, note("digest of the reference's model; empty if it was not imported")]
    contents: Annotated[str, note("digest of the dataset's archive, or of its index and labels")] = ""
    metric: Annotated[str, note("digest of the metric's Python file; empty for metrics of hil")] = ""


class ScoreInterval(Record, kw_only=True):
    """Confidence interval of the difference."""

    low: float
    high: float
    level: Annotated[float, note("probability that the interval contains the true difference")]
    method: Annotated[
        IntervalMethod,
        note(
            "tango: score interval for paired shares; bootstrap: paired percentile bootstrap; betting: sequential "
            "interval for the whole dataset, after an early stop"
        ),
    ]


class EvaluationScores(Record, kw_only=True):
    """Scores of the finished samples."""

    board: Number
    reference: Number
    difference: Annotated[Number, note("score on the board - score on the reference")]
    interval: Annotated[ScoreInterval | None, note("null if the samples allow no interval")]
    p_value: Annotated[
        float | None,
        note(
            "exact McNemar test, for samples that are right or wrong; null for other metrics, and after an early stop"
        ),
    ]
    differing: Annotated[Count, note("samples whose answers differ")]
    worst: Annotated[list[WorstSample], note("samples with the largest loss, at most 10")]


class EvaluationRecord(Record, kw_only=True):
    """Record of an evaluation."""

    schema: Literal[1]
    id: str
    folder: Annotated[str, note("directory of eval.json, samples.jsonl and run.json; empty if discarded")]
    created: Annotated[float, note("seconds since the epoch")]
    origin: Origin | None = None
    finished: Annotated[bool, note("false if the evaluation still runs, was killed, or was interrupted")]
    settings: EvaluationSettings
    identity: DatasetIdentity
    name: Annotated[str, note("of the case in run.json")]
    model: str
    board: str | None
    runtime: str | None
    reference: Annotated[str, note("the reference with its version; empty if it did not run")]
    is_higher_better: Annotated[bool, note("false for a metric that measures errors")]
    is_share: Annotated[bool, note("true if the score 1 is 100 %")]
    evaluated: Annotated[Count, note("number of finished samples")]
    stopped_early: Annotated[bool, note("true if the answer was clear before all samples ran")]
    allowed_drop: Annotated[Number, note("largest loss that passes, in units of the score; null without --max-drop")]
    scores: Annotated[EvaluationScores | None, note("null without finished samples")]
    outcome: Annotated[
        Outcome | None, note("PASS or FAIL with --max-drop, SKIP without; an error; null if not finished")
    ]
    reason: str
    hint: str
    exit_code: int
