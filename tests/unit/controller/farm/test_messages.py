"""Test the farm's documents, job names and combined exit codes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.controller.farm import rpc
from hil.controller.farm.messages import (
    BoardCard,
    Grant,
    JobResult,
    JobSpec,
    Kind,
    Priority,
    Role,
    Submission,
    format_job_name,
    parse_job,
)
from hil.controller.records.base import Record, make_record
from hil.core.results import choose_exit_code
from hil.errors import UsageError

SPEC = JobSpec(
    Kind.RUN,
    {"models": ["net.onnx"], "dims": {"N": 1}},
    {"net.onnx": "blake3:" + "0" * 64},
    affinity="net",
    title="net",
)
DOCUMENTS = [
    SPEC,
    Submission("net", (SPEC, JobSpec(Kind.LEASE)), "chip=a53", "rpi", Priority.HIGH, 10.0, 1, "nets"),
    JobResult(
        1,
        "FAIL",
        "y differs",
        False,
        {"cases": [{"name": "é"}]},
        {"run.json": "blake3:" + "1" * 64},
        {"open": 0.5},
        (1, 2),
    ),
    Grant(4, "17.3", 9, "rpi", 12, 6.0, 60.0, 2, SPEC, "ada", "00-1-2-01"),
    BoardCard(
        "rpi",
        "lab",
        "bench",
        {"mem": 1 << 30, "runtimes": ["iree"]},
        "[board]",
        "rpi5",
        3,
        True,
        "unix:/a",
        "b",
        ["cycle"],
    ),
]


WIRE = {
    JobSpec: (rpc.encode_spec, rpc.decode_spec),
    Submission: (rpc.encode_submission, rpc.decode_submission),
    JobResult: (rpc.encode_result, rpc.decode_result),
    Grant: (rpc.encode_grant, rpc.decode_grant),
    BoardCard: (rpc.encode_card, rpc.decode_card),
}
STORED = [one for one in DOCUMENTS if isinstance(one, Record)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda one: type(one).__name__)
def test_document_survives_wire_round_trip(document: Any):
    write, read = WIRE[type(document)]
    sent = write(document)
    assert read(type(sent).FromString(sent.SerializeToString())) == document


@pytest.mark.parametrize("document", STORED, ids=lambda one: type(one).__name__)
def test_document_survives_storage_round_trip(document: Record):
    values = json.loads(json.dumps(document.to_json()))
    assert make_record(values, type(document)) == document


@pytest.mark.parametrize("document", STORED, ids=lambda one: type(one).__name__)
def test_document_ignores_unknown_fields(document: Record):
    assert make_record({**document.to_json(), "colour": "green"}, type(document)) == document


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (JobSpec, {}),
        (JobSpec, {"kind": "dance"}),
        (JobResult, {}),
        (JobResult, {"exit_code": 0, "board_ns": 3}),
        (BoardCard, {}),
    ],
)
def test_document_rejects_invalid_values(kind: type[Record], values: dict[str, object]):
    with pytest.raises(UsageError, match="invalid record: "):
        make_record(values, kind)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (JobSpec, {"kind": "health"}),
        (JobSpec, {"kind": "run", "options": {"models": ["net.onnx"]}, "files": {"net.onnx": "blake3:00"}}),
        (JobResult, {"exit_code": 130, "reason": "cancelled by ann"}),
        (JobResult, {"exit_code": 0, "record": {"cases": None}, "timings": {"open": 1}, "board_ns": [0, 5]}),
        (BoardCard, {"name": "rpi", "labels": {"mem": 4, "gpu": True, "runtimes": ["iree"]}, "fence": -1}),
    ],
)
def test_document_of_earlier_version_decodes(kind: type[Record], values: dict[str, Any]):
    document = make_record(values, kind)
    assert {name: document.to_json()[name] for name in values} == values


def test_submission_has_unique_stable_key():
    one, other = Submission("net", (SPEC,)), Submission("net", (SPEC,))
    assert one.key != other.key
    assert rpc.decode_submission(rpc.encode_submission(one)).key == one.key


@pytest.mark.parametrize(
    ("role", "may"),
    [
        (Role.VIEWER, [Role.VIEWER]),
        (Role.SUBMITTER, [Role.VIEWER, Role.SUBMITTER]),
        (Role.HOST, [Role.VIEWER, Role.SUBMITTER, Role.HOST]),
        (Role.ADMIN, list(Role)),
    ],
)
def test_role_covers_lower_roles(role: Role, may: list[Role]):
    assert [one for one in Role if role.covers(one)] == may


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([], 5),
        ([0], 0),
        ([5, 5], 5),
        ([0, 5], 0),
        ([5, 0, 2], 2),
        ([5, 1], 1),
        ([1, 3, 0], 3),
        ([3, 4, 1], 4),
        ([4, 130], 130),
        ([0, 77], 4),
        ([77, 130], 130),
    ],
)
def test_gravest_selects_most_severe_exit_code(codes: list[int], code: int):
    assert choose_exit_code(codes) == code
    assert choose_exit_code(codes[::-1]) == code


@given(st.integers(1, 10**9), st.integers(1, 1000), st.integers(1, 1000))
def test_parse_job_restores_submission_and_number(submission: int, number: int, of: int):
    name = format_job_name(submission, number, of)
    assert parse_job(name) == (submission, None if of == 1 else number)


@pytest.mark.parametrize("text", ["", "x", "17.", ".3", "17.x", "-1", "1.2.3", " 17", "17 ", "1e3", "²", "9" * 5000])
def test_parse_job_rejects_invalid_name(text: str):
    with pytest.raises(UsageError, match="invalid job name"):
        parse_job(text)
