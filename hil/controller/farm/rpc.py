"""The farm's protocol in Python: stubs from the protobuf descriptor, and conversions of documents to messages.

Conversions in both directions validate the document and raise UsageError. The database checks whether a
submission can be scheduled.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NoReturn

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from hil.controller.farm.messages import (
    MAX_FENCE,
    POWER_ACTIONS,
    BoardAccess,
    BoardCard,
    BoardRequest,
    Grant,
    GrantedLease,
    JobResult,
    JobSpec,
    Kind,
    MeterCard,
    Submission,
)
from hil.controller.records.lab.board_image import ProvisionedImage
from hil.controller.records.lab.farm import FarmJob
from hil.core import digest
from hil.core.text import replace_surrogates
from hil.errors import UsageError
from hil.protocol import wire
from hil.protocol.bounded_message import MAX_FARM_FIELDS, parse_message
from hil.protocol.v1 import farm_pb2 as pb

SERVICES = ("Farm", "Hosts", "Artifacts")
LEASE_KEY, LEASE_SECRET_KEY, DIAL_KEY = "hil-lease", "hil-lease-key", "hil-dial"
# Name of the board whose console a Dial connects to.
CONSOLE_KEY = "hil-console"

MAX_FILES = 100_000
# Maximum characters in a name or title, because the tables of all users show names and titles. Maximum bytes of a
# board's labels, because every selector reads the labels. Maximum bytes of a board config.
_TEXT, _MOST_LABELS, _MOST_CONFIG = 2000, 64 << 10, 1 << 20
# Maximum bytes of a file name, and of a path below a job's directory: file system limits.
_LONGEST_NAME, _LONGEST_PATH = 255, 1000
_BOARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,99}")
# Maximum boards of a job, and maximum users and groups in the access list of a board.
MAX_BOARDS, _MOST_NAMES = 16, 1000
_KEY = re.compile(r"[\x21-\x7e]{8,200}")
# SHA-256 in hex, and the latest time of an image in seconds since the epoch: the year 9999.
_HEX_DIGEST, _MAX_SECONDS = re.compile(r"[0-9a-f]{64}"), 253_402_300_800
_MAX_IMAGE_NAME = 200
# PostgreSQL's jsonb rejects NUL and lone surrogates.
_UNSTORABLE = re.compile(rb"\\u(?:0000|[dD][89a-fA-F][0-9a-fA-F]{2})|\x00")


def iter_methods(service: str) -> Iterable[tuple[str, str, str, Any, Any]]:
    """Yield each method of a service: name, path, gRPC kind (``unary_stream``), request class and reply class."""
    for method in pb.DESCRIPTOR.services_by_name[service].methods:
        streams = ["stream" if one else "unary" for one in (method.client_streaming, method.server_streaming)]
        asked, answered = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        yield method.name, f"/{wire.PACKAGE}.{service}/{method.name}", "_".join(streams), asked, answered


class FarmStub:
    """gRPC stub of all gateway services; each method is an attribute: ``stub.Submit(pb.SubmitRequest())``."""

    def __init__(self, channel: object) -> None:
        for service in SERVICES:
            for name, path, kind, asked, answered in iter_methods(service):
                make = getattr(channel, kind)
                decode = partial(parse_message, answered, most=MAX_FARM_FIELDS)
                call = make(path, request_serializer=asked.SerializeToString, response_deserializer=decode)
                setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@contextlib.contextmanager
def _convert_errors(what: str) -> Iterator[None]:
    """Raise UsageError for values that do not fit their fields."""
    try:
        yield
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"invalid {what}: {str(error)[:200]}") from error


def encode_json(value: Any) -> pb.Json:
    """Return a JSON document as a message."""
    return pb.Json(text=json.dumps(value).encode())


def decode_json_object(message: pb.Json, what: str, *, storable: bool = True) -> dict[str, Any]:
    """Parse a message with a JSON object.

    Args:
        storable: also refuse values that the database rejects, such as NaN and NUL characters.

    Raises:
        UsageError: the text is invalid JSON, not an object, or not storable.
    """

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not valid JSON")

    try:
        value = json.loads(message.text or b"{}", parse_constant=refuse if storable else None)
        if storable and _UNSTORABLE.search(message.text):
            text = json.dumps(value, ensure_ascii=False)
            text.encode()
            if "\\u0000" in text:
                raise ValueError("contains a NUL character")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what} is not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{what} is not a JSON object")
    return value


def _copy_shared_fields(source: Any, message: type[Message], *others: str) -> dict[str, Any]:
    """Return the fields that a document and a message share. ``others`` are fields that differ."""
    return {name: getattr(source, name) for name in message.DESCRIPTOR.fields_by_name if name not in others}


def encode_spec(spec: JobSpec) -> pb.JobSpec:
    """Convert a job's spec to a message."""
    with _convert_errors("job"):
        options = encode_json(dict(spec.options))
        same = _copy_shared_fields(spec, pb.JobSpec, "kind", "options")
        return pb.JobSpec(kind=spec.kind.value, options=options, **same)


def decode_spec(message: pb.JobSpec) -> JobSpec:
    """Convert a message to a job's spec."""
    options = decode_json_object(message.options, "options")
    with _convert_errors("job"):
        return JobSpec(Kind(message.kind), options, dict(message.files), message.affinity, message.title)


def encode_submission(submission: Submission) -> pb.Submission:
    """Convert a submission to a message."""
    with _convert_errors("submission"):
        same = _copy_shared_fields(submission, pb.Submission, "specs", "priority", "more")
        specs = map(encode_spec, submission.specs)
        more = [pb.BoardRequest(selector=one.selector, board=one.board) for one in submission.more]
        return pb.Submission(**same, specs=specs, priority=submission.priority.value, more=more)


def decode_submission(message: pb.Submission) -> Submission:
    """Convert a message to a submission, and validate text fields and file paths."""
    specs = tuple(map(decode_spec, message.specs))
    if len(message.more) >= MAX_BOARDS:
        raise UsageError(f"a job can use at most {MAX_BOARDS} boards, got {len(message.more) + 1}")
    more = tuple(BoardRequest(one.selector, one.board) for one in message.more)
    with _convert_errors("submission"):
        submission = Submission(**_copy_shared_fields(message, pb.Submission, "specs", "more"), specs=specs, more=more)
    for request in more:
        _check_texts(request, "selector", "board")
    _check_texts(submission, "title", "selector", "board", "project")
    if not _KEY.fullmatch(submission.key):
        raise UsageError("the submission's key must be 8 to 200 printable characters")
    for spec in submission.specs:
        _check_files(spec.files)
        _check_texts(spec, "affinity", "title")
    return submission


def encode_result(result: JobResult) -> pb.JobResult:
    """Convert a result to a message. Replaces lone surrogates in text fields, so that the result is not lost."""
    begin_ns, end_ns = result.board_ns
    with _convert_errors("result"):
        return pb.JobResult(
            **_copy_shared_fields(
                result, pb.JobResult, "outcome", "reason", "record", "files", "board_begin_ns", "board_end_ns"
            ),
            outcome=replace_surrogates(result.outcome),
            reason=replace_surrogates(result.reason),
            record=encode_json(dict(result.record)),
            files={replace_surrogates(path): name for path, name in result.files.items()},
            board_begin_ns=begin_ns,
            board_end_ns=end_ns,
        )


def decode_result(message: pb.JobResult) -> JobResult:
    """Convert a message to a result. The record may contain NaN, which the store replaces."""
    result = JobResult(
        **_copy_shared_fields(message, pb.JobResult, "record", "files", "timings", "board_begin_ns", "board_end_ns"),
        record=decode_json_object(message.record, "the record", storable=False),
        files=dict(message.files),
        timings=dict(message.timings),
        board_ns=(message.board_begin_ns, message.board_end_ns),
    )
    if not 0 <= result.exit_code <= 255:
        raise UsageError(f"the result's exit_code must be 0 to 255, got {result.exit_code}")
    if not all(map(math.isfinite, result.timings.values())):
        raise UsageError("the result's timings must be finite numbers")
    _check_files(result.files)
    return result


def encode_grant(grant: Grant) -> pb.Grant:
    """Convert a grant to a message."""
    same = _copy_shared_fields(grant, pb.Grant, "spec", "more")
    return pb.Grant(**same, spec=encode_spec(grant.spec), more=map(encode_lease, grant.more))


def decode_grant(message: pb.Grant) -> Grant:
    """Convert a message to a grant."""
    if len(message.more) >= MAX_BOARDS:
        raise UsageError(f"the grant has {len(message.more) + 1} boards; the limit is {MAX_BOARDS}")
    if any(one.grant.more for one in message.more):
        raise UsageError("invalid grant: nested boards")
    more = tuple(map(decode_lease, message.more))
    return Grant(**_copy_shared_fields(message, pb.Grant, "spec", "more"), spec=decode_spec(message.spec), more=more)


def encode_lease(lease: GrantedLease) -> pb.LeaseGranted:
    """Convert a lease with its secret to a message for the holder."""
    return pb.LeaseGranted(grant=encode_grant(lease.grant), card=encode_card(lease.card), key=lease.key)


def decode_lease(message: pb.LeaseGranted) -> GrantedLease:
    """Convert a message to a lease with its secret."""
    return GrantedLease(decode_grant(message.grant), decode_card(message.card), message.key)


def encode_card(card: BoardCard) -> pb.BoardCard:
    """Convert a board description to a message."""
    with _convert_errors("board card"):
        labels = {name: _label_message(name, value) for name, value in card.labels.items()}
        access = pb.BoardAccess(users=card.access.users, groups=card.access.groups)
        shared = _copy_shared_fields(card, pb.BoardCard, "labels", "access", "image", "meter")
        meter = None if card.meter is None else pb.MeterCard(**_copy_shared_fields(card.meter, pb.MeterCard))
        image = None if card.image is None else pb.WrittenImage(**_copy_shared_fields(card.image, pb.WrittenImage))
        return pb.BoardCard(**shared, labels=labels, access=access, image=image, meter=meter)


def _label_message(name: str, value: Any) -> pb.Label:
    # bool is a subclass of int, so check it first.
    for kind, field in ((bool, "truth"), (int, "whole"), (float, "number"), (str, "text")):
        if isinstance(value, kind):
            one: dict[str, Any] = {field: value}
            return pb.Label(**one)
    if isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value):
        return pb.Label(texts=pb.Texts(texts=value))
    raise ValueError(
        f"label {name[:50]!r} must be a string, number, boolean or list of strings, got {str(value)[:50]!r}"
    )


def decode_card(message: pb.BoardCard) -> BoardCard:
    """Convert a message to a board description, and validate it."""
    labels = {name: _label_of(label) for name, label in message.labels.items()}
    power = [action for action in message.power if action in POWER_ACTIONS]
    access = _decode_access(message.access)
    same = _copy_shared_fields(message, pb.BoardCard, "labels", "power", "access", "image", "meter")
    image = _decode_image(message.image) if message.HasField("image") else None
    meter = _decode_meter(message.meter) if message.HasField("meter") else None
    card = BoardCard(**same, labels=labels, power=power, access=access, image=image, meter=meter)
    _check_texts(card, "name", "site", "host", "hw_type", "direct", "machine")
    if any(len(text) > _MOST_CONFIG or "\0" in text for text in (card.config, card.console)):
        raise UsageError("the board card's config must be TOML of at most 1 MiB")
    if not _BOARD.fullmatch(card.name):
        raise UsageError(f"invalid board name {card.name[:120]!r}", hint="use letters, digits and . _ - @ : +")
    if not 0 <= card.fence < MAX_FENCE:
        raise UsageError(
            f"invalid fence {card.fence} (session number) in the board card",
            hint="reset the agent's fence with hil board reset-fence BOARD",
        )
    text = json.dumps(labels)
    if len(text) > _MOST_LABELS:
        raise UsageError(f"the labels of {card.name} are longer than {_MOST_LABELS >> 10} KiB")
    if "\\u0000" in text or not all(math.isfinite(one) for one in labels.values() if isinstance(one, float)):
        raise UsageError(f"the labels of {card.name} contain NaN, infinity or a NUL character")
    return card


def _decode_image(message: pb.WrittenImage) -> ProvisionedImage:
    if not _HEX_DIGEST.fullmatch(message.sha256) or not 0 <= message.time_s < _MAX_SECONDS:
        raise UsageError("the board card's image must have a SHA-256 in hex and a time")
    if not is_image_name(message.file):
        raise UsageError(f"invalid name of an image: {message.file[:100]!r}")
    return ProvisionedImage(file=message.file, sha256=message.sha256, time_s=message.time_s)


def _decode_meter(message: pb.MeterCard) -> MeterCard:
    """Convert a meter. The client checks the settings of a sensor, because it uses them."""
    meter = MeterCard(**_copy_shared_fields(message, pb.MeterCard))
    _check_texts(meter, "kind", "path")
    if not all(map(math.isfinite, (meter.rate_hz, meter.idle_s))):
        raise UsageError("the rate and the idle time of a meter must be finite numbers")
    return meter


def is_image_name(name: str) -> bool:
    """Return True for the name of an image: a file name of at most 200 printable characters."""
    is_short = 0 < len(name.encode(errors="replace")) <= _MAX_IMAGE_NAME
    return is_short and name.isprintable() and "/" not in name and name not in (".", "..")


def _decode_access(message: pb.BoardAccess) -> BoardAccess:
    names = [*message.users, *message.groups]
    if len(names) > _MOST_NAMES or any(not name or len(name) > _TEXT or "\0" in name for name in names):
        raise UsageError(f"a board's access list must have at most {_MOST_NAMES} names of users and groups")
    return BoardAccess(tuple(message.users), tuple(message.groups))


def _label_of(label: pb.Label) -> Any:
    kind = label.WhichOneof("value") or "text"
    return list(label.texts.texts) if kind == "texts" else getattr(label, kind)


def encode_status(job: FarmJob, *, unrunnable: str = "", blocked: str = "") -> pb.JobStatus:
    """Convert a job to a message."""
    names = ("name", "submission", "state", "priority", "attempts", "board", "boards", "exit_code", "outcome", "reason")
    return pb.JobStatus(**{name: getattr(job, name) for name in names}, unrunnable=unrunnable, blocked=blocked)


def _check_texts(document: object, *names: str) -> None:
    for name in names:
        value = getattr(document, name)
        if len(value) > _TEXT or "\0" in value:
            raise UsageError(f"{name} must be a string of at most {_TEXT} characters without NUL, got {value[:50]!r}")


def _check_files(files: Mapping[str, str]) -> None:
    if len(files) > MAX_FILES:
        raise UsageError(f"a job has at most {MAX_FILES} files")
    for path, name in files.items():
        if not is_job_path(path):
            raise UsageError(f"invalid path {path[:100]!r}: expected a file below the job's directory")
        digest.check(name)


def is_job_path(path: str) -> bool:
    """Return True if a file of a job or result can have this path."""
    inside = PurePosixPath(path)
    try:
        long = len(path.encode()) > _LONGEST_PATH or any(len(part.encode()) > _LONGEST_NAME for part in inside.parts)
    except UnicodeEncodeError:
        return False
    return bool(path) and not (
        long or "\0" in path or inside.is_absolute() or ".." in inside.parts or str(inside) != path
    )
