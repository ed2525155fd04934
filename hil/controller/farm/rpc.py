"""The farm's protocol as Python sees it: stubs made from its descriptor, and the farm's documents as its messages.

The functions that read a message check its form only; what a document may hold is for the gateway to check
(:mod:`hil.controller.farm.gateway.validation`).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from hil.controller.farm.messages import BoardCard, Grant, JobResult, JobSpec, Kind, Submission
from hil.errors import UsageError
from hil.protocol import wire
from hil.protocol.v1 import farm_pb2 as pb

SERVICES = ("Farm", "Hosts", "Artifacts")
LEASE_KEY, LEASE_SECRET_KEY, DIAL_KEY = "hil-lease", "hil-lease-key", "hil-dial"

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
    """Return the value of an open document.

    Raises:
        ValueError: it is not JSON.
    """
    return json.loads(message.text or b"{}")


def json_object(message: pb.Json, what: str, *, storable: bool = True) -> dict[str, Any]:
    """Return an open document that is a JSON object.

    Args:
        what: how errors call it.
        storable: refuse NaN, NUL and halves of surrogate pairs, which the farm's database cannot hold.

    Raises:
        UsageError: it is no object, or not storable.
    """

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    try:
        value = json.loads(message.text or b"{}", parse_constant=refuse if storable else None)
        if storable and _UNSTORABLE.search(message.text):
            _check_encodable(value)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what} is not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{what} is no JSON object")
    return value


def _check_encodable(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    text.encode()
    if "\\u0000" in text:
        raise ValueError("it holds a NUL character")


def _same(source: Any, message: type[Message], *others: str) -> dict[str, Any]:
    """Read the fields that a document and its message share; of ``others`` name or type differ."""
    return {name: getattr(source, name) for name in message.DESCRIPTOR.fields_by_name if name not in others}


def spec_message(spec: JobSpec) -> pb.JobSpec:
    """Return a job's spec as a message."""
    with _converting("job"):
        options = json_message(dict(spec.options))
        return pb.JobSpec(kind=spec.kind.value, options=options, files=spec.files, affinity=spec.affinity)


def spec_of(message: pb.JobSpec) -> JobSpec:
    """Return the spec that a message holds.

    Raises:
        UsageError: there is no such kind, or the options are no JSON object.
    """
    options = json_object(message.options, "options")
    with _converting("job"):
        return JobSpec(Kind(message.kind), options, dict(message.files), message.affinity)


def submission_message(submission: Submission) -> pb.Submission:
    """Return a submission as a message.

    Raises:
        UsageError: a value does not fit its field.
    """
    with _converting("submission"):
        same = _same(submission, pb.Submission, "specs", "priority")
        specs = map(spec_message, submission.specs)
        return pb.Submission(**same, specs=specs, priority=submission.priority.value)


def submission_of(message: pb.Submission) -> Submission:
    """Return the submission that a message holds.

    Raises:
        UsageError: there is no such kind of job or priority.
    """
    specs = tuple(map(spec_of, message.specs))
    with _converting("submission"):
        return Submission(**_same(message, pb.Submission, "specs"), specs=specs)


def result_message(result: JobResult) -> pb.JobResult:
    """Return a result as a message; half surrogate pairs in its texts are replaced, so that no result is lost.

    Raises:
        UsageError: a value does not fit its field.
    """
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
    """Return the result that a message holds; its record may hold NaN.

    Raises:
        UsageError: the record is no JSON object.
    """
    return JobResult(
        **_same(message, pb.JobResult, "record", "files", "timings", "board_begin_ns", "board_end_ns"),
        record=json_object(message.record, "the record", storable=False),
        files=dict(message.files),
        timings=dict(message.timings),
        board_ns=(message.board_begin_ns, message.board_end_ns),
    )


def grant_message(grant: Grant) -> pb.Grant:
    """Return a grant as a message."""
    return pb.Grant(**_same(grant, pb.Grant, "spec"), spec=spec_message(grant.spec))


def grant_of(message: pb.Grant) -> Grant:
    """Return the grant that a message holds.

    Raises:
        UsageError: its job is of no kind that this release knows.
    """
    return Grant(**_same(message, pb.Grant, "spec"), spec=spec_of(message.spec))


def card_message(card: BoardCard) -> pb.BoardCard:
    """Return a board's card as a message.

    Raises:
        UsageError: a label is no text, number, truth or list of texts, or a value does not fit its field.
    """
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
    return BoardCard(**_same(message, pb.BoardCard, "labels"), labels=labels)


def _label_of(label: pb.Label) -> Any:
    kind = label.WhichOneof("value") or "text"
    return list(label.texts.texts) if kind == "texts" else getattr(label, kind)


def status_message(job: Mapping[str, Any], unrunnable: str = "") -> pb.JobStatus:
    """Return a job as the queries tell it (:func:`hil.controller.farm.store.queries.job`) as a message."""
    names = ("name", "submission", "state", "priority", "attempts", "board", "exit_code", "outcome", "reason")
    return pb.JobStatus(**{name: job[name] for name in names}, unrunnable=unrunnable)
