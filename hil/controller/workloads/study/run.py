"""Run a study from the list to the stored table. This implements `hil study run`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.compare.criteria import Rule
from hil.compare.tolerance import check_tolerance
from hil.compare.verdict import compare_output
from hil.controller.backends.references.independence import find_relation
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.loaded_program import LoadedProgram
from hil.controller.models.importers import import_model
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.boards.board_session import BoardSession
from hil.controller.pipeline.verdicts.accepting import load_rules
from hil.controller.records.base import make_record
from hil.controller.records.console import StoredConsole
from hil.controller.records.outputs import StoredPart
from hil.controller.records.study import StudyBoard, StudyDeviation, StudyRecord, StudyRow, StudyStage, make_study
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import Progress
from hil.controller.storage.runs import convert_write_errors, write_json
from hil.controller.storage.sources.origin import find_origin, get_typed_command
from hil.controller.storage.sources.packages import require_version
from hil.controller.storage.tensor_files import load_tensors, save_npz
from hil.controller.workloads.study.record import Asked, Experiment, exit_code, merge_rows
from hil.controller.workloads.study.toolchains import LOAD, MATCH, PREPARE, RUN, TOOLCHAINS, Making, StepProgram, call
from hil.controller.workloads.study.train_build import BATCH, NOISE, RESULT, SAVED, train
from hil.core.bounded_json import read_json
from hil.core.files import copy_file
from hil.core.results import Model, Outcome
from hil.core.tensors import Array
from hil.errors import (
    BoardError,
    BoardRefused,
    BoardUnreachable,
    HilError,
    ReferenceFailed,
    UsageError,
    VacuousTolerance,
)

Tensors = Mapping[str, Array]


class Differs(HilError):
    """A training step's values differ from TensorFlow's."""

    outcome = Outcome.FAIL.value


class CannotBeJudged(HilError):
    """All values agree with TensorFlow's values, but for some tensors wrong values would also agree."""

    outcome = Outcome.BLIND.value


def match_steps(
    row: StudyRow,
    results: Sequence[Tensors],
    expected_of: Callable[[int], tuple[Tensors, Tensors]],
    *,
    rtol: float,
    atol: float | None,
    allow_blind: Sequence[str] = (),
    accept: Sequence[Rule] = (),
) -> None:
    """Compare all steps. Store the number of agreeing steps and the largest difference in the row.

    Args:
        results: outputs and variables of all steps.
        load_expected: returns TensorFlow's values and their noise by name, for a step number from 0.

    Raises:
        Differs: a value does not agree, or no values can be compared.
        CannotBeJudged: all values agree, but wrong values of a tensor that is not in ``allow_blind`` would also agree.
    """
    within: dict[str, Any] = {"rtol": rtol, "atol": atol, "allow_blind": allow_blind, "accept": accept}
    if not results:
        raise Differs("no steps to compare")
    unjudged: dict[str, str] = {}
    largest = 0.0
    for step, outputs in enumerate(results):
        place = f"step {step + 1} of {len(results)}"
        expected, noise = expected_of(step)
        if outputs.keys() != expected.keys():
            others = ", ".join(sorted(outputs.keys() ^ expected.keys()))
            raise Differs(f"{place}: only the program or only TensorFlow returns these values: {others}")
        if not expected:
            raise Differs(f"{place}: no outputs or variables to compare")
        for name, reference in expected.items():
            try:
                compared = compare_output(name, outputs[name], reference, noise=noise.get(name), **within)
            except VacuousTolerance as error:
                unjudged.setdefault(name, f"{place}: {error.message}")
                continue
            if compared.max_abs is not None and compared.max_abs >= largest:
                largest = compared.max_abs
                row.worst = StudyDeviation(max_abs=largest, max_ulp=compared.max_ulp, of=name, step=step + 1)
            if compared.blind and not compared.passed:
                unjudged.setdefault(name, f"{place}: {name}: {compared.reason}")
            elif not compared.passed:
                raise Differs(f"{place}: {name}: {compared.reason}")
        row.steps = step + 1
    if unjudged:
        more = f" (and {len(unjudged) - 1} more tensors)" if len(unjudged) > 1 else ""
        raise CannotBeJudged(
            f"{next(iter(unjudged.values()))}{more}", hint="accept the tensor without a verdict: --allow-blind NAME"
        )


DOCUMENT = "study.json"
# A row's program inputs and outputs per step, for `hil run PROGRAM --input ... --expected ...`.
INPUTS, OUTPUTS = "inputs-{}.npz", "outputs-{}.npz"


def run_study(asked: Asked, choice: BoardChoice, *, wait_s: float, screen: Progress) -> StudyRecord:
    """Run all experiments with all compilers, and store rows as they end.

    Args:
        wait_s: timeout in seconds while the board is in use.

    Returns:
        The study; after Ctrl-C, the partial results.

    Raises:
        UsageError: the settings are invalid, or a package is missing. No experiment was run.
        BoardError: the board is unreachable. No experiment was run. If the board is lost later, only the current row
            ends.
    """
    check_tolerance(asked.rtol, asked.atol)
    load_rules(asked.accept)
    if asked.steps < 1:
        raise UsageError("--steps must be at least 1")
    for toolchain in asked.toolchains:
        TOOLCHAINS[toolchain].compiler()
    require_version("tensorflow", "tensorflow")
    with (
        Isolated() as isolated,
        BoardPool("hil study", wait_s=wait_s, say=screen.note, record_folder=asked.out) as pool,
    ):
        return _Study(asked, choice, isolated, pool, screen).run()


class _Study:
    def __init__(
        self, asked: Asked, choice: BoardChoice, isolated: Isolated, pool: BoardPool, screen: Progress
    ) -> None:
        self.asked = asked
        self.choice = choice
        self.isolated = isolated
        self.pool = pool
        self.screen = screen
        self.cache = Cache()
        self.board = StudyBoard()
        self.consoles: list[StoredConsole] = []  # of an earlier process
        self.created, self.origin = time.time(), find_origin(asked.labels)
        self.command = get_typed_command()
        self.rows = [
            StudyRow(
                experiment=one.name,
                title=one.title,
                reported=one.reported,
                toolchain=toolchain,
                stages=[StudyStage(name=name) for name in TOOLCHAINS[toolchain].all_stages],
                relation=find_relation(TOOLCHAINS[toolchain].runtime, "tensorflow"),
            )
            for one in asked.experiments
            for toolchain in asked.toolchains
        ]

    def run(self) -> StudyRecord:
        out = self.asked.out
        made_folder = not out.exists()
        with convert_write_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        if (out / DOCUMENT).exists():
            self._take_over(out / DOCUMENT)
        interrupted = finished = False
        try:
            self._open_session()
            self.board = self._describe_board()
            for experiment in self.asked.experiments:
                self._run_experiment(experiment)
            finished = True
        except (BoardRefused, BoardUnreachable):
            if made_folder and not (out / DOCUMENT).exists():
                out.rmdir()
            raise
        except KeyboardInterrupt:
            interrupted = True
            self.screen.note("interrupted; finished rows are kept: continue with the same command and --resume")
        return self._save(finished=finished, interrupted=interrupted)

    def _take_over(self, stored: Path) -> None:
        """Load the rows of a stored study. Raises UsageError if the settings or board differ, or without ``resume``."""
        out, hint = self.asked.out, "use a different directory with -o"
        if not self.asked.resume:
            raise UsageError(f"{out} already contains a study", hint=f"continue with --resume, or {hint}")
        try:
            study = make_study(read_json(stored))
        except (OSError, ValueError, UsageError) as error:
            raise UsageError(f"{stored} cannot be read: {error}", hint=hint) from error
        if study.asked != self.asked.settings:
            raise UsageError(f"{out} contains a study with different settings", hint=f"{hint}, or the same settings")
        if study.board not in (StudyBoard(), self._describe_board()):
            raise UsageError(f"{out} contains a study on a different board: {study.board.name}", hint=hint)
        self.rows = merge_rows(study.rows, self.rows)
        self.created, self.consoles = study.created or self.created, study.consoles
        self.origin = study.origin or self.origin
        self.command = study.command  # without --resume

    def _describe_board(self) -> StudyBoard:
        return StudyBoard(name=self.choice.name, hw_type=self.choice.config.hw_type)

    def _open_session(self) -> BoardSession:
        """Return the board's session. Reopen a lost board."""
        runtimes = [TOOLCHAINS[toolchain].runtime for toolchain in self.asked.toolchains]
        # Prefer IREE: its runtime must be deployed to the board, while XLA's runtime is linked into programs.
        return self.pool.session(self.choice, runtimes=("iree" if "iree" in runtimes else runtimes[0],))

    def _run_experiment(self, experiment: Experiment) -> None:
        mine = [row for row in self.rows if row.experiment == experiment.name and row.outcome is None]
        if not mine:
            return
        trained = self.asked.out / experiment.name / "tensorflow"
        first = mine[0]
        self.screen.begin(experiment.name, sum(len(row.stages) for row in mine))
        try:
            # Train once for all compilers.
            with self._run_stages(first) as stage:
                stage(PREPARE, lambda: self._train(experiment, trained))
            for row in mine[1:]:
                row.stages[0] = first.stages[0]
                if first.outcome is not None:
                    row.outcome, row.detail = first.outcome, first.detail
                    row.failed_stage, row.message = first.failed_stage, first.message
            for row in mine:
                if row.outcome is None:
                    with self._run_stages(row) as stage:
                        self._run_row(row, trained, stage)
                self._save(finished=False)
        finally:
            self.screen.end(experiment.name)

    def _train(self, experiment: Experiment, folder: Path) -> None:
        self._open_session()  # if the board is lost, fail before the training
        folder.mkdir(parents=True, exist_ok=True)
        what = {"model": str(experiment.path.absolute()), "seed": self.asked.seed, "steps": self.asked.steps}
        arguments = {**what, "folder": str(folder.absolute())}
        call(self.isolated, train, arguments, folder / "log.txt", failure=ReferenceFailed, crash=ReferenceFailed)

    def _run_row(self, row: StudyRow, trained: Path, stage: Callable[[str, Callable[[], Any]], Any]) -> None:
        folder = (self.asked.out / row.experiment / row.toolchain).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        saved = trained.absolute() / SAVED / "saved_model.pb"
        session = self._open_session()
        board, machine = session.board, session.board.info["machine"]
        making = Making(saved, board.config, machine, folder, self.cache, self.isolated, stage)
        row.compiler = TOOLCHAINS[row.toolchain].compiler()
        program = TOOLCHAINS[row.toolchain].make(making)
        row.bytes = sum(path.stat().st_size for path in program.artifact.files.values())
        stored = self._keep(program, folder)
        row.program = str(stored.path.relative_to(self.asked.out.absolute()))

        def load() -> Any:
            board.push(program.artifact)
            loaded, _ = session.load(program.artifact, timeout=self.asked.timeout, no_fallback=self.asked.no_fallback)
            return loaded

        loaded = stage(LOAD, load)
        try:
            results = stage(RUN, lambda: self._run_steps(row, loaded, program, trained, stored))
        finally:
            session.unload_after_run(program.artifact, broken=False)
        asked = self.asked

        def load_expected(step: int) -> tuple[Tensors, Tensors]:
            return load_tensors(trained / RESULT.format(step)), load_tensors(trained / NOISE.format(step))

        within: dict[str, Any] = {"rtol": asked.rtol, "atol": asked.atol, "allow_blind": asked.allow_blind}
        within["accept"] = load_rules(asked.accept)
        stage(MATCH, lambda: match_steps(row, results, load_expected, **within))

    def _keep(self, program: StepProgram, folder: Path) -> Model:
        """Copy a program's files from the cache, which may evict them.

        Return the program as a model for repeated runs.
        """
        files = program.artifact.files
        main = folder / f"program{Path(program.artifact.main).suffix}"
        with convert_write_errors(folder):
            for name, path in files.items():
                copy_file(path, main if name == program.artifact.main else folder / name)
        return import_model(main, isolated=self.isolated, cache=self.cache)

    def _run_steps(
        self, row: StudyRow, loaded: LoadedProgram, program: StepProgram, trained: Path, stored: Model
    ) -> list[dict[str, Array]]:
        """Run all steps and return their outputs.

        A step starts from the program's variables after the previous step.
        """
        state, results = dict(program.values), []
        for step in range(self.asked.steps):
            batch = load_tensors(trained / BATCH.format(step))
            given = {name: (batch | state)[name] for name in program.inputs}
            result, _ = loaded.run(given, names=program.outputs, timeout=self.asked.timeout)
            placement = result.provenance["placement"]
            row.placement = None if placement is None else [make_record(part, StoredPart) for part in placement]
            outputs = dict(result.outputs)
            for name, specs, tensors in ((INPUTS, stored.inputs, given), (OUTPUTS, stored.outputs, outputs)):
                keys = [spec.name for spec in specs or ()]
                save_npz(stored.path.with_name(name.format(step + 1)), dict(zip(keys, tensors.values(), strict=True)))
            state |= {name: value for name, value in outputs.items() if name in state}
            # Also compare variables without a new value, because they must not change.
            results.append(outputs | state)
        return results

    @contextlib.contextmanager
    def _run_stages(self, row: StudyRow) -> Iterator[Callable[[str, Callable[[], Any]], Any]]:
        """Yield a function that runs a row's stage. Model errors end only the row."""
        by_name = {stage.name: (number, stage) for number, stage in enumerate(row.stages)}

        def stage(name: str, work: Callable[[], Any]) -> Any:
            number, result = by_name[name]
            self.screen.stage(row.experiment, number, f"{row.toolchain}: {name}")
            begin = time.monotonic()
            try:
                made = work()
            except HilError as error:
                row.fail(result, error.message)
                raise
            finally:
                result.seconds = time.monotonic() - begin
            result.outcome = "pass"
            return made

        try:
            yield stage
        except UsageError:
            raise
        except HilError as error:
            if not row.failed_stage:  # between two stages, for example while the board is reopened
                row.fail(next(one for one in row.stages if one.outcome == "not reached"), error.message)
            if isinstance(error, BoardError):
                self.pool.reconnect(self.choice, error)
                row.outcome, row.detail = Outcome(error.outcome or Outcome.BOARD_LOST), error.detail or error.message
                self.screen.note(f"the board was lost: {error.message}")
            else:
                row.outcome, row.detail = Outcome(error.outcome or Outcome.RUN_ERROR), error.detail
        else:
            if all(one.outcome == "pass" for one in row.stages):
                row.outcome = Outcome.PASS

    def _save(self, *, finished: bool, interrupted: bool = False) -> StudyRecord:
        from hil.controller.workloads.study.show import write_tables

        study = StudyRecord(
            schema=1,
            folder=str(self.asked.out),
            created=self.created,
            origin=self.origin,
            command=self.command,
            asked=self.asked.settings,
            board=self.board,
            finished=finished,
            rows=self.rows,
            consoles=[*self.consoles, *self.pool.save_consoles(is_last=finished or interrupted)],
            exit_code=exit_code(self.rows, interrupted),
        )
        write_json(self.asked.out / DOCUMENT, study.to_json())
        with convert_write_errors(self.asked.out):
            write_tables(self.rows, self.asked.out)
        return study
