"""Run candidates on the board, and store each result in the journal."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hil.compare.comparison import OutputComparison
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.case import Case, ProgressSink
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Options
from hil.controller.pipeline.verdicts.in_arithmetic import needs_control
from hil.controller.pipeline.verdicts.judging import compare_without_noise
from hil.controller.records.decisions.reduce import ReduceFailure, ReduceRecord, ReduceTrial
from hil.controller.storage.run_context import Progress, RunContext
from hil.controller.storage.runs import convert_write_errors, write_json
from hil.controller.workloads.reduce.failure import Failure, find_failure, measure_slowness, require_failure
from hil.core.results import BOARD_OUTCOMES, Outcome, Stage
from hil.core.tensors import Array
from hil.errors import HilError, NotRun, StorageError, UsageError

RECORD = "reduce.json"
# Maximum attempts for a run that ends with a board error.
_ATTEMPTS = 3
# An SQNR in dB below these limits is not caused by rounding. The first limit is for float32 and float64, the second for
# other types.
_GROSS_DB = 60.0, 20.0
# Failures that a comparison of outputs shows.
_COMPARED = (Outcome.FAIL.value, Outcome.UNSTABLE.value)


class RunsSpent(Exception):
    """The limit of runs is reached."""


@dataclass(frozen=True)
class _QuickRunner(Runner):
    """Runner that judges only as much as a reduction needs.

    A measurement of the references' noise needs multiple times the memory and time of a run.

    Attributes:
        failure: the failure of the whole model; None while it is not known.
        is_timed: whether only times matter, so that no outputs are compared.
    """

    failure: Failure | None = None
    is_timed: bool = False

    def refer_early(self, case: Case) -> Case | None:
        """Return None: most failures need no reference, and a reference needs memory."""
        return None

    def judge(self, case: Case, early: Case | None = None) -> Case:
        """Compare the board's outputs with the references, if that can show the failure.

        hil does not measure the noise of the references if the error is too large for rounding. The same applies if the
        difference is not the failure of the whole model.
        """
        if case.outcome:
            return case
        if self.is_timed or (self.failure is not None and self.failure.outcome not in _COMPARED):
            return replace(case, outcome=Outcome.SKIP, reason="output not compared")
        case = self.run_reference(case)
        is_stable = case.result is not None and (case.result.repetition is None or case.result.repetition.is_stable)
        if case.outcome or not is_stable or not case.references or needs_control(case):
            return super().judge(case)
        verdicts = compare_without_noise(case)
        wrong = [one for one in verdicts[0].outputs if not one.passed and not one.blind]
        outcome = Outcome.FAIL if wrong else Outcome.PASS
        judged = replace(case, stage=Stage.COMPARE.value, verdicts=verdicts, outcome=outcome, reason=verdicts[0].reason)
        if any(map(_is_gross, wrong)):
            return judged
        if self.failure is not None:
            found = find_failure(judged)
            if found is None or not self.failure.is_same(found):
                return judged
        return super().judge(case)


@dataclass(frozen=True)
class Candidate:
    """A model that may fail like the whole model."""

    model: Path  # alone in its directory, except for external data
    inputs: Mapping[str, Array]
    nodes: int


@dataclass
class Trials:
    """Runs candidates and keeps the smallest one that fails in the same way."""

    record: ReduceRecord
    folder: Path
    options: Options  # options of the whole model; each candidate has its own inputs and sizes
    choice: BoardChoice
    faults: tuple[str, ...]
    pool: BoardPool
    context: RunContext
    screen: Progress
    best: Candidate | None = None
    _scratch: int = field(default=0)

    def __post_init__(self) -> None:
        self._earlier_consoles = list(self.record.consoles)  # of a resumed reduction

    def save(self, *, is_last: bool = False) -> None:
        """Write the journal atomically. With ``is_last``, also write the last console lines."""
        self.record.consoles = [*self._earlier_consoles, *self.pool.save_consoles(is_last=is_last)]
        write_json(self.folder / RECORD, self.record.to_json())

    def add_note(self, text: str) -> None:
        """Add a note to the record. A resumed reduction may add it again."""
        if text not in self.record.notes:
            self.record.notes = [*self.record.notes, text]

    def run_model(self, case: Case) -> Failure:
        """Run the imported model, or read the result from the journal. Return the failure.

        Raises:
            UsageError: the model does not fail, or its failure cannot be reduced.
            BoardError: the board failed.
        """
        found = self.record.failure
        if found is None:
            start = time.monotonic()
            case = self._run_case(case, self._runner)
            failure = require_failure(case, is_slow=self.record.slow is not None)
            found = ReduceFailure(
                outcome=Outcome(failure.outcome),
                stage=failure.stage,
                reason=case.reason if failure.time_ns is None else f"{failure.time_ns / 1e6:.4g} ms per iteration",
                kind=failure.kind,
                sqnr_db=failure.sqnr_db,
                time_ns=failure.time_ns,
            )
            self.record.failure = found
            self._add(
                "whole", "whole model", self.record.nodes_before, case, same=True, seconds=time.monotonic() - start
            )
        return self._failure

    @property
    def _failure(self) -> Failure:
        found = self.record.failure
        assert found is not None
        return Failure(found.outcome.value, found.stage, found.kind, found.sqnr_db, found.time_ns)

    def test(self, key: str, text: str, make: Callable[[Path], Candidate | None]) -> bool:
        """Return True if a candidate fails like the whole model. The candidate then becomes the smallest model so far.

        Args:
            make: writes the candidate to a directory; returns None if the candidate is not a valid model.

        Raises:
            RunsSpent: the candidate needs a run, and the limit is reached.
            BoardError: the board failed repeatedly.
        """
        known = next((one for one in self.record.trials if one.key == key), None)
        if known is not None and not known.same:
            return False
        # Reserve one run for the result.
        if known is None and len(self.record.trials) >= self.record.max_runs - 1:
            raise RunsSpent
        candidate = self._make(make)
        if candidate is None:
            return False
        if known is None:
            case = self.run(key, text, candidate)
            if case is None or not self._is_same(case):
                self._remove(candidate)
                return False
        if self.best is not None:
            self._remove(self.best)
        self.best = candidate
        return True

    def run(self, key: str, text: str, candidate: Candidate, *, is_final: bool = False) -> Case | None:
        """Run a candidate and add the result to the journal. Return None if hil cannot run the model.

        Args:
            is_final: whether to judge all outputs as `hil run` does.
        """
        runner = self._final_runner if is_final else self._runner
        start = time.monotonic()
        smallest = self.best.nodes if self.best else self.record.nodes_before
        number = len(self.record.trials) + 1
        progress = f"smallest {smallest} nodes, run {number} of at most {self.record.max_runs}: {text}"
        self.screen.stage(self.record.model, number, progress)
        options = replace(self.options, function="", dims={}, expected={}, inputs=dict(candidate.inputs))
        folder = candidate.model.parent / "case"
        with convert_write_errors(folder):
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        try:
            case = self._run_case(runner.begin(candidate.model, options, folder, name="candidate"), runner)
        except StorageError:
            raise
        except UsageError:
            return None
        self._add(key, text, candidate.nodes, case, same=self._is_same(case), seconds=time.monotonic() - start)
        return case

    def _is_same(self, case: Case) -> bool:
        share = self.record.slow
        failure = find_failure(case) if share is None else measure_slowness(case)
        return failure is not None and self._failure.is_same(failure, share or 1.0)

    @property
    def _runner(self) -> Runner:
        failure = self._failure if self.record.failure is not None else None
        is_timed = self.record.slow is not None
        return _QuickRunner(self.context, of_usage=_reject, sink=ProgressSink(), failure=failure, is_timed=is_timed)

    @property
    def _final_runner(self) -> Runner:
        return Runner(self.context, of_usage=_reject, sink=ProgressSink())

    def _run_case(self, case: Case, runner: Runner) -> Case:
        """Run a case. After a board error, repeat the run, because the error gives no information about the model."""
        for _ in range(_ATTEMPTS):
            runtime = case.options.runtime
            (ended,) = runner.run([case], self.pool, self.choice, runtimes=(runtime,), faults=self.faults)
            if ended.outcome not in BOARD_OUTCOMES:
                break
        if ended.outcome in BOARD_OUTCOMES and ended.error is not None:
            raise ended.error
        return ended

    def _add(self, key: str, text: str, nodes: int, case: Case, *, same: bool, seconds: float) -> None:
        time = measure_slowness(case)
        trial = ReduceTrial(
            key=key,
            text=text,
            nodes=nodes,
            outcome=case.outcome or Outcome.SKIP,
            reason=case.reason,
            same=same,
            seconds=round(seconds, 3),
            time_ns=time.time_ns if time is not None else None,
        )
        self.record.trials = [*self.record.trials, trial]
        self.save()

    def _make(self, make: Callable[[Path], Candidate | None]) -> Candidate | None:
        self._scratch += 1
        folder = self.folder / "work" / str(self._scratch)
        with convert_write_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        candidate = make(folder)
        if candidate is None:
            shutil.rmtree(folder, ignore_errors=True)
        return candidate

    def _remove(self, candidate: Candidate) -> None:
        shutil.rmtree(candidate.model.parent, ignore_errors=True)


def _is_gross(output: OutputComparison) -> bool:
    limit = _GROSS_DB[output.dtype not in ("float32", "float64")]
    return bool(output.nonfinite) or (output.sqnr_db is not None and output.sqnr_db < limit)


def _reject(error: UsageError, stage: Stage) -> HilError:
    """Convert a usage error in a stage to an outcome, because the candidate caused it, not the user."""
    if isinstance(error, StorageError):
        raise error
    return error.as_kind(NotRun)
