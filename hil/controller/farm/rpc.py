"""The farm's protocol as Python sees it: stubs made from its descriptor, and the farm's documents as its messages.

What is read of a message is a valid document, or a UsageError; likewise what is written. The database checks whether a
submission can be scheduled.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, NoReturn

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from hil.controller.farm.messages import MOST_FENCE, BoardCard, Grant, JobResult, JobSpec, Kind, Submission
from hil.core import digest
from hil.errors import UsageError
from hil.protocol import wire
from hil.protocol.v1 import farm_pb2 as pb

SERVICES = ("Farm", "Hosts", "Artifacts")
LEASE_KEY, LEASE_SECRET_KEY, DIAL_KEY = "hil-lease", "hil-lease-key", "hil-dial"

MOST_FILES = 100_000
# Most characters of a name or a title, which every user's table shows; most bytes of a board's labels, which every
# selector reads, and of its config.
_TEXT, _MOST_LABELS, _MOST_CONFIG = 2000, 64 << 10, 1 << 20
# Most bytes of a file's name, and of its path below a job's folder: what file systems take.
_LONGEST_NAME, _LONGEST_PATH = 255, 1000
_BOARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,99}")
_KEY = re.compile(r"[\x21-\x7e]{8,200}")
# PostgreSQL's jsonb holds neither NUL nor half of a surrogate pair.
_UNSTORABLE = re.compile(rb"\\u(?:0000|[dD][89a-fA-F][0-9a-fA-F]{2})|\x00")


def methods(service: str) -> Iterable[tuple[str, str, str, Any, Any]]:
    """Of each method of a service: name, path, gRPC kind (``unary_stream``), request class and reply class."""
    for method in pb.DESCRIPTOR.services_by_name[service].methods:
        streams = ["stream" if one else "unary" for one in (method.client_streaming, method.server_streaming)]
        asked, answered = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        yield method.name, f"/{wire.PACKAGE}.{service}/{method.name}", "_".join(streams), asked, answered


class FarmStub:
    """The gateway's methods over a channel, each under its name: ``stub.Submit(pb.SubmitRequest())``."""

    def __init__(self, channel: object) -> None:
        for service in SERVICES:
            for name, path, kind, asked, answered in methods(service):
                make = getattr(channel, kind)
                call = make(path, request_serializer=asked.SerializeToString, response_deserializer=answered.FromString)
                setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@contextlib.contextmanager
def _converting(what: str) -> Iterator[None]:
    """Raise UsageError where a value does not fit its field."""
    try:
        yield
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"this is no {what} of a farm: {str(error)[:200]}") from error


def json_message(value: Any) -> pb.Json:
    """Return an open document as a message."""
    return pb.Json(text=json.dumps(value).encode())


def json_of(message: pb.Json) -> Any:
    """Return the value of an open document."""
    return json.loads(message.text or b"{}")


def json_object(message: pb.Json, what: str, *, storable: bool = True) -> dict[str, Any]:
    """Return an open document that is a JSON object; UsageError where it is none, or the database cannot hold it."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    try:
        value = json.loads(message.text or b"{}", parse_constant=refuse if storable else None)
        if storable and _UNSTORABLE.search(message.text):
            text = json.dumps(value, ensure_ascii=False)
            text.encode()
            if "\\u0000" in text:
                raise ValueError("it holds a NUL character")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what} is not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{what} is no JSON object")
    return value


def _same(source: Any, message: type[Message], *others: str) -> dict[str, Any]:
    """Read the fields that a document and its message share; of ``others`` name or type differ."""
    return {name: getattr(source, name) for name in message.DESCRIPTOR.fields_by_name if name not in others}


def spec_message(spec: JobSpec) -> pb.JobSpec:
    """Return a job's spec as a message."""
    with _converting("job"):
        options = json_message(dict(spec.options))
        return pb.JobSpec(kind=spec.kind.value, options=options, files=spec.files, affinity=spec.affinity)


def spec_of(message: pb.JobSpec) -> JobSpec:
    """Return the spec that a message holds."""
    options = json_object(message.options, "options")
    with _converting("job"):
        return JobSpec(Kind(message.kind), options, dict(message.files), message.affinity)


def submission_message(submission: Submission) -> pb.Submission:
    """Return a submission as a message."""
    with _converting("submission"):
        same = _same(submission, pb.Submission, "specs", "priority")
        specs = map(spec_message, submission.specs)
        return pb.Submission(**same, specs=specs, priority=submission.priority.value)


def submission_of(message: pb.Submission) -> Submission:
    """Return the submission that a message holds; its texts and files can be stored."""
    specs = tuple(map(spec_of, message.specs))
    with _converting("submission"):
        submission = Submission(**_same(message, pb.Submission, "specs"), specs=specs)
    _check_texts(submission, "title", "selector", "board", "project")
    if not _KEY.fullmatch(submission.key):
        raise UsageError("the submission's key must be 8 to 200 printable characters")
    for spec in submission.specs:
        _check_files(spec.files)
        _check_texts(spec, "affinity")
    return submission


def result_message(result: JobResult) -> pb.JobResult:
    """Return a result as a message; half surrogate pairs in its texts are replaced, so that no result is lost."""
    begin_ns, end_ns = result.board_ns
    with _converting("result"):
        return pb.JobResult(
            **_same(result, pb.JobResult, "outcome", "reason", "record", "files", "board_begin_ns", "board_end_ns"),
            outcome=_encodable(result.outcome),
            reason=_encodable(result.reason),
            record=json_message(dict(result.record)),
            files={_encodable(path): name for path, name in result.files.items()},
            board_begin_ns=begin_ns,
            board_end_ns=end_ns,
        )


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def result_of(message: pb.JobResult) -> JobResult:
    """Return the result that a message holds. Its record may hold NaN, which the store replaces."""
    result = JobResult(
        **_same(message, pb.JobResult, "record", "files", "timings", "board_begin_ns", "board_end_ns"),
        record=json_object(message.record, "the record", storable=False),
        files=dict(message.files),
        timings=dict(message.timings),
        board_ns=(message.board_begin_ns, message.board_end_ns),
    )
    if not 0 <= result.exit_code <= 255:
        raise UsageError(f"the result's exit_code must be 0 to 255, not {result.exit_code}")
    if not all(map(math.isfinite, result.timings.values())):
        raise UsageError("the result's timings must be finite numbers")
    _check_files(result.files)
    return result


def grant_message(grant: Grant) -> pb.Grant:
    """Return a grant as a message."""
    return pb.Grant(**_same(grant, pb.Grant, "spec"), spec=spec_message(grant.spec))


def grant_of(message: pb.Grant) -> Grant:
    """Return the grant that a message holds."""
    return Grant(**_same(message, pb.Grant, "spec"), spec=spec_of(message.spec))


def card_message(card: BoardCard) -> pb.BoardCard:
    """Return a board's card as a message."""
    with _converting("board's card"):
        labels = {name: _label_message(name, value) for name, value in card.labels.items()}
        return pb.BoardCard(**_same(card, pb.BoardCard, "labels"), labels=labels)


def _label_message(name: str, value: Any) -> pb.Label:
    # A truth is a whole number too: the first that fits counts.
    for kind, field in ((bool, "truth"), (int, "whole"), (float, "number"), (str, "text")):
        if isinstance(value, kind):
            one: dict[str, Any] = {field: value}
            return pb.Label(**one)
    if isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value):
        return pb.Label(texts=pb.Texts(texts=value))
    raise ValueError(f"label {name[:50]!r} is no text, number, truth or list of texts: {str(value)[:50]!r}")


def card_of(message: pb.BoardCard) -> BoardCard:
    """Return the board's card that a message holds."""
    labels = {name: _label_of(label) for name, label in message.labels.items()}
    card = BoardCard(**_same(message, pb.BoardCard, "labels"), labels=labels)
    _check_texts(card, "name", "site", "host", "hw_type", "direct", "machine")
    if len(card.config) > _MOST_CONFIG or "\0" in card.config:
        raise UsageError("the card's config must be TOML of at most 1 MiB")
    if not _BOARD.fullmatch(card.name):
        raise UsageError(f"{card.name[:120]!r} cannot be a board's name", hint="letters, digits and . _ - @ : +")
    if not 0 <= card.fence < MOST_FENCE:
        raise UsageError(
            f"the card's fence makes no sense: {card.fence}", hint="hil board reset-fence mends an agent's"
        )
    text = json.dumps(labels)
    if len(text) > _MOST_LABELS:
        raise UsageError(f"the labels of {card.name} are longer than {_MOST_LABELS >> 10} KiB")
    if "\\u0000" in text or not all(math.isfinite(one) for one in labels.values() if isinstance(one, float)):
        raise UsageError(f"the labels of {card.name} hold NaN, an infinite number or a NUL character")
    return card


def _label_of(label: pb.Label) -> Any:
    kind = label.WhichOneof("value") or "text"
    return list(label.texts.texts) if kind == "texts" else getattr(label, kind)


def status_message(job: Mapping[str, Any], unrunnable: str = "") -> pb.JobStatus:
    """Return a job as the queries tell it (:func:`hil.controller.farm.store.queries.job`) as a message."""
    names = ("name", "submission", "state", "priority", "attempts", "board", "exit_code", "outcome", "reason")
    return pb.JobStatus(**{name: job[name] for name in names}, unrunnable=unrunnable)


def _check_texts(document: object, *names: str) -> None:
    for name in names:
        value = getattr(document, name)
        if len(value) > _TEXT or "\0" in value:
            raise UsageError(f"{name} must be a text of at most {_TEXT} characters, without NUL, not {value[:50]!r}")


def _check_files(files: Mapping[str, str]) -> None:
    if len(files) > MOST_FILES:
        raise UsageError(f"a job has at most {MOST_FILES} files")
    for path, name in files.items():
        inside = PurePosixPath(path)
        long = len(os.fsencode(path)) > _LONGEST_PATH or any(
            len(os.fsencode(part)) > _LONGEST_NAME for part in inside.parts
        )
        unusual = "\0" in path or inside.is_absolute() or ".." in inside.parts or str(inside) != path
        if not path or long or unusual:
            raise UsageError(f"{path[:100]!r} is no path of a file below a job's folder")
        digest.check(name)
