"""Validate gateway responses before other modules use them. A gateway may be of another release, or hostile."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Set
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from hil.controller.farm.messages import parse_job
from hil.core.bounded_json import parse_json
from hil.errors import FarmError, HilError, UsageError
from hil.protocol.v1 import farm_pb2 as pb

Check = Callable[[Any], None]
# `hil farm status` requests 5,000 jobs of 20 values each; `--json` requests all jobs of a submission.
_MAX_VALUES = 4_000_000
_MAX_NUMBER = 1 << 63
# Limits of a result: nesting, integers (uint64 outputs), and texts with paths of the host, in characters.
_MAX_DEPTH, _MAX_INTEGER, _MAX_PATHS_TEXT = 64, 1 << 64, 64 << 10
_MAX_TIME_S = 253_402_300_800  # start of the year 10000
# Limits of a followed job: the number in its submission, and each text, in characters.
_MAX_JOB, _MAX_STATUS_TEXT = 100_000, 1000


def parse_answer(answer: pb.Json, question: str) -> Any:
    """Parse and validate a gateway's response to a query or an action.

    Args:
        question: field of ``AskRequest`` or ``DoRequest``.

    Raises:
        FarmError: the response is not JSON, or has invalid fields.
    """
    try:
        document = parse_json(answer.text or b"{}", _MAX_VALUES)
        # Reject lone surrogates, as escapes or as bytes: they can neither be printed nor stored.
        answer.text.decode()
        if b"\\u" in answer.text:
            json.dumps(document, ensure_ascii=False).encode()
        if question in _ANSWERS:
            _ANSWERS[question](document)
    except (ValueError, TypeError, UsageError) as error:
        raise invalid_answer(error) from error
    return document


def invalid_answer(error: Exception, what: str = "response") -> FarmError:
    """Return the error for an invalid response, or for an invalid part of it."""
    text = error.message if isinstance(error, HilError) else str(error)  # without the hint
    why = f"{type(error).__name__}: {text[:200]}"
    return FarmError(f"invalid {what} from the farm: {why}", hint="check that the gateway has the same hil version")


def check_result_values(document: Any) -> None:
    """Check the nesting and the numbers of a result. Raises ValueError."""
    level = [document]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list | tuple):
                inner += value
            elif not (math.isfinite(value) if isinstance(value, float) else _fits_integer(value)):
                raise ValueError("number out of range")
        if not inner:
            return
        level = inner
    raise ValueError("nesting exceeds the limit")


def _fits_integer(value: Any) -> bool:
    return not isinstance(value, int) or abs(value) <= _MAX_INTEGER


def check_suite_record(record: Any) -> None:
    """Check the fields of a suite's record that reports use. Raises TypeError or ValueError."""
    _check_suite(record)


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
        raise invalid_answer(error) from error
    if not jobs & {(submission, number), (submission, None)} or (number or 0) > _MAX_JOB:
        raise invalid_answer(ValueError(f"job {name} was not requested"))
    for field, value in reply.job.ListFields():
        if isinstance(value, str) and len(value) > _MAX_STATUS_TEXT:
            setattr(reply.job, field.name, value[:_MAX_STATUS_TEXT])


def _check_text(value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError("expected a string")


def _check_bool(value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError("expected true or false")


def _check_number(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("expected a number")
    if not (abs(value) < _MAX_NUMBER and math.isfinite(value)):
        raise ValueError("number out of range")


def _check_integer(value: Any) -> None:
    if not isinstance(value, int):
        raise TypeError("expected a whole number")
    _check_number(value)


def _check_time(value: Any) -> None:
    _check_text(value)
    # Local time conversion fails for years before 1 or after 9999.
    time = datetime.fromisoformat(value)
    if not 1970 <= time.year < 9999:
        raise ValueError("time out of range")
    if time.tzinfo is None:
        raise ValueError("missing time zone")


def _check_seconds(value: Any) -> None:
    """Check a time in seconds since the epoch."""
    _check_number(value)
    if not 0 <= value < _MAX_TIME_S:
        raise ValueError("time out of range")


def _check_paths_text(value: Any) -> None:
    _check_text(value)
    if len(value) > _MAX_PATHS_TEXT:
        raise ValueError(f"text longer than {_MAX_PATHS_TEXT} characters")


def _check_inner_path(value: Any) -> None:
    _check_text(value)
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or "\0" in value:
        raise ValueError("path outside the run's directory")


def _check_job_name(value: Any) -> None:
    _check_text(value)
    parse_job(value)


def _check_label(value: Any) -> None:
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, str):
            _check_number(int(one) if isinstance(one, bool) else one)


def _accept_any(value: Any) -> None:
    pass


def _allow_none(check: Check) -> Check:
    def check_optional(value: Any) -> None:
        if value is not None:
            check(value)

    return check_optional


def _make_items_check(kind: type[list[Any]] | type[dict[str, Any]], text: str, check: Check) -> Check:
    def check_each(value: Any) -> None:
        if not isinstance(value, kind):
            raise TypeError(f"expected {text}")
        for one in value.values() if isinstance(value, dict) else value:
            check(one)

    return check_each


def _make_list_check(check: Check) -> Check:
    return _make_items_check(list, "a list", check)


def _make_mapping_check(check: Check) -> Check:
    return _make_items_check(dict, "an object", check)


def _make_record_check(fields: Mapping[str, Check], absent: Mapping[str, Check] | None = None) -> Check:
    """Return a check of an object's fields.

    Args:
        absent: optional fields that gateways of older releases do not send.
    """

    def check_record(value: Any) -> None:
        if not isinstance(value, dict):
            raise TypeError("expected an object")
        for name, check in fields.items():
            if name not in value:
                raise ValueError(f"{name!r} is missing")
            _check_field(name, check, value[name])
        for name, check in (absent or {}).items():
            if name in value:
                _check_field(name, check, value[name])

    return check_record


def _check_field(name: str, check: Check, value: Any) -> None:
    try:
        check(value)
    except (TypeError, ValueError, UsageError) as error:
        raise ValueError(f"{name}: {error}") from error


_TURN: dict[str, Check] = {"position": _check_integer, "why": _check_text}
_JOB: dict[str, Check] = {
    **dict.fromkeys(
        ("title", "kind", "project", "priority", "selector", "state", "user", "board", "outcome"), _check_text
    ),
    "name": _check_job_name,
    "submission": _check_integer,
    "attempts": _check_integer,
    "queued_at": _check_time,
    "reason": _check_text,
    "started_at": _allow_none(_check_time),
    "finished_at": _allow_none(_check_time),
    "exit_code": _allow_none(_check_integer),
}
_ATTEMPT: dict[str, Check] = {
    "lease": _check_integer,
    "board": _check_text,
    "fence": _check_integer,
    "granted_at": _check_time,
    "reason": _check_text,
    "started_at": _allow_none(_check_time),
    "ended_at": _allow_none(_check_time),
}
_BOARD: dict[str, Check] = {
    **dict.fromkeys(("name", "site", "host", "hw_type", "reason", "state", "job", "user"), _check_text),
    "labels": _make_mapping_check(_check_label),
    "failures": _check_integer,
    "since": _allow_none(_check_time),
    "checked_at": _allow_none(_check_time),
}
_EVENT: dict[str, Check] = {
    "id": _check_integer,
    "at": _check_time,
    "what": _check_text,
    "board": _check_text,
    "job": _check_text,
    "reason": _check_text,
    "lease": _allow_none(_check_integer),
}
_USER: dict[str, Check] = {
    "user": _check_text,
    "project": _check_text,
    "running": _check_integer,
    "queued": _check_integer,
    "board_s": _check_number,
}
_STATS: dict[str, Check] = {
    "jobs": _make_mapping_check(_check_integer),
    "boards": _make_mapping_check(_check_integer),
    "queue": _make_mapping_check(_check_integer),
    "waiting_s": _make_record_check({"p50": _allow_none(_check_number), "p95": _allow_none(_check_number)}),
    "users": _make_list_check(_make_record_check(_USER)),
}
_TOKEN: dict[str, Check] = {
    "id": _check_integer,
    "user": _check_text,
    "project": _check_text,
    "role": _check_text,
    "note": _check_text,
    "made_at": _check_time,
    "good": _check_bool,
    "expires_at": _allow_none(_check_time),
    "revoked_at": _allow_none(_check_time),
}
_AUDIT: dict[str, Check] = {
    "id": _check_integer,
    "at": _check_time,
    "user": _check_text,
    "role": _check_text,
    "peer": _check_text,
    "action": _check_text,
    "object": _check_text,
    "allowed": _check_bool,
    "detail": _make_mapping_check(_accept_any),
}
_CASE: dict[str, Check] = dict.fromkeys(("job", "name", "outcome", "reason"), _check_text)
# Fields of a suite's record. `hil.core.field_types` checks the other fields of a case.
_OUTPUTS = _make_list_check(
    _make_record_check(
        {},
        {
            "name": _check_text,
            "reason": _check_text,
            "tolerance": _allow_none(_make_mapping_check(_accept_any)),
            "criteria": _make_list_check(
                _make_record_check(
                    {
                        **dict.fromkeys(("criterion", "reason"), _check_text),
                        **dict.fromkeys(("value", "passed"), _accept_any),
                    }
                )
            ),
        },
    )
)
_REFERENCE: dict[str, Check] = dict.fromkeys(("against", "relation", "outcome"), _check_text)
_PART: dict[str, Check] = {
    "device": _check_text,
    "nodes": _check_integer,
    "names": _make_list_check(_check_text),
    "elsewhere": _check_bool,
}
_SUITE_CASE: dict[str, Check] = {
    "timings": _make_mapping_check(_allow_none(_check_number)),
    **dict.fromkeys(("device_p50_ns", "device_p90_ns", "artifact_bytes"), _allow_none(_check_number)),
    "iterations": _check_integer,
    "placement": _allow_none(_make_list_check(_make_record_check({}, _PART))),
    **dict.fromkeys(("outputs", "plain_outputs"), _OUTPUTS),
    "unanswered": _make_list_check(
        _make_record_check({"reference": _check_text}, dict.fromkeys(("outcome", "reason", "detail"), _check_text))
    ),
    "other_references": _make_list_check(_make_record_check({**_REFERENCE, "outputs": _OUTPUTS})),
    **dict.fromkeys(("diff", "hint"), _check_paths_text),
    "folder": _check_inner_path,
    "started": _check_seconds,
}
_check_suite = _make_record_check(
    {},
    {
        "folder": _check_paths_text,
        **dict.fromkeys(("started", "finished"), _allow_none(_check_seconds)),
        "boards": _make_list_check(_check_text),
        "board_info": _make_mapping_check(_accept_any),
        "models": _make_mapping_check(_make_mapping_check(_check_text)),
        "versions": _make_mapping_check(_check_text),
        "suite_ids": _make_list_check(_check_text),
        "cases": _allow_none(_make_list_check(_make_record_check({"id": _check_text}, _SUITE_CASE))),
    },
)
# `hil.controller.farm.client.results` validates the contents of a job's result.
_ANSWERS: dict[str, Check] = {
    "jobs": _make_list_check(_make_record_check(_JOB, {"pinned": _check_text})),
    "job": _make_record_check(
        {**_JOB, "attempts_made": _make_list_check(_make_record_check(_ATTEMPT))}, {"pinned": _check_text}
    ),
    "result": _make_list_check(_make_record_check({"name": _check_job_name, "state": _check_text})),
    "boards": _make_list_check(_make_record_check(_BOARD)),
    "events": _make_list_check(_make_record_check(_EVENT, {"host": _check_text})),
    "audit": _make_list_check(_make_record_check(_AUDIT)),
    "stats": _make_record_check(_STATS, {"matching": _check_integer}),
    "tokens": _make_list_check(_make_record_check(_TOKEN)),
    "logs": _make_list_check(_make_record_check({"number": _check_integer, "job": _check_text, "text": _check_text})),
    "me": _make_record_check({"user": _check_text, "role": _check_text}),
    "queue": _make_list_check(_make_record_check({**_JOB, **_TURN}, {"pinned": _check_text})),
    "cases": _make_record_check({"total": _check_integer, "cases": _make_list_check(_make_record_check(_CASE))}),
    "cancel": _make_record_check({"cancelled": _make_list_check(_check_text)}),
    "forget": _make_record_check({"ended": _make_list_check(_check_text)}),
    "token": _make_record_check({"token": _check_text}),
    "revoke": _make_record_check({"user": _check_text}),
    "gc": _make_record_check({"counts": _make_mapping_check(_check_integer), "bytes": _check_integer}),
}
