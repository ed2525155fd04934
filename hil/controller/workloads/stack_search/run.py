"""Run a program on boards with different stacks, multiple times on each board."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.case import Case, ProgressSink
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Options
from hil.controller.pipeline.stages import check_options
from hil.controller.records.base import make_record, read_record
from hil.controller.records.decisions.stack_search import BoardAnswer, BoardRun, StackSearchRecord, TriedBoard
from hil.controller.records.stack import StackPart
from hil.controller.storage.run_context import Progress, RunContext
from hil.controller.storage.runs import convert_write_errors, make_safe_name, write_json
from hil.controller.storage.sources.origin import find_origin, get_typed_command
from hil.controller.workloads.stack_search.verdict import BOARD, conclude, get_version, group_by_version
from hil.core.digest import digest_of
from hil.core.results import BOARD_OUTCOMES, Artifact, Outcome, Stage
from hil.core.scratch import make_temporary_folder
from hil.errors import EXIT_INTERRUPTED, BoardError, HilError, UsageError, did_you_mean

DOCUMENT = "stack-search.json"
_MAX_BYTES = 64 << 20
# Answers that a resumed search keeps.
_FINAL = ("pass", "fail", "unstable", "not judged")


@dataclass(frozen=True)
class StackSearch:
    """Search that the user requested.

    Args:
        over: part of the stack, or ``board``.
        request: settings that must not change when the search resumes.
        runs: runs per board.
        out: directory for the record and logs; None stores nothing.
        resume: True to keep the results of boards in ``out``.
        unavailable: boards that match the request but run no jobs now, for the record.
    """

    over: str
    model: Path
    choices: Sequence[tuple[str, BoardChoice]]
    options: Options
    faults: tuple[str, ...]
    wait_s: float
    runs: int
    request: dict[str, Any]
    out: Path | None = None
    resume: bool = False
    unavailable: Sequence[TriedBoard] = ()

    def run(self, context: RunContext, screen: Progress) -> StackSearchRecord:
        """Run the program on all boards, and conclude.

        Ctrl-C ends the search with the results so far.

        Raises:
            UsageError: an option is invalid, no board has the part, or ``out`` contains another search.
            StageError: the model cannot be imported or compiled.
        """
        if len({request for request, _ in self.choices}) < 2:
            excluded = "".join(f"; {one.name}: {one.reason}" for one in self.unavailable)
            raise UsageError(
                f"--over requires at least two boards{excluded}",
                hint="repeat --board, or use --board farm:SELECTOR",
                option="--over",
            )
        for _, choice in self.choices:
            check_options(self.options, choice)
        record = self._open_record()
        known = {one.request: one for one in record.boards if one.answer in _FINAL}
        record.boards = [known[request] for request, _ in self.choices if request in known]
        record.boards += [known.get(one.request, one) for one in self.unavailable]
        for one in self.unavailable:
            if one.request not in known:
                screen.note(f"{one.name}: not used: {one.reason}")
        earlier = list(record.consoles)
        with make_temporary_folder("hil-stack-") as scratch:
            folder = self.out or Path(scratch)
            pool = BoardPool(
                f"hil bisect {self.model.name}", wait_s=self.wait_s, say=screen.note, record_folder=self.out
            )
            with pool:
                search = _BoardTrials(self, record, Runner(context), pool, screen, folder)
                screen.begin(self.model.stem, len(self.choices))
                try:
                    for number, (request, choice) in enumerate(self.choices):
                        if request not in known:
                            screen.stage(self.model.stem, number, f"{choice.name}")
                            record.boards.append(search.try_board(request, choice))
                            record.consoles = [*earlier, *pool.save_consoles()]
                            self._save(record)
                except KeyboardInterrupt:
                    record.exit_code = EXIT_INTERRUPTED
                finally:
                    screen.end(self.model.stem)
                record.consoles = [*earlier, *pool.save_consoles(is_last=True)]
        self._finish(record)
        return record

    def _open_record(self) -> StackSearchRecord:
        path = None if self.out is None else self.out / DOCUMENT
        if path is not None and path.exists():
            if not self.resume:
                raise UsageError(
                    f"{self.out} already contains a search", hint="continue with --resume, or use another --out"
                )
            found = read_record(path, StackSearchRecord, _MAX_BYTES)
            if (found.request, found.over, found.runs) != (self.request, self.over, self.runs):
                raise UsageError(
                    f"{self.out} contains a search with different settings",
                    hint="use the same settings, or another --out",
                )
            found.exit_code, found.finished = None, False
            return found
        if self.resume:
            raise UsageError("no search to resume", hint="use --out DIR with the directory of an interrupted search")
        return StackSearchRecord(
            schema=1,
            over=self.over,
            model=str(self.model),
            request=self.request,
            created=time.time(),
            origin=find_origin(self.options.labels),
            command=get_typed_command(),
            runs=self.runs,
            boards=[],
            folder=str(self.out or ""),
        )

    def _finish(self, record: StackSearchRecord) -> None:
        record.versions = group_by_version(record.boards, self.over)
        found = conclude(record.boards, self.over)
        record.conclusion, record.verdict, record.hint = found.conclusion, found.text, found.hint
        record.found, record.confounders = list(found.found), list(found.confounders)
        record.finished = record.exit_code is None
        record.exit_code = found.exit_code if record.exit_code is None else record.exit_code
        self._save(record)

    def _save(self, record: StackSearchRecord) -> None:
        if self.out is not None:
            with convert_write_errors(self.out):
                self.out.mkdir(parents=True, exist_ok=True)
            write_json(self.out / DOCUMENT, record.to_json())


@dataclass(frozen=True)
class _BoardTrials:
    """Runs the program on one board after the other."""

    search: StackSearch
    record: StackSearchRecord
    runner: Runner
    pool: BoardPool
    screen: Progress
    folder: Path

    def try_board(self, request: str, choice: BoardChoice) -> TriedBoard:
        """Run the program on a board. A board that fails never ends the search."""
        try:
            return self._run_on_board(request, choice)
        except BoardError as error:
            return TriedBoard(request=request, answer="board error", reason=error.message)
        finally:
            try:
                self.pool.give_back(choice, faults=self.search.faults)
            except BoardError as error:
                self.screen.note(f"{choice.name}: {error.message}")

    def _run_on_board(self, request: str, choice: BoardChoice) -> TriedBoard:
        search = self.search
        session = self.pool.session(choice, runtimes=(search.options.runtime,), faults=search.faults)
        board = session.board
        stack = [make_record(one, StackPart) for one in board.info.get("stack", ())]
        configured = {name for _, one in search.choices for name in one.config.stack}
        check_part(search.over, [*configured, *(part.name for one in self.record.boards for part in one.stack)], stack)
        cases = [self._begin(f"{make_safe_name(board.name)}-{number + 1}") for number in range(search.runs)]
        self.record.model_digest = cases[0].model.digest if cases[0].model else ""
        sink = ProgressSink(self._show_stage)
        found, program = [], ""
        runner = replace(self.runner, sink=sink)
        for case in runner.run(cases, self.pool, choice, runtimes=(search.options.runtime,), faults=search.faults):
            _raise_compile_error(case)
            program = _digest_program(case.artifact) if case.artifact else program
            found.append(_record_run(case))
        tried = TriedBoard(
            request=request,
            name=board.name,
            board_id=str(board.info.get("board_id", "")),
            stack=stack,
            program=program,
            answer=find_answer(found),
            reason=next((one.reason for one in found if one.outcome != Outcome.PASS.value), ""),
            runs=found,
        )
        version = get_version(tried, search.over) or "unknown"
        self.screen.note(f"{board.name}: {search.over} {version}: {tried.answer}")
        return tried

    def _begin(self, name: str) -> Case:
        folder = self.folder / name
        with convert_write_errors(folder):
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        case = self.runner.begin(self.search.model, self.search.options, folder, name=name)
        if case.error is not None:
            raise case.error
        return case

    def _show_stage(self, case: Case, stage: Stage, note: str) -> None:
        self.screen.stage(self.search.model.stem, len(self.record.boards), f"{case.name}: {stage.value} {note}".strip())


def check_part(over: str, known: Collection[str], stack: Sequence[StackPart]) -> None:
    """Raise UsageError if a part is not known, and not in the stack of a board.

    Args:
        known: parts in configs, and of earlier boards.
    """
    names = list(dict.fromkeys((BOARD, *(one.name for one in stack), *sorted(known))))
    if over not in names:
        raise UsageError(
            f"no board has the part {over!r}",
            hint=f"{did_you_mean(over, names)}known: {', '.join(names)}",
            option="--over",
        )


def find_answer(runs: Sequence[BoardRun]) -> BoardAnswer:
    """Return the answer of a board from its runs.

    Errors of the board exclude the board, and runs with different outcomes or outputs are unstable.
    """
    outcomes = {one.outcome for one in runs}
    if any(one.value in outcomes for one in BOARD_OUTCOMES):
        return "board error"
    if len(outcomes) > 1 or Outcome.UNSTABLE.value in outcomes or len({one.outputs for one in runs}) > 1:
        return "unstable"
    if outcomes == {Outcome.PASS.value}:
        return "pass"
    return "not judged" if outcomes <= {Outcome.BLIND.value, Outcome.SKIP.value} else "fail"


def _record_run(case: Case) -> BoardRun:
    outcome = case.outcome.value if case.outcome else Outcome.SKIP.value
    return BoardRun(outcome=outcome, reason=case.reason, outputs=_digest_outputs(case))


def _digest_program(artifact: Artifact) -> str:
    return digest_of("\0".join(sorted(artifact.digests.values())).encode())


def _digest_outputs(case: Case) -> str:
    if case.result is None:
        return ""
    parts = [
        f"{name}\0{array.dtype}\0{array.shape}\0".encode() + array.tobytes()
        for name, array in sorted(case.result.outputs.items())
    ]
    return digest_of(b"".join(parts))


def _raise_compile_error(case: Case) -> None:
    """Raise the error of a program that could not be made: it is not an answer of a board."""
    if case.artifact is None and isinstance(case.error, HilError) and not isinstance(case.error, BoardError):
        raise case.error


def make_choices(boards: Sequence[str], choose: Callable[[str], BoardChoice]) -> list[tuple[str, BoardChoice]]:
    """Return the choice of each value of --board, without repetitions."""
    return [(board, choose(board)) for board in dict.fromkeys(boards)]
