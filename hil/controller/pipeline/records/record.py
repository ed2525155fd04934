"""Build the record of a run from its cases, and write run.json."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hil.compare.comparison import OutputComparison
from hil.compare.verdict import Verdict, find_deciding
from hil.controller.devices.board import Board
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.instructions import summarise_counts
from hil.controller.pipeline.verdicts.repetition import find_worst_answer
from hil.controller.records.base import make_record
from hil.controller.records.console import ConsoleQuoteRecord
from hil.controller.records.outputs import FailedReference, StoredComparison, StoredVerdict
from hil.controller.records.run import (
    CachedStage,
    CaseError,
    DeviceStatistics,
    RunBoard,
    RunCase,
    RunRecord,
    StageTimes,
    StoredArtifact,
    StoredCompilations,
    StoredJudging,
    StoredModel,
    StoredProvenance,
    StoredReference,
    StoredRepetition,
    StoredSpec,
)
from hil.controller.storage.runs import Run, store_tensors
from hil.core.results import NEVER_IN, Outcome, RunResult, exit_code_of
from hil.core.tensors import TensorSpec
from hil.core.text import convert_to_json
from hil.errors import EXIT_INTERRUPTED, StorageError

_SAMPLES_KEPT = 10_000


def summarize_device_times(result: RunResult) -> DeviceStatistics:
    """Return statistics of the device time in nanoseconds, with at most 10,000 samples.

    A cold iteration is the program's first iteration after loading. Its time is ``cold_ns`` (otherwise None). The
    statistics exclude it unless it is the only iteration.
    """
    samples = result.device_ns
    if not samples:
        return DeviceStatistics(iterations=0)
    ordered = sorted(samples[1:] if result.cold and len(samples) > 1 else samples)
    count = len(ordered)
    return DeviceStatistics(
        iterations=len(samples),
        cold_ns=samples[0] if result.cold else None,
        p50_ns=ordered[count // 2] if count % 2 else (ordered[count // 2 - 1] + ordered[count // 2]) / 2,
        p90_ns=ordered[min(int(0.9 * count), count - 1)],
        min_ns=ordered[0],
        mean_ns=sum(ordered) / count,
        stdev_ns=float(np.std(ordered, ddof=1)) if count > 1 else 0.0,
        samples_ns=samples[:_SAMPLES_KEPT],
    )


def _record_generation(case: Case) -> dict[str, Any]:
    """Return the fields of a case with --generate."""
    if case.decoder is None:
        return {}
    from hil.controller.pipeline.records.generation import digest_generation, record_generation

    return {"generation": record_generation(case), "generation_digest": digest_generation(case)}


def record_case(case: Case, tensors: Mapping[str, Any]) -> RunCase:
    """Return a case's record.

    Args:
        tensors: The tensors stored so far: ``inputs``, ``outputs`` -> entries with files; ``references`` -> entries
            for every reference.
    """
    model, result, compilations = case.model, case.result, case.compilations
    stored_references = tensors.get("references") or [[] for _ in case.references]
    return RunCase(
        name=case.name,
        path=str(case.path),
        outcome=case.outcome,
        stage=case.stage,
        reason=case.reason,
        error=_record_error(case),
        model=None
        if model is None
        else StoredModel(
            **_pick_fields(model, "format", "digest", "function"),
            inputs=None if model.inputs is None else record_specs(model.inputs),
            outputs=None if model.outputs is None else record_specs(model.outputs),
        ),
        artifact=_record_artifact(case),
        timings=StageTimes(**vars(case.timings)),
        cached=list_cached_stages(case),
        pushed_bytes=case.pushed_bytes,
        device=None if result is None else summarize_device_times(result),
        instructions=None if result is None else summarise_counts(result.instructions, cold=result.cold),
        conditions=case.conditions,
        grade=case.grade,
        energy=case.energy,
        **_record_generation(case),
        repetition=_record_repetition(case),
        compilations=None if compilations is None else make_record(compilations.record(), StoredCompilations),
        peak_memory_bytes=None if result is None else result.peak_memory_bytes,
        peak_device_memory_bytes=None if result is None else result.peak_device_memory_bytes,
        provenance=make_record(result.provenance, StoredProvenance) if result and result.provenance else None,
        inputs=tensors.get("inputs", []),
        outputs=tensors.get("outputs", []),
        references=[
            StoredReference(
                source=reference.source,
                relation=reference.relation,
                provenance=convert_to_json(reference.provenance),
                outputs=stored,
            )
            for reference, stored in zip(case.references, stored_references, strict=True)
        ],
        unanswered=[
            FailedReference(reference=name, outcome=why.outcome or "", reason=why.message, detail=why.detail)
            for name, why in case.unanswered.items()
        ],
        verdicts=[record_verdict(verdict) for verdict in case.verdicts],
        judging=StoredJudging(
            **_pick_fields(case.options, "rtol", "atol", "replace_blind_tolerance"), accept=list(case.options.accept)
        ),
        decided_by=_name_decider(case),
        disagreement=case.disagreement,
        random=list(model.random) if model else [],
        worker_log=list(case.worker_log[-200:]),
        profiles=list(case.profiles),
    )


def _record_error(case: Case) -> CaseError | None:
    error = case.error
    if error is None:
        return None
    quotes = [ConsoleQuoteRecord(**vars(quote)) for quote in error.console]
    return CaseError(kind=type(error).__name__, console=quotes, **_pick_fields(error, "hint", "board", "detail"))


def _record_artifact(case: Case) -> StoredArtifact | None:
    artifact = case.artifact
    if artifact is None:
        return None
    return StoredArtifact(
        **_pick_fields(artifact, "runtime", "compiler", "function", "cached"),
        flags=list(artifact.flags),
        main=artifact.main,
        digests=dict(artifact.digests),
        bytes=sum(path.stat().st_size for path in artifact.files.values() if path.exists()),
        notes=convert_to_json(artifact.notes),
    )


def _record_repetition(case: Case) -> StoredRepetition | None:
    """Return the record of compared iterations, with verdicts of differing outputs."""
    repetition = case.result.repetition if case.result is not None else None
    if repetition is None:
        return None
    record = make_record(repetition.record(), StoredRepetition)
    for number, verdict in case.answer_verdicts.items():
        record.answers[number].verdict = record_verdict(verdict)
    record.worst = find_worst_answer(case.answer_verdicts) if case.answer_verdicts else None
    return record


def list_cached_stages(case: Case) -> list[CachedStage]:
    """Return the stages whose complete result was cached."""
    sources = [reference.provenance.get("cached", False) for reference in case.references]
    found: dict[CachedStage, bool] = {
        "import": case.model is not None and case.model.cached,
        "compile": case.artifact is not None and case.artifact.cached and case.compilations is None,
        "refer": bool(sources) and all(sources),
    }
    return [stage for stage, cached in found.items() if cached]


def record_board(board: Board) -> RunBoard:
    """Return the record of a run's board."""
    return RunBoard(name=board.name, hw_type=board.config.hw_type, info=convert_to_json(board.info))


def record_verdict(verdict: Verdict) -> StoredVerdict:
    """Return a verdict's record with all statistics."""
    outputs = list(map(record_comparison, verdict.outputs))
    return StoredVerdict(outputs=outputs, **_pick_fields(verdict, "outcome", "relation", "against", "reason"))


def record_comparison(output: OutputComparison) -> StoredComparison:
    """Return the record of an output's comparison."""
    return make_record({**output.record(), "mismatch_share": output.mismatch_share}, StoredComparison)


def _name_decider(case: Case) -> str:
    """Return the reference that decides a pass, with its relation; "" if the case did not pass."""
    decider = find_deciding(case.verdicts) if case.outcome is Outcome.PASS else None
    return decider.named if decider else ""


def _pick_fields(value: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def record_specs(specs: Iterable[TensorSpec]) -> list[StoredSpec]:
    """Return the records of a model's inputs or outputs."""
    return [StoredSpec(**{**vars(spec), "shape": list(spec.shape)}) for spec in specs]


# Write delay. Stages with cached results take milliseconds, and writing the record of many cases takes as long.
_SOON_SECONDS = 0.2


class Recorder:
    """Updates a run's record. Thread-safe.

    Args:
        order: Names of all cases of the run.
        cases: Cases to run now. Entries of other cases stay unchanged.
    """

    def __init__(self, run: Run, order: Sequence[str], cases: Sequence[Case]) -> None:
        self._run = run
        self._order = list(order)
        self._cases = {case.name: case for case in cases}
        self._records: dict[str, RunCase] = {}
        # Case records as JSON. Encoding hundreds of cases again at each change would take most of the time.
        self._texts: dict[str, str] = {}
        self._tensors: dict[str, dict[str, Any]] = {case.name: {} for case in cases}
        self._lock = threading.Lock()
        # Changed cases to write, and the timer that writes them. If another write comes first, the timer continues,
        # because starting a new timer thread for each case takes longer.
        self._news: dict[str, Case] = {}
        self._writer: threading.Timer | None = None
        self.ended: set[str] = set()
        self._is_new = not run.record.cases
        for record in run.record.cases:
            self._set_record(record)
        self._update_records(cases)

    def add(self, cases: Sequence[Case]) -> None:
        """Add cases after the existing ones."""
        with self._lock:
            self._order += [case.name for case in cases if case.name not in self._order]
            self._cases |= {case.name: case for case in cases}
            self._tensors |= {case.name: {} for case in cases}

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """Outcomes of ended cases, by name."""
        with self._lock:
            return {name: record.outcome for name, record in self._records.items() if record.outcome}

    def write(self, case: Case | None = None) -> None:
        """Write the record now, with one changed case or with all cases. Raises StorageError."""
        with self._lock:
            if case is not None:
                self._news[case.name] = self._cases[case.name] = case
            self._save_cases(list(self._cases.values()) if case is None else list(self._news.values()))

    def write_soon(self, case: Case) -> None:
        """Schedule a write for a case without an outcome. The write includes other changes until then."""
        with self._lock:
            self._news[case.name] = self._cases[case.name] = case
            if self._writer is None:
                self._writer = threading.Timer(_SOON_SECONDS, self._write_scheduled)
                self._writer.daemon = True
                self._writer.start()

    def forget(self) -> None:
        """Discard scheduled writes."""
        with self._lock:
            self._news.clear()

    def _write_scheduled(self) -> None:
        with self._lock, contextlib.suppress(StorageError):  # the next write reports the error
            self._writer = None
            if self._news:
                self._save_cases(list(self._news.values()))

    def _save_cases(self, cases: Sequence[Case]) -> None:
        self._news.clear()
        self._update_records(cases)
        self._run.save([self._texts[name] for name in self._order if name in self._texts])

    def keep(self, case: Case, what: str) -> None:
        """Store a case's ``inputs``, ``outputs`` or ``references``."""
        folder = self._run.folder
        stored: list[Any]
        if what == "references":
            stored = [
                store_tensors(folder, case.name, f"reference-{number}", one.outputs)
                for number, one in enumerate(case.references)
            ]
        else:
            held = case.inputs if what == "inputs" else case.result.outputs if case.result else None
            stored = store_tensors(folder, case.name, what, held or {})
        self._tensors[case.name][what] = stored
        self.write_soon(case)

    def end(self, case: Case) -> None:
        """Record a case's outcome."""
        self.ended.add(case.name)
        self.write(case)

    def interrupt(self) -> None:
        """Record an interrupt by Ctrl-C. Cases that have not ended are stopped and have no outcome."""
        for name, case in self._cases.items():
            if name not in self.ended:
                self._cases[name] = replace(case, outcome=None, error=None, reason="interrupted")
        self._run.record.exit_code = EXIT_INTERRUPTED
        self.write()

    def finish(self, exit_code: int | None = None, *, finished: bool = True) -> RunRecord:
        """Set the run's outcome and exit code from its cases, which must have ended.

        Args:
            exit_code: Replaces the exit code derived from the outcomes.

        Returns:
            The record with ``folder``. A new run that never reached a board is deleted, and ``folder`` is "".
        """
        self.forget()
        self._update_records(list(self._cases.values()))
        record = self._run.record
        outcomes = [case.outcome for case in record.cases if case.outcome]
        record.exit_code = exit_code_of(outcomes) if exit_code is None else exit_code
        # Independent of the order, a skipped case must not decide the run's outcome if another case passed.
        counted = sorted(outcomes, key=lambda outcome: outcome is Outcome.SKIP)
        record.outcome = max(counted, key=lambda outcome: outcome.exit_code)
        record.finished = finished
        came_in = record.board or not NEVER_IN.issuperset(outcomes)
        if self._is_new and not came_in:
            self._run.discard()
            return record.replace(folder="")
        self._run.save()
        return record.replace(folder=str(self._run.folder))

    def _update_records(self, cases: Sequence[Case]) -> None:
        for case in cases:
            self._set_record(record_case(case, self._tensors[case.name]))
        self._run.record.cases = [self._records[name] for name in self._order if name in self._records]

    def _set_record(self, record: RunCase) -> None:
        self._records[record.name] = record
        self._texts[record.name] = json.dumps(record.to_json(), allow_nan=False)
