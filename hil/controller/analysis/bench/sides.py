"""The programs of a bench on their way to being measured: compiled, given a board, run once, checked."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hil.controller.analysis.bench.measure import Side
from hil.controller.devices.board_factory import AnyBoard, open_board
from hil.controller.devices.board_resolver import BoardChoice, choose, knows_target, with_target
from hil.controller.devices.links.factory import is_address
from hil.controller.pipeline.case import Case, Workshop
from hil.controller.pipeline.job import Job, Progress
from hil.controller.pipeline.stages import check_options, conclude, execute, prepare, refer_case
from hil.core.boards import is_file
from hil.core.results import Outcome
from hil.errors import UsageError

# What says which board a job is for, but for a simulator's faults.
_WHERE = ("board", "hw_type", "identity", "known_hosts", "accept_new_host_key")


def on_the_same_board(job: Job, stored: Job) -> Job:
    """The job with the board of a stored one, where its own command named none. Faults are never taken over."""
    if job.board or job.hw_type:
        return job
    return replace(job, **{name: getattr(stored, name) for name in _WHERE})


def board_of_stored(stored: Job, job: Job, *, own: bool) -> Job:
    """A stored job with the board that it may have: what somebody else's record says of boards is not theirs to say.

    Args:
        stored: what the record says.
        job: what was typed.
        own: whether the user began the stored one.

    Raises:
        UsageError: it is somebody else's, names an address or a file, and no board was typed.
    """
    if own:
        return stored
    if job.board or job.hw_type:
        return replace(stored, **{name: getattr(job, name) for name in _WHERE})
    if is_address(stored.board) or is_file(stored.board):
        raise UsageError(
            f"the stored bench ran on {stored.board}, and was not begun by you here: its record may be anybody's",
            hint="name the board: --board",
        )
    return replace(stored, identity=None, known_hosts=None, accept_new_host_key=False)


def choice_of(job: Job) -> BoardChoice:
    """The board that a job is for.

    Raises:
        UsageError: there is none, or it cannot do what is asked for.
    """
    keys = {name: getattr(job, name) for name in ("identity", "known_hosts", "accept_new_host_key")}
    choice = choose(job.board, job.hw_type, **keys)
    check_options(job.options(), choice)
    return choice


class Boards:
    """The boards of a bench, each opened once and on first use. A context manager.

    Args:
        jobs: what is going to run on them: those for one board, with the same faults, share it.
        purpose: told to others who wait for a board.
        screen: told what goes on.
    """

    def __init__(self, jobs: Sequence[Job], purpose: str, screen: Progress) -> None:
        self._jobs = jobs
        self._purpose = purpose
        self._screen = screen
        self._stack = contextlib.ExitStack()
        self._open: dict[Any, AnyBoard] = {}

    def open(self, job: Job, choice: BoardChoice) -> AnyBoard:
        """The board of a job.

        Raises:
            BoardError: it cannot be had.
        """
        key = _place(job, choice)
        if key not in self._open:
            first, *others = dict.fromkeys(one.runtime for one in self._jobs if _place(one, choice_of(one)) == key)
            board = self._connected(job, choice, first)
            for runtime in others if board.shell is not None else ():
                # An agent is put on a board with the runtime that is named then, and keeps those that it had.
                board.close()
                board = self._connected(job, choice, runtime)
            self._stack.callback(board.close)
            self._open[key] = board
        return self._open[key]

    def say(self, text: str) -> None:
        """Tell the user."""
        self._screen.note(text)

    def _connected(self, job: Job, choice: BoardChoice, runtime: str) -> AnyBoard:
        return open_board(
            choice,
            runtime=runtime,
            purpose=self._purpose,
            faults=job.faults,
            wait_s=job.wait_s,
            say=self._screen.note,
        )

    def __enter__(self) -> Boards:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _place(job: Job, choice: BoardChoice) -> tuple[Any, ...]:
    return choice.name, choice.config.path, job.faults


def trial(case: Case, board: AnyBoard, shop: Workshop, *, check: bool) -> Case:
    """Push, load and run a case once, cold, and compare its answer: what is measured has to be right.

    Args:
        case: with an artifact; with references already where it was stored.
        board: where.
        shop: what cases share.
        check: compare; else the case's outcome says that nothing was compared.
    """
    execute(case, board, shop)
    if case.outcome:
        return case
    if not check or not (case.references or case.model):
        case.outcome, case.reason = Outcome.SKIP, "the answer was not compared"
        return case
    if not case.references:
        refer_case(case, shop)
    return conclude(case, shop)


def compiled(case: Case, job: Job, choice: BoardChoice, boards: Boards, shop: Workshop) -> Case:
    """Compile a case, unless it was stored compiled; the board is asked first only where it alone knows for what."""
    if case.artifact is not None or case.outcome:
        return case
    config = choice.config
    if not knows_target(config, job.runtime):
        board = boards.open(job, choice)
        config, target = with_target(board.config, job.runtime, board.info["machine"])
        boards.say(f"compiling for {target or board.target or board.name}")
    return prepare(case, config, shop)


def side_of(case: Case, label: str, board: AnyBoard) -> Side:
    """The side that a case makes after its trial."""
    side = Side(label, case, board, result=case.result)
    if case.result is not None and case.result.device_ns:
        side.first_run_ns = case.result.device_ns[0]
        side.peak_memory_bytes = case.result.peak_memory_bytes
    return side
