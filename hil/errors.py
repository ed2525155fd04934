"""Every error that hil raises on purpose, with the outcome and the exit code that it ends in.

"You used it wrongly" and "the board failed" are different families, so that neither is ever blamed for the other.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

EXIT_OK = 0
EXIT_FAIL = 1
EXIT_USAGE = 2
EXIT_STAGE = 3
EXIT_BOARD = 4
EXIT_NOTHING_RAN = 5
EXIT_INTERRUPTED = 130


class HilError(Exception):
    """Something went wrong in hil.

    Args:
        stage: the pipeline stage it happened in (a value of :class:`hil.core.results.Stage`), or "".
        detail: the far side's own words: a log's tail, a traceback, stderr.
    """

    outcome: ClassVar[str | None] = None
    exit_code: ClassVar[int] = EXIT_STAGE

    def __init__(
        self, message: str = "", *, stage: str = "", board: str = "", hint: str = "", detail: str = ""
    ) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip().split("\n", 1)[0])
        self.stage = stage
        self.board = board
        self.hint = hint
        self.detail = detail

    @property
    def message(self) -> str:
        """What happened, without place or hint."""
        return str(self.args[0])

    def located(self, *, stage: str = "", board: str = "") -> HilError:
        """Fill in the stage and the board where they were not known yet; returns the error itself."""
        self.stage = self.stage or stage
        self.board = self.board or board
        return self

    def add(self, what: str) -> None:
        """Say more of what happened, where that was found out later."""
        self.args = (f"{self.message}; {what}", *self.args[1:])

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.stage, self.board and f"board {self.board}") if part)
        text = f"{self.message} [{where}]" if where else self.message
        return f"{text}\n  hint: {self.hint}" if self.hint else text


@contextlib.contextmanager
def locating(*, stage: str = "", board: str = "") -> Iterator[None]:
    """Errors raised in here are of that stage and board, where they do not say otherwise."""
    try:
        yield
    except HilError as error:
        raise error.located(stage=stage, board=board) from error.__cause__


class UsageError(HilError):
    """What was typed or configured is wrong; nothing was run."""

    exit_code = EXIT_USAGE


class StorageError(UsageError):
    """A folder that hil writes to is full or cannot be written."""


class VacuousTolerance(UsageError):
    """A tolerance that was given is so wide that wrong answers would agree as well.

    A suite has one tolerance for many cases: there it is the outcome of the case that it does not fit.
    """

    outcome = "BLIND"


class AccessRefused(UsageError):
    """The farm does not let the bearer of this token do that."""


class StageError(HilError):
    """A stage of the model's own way failed."""

    outcome: ClassVar[str | None] = "RUN_ERROR"


class AnswersDiffer(StageError):
    """A program gave different answers to the same inputs."""

    outcome = "UNSTABLE"
    exit_code = EXIT_FAIL


class ImportFailed(StageError):
    """The model cannot be read."""

    outcome = "IMPORT_ERROR"


class CompileFailed(StageError):
    """The compiler refused the model."""

    outcome = "COMPILE_ERROR"


class CompileCrashed(StageError):
    """The compiler died while compiling the model."""

    outcome = "COMPILE_CRASH"


class LoadFailed(StageError):
    """The board refused to load the program."""

    outcome = "LOAD_ERROR"


class PartMissing(LoadFailed):
    """The board's runtime lacks what the program calls: a backend, or operators."""


class RunFailed(StageError):
    """The runtime on the board reported an error while running the program."""

    outcome = "RUN_ERROR"


class RunCrashed(StageError):
    """The worker process that ran the program died."""

    outcome = "RUN_CRASH"


class StageTimeout(StageError):
    """A stage outlived its time limit and was ended."""

    outcome = "TIMEOUT"


class NotRun(StageError):
    """It was not run, for a reason that is no failure of its own: what it needs is not here."""

    outcome = "SKIP"
    exit_code = EXIT_NOTHING_RAN


class RanElsewhere(StageError):
    """The program ran on another device than it was told to."""

    outcome = "FALLBACK"
    result: Any = None  # what it gave there, a :class:`hil.core.results.RunResult`; None where that is not known


class ReferenceFailed(StageError):
    """The CPU reference could not compute an answer."""

    outcome = "REFERENCE_ERROR"


class CriterionFailed(StageError):
    """A criterion could not judge the output: the user's function failed."""

    outcome = "REFERENCE_ERROR"


class ReferenceTooSlow(ReferenceFailed):
    """A reference takes longer than hil allows for the default one."""


class BoardError(HilError):
    """The board failed, not the model."""

    outcome: ClassVar[str | None] = "BOARD_LOST"
    exit_code = EXIT_BOARD


class BoardLost(BoardError):
    """The board stopped answering."""


class BlobDamaged(BoardError):
    """A file in the board's store is not what was sent there, or is gone."""

    outcome = "BLOB_DAMAGED"


class ProtocolBroken(BoardError):
    """The other side answered with what is no sane message of the protocol."""


class BoardRefused(BoardError):
    """The board did not let us in: its host key, our key or password, or no board that was asked for."""

    outcome = "BOARD_REFUSED"


class BoardUnreachable(BoardError):
    """The board could not be reached."""

    outcome = "BOARD_UNREACHABLE"


class BoardBusy(BoardError):
    """Another session holds the board."""


class SessionEnded(BoardError):
    """Our session on the board was ended, by a higher fence or because its time ran out."""


class FarmError(BoardError):
    """The farm failed."""


class NoSuchBoard(FarmError):
    """No board of the farm is as asked for, or the one that is cannot do what is asked."""

    outcome = "BOARD_REFUSED"


class FarmUnreachable(FarmError):
    """No gateway of the farm answers."""

    outcome = "BOARD_UNREACHABLE"


def one_of(known: Iterable[str], intro: str = "one of ") -> str:
    """The end of a hint, ``one of a, b``; "" where there are none to choose from."""
    listed = ", ".join(known)
    return f"{intro}{listed}" if listed else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The start of a hint, ``did you mean 'run'? ``, for a name that is like known ones; "" where none is."""
    close = difflib.get_close_matches(name, list(known))
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""
