"""Validate gateway responses before other modules use them. A gateway may be of another release, or hostile."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from hil.controller.farm.messages import parse_job
from hil.core.bounded_json import parse_json
from hil.errors import FarmError, UsageError
from hil.protocol.v1 import farm_pb2 as pb

Check = Callable[[Any], None]
# `hil farm status` requests 5,000 jobs of 20 values each; `--json` requests all jobs of a submission.
_MAX_VALUES = 4_000_000
_MAX_NUMBER = 1 << 63


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


def invalid_answer(error: Exception) -> FarmError:
    """Return the error for an invalid response."""
    what = f"{type(error).__name__}: {str(error)[:200]}"
    return FarmError(f"invalid response from the farm: {what}", hint="check that the gateway has the same hil version")


def _text(value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError("expected a string")


def _flag(value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError("expected true or false")


def _number(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("expected a number")
    if not (abs(value) < _MAX_NUMBER and math.isfinite(value)):
        raise ValueError("number out of range")


def _whole(value: Any) -> None:
    if not isinstance(value, int):
        raise TypeError("expected a whole number")
    _number(value)


def _time(value: Any) -> None:
    _text(value)
    # Local time conversion fails for years before 1 or after 9999.
    time = datetime.fromisoformat(value)
    if not 1970 <= time.year < 9999:
        raise ValueError("time out of range")
    if time.tzinfo is None:
        raise ValueError("missing time zone")


def _job_name(value: Any) -> None:
    _text(value)
    parse_job(value)


def _label(value: Any) -> None:
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, str):
            _number(int(one) if isinstance(one, bool) else one)


def _any(value: Any) -> None:
    pass


def _optional(check: Check) -> Check:
    def check_optional(value: Any) -> None:
        if value is not None:
            check(value)

    return check_optional


def _each(kind: type[list[Any]] | type[dict[str, Any]], text: str, check: Check) -> Check:
    def check_each(value: Any) -> None:
        if not isinstance(value, kind):
            raise TypeError(f"expected {text}")
        for one in value.values() if isinstance(value, dict) else value:
            check(one)

    return check_each


def _list(check: Check) -> Check:
    return _each(list, "a list", check)


def _mapping(check: Check) -> Check:
    return _each(dict, "an object", check)


def _record(fields: Mapping[str, Check], absent: Mapping[str, Check] | None = None) -> Check:
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


_TURN: dict[str, Check] = {"position": _whole, "why": _text}
_JOB: dict[str, Check] = {
    **dict.fromkeys(("title", "kind", "project", "priority", "selector", "state", "user", "board", "outcome"), _text),
    **{"name": _job_name, "submission": _whole, "attempts": _whole, "queued_at": _time, "reason": _text},
    **{"started_at": _optional(_time), "finished_at": _optional(_time), "exit_code": _optional(_whole)},
}
_ATTEMPT: dict[str, Check] = {
    **{"lease": _whole, "board": _text, "fence": _whole, "granted_at": _time, "reason": _text},
    **{"started_at": _optional(_time), "ended_at": _optional(_time)},
}
_BOARD: dict[str, Check] = {
    **dict.fromkeys(("name", "site", "host", "hw_type", "reason", "state", "job", "user"), _text),
    **{"labels": _mapping(_label), "failures": _whole, "since": _optional(_time), "checked_at": _optional(_time)},
}
_EVENT: dict[str, Check] = {
    **{"id": _whole, "at": _time, "what": _text, "board": _text, "job": _text, "reason": _text},
    "lease": _optional(_whole),
}
_USER: dict[str, Check] = {
    **{"user": _text, "project": _text, "running": _whole, "queued": _whole, "board_s": _number},
}
_STATS: dict[str, Check] = {
    **{"jobs": _mapping(_whole), "boards": _mapping(_whole), "queue": _mapping(_whole)},
    "waiting_s": _record({"p50": _optional(_number), "p95": _optional(_number)}),
    "users": _list(_record(_USER)),
}
_TOKEN: dict[str, Check] = {
    **{"id": _whole, "user": _text, "project": _text, "role": _text, "note": _text, "made_at": _time, "good": _flag},
    **{"expires_at": _optional(_time), "revoked_at": _optional(_time)},
}
_AUDIT: dict[str, Check] = {
    **{"id": _whole, "at": _time, "user": _text, "role": _text, "peer": _text, "action": _text, "object": _text},
    **{"allowed": _flag, "detail": _mapping(_any)},
}
_CASE: dict[str, Check] = dict.fromkeys(("job", "name", "outcome", "reason"), _text)
# `hil.controller.farm.results` validates the contents of a job's result.
_ANSWERS: dict[str, Check] = {
    "jobs": _list(_record(_JOB, {"pinned": _text})),
    "job": _record({**_JOB, "attempts_made": _list(_record(_ATTEMPT))}, {"pinned": _text}),
    "result": _list(_record({"name": _job_name, "state": _text})),
    "boards": _list(_record(_BOARD)),
    "events": _list(_record(_EVENT, {"host": _text})),
    "audit": _list(_record(_AUDIT)),
    "stats": _record(_STATS, {"matching": _whole}),
    "tokens": _list(_record(_TOKEN)),
    "logs": _list(_record({"number": _whole, "job": _text, "text": _text})),
    "me": _record({"user": _text, "role": _text}),
    "queue": _list(_record({**_JOB, **_TURN}, {"pinned": _text})),
    "cases": _record({"total": _whole, "cases": _list(_record(_CASE))}),
    "cancel": _record({"cancelled": _list(_text)}),
    "forget": _record({"ended": _list(_text)}),
    "token": _record({"token": _text}),
    "revoke": _record({"user": _text}),
    "gc": _record({"counts": _mapping(_whole), "bytes": _whole}),
}
