"""Run a bench from the first check to its stored document, for `hil bench`."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from hil.controller.analysis.bench.conditions import prepare_boards, settle_boards, watch_conditions
from hil.controller.analysis.bench.energy import measure_side_energy
from hil.controller.analysis.bench.measure import MIN_ROUNDS, BenchSide, measure
from hil.controller.analysis.bench.prompts import group_sides, split_prompts
from hil.controller.analysis.bench.stats import Batch, BenchJob
from hil.controller.analysis.bench.store import (
    keep_program,
    record_bench,
    restore_last_side,
    sample_file,
    write_google,
)
from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice, fill_target, knows_target
from hil.controller.devices.metering.meter_factory import make_missing_error
from hil.controller.models.sizing.dimensions import choose_model_sizes
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.boards.board_session import BoardSession
from hil.controller.pipeline.case import Case, ProgressSink
from hil.controller.pipeline.records.record import Recorder, record_board
from hil.controller.pipeline.records.restored import copy_board_options, restore_board
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.given_inputs import add_inputs_file, describe_inputs_file
from hil.controller.pipeline.settings.model_settings import apply_model_settings, refuse_functions
from hil.controller.pipeline.settings.options import MAX_RUNS, SECONDS, Job, check_value, make_count_kind
from hil.controller.pipeline.stages import STAGES, choose_board, needs_compiler
from hil.controller.pipeline.verdicts.accepting import check_accepted_outputs
from hil.controller.records.measurements.bench import BenchProgram, BenchRecord, SideLabel
from hil.controller.storage.run_context import Progress, RunContext, open_context
from hil.controller.storage.runs import Run, RunStore, is_sealed, make_safe_name, write_json
from hil.controller.storage.screen.texts import format_seconds
from hil.controller.storage.sources.origin import get_typed_command
from hil.core.results import Outcome, Stage
from hil.core.text import convert_to_json, make_names_unique
from hil.errors import EXIT_INTERRUPTED, BoardError, HilError, StorageError, UsageError

_MAX_COPIES = 32
# Range of --sustained. A longer measurement would need too much memory.
_SUSTAINED_LEAST_S, _SUSTAINED_MOST_S = 1, 24 * 3600


def run_bench(bench: BenchJob, *, screen: Progress) -> BenchRecord:
    """Measure one program, or two programs in turns, and store results as soon as they are available.

    Returns:
        The record; after Ctrl-C, with the measurements so far.

    Raises:
        UsageError: an option is invalid or unsupported. hil ran nothing.
        KeyboardInterrupt: Ctrl-C before anything was measured. Completed stages are stored.
    """
    _check_settings(bench)
    with open_context() as context:
        return _BenchRun(bench, context, screen).run()


def _check_settings(bench: BenchJob) -> None:
    """Raise UsageError for invalid settings."""
    models, sides = bench.job.models, len(bench.job.models) + bool(bench.against)
    two = sides == 2
    if not sides or len(models) > 2:
        raise UsageError(
            f"expected 1 or 2 MODEL arguments, got {len(models)}", hint="run hil bench MODEL, or see hil bench --help"
        )
    if bench.against and len(models) == 2:
        raise UsageError("--against requires a single MODEL, got 2", hint="remove --against or one MODEL")
    for option, count, least in (("--iterations", bench.iterations, 1), ("--warmup", bench.warmup, 0)):
        if count is not None:
            check_value(option, count, make_count_kind(least, MAX_RUNS))
    if two and bench.iterations is not None and bench.iterations < 2 * MIN_ROUNDS:
        raise UsageError(
            f"invalid --iterations {bench.iterations}: a comparison requires at least {2 * MIN_ROUNDS} per model"
        )
    if not bench.min_time_s > 0:
        raise UsageError(f"invalid --min-time {bench.min_time_s:g}: expected more than 0 seconds")
    if bench.sustained_s is not None:
        _check_sustained(bench, bench.sustained_s, two=two)
    if bench.settle_s is not None:
        check_value("--settle", bench.settle_s, SECONDS)
    if (out := bench.benchmark_out) is not None:
        with contextlib.suppress(OSError):
            out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir() or not os.access(out.parent, os.W_OK):
            raise UsageError(f"cannot write --benchmark-out {out}", hint="choose a different file")
    if not 1 <= bench.concurrency <= _MAX_COPIES:
        raise UsageError(f"invalid --concurrency {bench.concurrency}: expected 1 to {_MAX_COPIES}")
    if two and bench.concurrency > 1:
        raise UsageError(
            "--concurrency supports only a single program", hint="remove --concurrency to compare two programs"
        )
    if bench.energy and bench.concurrency > 1:
        raise UsageError("--energy does not support --concurrency", hint="remove --concurrency")
    if not 0 <= bench.min_effect < 1:
        raise UsageError(f"invalid --min-effect {100 * bench.min_effect:g}: expected 0 to less than 100 percent")
    if bench.job.generate is not None and (bench.against or bench.concurrency > 1):
        option = "--against" if bench.against else "--concurrency"
        raise UsageError(f"--generate does not support {option}", hint=f"remove {option}, and compare two models")
    if bench.fail_if_slower is not None and not two:
        raise UsageError("--fail-if-slower requires a comparison", hint="add a second MODEL or --against RUN")


def _check_sustained(bench: BenchJob, sustained_s: float, *, two: bool) -> None:
    """Raise UsageError for invalid settings of a sustained measurement."""
    if not _SUSTAINED_LEAST_S <= sustained_s <= _SUSTAINED_MOST_S:
        raise UsageError(
            f"invalid --sustained {sustained_s:g}s: "
            f"expected a time from {_SUSTAINED_LEAST_S} s to {_SUSTAINED_MOST_S // 3600} h"
        )
    others = {
        "a second program": two,
        "--iterations": bench.iterations is not None,
        "--concurrency": bench.concurrency > 1,
        "--generate": bench.job.generate is not None,
    }
    if unsupported := [name for name, is_given in others.items() if is_given]:
        raise UsageError(f"--sustained does not support {unsupported[0]}", hint="hil bench MODEL --sustained 30m")


class _BenchRun:
    """The state of a running bench."""

    def __init__(self, bench: BenchJob, context: RunContext, screen: Progress) -> None:
        self.bench = bench
        self.runner = Runner(context)
        self.screen = screen
        self.store = RunStore(bench.job.out)
        # A case per program and prompt, with the label and the job of the program.
        self.labels: list[SideLabel] = []
        self.jobs: list[Job] = []
        self.cases: list[Case] = []
        self.sides: list[BenchSide] = []
        self.programs: dict[str, BenchProgram] = {}

    def run(self) -> BenchRecord:
        base = self.store.open(self.bench.against) if self.bench.against else None
        # Report usage errors before anything is stored.
        self._import_cases(base)
        self.choices = [choose_board(job) for job in self.jobs]
        _refuse_different_devices(self.choices)
        run = self.store.create(
            f"bench-{self.cases[-1].name}", convert_to_json(asdict(self.jobs[-1])), command=get_typed_command()
        )
        self.cases = [replace(case, folder=run.make_case_folder(case.name)) for case in self.cases]
        self.recorder = Recorder(run, [case.name for case in self.cases], self.cases)
        sink = ProgressSink(self._report_stage, self.recorder.keep, self.recorder.write)
        self.runner = replace(self.runner, sink=sink)
        interrupted = False
        try:
            pool = BoardPool(
                f"hil bench {run.id}",
                wait_s=self.bench.job.wait_s,
                timeout_s=self.bench.job.timeout,
                say=self.screen.note,
                record_folder=run.folder,
            )
            with pool:
                for number in range(len(self.jobs)):
                    self._prepare_side(run, number, pool)
                if all(map(_is_measurable, self.cases)):
                    self._measure_sides(run)
        except StorageError:
            raise
        except UsageError:
            # Only the board could detect this error. Discard the run if nothing was measured.
            if not any(side.batches for side in self.sides):
                run.discard()
            raise
        except KeyboardInterrupt:
            if not any(side.batches for side in self.sides):
                self.recorder.interrupt()
                raise
            interrupted = True
        run.record.consoles = pool.save_consoles()
        return self._finish_run(run, interrupted)

    def _import_cases(self, base: Run | None) -> None:
        models, job = self.bench.job.models, self.bench.job
        names = [make_safe_name(path.stem) for path in models]
        if base is not None:
            stored, case = restore_last_side(base)
            is_own = is_sealed(base.folder, base.record.request)
            if not is_own:  # the record may be from another user, and must not run code
                refuse_functions(stored)
            is_moved = not models and bool(job.board or job.hw_type)
            stored = restore_board(stored, job, own=is_own and not is_moved)
            if not (job.board or job.hw_type):  # faults are never copied from the stored job
                job = copy_board_options(job, stored)
            # Count both programs, or none.
            stored = replace(stored, instructions=job.instructions)
            case = replace(case, options=replace(case.options, instructions=job.instructions))
            self.labels.append("A")
            self.jobs.append(stored)
            name = make_safe_name(case.path.stem)
            self.cases.append(replace(case, name=f"A-{name}" if models else name))
            names = [f"B-{name}" for name in names]
        elif len(models) == 2:
            names = [f"{label}-{name}" for label, name in zip("AB", names, strict=True)]
        several = len(models) > 1
        dims = choose_model_sizes(models, job.dims, self.runner.context, job.function) if several else [job.dims]
        labels: tuple[SideLabel, ...] = ("A", "B") if base is None else ("B",)
        for label, name, path, own in zip(labels, names, models, dims, strict=False):
            prompts = split_prompts(replace(apply_model_settings(job.make_options(), path), dims=own))
            case_names = make_names_unique(
                [make_safe_name(f"{name}-{one.prompt}") if one.prompt else name for one in prompts]
            )
            for options, case_name in zip(prompts, case_names, strict=True):
                self.labels.append(label)
                self.jobs.append(job)
                # Without the check, the board also runs with inputs from the file.
                # The bench measures the energy itself, after the times.
                before, options = options, replace(add_inputs_file(options, path), energy=False)
                if note := describe_inputs_file(before, options, path):
                    self.screen.note(note)
                self.cases.append(
                    self.runner.begin(path, options, Path(), name=case_name, want_inputs=self.bench.check)
                )
        check_accepted_outputs((case.options.accept, case.model) for case in self.cases)

    def _open_session(self, pool: BoardPool, number: int) -> BoardSession:
        """Open a session on a job's board. Jobs with the same board and faults share the session."""
        places = [
            (its.name, its.config.path, its.devices, job.faults)
            for job, its in zip(self.jobs, self.choices, strict=True)
        ]
        shared = [job.runtime for job, place in zip(self.jobs, places, strict=True) if place == places[number]]
        return pool.session(self.choices[number], runtimes=shared, faults=self.jobs[number].faults)

    def _prepare_side(self, run: Run, number: int, pool: BoardPool) -> None:
        """Prepare a side for measurement. An error of the model or board becomes the case's outcome."""
        case, runtime, config = self.cases[number], self.jobs[number].runtime, self.choices[number].config
        self.screen.begin(case.name, len(STAGES))
        try:
            # Ask the board before compiling only if no other source knows the target.
            if needs_compiler(case, config) and not knows_target(config, runtime):
                board = self._open_session(pool, number).board
                config, target = fill_target(board.config, runtime, board.info)
                self.screen.note(f"compiling for {target or board.target or board.name}")
            case = self.runner.compile(case, config)
            if not case.outcome:
                session = self._open_session(pool, number)
                board = session.board
                self._check_clock(board)
                if self.bench.concurrency > 1 and board.config.mcu is not None:
                    raise UsageError(
                        f"--concurrency is not for microcontrollers: board {board.name} holds only one program",
                        hint="remove --concurrency",
                    )
                self._check_meter(board)
                if number == len(self.cases) - 1:
                    run.record.board = record_board(board)
                case = _drop_references(self._run_once(case, session))
                self.sides.append(BenchSide(self.labels[number], case, board))
                if case.model is None:
                    self.recorder.keep(case, "references")  # references from a stored bench
            if _is_measurable(case) and case.decoder is None:
                self.programs[case.name] = keep_program(run, case)
        except BoardError as error:
            case = case.with_error(error, Stage.PUSH)
        finally:
            self.screen.end(case.name)
            self.cases[number] = case
        self.recorder.end(case)

    def _check_clock(self, board: Board) -> None:
        """Raise UsageError for options that need times, if the board's clock counts instructions."""
        bench = self.bench
        options = {
            "--sustained": bench.sustained_s is not None,
            "--generate": bench.job.generate is not None,
            "--fail-if-slower": bench.fail_if_slower is not None,
            "--benchmark-out": bench.benchmark_out is not None,
        }
        given = next((name for name, is_given in options.items() if is_given), "")
        if given and not board.config.has_time:
            raise UsageError(f"{given} needs times, but the clock of board {board.name} counts instructions")

    def _check_meter(self, board: Board) -> None:
        """Raise UsageError for --energy on a board without a usable meter."""
        if board.meter.is_set:
            return
        missing = make_missing_error(board)
        if self.bench.energy:
            raise UsageError(f"--energy needs a meter, but {missing.message}", hint=missing.hint)
        if board.config.connection.host_meter and self.bench.energy is None:
            self.screen.note(f"energy not measured: {missing.message}")

    def _run_once(self, case: Case, session: BoardSession) -> Case:
        """Push, load and run a case once, cold, and compare its output: only correct programs are measured."""
        case = self.runner.execute(case, session)
        if case.outcome:
            return case
        if not self.bench.check or not (case.references or case.model):
            return replace(case, outcome=Outcome.SKIP, reason="output not compared")
        return self.runner.judge(case)

    def _measure_sides(self, run: Run) -> None:
        write_json(run.folder / "bench.json", self._record_bench(run, finished=False).to_json())
        order = random.Random(secrets.randbits(64))
        groups = group_sides(self.sides)
        prompts = make_names_unique([make_safe_name(sides[0].case.options.prompt) for sides in groups])
        for sides, prompt in zip(groups, prompts, strict=True):
            is_generation = sides[0].case.decoder is not None
            self._measure_group(run, sides, order, f"samples-{prompt}.csv" if is_generation else "samples.csv")

    def _measure_group(self, run: Run, sides: Sequence[BenchSide], order: random.Random, samples: str) -> None:
        """Measure one program, or two programs in turns. With ``--generate``, measure the programs of one prompt."""
        title = " and ".join(side.case.name for side in sides)

        def keep(side: BenchSide, batch: Batch, share: float) -> None:
            append(batch)
            typical = format_seconds(float(np.median(batch.duration_ns)) / 1e9)
            self.screen.stage(title, round(100 * share), f"measuring {side.label}: {typical}")

        self.screen.begin(title, 100)
        try:
            prepare_boards(sides)
            if self.bench.settle_s is not None:
                self.screen.stage(title, 0, "waiting for a steady board")
                settle_boards(sides, self.bench.settle_s)
            with sample_file(run.folder, samples) as append, watch_conditions(sides, self.bench.concurrency):
                measure(sides, self.bench, keep, order)
            self._measure_energy(sides, title)
        except UsageError:
            raise
        except HilError:
            pass  # the error is the outcome of the side's case; keep the measurements so far
        finally:
            self.screen.end(title)

    def _measure_energy(self, sides: Sequence[BenchSide], title: str) -> None:
        """Measure the energy of the sides whose boards have a meter."""
        if self.bench.energy is False or self.bench.concurrency > 1:
            return
        for side in sides:
            if side.board.meter.is_set and side.batches:

                def report(share: float, label: str = side.label) -> None:
                    self.screen.stage(title, round(100 * share), f"measuring the energy of {label}")

                side.energy = measure_side_energy(side, report)

    def _finish_run(self, run: Run, interrupted: bool) -> BenchRecord:
        for side in self.sides:
            if side.batches and side.result is not None and side.case.result is not None:
                first = [batch for batch in side.batches if batch.copy == 0]
                stamps = tuple(
                    (start, start + duration)
                    for batch in first
                    for start, duration in zip(batch.start_ns.tolist(), batch.duration_ns.tolist(), strict=True)
                )
                result = replace(
                    side.result,
                    outputs=side.case.result.outputs,  # the outputs that were compared with the references
                    iterations_ns=stamps if side.clock == "board" else (),
                    peak_memory_bytes=side.peak_memory_bytes,
                    peak_device_memory_bytes=side.peak_device_memory_bytes,
                    cold=False,
                    repetition=side.repetition,
                )
                calls = tuple(call for batch in side.batches for call in batch.calls)
                # The conditions and the grade of the measurement are in bench.json.
                case = replace(side.case, result=result, calls=calls, conditions=None, grade=None)
                side.case = self.runner.judge_repetition(case)
        measured = {side.case.name: side.case for side in self.sides}
        self.cases = [measured.get(case.name, case) for case in self.cases]
        for case in self.cases:
            self.recorder.write(case)
        record = self._record_bench(run, finished=not interrupted, interrupted=interrupted)
        record.folder = self.recorder.finish(record.exit_code, finished=not interrupted).folder or ""
        if record.folder:
            write_json(run.folder / "bench.json", record.to_json())
        if self.bench.benchmark_out is not None:
            write_google(self.bench.benchmark_out, record, self.sides)
        return record

    def _record_bench(self, run: Run, *, finished: bool, interrupted: bool = False) -> BenchRecord:
        code = EXIT_INTERRUPTED if interrupted else None
        cases = [*zip(self.labels, self.cases, strict=True)]
        return record_bench(run, self.bench, cases, self.sides, self.programs, finished=finished, exit_code=code)

    def _report_stage(self, case: Case, stage: Stage, note: str) -> None:
        self.screen.stage(case.name, STAGES.index(stage), f"{stage.value} {note}".strip())
        if not note:
            self.recorder.write(case)


def _refuse_different_devices(choices: Sequence[BoardChoice]) -> None:
    """Raise UsageError for programs on different devices of a board. They need two sessions, but a board has one."""
    found: dict[tuple[str, Path], BoardChoice] = {}
    for choice in choices:
        first = found.setdefault((choice.name, choice.config.path), choice)
        if first.devices != choice.devices and not choice.config.is_simulator:
            names = [", ".join(device for _, device in one.devices) or "the default" for one in (first, choice)]
            raise UsageError(
                f"the programs use different devices of board {choice.name}: {names[0]} and {names[1]}",
                hint="use the same --device for both programs, or bench each device separately",
            )


def _drop_references(case: Case) -> Case:
    """Drop tensors that a judged generation no longer needs: memory may be too small for the tensors of all prompts."""
    if case.generation is None:
        return case
    return replace(case, prefill=None, references=tuple(replace(one, outputs={}) for one in case.references))


def _is_measurable(case: Case) -> bool:
    """Return True if the case ran and the output is correct or not compared."""
    return case.error is None and case.outcome in (Outcome.PASS, Outcome.SKIP)
