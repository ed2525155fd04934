"""Define all errors that hil raises, with their outcome and exit code.

Usage errors and board failures have separate base classes, so that hil never reports one as the other.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, TypeVar

EXIT_OK = 0
EXIT_FAIL = 1
EXIT_USAGE = 2
EXIT_STAGE = 3
EXIT_BOARD = 4
EXIT_NOTHING_RAN = 5
EXIT_INTERNAL = 70  # EX_SOFTWARE in sysexits.h
EXIT_INTERRUPTED = 130


E = TypeVar("E", bound="HilError")


class ErrorCode(str, Enum):
    """Cause of an error, for callers that handle this cause.

    Agents send the code with the class of the error. A release that does not know a code treats it as NONE.
    """

    NONE = ""
    BACKEND_MISSING = "backend-missing"  # the program delegates to a backend that the board's runtime lacks
    ILLEGAL_INSTRUCTION = "illegal-instruction"  # the program uses an instruction that the CPU lacks
    WRONG_TARGET = "wrong-target"  # the program was compiled for another CPU or device

    @classmethod
    def _missing_(cls, value: object) -> ErrorCode:
        return cls.NONE


@dataclass(frozen=True)
class ConsoleQuote:
    """Line of a board's console that explains an error."""

    pattern: str  # name of the pattern that matches
    meaning: str
    text: str
    host_ns: int  # arrival on the host's clock
    board_ns: int | None = None  # the same time on the board's clock; None if unknown


class HilError(Exception):
    """Something went wrong in hil.

    Args:
        stage: pipeline stage of the error (a value of :class:`hil.core.results.Stage`), or "".
        detail: raw output from the source: end of a log, traceback, stderr.
        code: cause of the error, if callers handle this cause.
        option: option of ``hil run`` that the hint asks for, such as ``--input``, or "".
    """

    outcome: ClassVar[str | None] = None
    exit_code: ClassVar[int] = EXIT_STAGE

    def __init__(
        self,
        message: str = "",
        *,
        stage: str = "",
        board: str = "",
        hint: str = "",
        detail: str = "",
        code: ErrorCode = ErrorCode.NONE,
        option: str = "",
    ) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip().split("\n", 1)[0])
        self.stage = stage
        self.board = board
        self.hint = hint
        self.detail = detail
        self.code = code
        self.option = option
        # Lines of the board's console, for a lost board and a crashed program.
        self.console: tuple[ConsoleQuote, ...] = ()

    @property
    def message(self) -> str:
        """Error message without stage, board and hint."""
        return str(self.args[0])

    def as_kind(self, kind: type[E]) -> E:
        """Return an error of another class with the same text and fields."""
        error = kind(self.message, stage=self.stage, board=self.board, hint=self.hint, detail=self.detail)
        error.code, error.option, error.console = self.code, self.option, self.console
        return error

    def locate(self, *, stage: str = "", board: str = "") -> HilError:
        """Set the stage and board if they are unknown, and return the error."""
        self.stage = self.stage or stage
        self.board = self.board or board
        return self

    def add(self, what: str) -> None:
        """Append text to the message."""
        self.args = (f"{self.message}; {what}", *self.args[1:])

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.stage, self.board and f"board {self.board}") if part)
        text = f"{self.message} [{where}]" if where else self.message
        return f"{text}\n  hint: {self.hint}" if self.hint else text


class InternalError(HilError):
    """An error of hil itself: see :func:`hil.core.crash.report_crash`."""

    exit_code = EXIT_INTERNAL


@contextlib.contextmanager
def locate_errors(*, stage: str = "", board: str = "") -> Iterator[None]:
    """Set the stage and board of errors raised in this block, unless already set."""
    try:
        yield
    except HilError as error:
        raise error.locate(stage=stage, board=board) from error.__cause__


class UsageError(HilError):
    """The command line, configuration or input is invalid; nothing was run."""

    exit_code = EXIT_USAGE


class UnreadableFile(UsageError, OSError):
    """A file cannot be read: it is a directory, pipe, socket or device, is too large, or its name is invalid.

    The error is an OSError, as for a missing file, so code that handles missing files also handles this error.

    Args:
        reason: reason without the path, for :attr:`strerror`.
    """

    def __init__(self, message: str = "", *, reason: str = "", **fields: Any) -> None:
        super().__init__(message, **fields)
        self.strerror = reason or self.message


class StorageError(UsageError):
    """A directory that hil writes to is full or not writable."""


class VacuousTolerance(UsageError):
    """The given tolerance is so wide that wrong outputs would agree.

    A suite has one tolerance for many cases. There, the error becomes the outcome of the affected case only.
    """

    outcome = "BLIND"


class AccessRefused(UsageError):
    """The farm does not permit this with the given token."""


class StageError(HilError):
    """A stage failed because of the model or program."""

    outcome: ClassVar[str | None] = "RUN_ERROR"


class AnswersDiffer(StageError):
    """A program gave different outputs for the same inputs."""

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
    """The board's runtime lacks a backend or operators that the program uses."""


class RunFailed(StageError):
    """The runtime on the board reported an error while running the program."""

    outcome = "RUN_ERROR"


class RunCrashed(StageError):
    """The worker process that ran the program died."""

    outcome = "RUN_CRASH"


class StageTimeout(StageError):
    """A stage exceeded its time limit and was stopped."""

    outcome = "TIMEOUT"


class NotRun(StageError):
    """The case was skipped because a requirement is missing."""

    outcome = "SKIP"
    exit_code = EXIT_NOTHING_RAN


class RanElsewhere(StageError):
    """The program ran on another device than requested."""

    outcome = "FALLBACK"
    result: Any = None  # the program's :class:`hil.core.results.RunResult`; None if unknown


class ReferenceFailed(StageError):
    """The CPU reference could not compute the outputs."""

    outcome = "REFERENCE_ERROR"


class CriterionFailed(StageError):
    """A criterion could not judge the output: the user's function failed."""

    outcome = "REFERENCE_ERROR"


class ReferenceTooSlow(ReferenceFailed):
    """A default reference exceeds hil's time limit."""


class BoardError(HilError):
    """The board failed, not the model."""

    outcome: ClassVar[str | None] = "BOARD_LOST"
    exit_code = EXIT_BOARD


class BoardLost(BoardError):
    """The board stopped responding."""


class BoardUnfit(BoardError):
    """The board responds, but cannot run the program: its disk, memory, runtime or device fails."""

    outcome = "BOARD_UNFIT"


class ProvisionFailed(BoardError):
    """The command that writes an image to the board failed."""

    outcome = "BOARD_UNFIT"


class BlobDamaged(BoardError):
    """A file in the board's store is missing or damaged."""

    outcome = "BLOB_DAMAGED"


class ProtocolBroken(BoardError):
    """The peer sent an invalid message."""


class BoardRefused(BoardError):
    """The board rejected the login, its host key is not trusted, or it is not the requested board."""

    outcome = "BOARD_REFUSED"


class VersionMismatch(BoardRefused):
    """The peer runs a hil release with an incompatible protocol."""


class BoardUnreachable(BoardError):
    """The board could not be reached."""

    outcome = "BOARD_UNREACHABLE"


class BoardBusy(BoardError):
    """The board is in use by another session."""

    outcome = "BOARD_BUSY"


class SessionEnded(BoardError):
    """The session was ended by a higher fence or by its time limit."""


class FarmError(BoardError):
    """The farm failed."""


class NoSuchBoard(FarmError):
    """No board in the farm matches the request, or the matching board cannot fulfil it."""

    outcome = "BOARD_REFUSED"


class FarmUnreachable(FarmError):
    """No farm gateway responds."""

    outcome = "BOARD_UNREACHABLE"


class DeliveryFailed(HilError):
    """A webhook did not accept a message."""

    is_permanent: bool = False  # True if a repeated request cannot succeed
    retry_after_s: float = 0.0  # waiting time in seconds that the receiver requested


def format_expected(known: Iterable[str], intro: str = "expected one of ") -> str:
    """Return the end of a hint, ``expected one of a, b``; "" if ``known`` is empty."""
    listed = ", ".join(known)
    return f"{intro}{listed}" if listed else ""


# Names whose similarity to a wrong name differs by less are equally likely.
_CLOSE = 0.1


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the start of a hint, ``did you mean 'run'? ``; "" if no known name is similar."""
    close = difflib.get_close_matches(name, list(known))
    if close:  # leave out names that are clearly less similar
        shares = [difflib.SequenceMatcher(None, one, name).ratio() for one in close]
        close = [one for one, share in zip(close, shares, strict=True) if share > shares[0] - _CLOSE]
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""
