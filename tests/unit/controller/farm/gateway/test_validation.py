from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.controller.farm.gateway.validation import card_of, json_object, order_of, result_of
from hil.controller.farm.messages import BoardCard, JobResult, JobSpec, Kind, Submission
from hil.errors import UsageError

_DIGEST = "blake3:" + "0" * 64
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
_SPEC = JobSpec(Kind.RUN, {"iterations": 3}, {"in/model.onnx": _DIGEST}, "warm")
_ORDER = Submission("digits", (_SPEC,), selector="chip=a53")
_CARD = BoardCard("rpi5-1", labels={"chip": "a76", "mem": 8, "gpu": False, "features": ["fp16"]}, fence=4)
_RESULT = JobResult(1, "FAIL", "they differ", record={"a": [1]}, files={"run.json": _DIGEST}, timings={"run": 0.5})


@pytest.mark.parametrize(("check", "document"), [(order_of, _ORDER), (card_of, _CARD), (result_of, _RESULT)])
def test_documents_come_through(check: Any, document: Any) -> None:
    assert check(json.dumps(document.to_json())) == document
    newer = {**document.to_json(), "of_a_later_version": 1}
    assert check(json.dumps(newer)) == document


@pytest.mark.parametrize(("check", "document"), [(order_of, _ORDER), (card_of, _CARD), (result_of, _RESULT)])
@given(data=st.data())
def test_any_field_of_any_type_is_taken_or_refused(check: Any, document: Any, data: st.DataObject) -> None:
    raw = document.to_json()
    raw[data.draw(st.sampled_from(sorted(raw)))] = data.draw(_JSON)
    try:
        taken = check(json.dumps(raw))
    except UsageError:
        return
    assert check(json.dumps(taken.to_json()).replace("NaN", "0").replace("Infinity", "0"))


@given(text=st.text() | _JSON.map(json.dumps))
def test_any_text_is_an_object_or_refused(text: str) -> None:
    try:
        assert isinstance(json_object(text, "it"), dict)
    except UsageError as error:
        assert error.message.startswith("it is")


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', '{"a": "\\u0000"}', '{"a": "\\ud800"}', '{"\\u0000": 1}', "5", "[]", "{"]
)
def test_what_the_database_cannot_hold_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        json_object(text, "it")


def test_pair_of_surrogates_is_a_character() -> None:
    assert json_object('{"a": "\\ud83d\\ude00"}', "it") == {"a": "😀"}


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "../up", "a/../../up", "a//b", "./a", "a/", "x" * 2000, "x" * 256, "é" * 128, "a/" * 500 + "b"],
)
def test_files_stay_below_their_folder(path: str) -> None:
    raw = {**_RESULT.to_json(), "files": {path: _DIGEST}}
    with pytest.raises(UsageError, match="path"):
        result_of(json.dumps(raw))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("exit_code", -1),
        ("exit_code", 256),
        ("exit_code", True),
        ("exit_code", "0"),
        ("infrastructure", "no"),
        ("outcome", None),
        ("files", []),
        ("files", {"a": "md5:1"}),
        ("timings", {"run": "long"}),
        ("timings", {"run": 10**4000}),
        ("board_ns", [0, 10**4000]),
        ("board_ns", [1]),
        ("board_ns", 5),
    ],
)
def test_result_that_makes_no_sense_is_refused(field: str, value: Any) -> None:
    with pytest.raises(UsageError):
        result_of(json.dumps({**_RESULT.to_json(), field: value}))


def test_nan_in_a_record_loses_no_result() -> None:
    found = result_of(json.dumps({**_RESULT.to_json(), "record": {"cosine": float("nan")}}))
    assert found.outcome == "FAIL" and "cosine" in found.record


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "a b"),
        ("name", "x" * 101),
        ("fence", -1),
        ("fence", 1 << 62),
        ("fence", True),
        ("powered", 1),
        ("labels", []),
        ("labels", {"a": {}}),
        ("labels", {"a": [1]}),
        ("labels", {"a": 10**4000}),
        ("labels", {"a": "x" * (1 << 16)}),
        ("labels", {str(number): True for number in range(10_000)}),
        ("site", "x" * 2001),
        ("fence", 1 << 31),
        ("config", 5),
    ],
)
def test_card_that_makes_no_sense_is_refused(field: str, value: Any) -> None:
    with pytest.raises(UsageError):
        card_of(json.dumps({**_CARD.to_json(), field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [("title", "x" * 2001), ("selector", "a," * 1001), ("board", "x" * 2001), ("project", "x" * 2001)],
)
def test_what_others_see_of_an_order_is_short(field: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{field} must be a text of at most"):
        order_of(json.dumps({**_ORDER.to_json(), field: value}))
