"""The programs of a bench on their way to being measured: compiled, given a board, run once, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hil.controller.analysis.bench.measure import Side
from hil.controller.devices.board_factory import AnyBoard
from hil.controller.devices.board_resolver import BoardChoice, choose, knows_target, with_target
from hil.controller.devices.links.factory import is_address
from hil.controller.pipeline.board_pool import BoardPool, BoardSession
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.job import Job
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.stages import check_options
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


def compiled(case: Case, job: Job, choice: BoardChoice, boards: Boards, runner: Runner) -> Case:
    """Compile a case; the board is asked first only where it alone knows for what."""
    config = choice.config
    if not (case.outcome or case.artifact or knows_target(config, job.runtime)):
        board = boards(job, choice).board
        config, target = with_target(board.config, job.runtime, board.info["machine"])
        boards.say(f"compiling for {target or board.target or board.name}")
    return runner.compile(case, config)


class Boards:
    """The boards of a bench's jobs: those for one board, with the same faults, share it.

    Args:
        jobs: what is going to run on them.
        pool: opens them.
        say: told what goes on.
    """

    def __init__(self, jobs: Sequence[Job], pool: BoardPool, say: Callable[[str], None]) -> None:
        self._jobs = [(one, choice_of(one)) for one in jobs]
        self._pool = pool
        self.say = say

    def __call__(self, job: Job, choice: BoardChoice) -> BoardSession:
        """The board of a job.

        Raises:
            BoardError: it cannot be had.
        """
        place = choice.name, choice.config.path, job.faults
        runtimes = [one.runtime for one, its in self._jobs if (its.name, its.config.path, one.faults) == place]
        return self._pool.session(choice, runtimes=runtimes, faults=job.faults)


def trial(case: Case, session: BoardSession, runner: Runner, *, check: bool) -> Case:
    """Push, load and run a case once, cold, and compare its answer: what is measured has to be right.

    Args:
        case: with an artifact; with references already where it was stored.
        session: the board.
        runner: takes it there.
        check: compare; else the case's outcome says that nothing was compared.
    """
    case = runner.execute(case, session)
    if case.outcome:
        return case
    if not check or not (case.references or case.model):
        return replace(case, outcome=Outcome.SKIP, reason="the answer was not compared")
    return runner.judge(case)


def side_of(case: Case, label: str, board: AnyBoard) -> Side:
    """The side that a case makes after its trial."""
    side = Side(label, case, board, result=case.result)
    if case.result is not None and case.result.device_ns:
        side.first_run_ns = case.result.device_ns[0]
        side.peak_memory_bytes = case.result.peak_memory_bytes
    return side
