"""Run an evaluation from the first check to its stored record, for `hil eval`."""

from __future__ import annotations

import contextlib
import shlex
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from hil.controller.analysis.evaluation.metric_choice import choose_metric
from hil.controller.analysis.evaluation.metrics import Metric, SampleScore
from hil.controller.devices.board_choice import BoardChoice, fill_target, knows_target
from hil.controller.models.inputs import fix_sizes, make_inputs
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.boards.board_session import BoardSession
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.records.record import Recorder, record_board
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Job
from hil.controller.pipeline.stages import choose_board
from hil.controller.records.base import make_record, parse_number
from hil.controller.records.decisions.evaluation import (
    DatasetIdentity,
    EvaluatedSample,
    EvaluationRecord,
    EvaluationScores,
    EvaluationSettings,
    SampleSide,
)
from hil.controller.storage.run_context import Progress, RunContext, open_context
from hil.controller.storage.runs import Run, RunStore, check_seal, lock_folder, make_safe_name
from hil.controller.storage.session_folders import DEFAULT_ROOT
from hil.controller.storage.sources.origin import get_typed_command
from hil.controller.workloads.evaluation.datasets import Dataset, LabeledSample, open_dataset
from hil.controller.workloads.evaluation.score_texts import describe_scores
from hil.controller.workloads.evaluation.scores import (
    align_names,
    allow_drop,
    compute_scores,
    decide_early,
    judge_scores,
)
from hil.controller.workloads.evaluation.stored import (
    open_samples,
    read_evaluation,
    read_samples,
    write_evaluation,
)
from hil.core.results import Model, Outcome, Stage
from hil.core.tensors import Array
from hil.core.text import convert_to_json
from hil.errors import (
    EXIT_INTERRUPTED,
    EXIT_NOTHING_RAN,
    EXIT_OK,
    BoardError,
    NotRun,
    ReferenceFailed,
    StorageError,
    UsageError,
)

# Key of the evaluation's settings in the request of run.json.
_SETTINGS = "evaluation"
# Check for an early decision after each of the first 64 samples, and then only after every 64 samples. A check takes
# longer with more finished samples.
_CHECKED = 64
# Outcomes of a complete evaluation. Evaluations with other outcomes can be resumed.
_JUDGED = (Outcome.PASS, Outcome.FAIL, Outcome.SKIP)


def run_evaluation(
    job: Job, settings: EvaluationSettings | None, *, resume: str = "", screen: Progress
) -> EvaluationRecord:
    """Score a model on a dataset, on a board and on a CPU reference, and store each sample when it is finished.

    Args:
        job: the model, the board and the run settings. With ``resume``, only ``out`` is used.
        settings: the dataset and the metric. None with ``resume``.
        resume: ID of an evaluation to continue. Finished samples do not run again.

    Returns:
        The record; after Ctrl-C, with the scores so far.

    Raises:
        UsageError: the request, the dataset or a stored evaluation is invalid. Finished samples are kept.
        KeyboardInterrupt: Ctrl-C before the first sample was finished.
    """
    store, run = RunStore(job.out), None
    if resume:
        run = store.open(resume)
        read_evaluation(run)
        check_seal(run.folder, run.record.request)
        request = dict(run.record.request)
        settings = make_record(request.pop(_SETTINGS, None), EvaluationSettings)
        job = replace(Job.from_record(request), out=job.out)
    assert settings is not None
    if len(job.models) != 1:
        raise UsageError(f"expected 1 MODEL, got {len(job.models)}", hint="hil eval MODEL --dataset DIR --metric top1")
    if len(job.references) > 1:
        raise UsageError("hil eval accepts a single --reference")
    if settings.max_drop is not None and not 0 <= settings.max_drop < 100:
        raise UsageError(f"invalid --max-drop {settings.max_drop:g}: expected 0 to less than 100 percent")
    metric = choose_metric(settings.metric, settings.output)
    dataset = open_dataset(Path(settings.dataset), metric.load_file)
    choice = choose_board(job)
    with open_context() as context:
        return _Evaluation(job, settings, metric, dataset, choice, context, screen).run(store, run)


class _Evaluation:
    """The state of a running evaluation."""

    def __init__(
        self,
        job: Job,
        settings: EvaluationSettings,
        metric: Metric,
        dataset: Dataset,
        choice: BoardChoice,
        context: RunContext,
        screen: Progress,
    ) -> None:
        self.job = job
        self.settings = settings
        self.metric = metric
        self.dataset = dataset
        self.choice = choice
        self.screen = screen
        self.runner = Runner(context, logs=False)
        self.samples: list[EvaluatedSample] = []
        self.differing = 0
        self.reference = ""
        self.reference_model: Model | None = None

    def run(self, store: RunStore, run: Run | None) -> EvaluationRecord:
        is_new = run is None
        # Report usage errors before anything is stored.
        path = self.job.models[0]
        case = self.runner.begin(
            path, self.job.make_options(), Path(), name=make_safe_name(path.stem), want_inputs=False
        )
        if not case.outcome:
            case = self._fix_sizes(case)
        case = self._import_reference_model(case)
        self.identity = DatasetIdentity(
            samples=len(self.dataset.names),
            names=self.dataset.digest_names(),
            contents=self.dataset.digest_contents(),
            metric=self.metric.digest,
            model=case.model.digest if case.model else "",
            reference_model=self.reference_model.digest if self.reference_model else "",
        )
        if run is None:
            request = {**convert_to_json(asdict(self.job)), _SETTINGS: self.settings.to_json()}
            run = store.create(f"eval-{case.name}", request, command=get_typed_command())
        with lock_folder(run.folder):
            return self._run_locked(case, run, is_new=is_new)

    def _run_locked(self, case: Case, run: Run, *, is_new: bool) -> EvaluationRecord:
        if not is_new and (stored := self._resume(run)).outcome in _JUDGED:
            return stored.replace(folder=str(run.folder))
        self.stored = run
        case = replace(case, folder=run.make_case_folder(case.name))
        self.recorder = Recorder(run, [case.name], [case])
        write_evaluation(self._record(case, finished=False), run.folder)
        interrupted = False
        self.screen.begin(case.name, self.identity.samples)
        try:
            if not case.outcome and self._list_pending():
                case = self._run_samples(case)
        except StorageError:
            raise
        except UsageError:
            if is_new and not self.samples:
                self.recorder.forget()
                run.discard()
            else:
                self.screen.note(f"finished samples are kept; resume with: {self._resume_command()}")
            raise
        except KeyboardInterrupt:
            if not self.samples:
                self.recorder.interrupt()
                raise
            interrupted = True
        finally:
            self.screen.end(case.name)
        return self._finish(case, interrupted)

    def _resume(self, run: Run) -> EvaluationRecord:
        """Load the finished samples of a stored evaluation. Return the stored record."""
        stored = read_evaluation(run)
        if stored.identity != self.identity:
            old, new = stored.identity, self.identity
            models = (old.model, old.reference_model) != (new.model, new.reference_model)
            changed = "model" if models else "metric" if old.metric != new.metric else "dataset"
            raise UsageError(f"cannot resume {run.id}: the {changed} changed", hint="start a new evaluation")
        self.samples = read_samples(run.folder)
        self.reference = stored.reference
        run.record.exit_code = None
        run.record.finished = False
        return stored

    def _fix_sizes(self, case: Case) -> Case:
        """Set the sizes of the model's dimensions from the first sample."""
        model = case.model
        if model is None or model.inputs is None:
            raise UsageError(
                f"{case.path}: only the board knows the inputs of this program",
                hint="evaluate the model of the program",
            )
        sample = self.dataset.read_checked(0, model.inputs, case.options.dims)
        return replace(case, model=fix_sizes(model, sample.inputs))

    def _import_reference_model(self, case: Case) -> Case:
        """Import the reference's model, if it differs from the board's model."""
        self.reference_model = case.model
        if case.outcome or not self.settings.reference_model:
            return case
        other = self.runner.begin(
            Path(self.settings.reference_model), self.job.make_options(), Path(), want_inputs=False
        )
        if other.error is not None:
            return case.with_error(other.error.as_kind(ReferenceFailed), Stage.REFER)
        self.reference_model = other.model
        return case

    def _list_pending(self) -> list[int]:
        """Return the samples to run, or an empty list if the evaluation is decided.

        The order is random, so that the first samples represent the dataset.
        """
        if self._decide():
            return []
        done = {one.name for one in self.samples}
        order = np.random.default_rng(self.job.seed).permutation(len(self.dataset.names)).tolist()
        return [index for index in order if self.dataset.names[index] not in done]

    def _decide(self) -> str:
        total, max_drop = self.identity.samples, self.settings.max_drop
        return decide_early(self.metric, self.samples, total=total, max_drop=max_drop)

    def _run_samples(self, case: Case) -> Case:
        """Run the remaining samples. Return the case, with an outcome if a sample failed to run."""
        purpose, earlier = f"hil eval {self.stored.id}", list(self.stored.record.consoles)
        with BoardPool(
            purpose,
            wait_s=self.job.wait_s,
            say=self.screen.note,
            most_loaded=1,
            record_folder=self.stored.folder,
        ) as pool:
            try:
                try:
                    case = self._compile(case, pool)
                    if case.outcome:
                        return case
                    session = self._open_session(pool)
                except BoardError as error:
                    return case.with_error(error, Stage.PUSH)
                self.stored.record.board = record_board(session.board)
                self.runner = replace(self.runner, config=session.board.config)
                with open_samples(self.stored.folder) as append, contextlib.closing(self._refer_ahead(case)) as ahead:
                    for ran in ahead:
                        failed = self._finish_sample(*ran, session, append)
                        if failed is not None:
                            return failed
                        count = len(self.samples)
                        if (count <= _CHECKED or count % _CHECKED == 0) and self._decide():
                            break
            finally:
                self.stored.record.consoles = [*earlier, *pool.save_consoles(is_last=True)]
        return case

    def _compile(self, case: Case, pool: BoardPool) -> Case:
        config, runtime = self.choice.config, self.job.runtime
        # Ask the board before compiling only if no other source knows the target.
        if not knows_target(config, case.options.runtime):
            board = self._open_session(pool).board
            config, _ = fill_target(board.config, runtime, board.info)
        self.screen.stage(case.name, 0, Stage.COMPILE.value)
        return self.runner.compile(case, config)

    def _open_session(self, pool: BoardPool) -> BoardSession:
        return pool.session(self.choice, runtimes=(self.job.runtime,), faults=self.job.faults)

    def _refer_ahead(self, case: Case) -> Generator[tuple[LabeledSample, Case, Future[Case | None]], None, None]:
        """Yield each sample to run with its case, while threads compute the references of the next samples."""
        assert case.model is not None and case.model.inputs is not None
        workers = self.runner.context.isolated.workers
        pending = deque(self._list_pending())
        ahead: deque[tuple[LabeledSample, Case, Future[Case | None]]] = deque()
        with ThreadPoolExecutor(workers, thread_name_prefix="refer") as threads:
            try:
                while pending or ahead:
                    while pending and len(ahead) <= 2 * workers:
                        sample = self.dataset.read_checked(pending.popleft(), case.model.inputs, case.options.dims)
                        one = replace(case, inputs=sample.inputs)
                        ahead.append((sample, one, threads.submit(self._refer, one)))
                    yield ahead.popleft()
            finally:
                for _, _, future in ahead:
                    future.cancel()
                if ahead:  # cancel references that still run, because their samples are not needed
                    self.runner.context.isolated.close()

    def _refer(self, case: Case) -> Case | None:
        """Compute the reference of a sample. Runs in a thread."""
        assert self.reference_model is not None
        model = self.reference_model
        if self.settings.reference_model and model.inputs is not None:
            given = case.inputs or {}
            if missing := [spec.name for spec in model.inputs if spec.name not in given]:
                raise UsageError(
                    f"--reference-model needs the input {missing[0]!r}", hint=f"inputs of MODEL: {', '.join(given)}"
                )
            model = fix_sizes(model, make_inputs(model.inputs, given, dims=case.options.dims))
        return self.runner.refer_early(replace(case, model=model))

    def _finish_sample(
        self,
        sample: LabeledSample,
        case: Case,
        referring: Future[Case | None],
        session: BoardSession,
        append: Callable[[EvaluatedSample], None],
    ) -> Case | None:
        """Run a sample on the board, score and store it. Return the case with its outcome if it failed to run."""
        case = self.runner.execute(case, session)
        early = None if case.outcome else referring.result()
        if early is not None:
            case = self.runner.add_references(case, early)
        if case.outcome or case.result is None:
            return replace(case, inputs=None, result=None, reason=f"sample {sample.name}: {case.reason}")
        expected = case.references[0]
        self.reference = expected.source
        actual = align_names(case.result.outputs, expected.outputs)
        scores = [self._measure(sample, outputs) for outputs in (actual, expected.outputs)]
        board, reference = (SampleSide(value=one.value, evidence=one.evidence, answer=one.answer) for one in scores)
        finished = make_record(
            EvaluatedSample(name=sample.name, board=board, reference=reference).to_json(), EvaluatedSample
        )
        append(finished)
        self.samples.append(finished)
        self.differing += finished.board.answer != finished.reference.answer
        done = len(self.samples)
        self.screen.stage(
            case.name,
            done,
            f"{done} of {self.identity.samples} samples, {self.differing} answers differ from the reference",
        )
        return None

    def _measure(self, sample: LabeledSample, outputs: Mapping[str, Array]) -> SampleScore:
        try:
            with np.errstate(all="ignore"):  # outputs of a faulty program may have any values
                return self.metric.measure(outputs, sample.label)
        except UsageError as error:
            raise UsageError(f"sample {sample.name}: {error.message}", hint=error.hint) from error

    def _finish(self, case: Case, interrupted: bool) -> EvaluationRecord:
        """Judge the scores, and store the records."""
        record = self._record(case, finished=not interrupted)
        if interrupted:
            record.exit_code = EXIT_INTERRUPTED
            self.recorder.interrupt()
            self.screen.interrupt(self._resume_command())
        else:
            self.recorder.end(replace(case, outcome=record.outcome, reason=record.reason))
            record.folder = self.recorder.finish(record.exit_code).folder or ""
        if record.folder:
            write_evaluation(record, self.stored.folder)
        return record

    def _record(self, case: Case, *, finished: bool) -> EvaluationRecord:
        run, metric = self.stored, self.metric
        decided = self._decide() if finished else ""
        stopped_early = bool(decided) and len(self.samples) < self.identity.samples
        scores = None
        if finished or self.samples:
            scores = compute_scores(
                metric,
                self.samples,
                total=self.identity.samples,
                seed=self.job.seed,
                stopped_early=stopped_early,
            )
        reference = parse_number(scores.reference) if scores else None
        allowed = None if reference is None else allow_drop(metric, reference, self.settings.max_drop)
        outcome, reason = case.outcome, case.reason
        if finished and outcome is None and scores is not None:
            outcome, reason = self._judge(scores, allowed, decided)
        code = outcome.exit_code if outcome else EXIT_OK
        if isinstance(case.error, NotRun):
            code = EXIT_NOTHING_RAN
        hint = case.error.hint if case.error else ""
        if isinstance(case.error, BoardError):
            hint = "; ".join(filter(None, (hint, f"resume with: {self._resume_command()}")))
        board = run.record.board
        return EvaluationRecord(
            schema=1,
            id=run.id,
            folder=str(run.folder),
            created=run.record.created,
            origin=run.record.origin,
            finished=finished,
            settings=self.settings,
            identity=self.identity,
            name=case.name,
            model=str(case.path),
            board=board.name if board else None,
            runtime=case.options.runtime or self.choice.config.runtime or None,
            reference=self.reference,
            is_higher_better=metric.is_higher_better,
            is_share=metric.is_share,
            evaluated=len(self.samples),
            stopped_early=stopped_early,
            allowed_drop=allowed,
            scores=scores,
            outcome=outcome,
            reason=reason,
            hint=hint,
            exit_code=code,
        )

    def _judge(self, scores: EvaluationScores, allowed: float | None, decided: str) -> tuple[Outcome, str]:
        text = f"{self.metric.name} {describe_scores(scores, is_share=self.metric.is_share)}"
        if allowed is None:
            return Outcome.SKIP, f"{text}; no verdict without --max-drop"
        return Outcome(decided) if decided else judge_scores(self.metric, scores, allowed), text

    def _resume_command(self) -> str:
        root = self.stored.folder.parent
        out = () if root == DEFAULT_ROOT else ("--out", str(root))
        return shlex.join(["hil", "eval", "--resume", self.stored.id, *out])
