"""Run a gate from the history to its stored record. The gate stores each verdict, and each round of a measurement."""

from __future__ import annotations

import contextlib
import functools
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from hil.controller.analysis.detection.sequential import DEFAULT_MIN_EFFECT
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Job
from hil.controller.pipeline.stages import choose_board
from hil.controller.records.base import read_record
from hil.controller.records.decisions.gate import GATE_VERDICTS, GateRecord, GateVerdict
from hil.controller.storage.history.store import HistoryStore
from hil.controller.storage.run_context import Progress, RunContext
from hil.controller.storage.runs import Run, RunStore, write_json
from hil.controller.storage.sources.origin import find_origin, get_typed_command
from hil.controller.workloads.gate.bisection.axes.axis import BisectAxis
from hil.controller.workloads.gate.bisection.over import DEFAULT_OVER, SearchPlan, plan_search
from hil.controller.workloads.gate.bisection.repository import GitRepository
from hil.controller.workloads.gate.bisection.run import DEFAULT_BUILD_TIMEOUT_SECONDS, CauseFinder
from hil.controller.workloads.gate.comparing.layers import LayerFinder
from hil.controller.workloads.gate.comparing.rounds import RoundsFile, RoundsKey
from hil.controller.workloads.gate.comparing.scores import compare_stored_scores
from hil.controller.workloads.gate.judge import Remeasurement, judge_case, needs_board
from hil.controller.workloads.gate.plan import GateCase, GatePlan, plan_gate
from hil.controller.workloads.gate.programs import ProgramRestorer
from hil.controller.workloads.gate.remeasure import Remeasurer
from hil.controller.workloads.gate.stored_cases import CaseOpener
from hil.controller.workloads.gate.suite_cases import StoredSuiteCases
from hil.controller.workloads.gate.verdict_texts import is_failure
from hil.controller.workloads.triage.entries import TriageList
from hil.core.scratch import make_temporary_folder
from hil.core.text import convert_to_json
from hil.errors import EXIT_BOARD, EXIT_FAIL, EXIT_INTERRUPTED, EXIT_NOTHING_RAN, EXIT_OK, UsageError

DEFAULT_BUDGET_SECONDS = 300.0
DEFAULT_FAIL_ON = ("regressed", "broken")
GATES = Path("hil-gates")
DOCUMENT = "gate.json"
PROFILES = "profiles"
# Value in `fail_on` for series of the baseline that the commit did not measure.
UNMEASURED = "unmeasured"
_MIN_COMMIT_LENGTH = 4


@dataclass(frozen=True)
class GateJob:
    """The settings of a `hil gate` command.

    Attributes:
        job: the board, and where to store the gate.
        budget_s: maximum board time in seconds, for all suspects together.
        fail_on: verdicts with exit code 1.
        second_board: board that measures a suspect if the first board fails or has changed, or "". A record never
            selects this board, so `--resume` needs the option again.
        resume: name of an interrupted gate to continue, or "". The settings of the stored gate apply.
        bisect: command that builds or installs a candidate of the search; None without a command.
        over: axis and values of the search for the causes of failures. Without a command, `commit` means no search.
        build_timeout_s: maximum duration of the command in seconds.
        known: triage of failures. Known failures do not fail the gate.
    """

    job: Job
    baseline: str
    commit: str = ""
    min_effect: float = DEFAULT_MIN_EFFECT
    budget_s: float = DEFAULT_BUDGET_SECONDS
    fail_on: tuple[str, ...] = DEFAULT_FAIL_ON
    second_board: str = ""
    resume: str = ""
    bisect: str | None = None
    over: str = DEFAULT_OVER
    build_timeout_s: float = DEFAULT_BUILD_TIMEOUT_SECONDS
    known: TriageList = field(default_factory=TriageList)

    @property
    def second_job(self) -> Job:
        """The job with the second board."""
        return replace(self.job, board=self.second_board, hw_type="")


def run_gate(gate: GateJob, store: HistoryStore, context: RunContext, screen: Progress) -> GateRecord:
    """Compare the newest measurements with the measurements of the baseline, and measure suspects again.

    Returns:
        The record; after Ctrl-C, with the verdicts so far.

    Raises:
        UsageError: an option is invalid, or the history has no measurement to judge.
    """
    commit = _resolve_commit(gate.commit)
    _check_boards(gate)
    search = plan_search(gate.over, gate.bisect, gate.build_timeout_s)
    repository = search.open_repository() if search is not None else None
    runs = RunStore(gate.job.out or GATES)
    if gate.resume:
        run = runs.open(gate.resume)
        record = read_gate(run)
        if record.finished:
            screen.note(f"gate {run.id} is finished; run hil gate again for a new one")
            return record
        if gate.bisect is None and record.bisect is not None:
            # Do not run the stored command, because the record may be from another user.
            raise UsageError(f"gate {run.id} uses --bisect", hint="repeat --bisect with the build command")
        if search is None and record.over != DEFAULT_OVER:
            raise UsageError(f"gate {run.id} uses --over", hint="repeat --over with its values")
        boards = {one.second_board for one in record.verdicts if one.second_board}
        if search is not None and boards - {gate.second_board}:
            # Without the option, the search would use the board that is suspect.
            raise UsageError(f"gate {run.id} uses --second-board", hint="repeat --second-board with the same board")
        record.bisect, record.over = gate.bisect, gate.over
        return _GateRun(gate, run, record, _plan(store, record), store, screen, search, repository).run(context)
    record = GateRecord(
        schema=1,
        id="",
        folder="",
        created=0,
        finished=False,
        history=str(store.place),
        baseline=gate.baseline,
        commit=commit or find_origin().commit,
        min_effect=gate.min_effect,
        budget_s=gate.budget_s,
        fail_on=list(gate.fail_on),
        bisect=gate.bisect,
        over=gate.over,
        unmeasured=[],
        verdicts=[],
        exit_code=EXIT_NOTHING_RAN,
    )
    plan = _plan(store, record)
    run = runs.create("gate", convert_to_json(asdict(gate.job)), command=get_typed_command())
    record.id, record.folder = run.id, str(run.folder)
    record.created, record.origin, record.unmeasured = run.record.created, run.record.origin, plan.unmeasured
    return _GateRun(gate, run, record, plan, store, screen, search, repository).run(context)


def _resolve_commit(text: str) -> str:
    """Return a commit or its first digits. Another text, such as a branch or HEAD, is resolved by git.

    Raises UsageError if git does not know the text.
    """
    if not text or re.fullmatch(f"[0-9a-f]{{{_MIN_COMMIT_LENGTH},64}}", text):
        return text
    return GitRepository.find(Path()).resolve(text)


def _check_boards(gate: GateJob) -> None:
    """Raise UsageError if a board of the options does not exist. A gate must not pass because of a wrong name."""
    if gate.job.board or gate.job.hw_type:
        choose_board(gate.job)
    if gate.second_board:
        choose_board(gate.second_job)


def _plan(store: HistoryStore, record: GateRecord) -> GatePlan:
    """Return the series to judge. Raises UsageError if there are none."""
    ancestors = None
    with contextlib.suppress(UsageError):  # not in a repository, or the history of another repository
        ancestors = GitRepository.find(Path()).list_ancestors(record.commit) if record.commit else None
    plan = plan_gate(
        store,
        baseline=record.baseline,
        commit=record.commit,
        min_effect=record.min_effect,
        ancestors=ancestors,
    )
    if not plan.cases:
        of = f" of commit {record.commit[:9]}" if record.commit else ""
        raise UsageError(
            f"the history {store.place} has no measurement{of}",
            hint="measure the models with hil bench, and add the results with hil history add",
        )
    return plan


@dataclass
class _GateRun:
    """The state of a running gate."""

    _gate: GateJob
    _run: Run
    _record: GateRecord
    _plan: GatePlan
    _store: HistoryStore
    _screen: Progress
    _search: SearchPlan | None
    _repository: GitRepository | None

    def run(self, context: RunContext) -> GateRecord:
        self._save()
        judged = {(one.series, one.new.run) for one in self._record.verdicts}
        left = [case for case in self._plan.cases if (case.series, case.new.run) not in judged]
        for case in left:
            if not needs_board(case):
                self._record.verdicts.append(judge_case(case, None, compare_stored_scores(case)))
        self._save()
        rounds = RoundsFile(self._run.folder)
        try:
            with (
                make_temporary_folder("hil-gate-") as folder,
                BoardPool(
                    f"hil gate {self._run.id}",
                    wait_s=self._gate.job.wait_s,
                    say=self._screen.note,
                    record_folder=self._run.folder,
                ) as pool,
            ):
                runner = Runner(context)
                opener = CaseOpener(lambda run, board: StoredSuiteCases(run, board, runner, Path(folder)))
                first = Remeasurer(
                    ProgramRestorer(self._store, self._gate.job, opener),
                    runner,
                    pool,
                    self._record.min_effect,
                    self._screen,
                    rounds.find_earlier,
                )
                second = replace(first, restorer=ProgramRestorer(self._store, self._gate.second_job, opener))
                suspects = [case for case in left if needs_board(case)]
                try:
                    for number, case in enumerate(suspects):
                        self._measure(case, len(suspects) - number, first, second, rounds)
                    if self._search is not None:
                        axis = self._search.make_axis(self._repository, context, self._screen, self._run.folder)
                        self._find_causes(axis, first, second, rounds)
                finally:
                    self._run.record.consoles = pool.save_consoles(is_last=True)
        except KeyboardInterrupt:
            self._finish(EXIT_INTERRUPTED, finished=False)
        else:
            self._finish(find_exit_code(self._record), finished=True)
        return self._record

    def _measure(
        self, case: GateCase, suspects: int, first: Remeasurer, second: Remeasurer, rounds: RoundsFile
    ) -> None:
        """Measure a suspect again. If its board is suspect too, use the second board.

        Args:
            suspects: number of suspects that share the remaining board time.
        """
        spent_s = sum(one.board_s for one in self._record.verdicts)
        budget_s = max(self._record.budget_s - spent_s, 0.0) / suspects
        again, verdict = self._measure_on(first, case, budget_s, rounds)
        name = self._gate.second_board
        if verdict.verdict == "board fault" and name:
            self._screen.note(f"{case.new.case}: {verdict.reason}; measuring on {name}")
            other, decided = self._measure_on(second, case, budget_s, rounds)
            if other.old:  # a program ran on the second board
                decided.second_board, decided.board_problem = name, verdict.reason
                decided.board_s += verdict.board_s
                again, verdict = other, decided
            else:
                verdict.reason = f"{verdict.reason}; {name}: {other.error}"
        if verdict.verdict in ("no change", "improved") and again.decision is not None:
            self._store.confirm(case.new, "drift" if verdict.suspect == "drift" else "measured")
        if again.decision is not None and again.decision.verdict == "regressed":
            self._name_layers(case, verdict, spent_s, second if verdict.second_board else first)
        self._record.verdicts.append(verdict)
        self._save()

    def _measure_on(
        self, measurer: Remeasurer, case: GateCase, budget_s: float, rounds: RoundsFile
    ) -> tuple[Remeasurement, GateVerdict]:
        assert case.old is not None
        key = RoundsKey(case.series, case.old.program, case.new.run, measurer.restorer.name_board(case.new))
        again = measurer.measure(
            case,
            budget_s=budget_s,
            known=rounds.read().get(key, ()),
            keep_round=functools.partial(rounds.append, key),
        )
        return again, judge_case(case, again)

    def _name_layers(self, case: GateCase, verdict: GateVerdict, spent_s: float, measurer: Remeasurer) -> None:
        """Add the layers of a slower program that became slower, if board time is left."""
        if spent_s + verdict.board_s >= self._record.budget_s:
            verdict.layers_reason = f"the board time of {self._record.budget_s:.0f} s is used up"
            return
        finder = LayerFinder(measurer, self._run.folder / PROFILES)
        verdict.slower_layers, verdict.layers_reason = finder.find_slower(case)
        verdict.board_s += finder.board_s

    def _find_causes(self, axis: BisectAxis, first: Remeasurer, second: Remeasurer, rounds: RoundsFile) -> None:
        """Search for the causes of failures, with --bisect or --over."""
        cases = {(case.series, case.new.run): case for case in self._plan.cases}
        suspects = [
            (cases[one.series, one.new.run], one)
            for one in self._record.verdicts
            if axis.is_searchable(one) and one.cause is None and (one.series, one.new.run) in cases
        ]
        for measurer, is_second in ((first, False), (second, True)):
            if chosen := [(case, one) for case, one in suspects if bool(one.second_board) == is_second]:
                finder = CauseFinder(
                    axis, self._run.folder, measurer, self._record.budget_s, rounds, self._gate.bisect or ""
                )
                finder.run(chosen, self._save)

    def _save(self) -> None:
        for one in self._record.verdicts:
            one.triage = self._gate.known.judge_verdict(one)
        self._record.verdicts.sort(key=lambda one: (GATE_VERDICTS.index(one.verdict), one.key.model, one.key.case))
        write_json(self._run.folder / DOCUMENT, self._record.to_json())

    def _finish(self, code: int, *, finished: bool) -> None:
        self._record.exit_code, self._record.finished = code, finished
        self._save()
        self._run.record.exit_code, self._run.record.finished = code, finished
        self._run.save()


def find_exit_code(record: GateRecord) -> int:
    """Return the exit code: 1 for a verdict of ``fail_on`` that is not known, else 4 if a board failed, else 0."""
    found = {one.verdict for one in record.verdicts}
    fails = any(is_failure(one, record) for one in record.verdicts)
    if fails or (record.unmeasured and UNMEASURED in record.fail_on):
        return EXIT_FAIL
    return EXIT_BOARD if "board fault" in found else EXIT_OK


def read_gate(run: Run) -> GateRecord:
    """Read gate.json.

    Raises:
        UsageError: the run is not a gate.
    """
    try:
        return read_record(run.folder / DOCUMENT, GateRecord)
    except UsageError as error:
        raise UsageError(f"run {run.id} is not a gate", hint="choose a run stored by `hil gate`") from error
