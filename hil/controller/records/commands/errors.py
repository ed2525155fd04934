"""Document of a command that failed."""

from __future__ import annotations

from typing import Annotated

from hil.controller.records.base import Record, note
from hil.controller.records.console import ConsoleQuoteRecord


class ErrorDetails(Record, kw_only=True):
    """Error of a command."""

    kind: Annotated[str, note("a class of hil/errors.py, or Interrupted")]
    message: str
    outcome: Annotated[str, note("outcome that the error causes, or empty")]
    hint: Annotated[str, note("suggested next step")]
    stage: str
    board: str
    detail: str
    console: Annotated[list[ConsoleQuoteRecord], note("lines of the board's console that explain the error")] = []


class ErrorDocument(Record, kw_only=True):
    """Output of a command that failed."""

    error: ErrorDetails
    exit_code: int
