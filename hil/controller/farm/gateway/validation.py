"""Documents from the wire, checked: whatever comes, a call either gets one that makes sense or a UsageError."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, NoReturn, TypeVar

from hil.controller.farm.messages import MOST_FENCE, BoardCard, Document, JobResult, JobSpec, Submission
from hil.core import digest
from hil.errors import UsageError

D = TypeVar("D", bound=Document)

MOST_FILES = 100_000
# Of a name or a title, which every user's table shows; and of what a board says of itself, which every selector reads.
_TEXT, _MOST_LABELS = 2000, 64 << 10
# File systems take no longer names, nor paths with what a host puts before them.
_LONGEST_NAME, _LONGEST_PATH = 255, 1000
_LARGEST = 1 << 63
_BOARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,99}")
_KEY = re.compile(r"[\x21-\x7e]{8,200}")
# PostgreSQL's text and jsonb hold neither NUL nor half a character.
_BROKEN = re.compile(r"\\u(?:0000|[dD][89a-fA-F][0-9a-fA-F]{2})|\x00")


def json_object(text: str, what: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        UsageError: it is none, or holds what the farm cannot keep.
    """

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    try:
        value = json.loads(text or "{}", parse_constant=refuse)
        if _BROKEN.search(text):
            _encodable(value)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what} is not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{what} is no JSON object")
    return value


def order_of(text: str) -> Submission:
    """An order that can be read; whether it makes sense is the desk's to say.

    Raises:
        UsageError: it is none.
    """
    raw = json_object(text, "the order")
    if not isinstance(raw.get("specs"), list) or not all(isinstance(one, dict) for one in raw["specs"]):
        raise UsageError("the order has no list of specs")
    order = _document(Submission, raw)
    for name in ("title", "selector", "board", "project"):
        _text(order, name)
    if not isinstance(order.key, str) or not _KEY.fullmatch(order.key):
        raise UsageError("the order's key must be 8 to 200 printable characters")
    for spec in order.specs:
        _check_spec(spec)
    return order


def card_of(text: str) -> BoardCard:
    """A board's card.

    Raises:
        UsageError: it is none.
    """
    card = _document(BoardCard, json_object(text, "the board's card"))
    for name in ("name", "site", "host", "hw_type", "direct", "machine"):
        _text(card, name)
    if not isinstance(card.config, str) or len(card.config) > 1 << 20:
        raise UsageError("the card's config must be TOML of at most 1 MiB")
    if not _BOARD.fullmatch(card.name):
        raise UsageError(f"{card.name[:120]!r} cannot be a board's name", hint="letters, digits and . _ - @ : +")
    if isinstance(card.fence, bool) or not isinstance(card.fence, int) or not 0 <= card.fence < MOST_FENCE:
        raise UsageError(
            f"the card's fence makes no sense: {str(card.fence)[:50]}", hint="hil board reset-fence mends an agent's"
        )
    if not isinstance(card.powered, bool):
        raise UsageError(f"the card's powered must be true or false, not {card.powered!r}")
    if len(json.dumps(_mapping(card.labels, "labels"))) > _MOST_LABELS:
        raise UsageError(f"the labels of {card.name} are longer than {_MOST_LABELS >> 10} KiB")
    for label, value in card.labels.items():
        known = isinstance(value, (str, bool)) or _number(value)
        if not known and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            raise UsageError(f"label {label[:50]!r} is no text, number, truth or list of texts: {str(value)[:50]!r}")
    return card


def result_of(text: str) -> JobResult:
    """A result as a worker reports it. A NaN in its record is no reason to lose it: the desk stores what can be.

    Raises:
        UsageError: it is none.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the result is not JSON: {str(error)[:200]}") from error
    result = _document(JobResult, _mapping(raw, "the result"))
    for name in ("outcome", "reason"):
        if not isinstance(getattr(result, name), str):
            raise UsageError(f"the result's {name} must be a text")
    if isinstance(result.exit_code, bool) or not isinstance(result.exit_code, int) or not 0 <= result.exit_code <= 255:
        raise UsageError(f"the result's exit_code must be 0 to 255, not {result.exit_code!r}")
    if not isinstance(result.infrastructure, bool):
        raise UsageError("the result's infrastructure must be true or false")
    _mapping(result.record, "record")
    _files(result.files)
    if not all(_number(value) for value in _mapping(result.timings, "timings").values()):
        raise UsageError("the result's timings must be numbers")
    if len(result.board_ns) != 2 or not all(isinstance(one, int) and _number(one) for one in result.board_ns):
        raise UsageError("the result's board_ns must be two whole numbers")
    return result


def _check_spec(spec: JobSpec) -> None:
    _mapping(spec.options, "options")
    _files(spec.files)
    _text(spec, "affinity")


def _document(kind: type[D], raw: Mapping[str, Any]) -> D:
    try:
        return kind.of_json(raw)
    except AttributeError as error:
        raise UsageError(f"this is no {kind.__name__} of a farm: {error}") from error


def _text(document: Document, name: str) -> None:
    value = getattr(document, name)
    if not isinstance(value, str) or len(value) > _TEXT:
        raise UsageError(f"{name} must be a text of at most {_TEXT} characters, not {str(value)[:50]!r}")


def _number(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and -_LARGEST <= value < _LARGEST
    return isinstance(value, float) and math.isfinite(value)


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{what} must be an object, not {str(value)[:50]!r}")
    return value


def _files(files: Any) -> None:
    if len(_mapping(files, "files")) > MOST_FILES:
        raise UsageError(f"a job has at most {MOST_FILES} files")
    for path, name in files.items():
        inside = PurePosixPath(path)
        long = len(os.fsencode(path)) > _LONGEST_PATH or any(
            len(os.fsencode(part)) > _LONGEST_NAME for part in inside.parts
        )
        if not path or long or inside.is_absolute() or ".." in inside.parts or str(inside) != path:
            raise UsageError(f"{path[:100]!r} is no path of a file below a job's folder")
        if not isinstance(name, str):
            raise UsageError(f"the file {path[:100]!r} has no digest")
        digest.check(name)


def _encodable(value: Any) -> None:
    """Refuse texts with NUL or half a character in them."""
    text = json.dumps(value, ensure_ascii=False)
    text.encode()
    if "\\u0000" in text:
        raise ValueError("it holds a NUL character")
