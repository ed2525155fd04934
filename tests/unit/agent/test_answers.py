"""Reading any worker message yields a value or a typed error, in bounded memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.agent import answers, forkserver, ipc
from hil.core.instructions import InstructionCounts
from hil.core.placement_reasons import PlacementReason
from hil.core.results import Part
from hil.core.steps import MAX_CALLS, StepCall
from hil.core.tensors import TensorSpec, count_bytes, from_bytes
from hil.errors import ErrorCode, HilError, LoadFailed, RunCrashed, RunFailed, UsageError
from hil.protocol.v1 import agent_pb2 as pb

OPS = ("prepare", "load", "invoke", "profile", "generate")
SPEC = {"name": "x", "dtype": "float32", "shape": [1, "n", None]}
LOADED = {"inputs": [SPEC], "outputs": [], "function": "main", "load_ns": 5}
OUTPUT = {"name": "y", "dtype": "float32", "shape": [2], "at": 0, "bytes": 8}
RAN = {"outputs": [OUTPUT], "placement": [{"device": "cpu", "nodes": 2, "names": ["a", "b"], "elsewhere": False}]}
FILE = {"name": "profile.json", "dtype": "uint8", "shape": [8], "at": 0, "bytes": 8}
PROFILED = {"outputs": [FILE]}
SAID = {"prepare": {}, "load": LOADED, "invoke": RAN, "profile": PROFILED, "generate": RAN}
# Warm-up time, CPU time, peak memory; one start, one end.
TOLD = {"prepare": (), "load": (), "invoke": (3, 4, 5, 1, 2), "profile": (3, 4, 5)}
# The same, and two calls of a decoder: tokens, start, end.
TOLD["generate"] = (*TOLD["invoke"], 4, 10, 20, 1, 20, 25)

numbers = st.integers() | st.floats() | st.sampled_from([-1, 0, 1, 1 << 31, 1 << 32, 1 << 62, 1 << 63, 1 << 64])
leaves = st.none() | st.booleans() | numbers | st.text(max_size=4) | st.sampled_from(["float32", "string", "\ud800"])
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner), max_leaves=6
)


def encoded(ok: object, numbers: Sequence[int] = ()) -> bytes:
    return ipc.join_message(numbers, ipc.encode({"ok": ok}))


def check(answer: answers.Answer, iterations: int) -> None:
    """Check the invariants of a decoded message."""
    if isinstance(answer, answers.Ran):
        end = 0
        for output in answer.outputs:
            assert end <= output.at
            assert output.dtype == "string" or output.size == count_bytes(output.dtype, output.shape)
            end = output.at + output.size
            if output.dtype != "string" and output.size < 1000:
                from_bytes(bytes(output.size), output.dtype, output.shape)
        assert end == answer.size
        assert len(answer.start_ns) == len(answer.end_ns) == iterations
        assert len(answer.calls) <= MAX_CALLS
        for call in answer.calls:
            assert 0 <= call.tokens < 1 << 32 and call.start_ns <= call.end_ns
            pb.StepCall(**vars(call))


def test_read_reply_decodes_worker_messages():
    assert answers.read(encoded({}), "prepare") is None
    spec = TensorSpec("x", "float32", (1, "n", None))
    assert answers.read(encoded(LOADED), "load") == answers.ProgramSignature((spec,), (), "main", 5)
    ran = answers.read(encoded(RAN, TOLD["invoke"]), "invoke", 1)
    placement = (Part("cpu", 2, ("a", "b")),)
    assert ran == answers.Ran((answers.Output("y", "float32", (2,), 0, 8),), (1,), (2,), 3, 4, 5, placement)


COUNTED = {**RAN, "instructions": {"counter": "perf_event", "problem": ""}}


@pytest.mark.parametrize("op", ["invoke", "generate"])
def test_read_reply_decodes_instructions(op):
    calls = TOLD["generate"][len(TOLD["invoke"]) :] if op == "generate" else ()
    ran = answers.read(encoded(COUNTED, (3, 4, 5, 1, 3, 2, 4, 700, 800, *calls)), op, 2)
    assert isinstance(ran, answers.Ran)
    assert (ran.start_ns, ran.end_ns) == ((1, 3), (2, 4))
    assert ran.instructions == InstructionCounts("perf_event", (700, 800))
    assert len(ran.calls) == len(calls) // 3


def test_read_reply_decodes_reason_for_missing_instructions():
    reply = {**RAN, "instructions": {"counter": "", "problem": "no counter"}}
    ran = answers.read(encoded(reply, TOLD["invoke"]), "invoke", 1)
    assert isinstance(ran, answers.Ran) and ran.instructions == InstructionCounts(problem="no counter")


def test_read_reply_reuses_description_with_new_instructions():
    known = answers.Known()
    for count in (700, 800):
        ran = answers.read(encoded(COUNTED, (*TOLD["invoke"], count)), "invoke", 1, known)
        assert isinstance(ran, answers.Ran) and ran.instructions == InstructionCounts("perf_event", (count,))


@pytest.mark.parametrize(
    ("counted", "counts"),
    [
        ({"counter": "perf_event", "problem": ""}, ()),
        ({"counter": "perf_event", "problem": ""}, (0,)),
        ({"counter": "perf_event", "problem": ""}, (7, 7)),
        ({"counter": "unknown", "problem": ""}, (7,)),
        ({"counter": "", "problem": "no counter"}, (7,)),
        ({"counter": "", "problem": "x" * 1001}, ()),
        ({"counter": "perf_event"}, (7,)),
        ([], (7,)),
    ],
)
def test_read_reply_rejects_invalid_instructions(counted, counts):
    with pytest.raises(RunCrashed, match="invalid response from the worker"):
        answers.read(encoded({**RAN, "instructions": counted}, (*TOLD["invoke"], *counts)), "invoke", 1)


def test_read_reply_decodes_calls_of_decoder():
    ran = answers.read(encoded(RAN, TOLD["generate"]), "generate", 1)
    assert isinstance(ran, answers.Ran)
    assert ran.calls == (StepCall(4, 10, 20), StepCall(1, 20, 25))
    whole = answers.read(encoded(RAN, TOLD["invoke"]), "invoke", 1)
    assert replace(ran, calls=()) == whole


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ((1,), "is incomplete"),
        ((1, 2), "is incomplete"),
        ((-1, 2, 3), "the number of tokens is out of range"),
        ((1 << 32, 2, 3), "the number of tokens is out of range"),
        ((1, 2, 3) * (MAX_CALLS + 1), "invalid response"),
    ],
)
def test_read_reply_rejects_invalid_calls(numbers: tuple[int, ...], problem: str):
    with pytest.raises(RunCrashed, match=problem):
        answers.read(encoded(RAN, (*TOLD["invoke"], *numbers)), "generate", 1)


def test_read_reply_rejects_calls_that_run_backwards():
    with pytest.raises(answers.ClockStepped):
        answers.read(encoded(RAN, (*TOLD["invoke"], 1, 3, 2)), "generate", 1)


def test_read_reply_rejects_calls_of_other_operations():
    with pytest.raises(RunCrashed):
        answers.read(encoded(RAN, TOLD["generate"]), "invoke", 1)


def test_read_reply_accepts_most_calls():
    ran = answers.read(encoded(RAN, (*TOLD["invoke"], *(1, 2, 3) * MAX_CALLS)), "generate", 1)
    assert isinstance(ran, answers.Ran) and len(ran.calls) == MAX_CALLS


def test_read_reply_caches_repeated_text_but_not_numbers():
    known = answers.Known()
    runs = [
        answers.read(encoded(ok, numbers), "invoke", 1, known)
        for ok in (RAN, RAN | {"placement": None}, RAN | {"placement": None}, RAN)
        for numbers in ((3, 4, 5, 1, 2), (6, 7, 8, -1, 9))
    ]
    whole = [answers.read(encoded(ok, (3, 4, 5, 1, 2)), "invoke", 1) for ok in (RAN, RAN | {"placement": None})]
    assert runs[::2] == [whole[0], whole[1], whole[1], whole[0]]
    assert [(run.start_ns, run.end_ns, run.peak_bytes) for run in runs[1::2]] == [((-1,), (9,), 8)] * 4
    for numbers in ((), (3, 4, 5), (3, 4, 5, 1, 2, 3), (-3, 4, 5, 1, 2)):
        with pytest.raises(RunCrashed):
            answers.read(encoded(RAN, numbers), "invoke", 1, known)
    # The cache of invoke does not skip the checks of profile.
    with pytest.raises(RunCrashed, match="plain names"):
        answers.read(encoded(RAN, (3, 4, 5)), "profile", 1, known)


def test_read_reply_does_not_cache_long_text():
    known = answers.Known()
    long = {"outputs": [OUTPUT | {"name": "y" * 10_000}]}
    assert isinstance(answers.read(encoded(long, (3, 4, 5, 1, 2)), "invoke", 1, known), answers.Ran)
    assert known == answers.Known()


@pytest.mark.parametrize(
    "body", [b"\0", b"\0\1\0\0\0", b"\0\xff\xff\xff\xff{}", ipc.join_message(range(6), b"{}")[:-3]]
)
def test_read_reply_rejects_truncated_or_excess_numbers(body: bytes):
    with pytest.raises(RunCrashed, match="invalid response from the worker"):
        answers.read(body, "invoke", 1)


@given(st.binary(max_size=200), st.sampled_from(OPS), st.integers(0, 3))
def test_read_reply_raises_typed_error_for_any_bytes(body: bytes, op: str, iterations: int):
    try:
        check(answers.read(body, op, iterations), iterations)
    except HilError as error:
        assert isinstance(error, (LoadFailed, RunFailed, RunCrashed, UsageError))


@given(st.data(), st.sampled_from(OPS))
def test_read_reply_raises_typed_error_for_any_json_value(data: st.DataObject, op: str):
    said = json.loads(json.dumps({"ok": SAID[op]}))
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = said
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(place[key], (dict, list)) and place[key] and data.draw(st.booleans()):
                place = place[key]
                continue
            place[key] = data.draw(values)
            break
    try:
        numbers = data.draw(st.just(TOLD[op]) | st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=6))
        check(answers.read(ipc.join_message(numbers, ipc.encode(said)), op, 1), 0 if op == "profile" else 1)
    except HilError as error:
        assert isinstance(error, (LoadFailed, RunFailed, RunCrashed, UsageError))


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", "a\0b", "a\nb", "x" * 300])
def test_read_reply_rejects_profile_file_names_with_paths(name: str):
    assert isinstance(answers.read(encoded(PROFILED, TOLD["profile"]), "profile"), answers.Ran)
    with pytest.raises(RunCrashed, match="plain names"):
        answers.read(encoded({"outputs": [FILE | {"name": name}]}, TOLD["profile"]), "profile")


@pytest.mark.parametrize(
    ("kind", "op", "told"),
    [
        ("LoadFailed", "load", LoadFailed),
        ("RunFailed", "invoke", RunFailed),
        ("UsageError", "invoke", UsageError),
        ("BoardLost", "invoke", RunFailed),
        ("SessionEnded", "load", LoadFailed),
        ("clock", "prepare", LoadFailed),
    ],
)
def test_read_reply_limits_error_types_a_program_may_report(kind: str, op: str, told: type[HilError]):
    body = json.dumps({"error": [kind, "no \udc80 good", "a hint", "detail", "wrong-target"]}).encode()
    with pytest.raises(told, match=r"no \? good") as caught:
        answers.read(body, op)
    assert type(caught.value) is told
    assert (caught.value.hint, caught.value.detail) == ("a hint", "detail")
    assert caught.value.code is ErrorCode.WRONG_TARGET


@pytest.mark.parametrize("text", ["x", "é", "\U0001f4a9", "{[,", "\udc80"])
def test_forkserver_error_fits_message_limit_for_any_text(text: str):
    body = json.dumps(forkserver._build_error(RunFailed, text * 3_000_000, text * 3_000_000, text * 3_000_000)).encode()
    with pytest.raises(RunFailed) as caught:
        answers.read(body, "invoke", 1)
    assert len(body) < ipc.MAX_BYTES
    assert len(caught.value.message) > 60_000


@pytest.mark.parametrize("piece", [b"{},", b'{"a":0},', b"[],", b"0,", b'"",', b"[[],["])
def test_read_reply_bounds_memory_for_many_small_values(piece: bytes):
    body = b"[" + piece * (ipc.MAX_BYTES // len(piece))
    tracemalloc.start()
    try:
        with pytest.raises(RunCrashed, match="invalid response from the worker"):
            answers.read(body, "invoke", 1)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.ci
def test_read_reply_accepts_a_million_iterations():
    times = tuple(range(10**18, 10**18 + 1_000_000))
    body = encoded(RAN, (3, 4, 5, *times, *times))
    assert len(body) < answers.max_response_bytes(1_000_000)
    ran = answers.read(body, "invoke", 1_000_000)
    assert isinstance(ran, answers.Ran)
    assert ran.start_ns == times


REASON = {"text": "no kernel", "nodes": 2, "names": ["a", "b"]}


def read_placement(**changes: Any) -> Any:
    (part,) = RAN["placement"]
    ok = RAN | {"placement": [part | {"elsewhere": True, "reasons": [REASON | changes]}]}
    return answers.read(encoded(ok, TOLD["invoke"]), "invoke", 1).placement


def test_read_reply_decodes_reasons_of_placement():
    (part,) = read_placement()
    assert part.reasons == (PlacementReason("no kernel", 2, ("a", "b")),)


@pytest.mark.parametrize(
    "changes",
    [{"text": "x" * 301}, {"text": 3}, {"nodes": 1 << 32}, {"nodes": -1}, {"names": ["a"] * 201}, {"names": [1]}],
)
def test_read_reply_rejects_invalid_reasons(changes):
    with pytest.raises(RunCrashed, match="invalid response"):
        read_placement(**changes)


def test_read_reply_decodes_device_memory():
    read = [answers.read(encoded(RAN | more, TOLD["invoke"]), "invoke", 1) for more in ({}, {"device_bytes": 9})]
    assert [one.device_bytes for one in read] == [0, 9]
    with pytest.raises(RunCrashed, match="invalid response"):
        answers.read(encoded(RAN | {"device_bytes": -1}, TOLD["invoke"]), "invoke", 1)
