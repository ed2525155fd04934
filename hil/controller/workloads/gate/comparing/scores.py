"""Compare the scores of two evaluations, sample by sample."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.analysis.evaluation.metric_choice import NAMES, choose_metric
from hil.controller.analysis.evaluation.metrics import Metric, SampleScore
from hil.controller.records.base import Interval
from hil.controller.records.decisions.evaluation import EvaluatedSample, EvaluationRecord
from hil.controller.records.decisions.gate import GateScore
from hil.controller.records.measurements.history import HistoryEntry
from hil.controller.storage.runs import RunStore
from hil.controller.workloads.evaluation.scores import compute_scores
from hil.controller.workloads.evaluation.stored import read_evaluation, read_samples
from hil.controller.workloads.gate.plan import GateCase
from hil.core.tensors import Array
from hil.errors import UsageError

# Probability that the interval contains the true difference.
_LEVEL = 0.99


class _StoredMetric(Metric):
    """Metric of a user's Python file. The gate only averages stored scores, so it does not run the file."""

    def __init__(self, record: EvaluationRecord) -> None:
        self.name = record.settings.metric
        self.is_higher_better = record.is_higher_better
        self.is_share = record.is_share

    def measure(self, outputs: Mapping[str, Array], label: Any) -> SampleScore:
        """Raise UsageError, because only stored scores are available."""
        raise UsageError(f"{self.name} cannot score new samples")


def compare_stored_scores(case: GateCase) -> GateScore | str:
    """Return the scores of two evaluations, or why they cannot be compared; "" if the series is not an evaluation."""
    if case.old is None or case.new.score is None or case.old.score is None:
        return ""
    try:
        return compare_scores(case.old, case.new)
    except UsageError as error:
        return error.message


def compare_scores(old: HistoryEntry, new: HistoryEntry) -> GateScore:
    """Compare the board's scores of two evaluations, for the samples that both contain.

    Raises:
        UsageError: the samples of an evaluation are missing, or the datasets or metrics differ.
    """
    folders = [_find_folder(old), _find_folder(new)]
    records = [read_evaluation(RunStore(folder.parent).open(str(folder))) for folder in folders]
    before, after = (record.identity for record in records)
    if (before.names, before.contents, before.samples) != (after.names, after.contents, after.samples):
        raise UsageError(f"the dataset has changed since {old.run}")
    if before.metric != after.metric:
        raise UsageError(f"the file of the metric has changed since {old.run}")
    earlier, later = ({one.name: one.board for one in read_samples(folder)} for folder in folders)
    pairs = [
        EvaluatedSample(name=name, board=side, reference=earlier[name])
        for name, side in later.items()
        if name in earlier
    ]
    settings = records[1].settings
    is_own = settings.metric in NAMES
    metric = choose_metric(settings.metric, settings.output) if is_own else _StoredMetric(records[1])
    try:
        found = compute_scores(metric, pairs, total=after.samples, seed=0, stopped_early=False, level=_LEVEL)
    except (TypeError, ValueError, OverflowError) as error:
        # A stored sample may have any JSON value as evidence.
        raise UsageError(f"the samples of {old.run} or {new.run} do not fit {settings.metric}: {error}") from error
    if found is None:
        raise UsageError(f"{old.run} and {new.run} have no sample in common")
    interval = found.interval
    ends = Interval(low=interval.low, high=interval.high, level=_LEVEL) if interval is not None else None
    return GateScore(
        old=found.reference,
        new=found.board,
        difference=found.difference,
        interval=ends,
        samples=len(pairs),
        is_higher_better=records[1].is_higher_better,
        is_share=records[1].is_share,
    )


def _find_folder(entry: HistoryEntry) -> Path:
    folder = Path(entry.folder)
    if not entry.folder or not folder.is_dir():
        raise UsageError(f"the directory of {entry.run} is missing, so the samples are unknown")
    return folder
