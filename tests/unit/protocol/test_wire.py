from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from hil.core.steps import PromptFunction, StepRule, StepsPlan
from hil.core.tensors import DTYPES, TensorSpec, to_bytes
from hil.errors import UsageError
from hil.protocol import grpc_calls, wire, wire_steps
from hil.protocol.v1 import agent_pb2 as pb

texts = st.text(max_size=30)
specs = st.builds(
    TensorSpec,
    texts,
    st.sampled_from(DTYPES),
    st.lists(st.one_of(st.integers(0, 2**40), st.text(min_size=1, max_size=5), st.none()), max_size=5).map(tuple),
)


@given(specs)
def test_tensor_spec_survives_message_round_trip(spec):
    sent = pb.TensorSpec.FromString(wire.encode_spec(spec).SerializeToString())
    assert wire.decode_spec(sent) == spec


uints = st.integers(0, 2**32 - 1)
places = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4).map(tuple)
plans = st.builds(
    StepsPlan,
    st.lists(st.tuples(uints, st.sampled_from(StepRule)), max_size=5).map(tuple),
    st.just(((2, 1), (3, 2))),
    shapes=st.tuples(*[st.lists(st.integers(0, 2**64 - 1), max_size=4).map(tuple)] * 2),
    logits=uints,
    steps=uints,
    chunk=uints,
    stop=st.lists(uints, max_size=4).map(tuple),
    bound=uints,
    prompts=st.lists(st.builds(PromptFunction, texts, places, places), max_size=3).map(tuple),
)


@given(plans)
def test_steps_plan_survives_message_round_trip(plan):
    sent = pb.Steps.FromString(wire_steps.encode_steps(plan).SerializeToString())
    assert wire_steps.decode_steps(sent) == plan


@pytest.mark.parametrize("rule", ["", "TOKENS", "tokens ", "x" * 1000])
def test_steps_from_message_rejects_unknown_rule(rule):
    with pytest.raises(UsageError, match="invalid steps") as caught:
        wire_steps.decode_steps(pb.Steps(rules=[pb.InputRule(input=0, rule=rule)]))
    assert len(caught.value.message) < 2000


@given(st.integers(0, 3 * wire.CHUNK + 7))
def test_data_messages_match_protobuf_encoding(size):
    data = memoryview(np.arange(size, dtype=np.uint8).data if size else b"")
    pieces = list(map(grpc_calls.encode, wire.split_pieces(data)))
    assert b"".join(pb.PutRequest.FromString(piece).data for piece in pieces) == bytes(data)
    for piece in pieces[:1] + pieces[-1:]:
        assert piece == pb.PutRequest(data=pb.PutRequest.FromString(piece).data).SerializeToString()


@given(st.binary(max_size=400))
def test_decoder_agrees_with_protobuf(raw):
    decode = partial(grpc_calls.decode, pb.PutRequest)
    try:
        expected = pb.PutRequest.FromString(raw)
    except DecodeError:
        with pytest.raises(DecodeError):
            decode(raw)
        return
    found = decode(raw)
    if expected.WhichOneof("kind") == "data":
        assert bytes(found) == expected.data
    else:
        assert found == expected


@given(st.binary(max_size=300))
def test_decoder_accepts_data_with_any_length_header(payload):
    decode = partial(grpc_calls.decode, pb.GetReply)
    for encoded in (
        pb.GetReply(data=payload).SerializeToString(),
        *map(grpc_calls.encode, wire.split_pieces(memoryview(payload))),
    ):
        assert bytes(decode(encoded)) == payload


@pytest.mark.parametrize("size", [0, 1, wire.INLINE_MAX // 4, wire.INLINE_MAX // 4 + 1])
def test_tensor_message_inlines_or_streams_by_size(size):
    array = np.arange(size, dtype=np.float32)
    data = to_bytes(array)
    message, streamed = wire.encode_tensor("x", "float32", array.shape, data)
    assert streamed == (data.nbytes > wire.INLINE_MAX)
    np.testing.assert_array_equal(wire.decode_tensor(message, data if streamed else None), array)
