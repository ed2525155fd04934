"""Validate gateway responses before other modules use them. A gateway may be of another release, or hostile."""

from __future__ import annotations

from collections.abc import Set
from pathlib import PurePosixPath
from typing import Any

import msgspec

from hil.controller.farm.messages import parse_job
from hil.controller.records.lab.farm import ANSWERS, SuitePart
from hil.core.bounded_json import check_value_count
from hil.errors import FarmError, HilError, UsageError
from hil.protocol.v1 import farm_pb2 as pb

# `hil farm status` requests 5,000 jobs of 20 values each; `--json` requests all jobs of a submission.
_MAX_VALUES = 4_000_000
# Limits for a result: nesting depth, largest integer (outputs may be uint64), and characters in texts with host paths.
_MAX_DEPTH, _MAX_INTEGER, _MAX_PATHS_TEXT = 64, 1 << 64, 64 << 10
_MAX_TIME_SECONDS = 253_402_300_800  # start of the year 10000
# Limits for a job's status: the job's number in its submission, and characters per text.
_MAX_JOB, _MAX_STATUS_TEXT = 100_000, 1000


def parse_answer(answer: pb.Json, question: str) -> Any:
    """Parse and validate a gateway's response to a query or an action.

    Args:
        question: field of ``AskRequest`` or ``DoRequest``.

    Returns:
        The type of the question in :data:`.ANSWERS`.

    Raises:
        FarmError: the response is not JSON, or has invalid fields.
    """
    text = answer.text or b"{}"
    try:
        check_value_count(text, _MAX_VALUES)
        return msgspec.json.decode(text, type=ANSWERS[question])
    except (ValueError, RecursionError) as error:
        raise make_answer_error(error) from error


def make_answer_error(error: Exception, what: str = "response") -> FarmError:
    """Return the error for an invalid response, or for an invalid part of it."""
    text = error.message if isinstance(error, HilError) else str(error)  # without the hint
    why = f"{type(error).__name__}: {text[:200]}"
    return FarmError(f"invalid {what} from the farm: {why}", hint="check that the gateway has the same hil version")


def check_result_values(document: Any) -> None:
    """Check the nesting and the integers of a result. Raises ValueError."""
    level = [document]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, int) and abs(value) > _MAX_INTEGER:
                raise ValueError("a number is out of range")
        if not inner:
            return
        level = inner
    raise ValueError("nesting exceeds the limit")


def check_suite_part(part: SuitePart) -> None:
    """Check times, paths and texts that reports use. Raises a ValueError with the field's name."""
    _check_length("folder", part.folder)
    for name in ("started", "finished"):
        _check_seconds(name, getattr(part, name))
    for case in part.cases or ():
        _check_seconds("started", case.started)
        _check_length("diff", case.diff)
        _check_length("hint", case.hint)
        path = PurePosixPath(case.folder)
        if path.is_absolute() or ".." in path.parts or "\0" in case.folder:
            raise ValueError("folder: the path is outside the run's directory")


def _check_seconds(name: str, value: float | None) -> None:
    """Check a time in seconds since the epoch."""
    if value is not None and not 0 <= value < _MAX_TIME_SECONDS:
        raise ValueError(f"{name}: the time is out of range")


def _check_length(name: str, text: str) -> None:
    if len(text) > _MAX_PATHS_TEXT:
        raise ValueError(f"{name}: the text is longer than {_MAX_PATHS_TEXT} characters")


def check_status(reply: pb.FollowReply, jobs: Set[tuple[int, int | None]]) -> None:
    """Check that a reply is about a requested job, and cut long texts of the job's status.

    Args:
        jobs: requested jobs and submissions, as from :func:`.parse_job`.

    Raises:
        FarmError: the job was not requested.
    """
    name = reply.job.name if reply.WhichOneof("kind") == "job" else reply.log.job
    try:
        submission, number = parse_job(name)
    except UsageError as error:
        raise make_answer_error(error) from error
    if not jobs & {(submission, number), (submission, None)} or (number or 0) > _MAX_JOB:
        raise make_answer_error(ValueError(f"job {name} was not requested"))
    for field, value in reply.job.ListFields():
        if isinstance(value, str) and len(value) > _MAX_STATUS_TEXT:
            setattr(reply.job, field.name, value[:_MAX_STATUS_TEXT])
