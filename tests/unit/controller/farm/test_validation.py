from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, is_dataclass, replace
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from hil.controller.farm.messages import BoardCard, JobResult, JobSpec, Kind, MeterCard, Submission
from hil.controller.farm.rpc import (
    decode_card,
    decode_json_object,
    decode_result,
    decode_submission,
    encode_card,
    encode_result,
    encode_submission,
)
from hil.controller.records.base import Record
from hil.errors import UsageError
from hil.protocol.v1 import farm_pb2 as pb

_DIGEST = "blake3:" + "0" * 64
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
_SPEC = JobSpec(Kind.RUN, {"iterations": 3}, {"in/model.onnx": _DIGEST}, "warm")
_SUBMISSION = Submission("digits", (_SPEC,), selector="chip=a53")
_CARD = BoardCard("rpi5-1", labels={"chip": "a76", "mem": 8, "gpu": False, "features": ["fp16"], "ghz": 1.5}, fence=4)
_RESULT = JobResult(1, "FAIL", "they differ", record={"a": [1]}, files={"run.json": _DIGEST}, timings={"run": 0.5})
_DOCUMENTS: list[tuple[Callable[[Any], Any], Callable[[Any], Message], Any]] = [
    (decode_submission, encode_submission, _SUBMISSION),
    (decode_card, encode_card, _CARD),
    (
        decode_card,
        encode_card,
        _CARD.replace(meter=MeterCard(kind="hwmon", on_board=True, path="/sys/h", rate_hz=50.0)),
    ),
    (decode_result, encode_result, _RESULT),
]


def change(document: Any, **values: Any) -> Any:
    """Return a copy of a record or a dataclass with changed fields."""
    return document.replace(**values) if isinstance(document, Record) else replace(document, **values)


def to_text(document: Any) -> str:
    values = asdict(document) if is_dataclass(document) else document
    return json.dumps(values, default=lambda record: record.to_json(), sort_keys=True)  # type: ignore[arg-type]


def fields_of(message: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every field of a message and of its nested messages, with the message."""
    for field in message.DESCRIPTOR.fields:
        yield message, field
        if field.message_type and not field.is_repeated:
            yield from fields_of(getattr(message, field.name))
        elif field.message_type and not field.message_type.GetOptions().map_entry:
            for one in getattr(message, field.name):
                yield from fields_of(one)


@pytest.mark.parametrize(("check", "write", "document"), _DOCUMENTS)
def test_valid_document_passes_validation(check: Any, write: Any, document: Any) -> None:
    assert check(type(write(document)).FromString(write(document).SerializeToString())) == document


@pytest.mark.parametrize(("check", "write", "document"), _DOCUMENTS)
@given(data=st.data())
def test_validation_accepts_or_rejects_any_field_value(
    check: Any, write: Any, document: Any, data: st.DataObject
) -> None:
    message = write(document)
    chosen, field = data.draw(st.sampled_from(list(fields_of(message))))
    texts = st.text() | st.text(max_size=3).map(lambda text: text * 1000)
    if field.message_type and field.message_type.GetOptions().map_entry:
        name = data.draw(texts)
        entry = getattr(chosen, field.name)
        if field.name == "labels":
            entry[name].CopyFrom(data.draw(st.floats().map(lambda number: pb.Label(number=number))))
        else:
            entry[name] = data.draw(st.floats() if field.name == "timings" else texts)
    elif field.type == field.TYPE_STRING and not field.is_repeated:
        setattr(chosen, field.name, data.draw(texts))
    elif field.type == field.TYPE_BYTES:
        setattr(chosen, field.name, data.draw(st.binary() | _JSON.map(lambda value: json.dumps(value).encode())))
    elif field.type == field.TYPE_DOUBLE:
        setattr(chosen, field.name, data.draw(st.floats()))
    elif field.type in (field.TYPE_INT32, field.TYPE_INT64):
        setattr(chosen, field.name, data.draw(st.integers(-(1 << 31), (1 << 31) - 1)))
    try:
        taken = check(message)
    except UsageError:
        return
    # Compare as text, because NaN equals no value.
    assert to_text(check(write(taken))) == to_text(taken)


@given(text=st.binary() | _JSON.map(lambda value: json.dumps(value).encode()))
def test_json_object_accepts_or_rejects_any_bytes(text: bytes) -> None:
    try:
        assert isinstance(decode_json_object(pb.Json(text=text), "it"), dict)
    except UsageError as error:
        assert error.message.startswith("it is")


@pytest.mark.parametrize(
    "text",
    [b'{"a": NaN}', b'{"a": "\\u0000"}', b'{"a": "\\ud800"}', b'{"\\u0000": 1}', b"5", b"[]", b"{", b"[" * 100_000],
)
def test_json_object_rejects_values_unsupported_by_database(text: bytes) -> None:
    with pytest.raises(UsageError):
        decode_json_object(pb.Json(text=text), "it")


def test_json_object_decodes_surrogate_pair() -> None:
    assert decode_json_object(pb.Json(text=b'{"a": "\\ud83d\\ude00"}'), "it") == {"a": "😀"}


@pytest.mark.parametrize(
    "path",
    [
        *("", "/etc/passwd", "../up", "a/../../up", "a//b", "./a", "a/", "x" * 2000, "x" * 256, "é" * 128),
        *("a/" * 500 + "b", "a\0b"),
    ],
)
def test_files_reject_paths_outside_directory(path: str) -> None:
    with pytest.raises(UsageError, match="path"):
        decode_result(encode_result(_RESULT.replace(files={path: _DIGEST})))
    with pytest.raises(UsageError, match="path"):
        decode_submission(encode_submission(replace(_SUBMISSION, specs=(_SPEC.replace(files={path: _DIGEST}),))))


@pytest.mark.parametrize(
    "wrong",
    [
        {"exit_code": -1},
        {"exit_code": 256},
        {"files": {"a": "md5:1"}},
        {"timings": {"run": math.inf}},
        {"record": pb.Json(text=b"[]")},
    ],
)
def test_result_rejects_invalid_fields(wrong: dict[str, Any]) -> None:
    message = encode_result(_RESULT)
    for name, value in wrong.items():
        message.ClearField(name)
        message.MergeFrom(pb.JobResult(**{name: value}))
    with pytest.raises(UsageError):
        decode_result(message)


@pytest.mark.parametrize(
    ("document", "write", "wrong"),
    [
        (_RESULT, encode_result, {"exit_code": "0"}),
        (_RESULT, encode_result, {"timings": {"run": "long"}}),
        (_RESULT, encode_result, {"board_ns": (0, 10**4000)}),
        (_CARD, encode_card, {"fence": 1 << 63}),
        (_CARD, encode_card, {"meter": MeterCard(kind="hwmon", channel=1 << 40)}),
        (_CARD, encode_card, {"site": None, "name": 5}),
        (_CARD, encode_card, {"labels": {"a": {}}}),
        (_CARD, encode_card, {"labels": {"a": [1]}}),
        (_CARD, encode_card, {"labels": {"a": 10**4000}}),
        (_SUBMISSION, encode_submission, {"title": 5}),
        (_SUBMISSION, encode_submission, {"title": "\ud800"}),
        (_SUBMISSION, encode_submission, {"timeout_s": "soon"}),
        (_SUBMISSION, encode_submission, {"specs": (JobSpec(Kind.RUN, {"a": {1, 2}}),)}),
    ],
)
def test_message_writer_rejects_values_of_wrong_type(document: Any, write: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"invalid (job|submission|result|board card): "):
        write(change(document, **wrong))


def test_result_survives_nan_and_lone_surrogate() -> None:
    odd = _RESULT.replace(record={"cosine": math.nan}, reason="\ud800")
    found = decode_result(encode_result(odd))
    assert found.outcome == "FAIL" and "cosine" in found.record and found.reason == "?"


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "a b"},
        {"name": "x" * 101},
        {"fence": -1},
        {"fence": 1 << 31},
        {"fence": 1 << 62},
        {"labels": {"a": "x" * (1 << 16)}},
        {"labels": {str(number): True for number in range(10_000)}},
        {"labels": {"a": math.nan}},
        {"labels": {"a": "\0"}},
        {"site": "x" * 2001},
        {"host": "a\0b"},
        {"config": "x" * ((1 << 20) + 1)},
        {"config": "\0"},
    ],
)
def test_card_rejects_invalid_fields(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        decode_card(encode_card(_CARD.replace(**wrong)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("title", "x" * 2001),
        ("selector", "a," * 1001),
        ("board", "x" * 2001),
        ("project", "x" * 2001),
        ("title", "\0"),
    ],
)
def test_submission_limits_length_of_public_fields(field: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{field} must be a string of at most"):
        decode_submission(encode_submission(replace(_SUBMISSION, **{field: value})))


@pytest.mark.parametrize("key", ["", "short", "with space", "é" * 10, "x" * 201])
def test_submission_requires_printable_key(key: str) -> None:
    with pytest.raises(UsageError, match="key"):
        decode_submission(encode_submission(replace(_SUBMISSION, key=key)))


@pytest.mark.parametrize("wrong", [{"priority": "urgent"}, {"priority": ""}, {"specs": [pb.JobSpec(kind="dance")]}])
def test_submission_rejects_unknown_priority_and_kind(wrong: dict[str, Any]) -> None:
    message = encode_submission(_SUBMISSION)
    for name, value in wrong.items():
        message.ClearField(name)
        message.MergeFrom(pb.Submission(**{name: value}))
        setattr(message, name, value) if name == "priority" else None
    with pytest.raises(UsageError, match=r"invalid (job|submission): "):
        decode_submission(message)
