"""Run cases through the pipeline for all workloads.

The host's stages (import, compile, refer) run in threads. At the same time, cases run on the board in the caller's
thread, one after another.
"""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from hil import errors
from hil.controller.backends.references import EXPECTED_HINT, choose_default_references
from hil.controller.backends.targets import explain
from hil.controller.devices.board_choice import BoardChoice, knows_target
from hil.controller.models.inputs import OpenDimensions, fix_sizes
from hil.controller.models.sizing.size_hints import suggest_sizes
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.boards.board_session import BoardSession
from hil.controller.pipeline.case import Case, ProgressSink
from hil.controller.pipeline.settings.given_inputs import add_inputs_file
from hil.controller.pipeline.settings.model_settings import apply_model_settings
from hil.controller.pipeline.settings.options import Options
from hil.controller.pipeline.stages import PIPELINE, PipelineStep, make_case_inputs, refuse_ranges
from hil.controller.pipeline.tools import Tools
from hil.controller.pipeline.verdicts.judging import judge_repetition
from hil.core import clock
from hil.core.board_config import BoardConfig
from hil.core.results import Stage
from hil.core.timeline import Span

T = TypeVar("T")

_STEPS = {step.stage: step for step in PIPELINE}
_ON_BOARD = (Stage.PUSH, Stage.LOAD, Stage.RUN)


def raise_usage_error(error: errors.UsageError, stage: Stage) -> errors.HilError:
    """Raise the error unconditionally, so that invalid usage never becomes a case outcome."""
    raise error


@dataclass(frozen=True)
class Runner(Tools):
    """Runs cases through the stages."""

    # called for invalid usage in a stage: raises the error, or returns the error for the case.
    of_usage: Callable[[errors.UsageError, Stage], errors.HilError] = raise_usage_error

    def begin(self, path: Path, options: Options, folder: Path, *, name: str = "", want_inputs: bool = True) -> Case:
        """Import a model and validate the inputs, so that later stages do not fail because of invalid inputs.

        The inputs are from the user, or from the file next to the model (:func:`add_inputs_file`).

        An unreadable model results in an outcome of the case. Invalid usage is raised.

        Args:
            want_inputs: True if the case will run and be compared. Such a case needs inputs and a reference.

        Raises:
            UsageError: missing file, unknown function, inputs that do not match the model, or a range of sizes.
        """
        options = apply_model_settings(options, path)
        refuse_ranges(options)
        if want_inputs:
            options = add_inputs_file(options, path)
        case = self._run_step(Case(name or path.stem, path, options, folder), _STEPS[Stage.IMPORT])
        if not want_inputs or case.model is None:
            return case
        if not (case.decoder or options.expected or options.references or choose_default_references(case.model)):
            is_bundled = path.suffix == ".bpte"
            raise errors.UsageError(
                f"no reference supports {case.model.format} models",
                hint="run the cases in the file: hil bundle import FILE --from bpte, then hil bundle run"
                if is_bundled
                else EXPECTED_HINT,
                option="" if is_bundled else "--expected",
            )
        if case.model.inputs is not None and case.decoder is None:
            try:
                inputs = make_case_inputs(case, case.model.inputs)
            except OpenDimensions as error:
                error.suggest(suggest_sizes(case.model, self.context))
                raise
            case = replace(case, model=fix_sizes(case.model, inputs), inputs=inputs)
        return case

    def compile(self, case: Case, config: BoardConfig) -> Case:
        """Compile the model on the host, unless the case contains a program."""
        return replace(self, config=config)._run_stages(case, Stage.COMPILE)

    def refer_early(self, case: Case) -> Case | None:
        """Compute references while the case waits for a board. Pass the result to :meth:`judge`.

        Returns None if the case already has an outcome or references, or if its inputs are not known before the run.
        """
        if case.outcome or case.inputs is None or case.references or case.needs_result:
            return None
        return replace(self, sink=ProgressSink()).run_reference(case)

    def run_reference(self, case: Case) -> Case:
        """Compute the references, unless the case already has references."""
        return self._run_stages(case, Stage.REFER)

    def execute(self, case: Case, session: BoardSession) -> Case:
        """Push, load and run the program on a board."""
        if case.artifact is None or case.outcome:
            return case
        console = session.console
        if console is not None and (boot := console.take_boot()) is not None:
            seconds = (boot.end_ns - boot.start_ns) / 1e9
            case = replace(case, spans=(*case.spans, boot)).with_timings(boot_s=seconds)
        case = replace(self, config=session.board.config, session=session)._run_stages(case, *_ON_BOARD)
        if console is not None:
            console.set_clock(session.board.get_clock_fit())
            console.end_case()
            if case.capture is not None:
                case.capture.console = console.list_spans(min((span.start_ns for span in case.spans), default=0))
        if case.error is not None and case.artifact is not None and case.artifact.runtime == "iree":
            device = session.board.config.devices.get("iree", "")
            explain(case.error, case.artifact.flags, session.board.info, device)
        return case

    def judge(self, case: Case, early: Case | None = None) -> Case:
        """Compare the board's outputs with the references.

        Computes the references first if neither ``case`` nor ``early`` has them.
        """
        if early is not None:
            case = self.add_references(case, early)
        return self._run_stages(case, Stage.REFER, Stage.COMPARE)

    def judge_repetition(self, case: Case) -> Case:
        """Judge a case a second time, by the outputs of further iterations."""
        repetition = case.result.repetition if case.result is not None else None
        if case.error is not None or repetition is None or repetition.is_stable:
            return case
        if case.generation is not None:
            from hil.controller.pipeline.decoding.generation import mark_unstable

            return mark_unstable(case)
        return self._run_step(case, PipelineStep(Stage.COMPARE, judge_repetition, lambda case: True))

    def add_references(self, case: Case, early: Case) -> Case:
        """Add the result of :meth:`refer_early` to a case: references, or an error."""
        if case.outcome:
            return case
        if early.outcome:
            return replace(case, outcome=early.outcome, error=early.error, stage=early.stage, reason=early.reason)
        case = replace(
            case,
            references=early.references,
            plain_reference=early.plain_reference,
            unanswered=early.unanswered,
            spans=(*case.spans, *(span for span in early.spans if span not in case.spans)),
        ).with_timings(refer_s=early.timings.refer_s)
        self.sink.keep(case, "references")
        return case

    def run_on_board(self, case: Case, session: BoardSession) -> Case:
        """Run the remaining stages of an imported case on a board."""
        return self.judge(self.execute(self.compile(case, session.board.config), session))

    def run(
        self,
        cases: Sequence[Case],
        pool: BoardPool,
        choice: BoardChoice,
        *,
        runtimes: Sequence[str] = ("",),
        faults: Sequence[str] = (),
    ) -> Iterator[Case]:
        """Run all remaining stages of imported cases. Yield each ended case, in order.

        Compilation and references run in threads. hil opens the board after the first compilation, or earlier if only
        the board knows the compile target. If the board is lost, the current case ends, and hil tries to reconnect for
        the next case. If the board is not available, all remaining cases end. Cases that already have an outcome are
        not changed.

        Args:
            runtimes: the runtimes of the cases; "" is the board's default.
            faults: see :meth:`BoardPool.session`.
        """
        lost: errors.BoardError | None = None
        config = choice.config

        def open_session() -> BoardSession:
            return pool.session(choice, runtimes=runtimes, faults=faults)

        with concurrent.futures.ThreadPoolExecutor(
            self.context.isolated.workers, thread_name_prefix="prepare"
        ) as threads:
            compiling: deque[Case | concurrent.futures.Future[Case]] = deque()
            try:
                if not all(case.outcome or knows_target(config, case.options.runtime) for case in cases):
                    try:
                        config = open_session().board.config
                    except errors.BoardError as error:
                        lost = error
                compiling.extend(
                    case if case.outcome or lost else threads.submit(self.compile, case, config) for case in cases
                )
                # Release ended cases, because there may be hundreds, each with tensors.
                del cases
                while compiling:
                    first = compiling.popleft()
                    case = first if isinstance(first, Case) else _await_result(first)
                    del first
                    # References depend only on model and inputs, so compute them while the board runs.
                    referring = threads.submit(self.refer_early, case)
                    if case.references:
                        self.sink.keep(case, "references")
                    if not case.outcome and lost is None:
                        try:
                            case = self._run_on_board(case, open_session(), pool, choice, faults)
                        except errors.BoardError as error:
                            lost = error
                    if not case.outcome and lost is not None:
                        case = case.with_error(lost, Stage.PUSH)
                    early = _await_result(referring)
                    yield self.judge(case, early)
            except BaseException:
                for waiting in compiling:
                    if not isinstance(waiting, Case):
                        waiting.cancel()
                self.context.isolated.close()
                raise

    def _run_on_board(
        self, case: Case, session: BoardSession, pool: BoardPool, choice: BoardChoice, faults: Sequence[str]
    ) -> Case:
        """Run a case. If the board is lost, try to reconnect for the next case."""
        case = self.execute(case, session)
        if isinstance(case.error, errors.BoardError) and not isinstance(case.error, errors.BoardUnfit):
            self.sink.stage(case, Stage(case.stage), "board lost, reconnecting")
            pool.reconnect(choice, case.error, faults=faults)
            # reconnect has added its result to the error's message.
            case = replace(case, reason=case.error.message)
        return case

    def _run_stages(self, case: Case, *stages: Stage) -> Case:
        for stage in stages:
            if not case.outcome and _STEPS[stage].needed(case):
                case = self._run_step(case, _STEPS[stage])
        return case

    def _run_step(self, case: Case, step: PipelineStep) -> Case:
        """Run a stage. An error ends the case."""
        case = replace(case, stage=step.stage.value)
        start = clock.get_time_ns()
        try:
            for made in step.run(case, self):
                case = made
        except errors.UsageError as error:
            case = case.with_error(self.of_usage(error, step.stage), step.stage)
        except errors.HilError as error:
            if self.session is not None:
                self.session.explain(error)
            case = case.with_error(error, step.stage)
        if case.error is not None:
            self.sink.ended(case)
        return replace(case, spans=(*case.spans, Span(step.stage.value, start, clock.get_time_ns())))


def _await_result(future: concurrent.futures.Future[T]) -> T:
    """Return a future's result. Waits have a timeout, so that Ctrl-C works on all platforms."""
    while True:
        try:
            return future.result(timeout=0.5)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
