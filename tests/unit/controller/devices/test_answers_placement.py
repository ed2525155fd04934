"""The placement in an agent's answer has bounded reasons."""

from __future__ import annotations

import pytest

from hil.controller.devices.agent_client.answers import call_of, parse_placement
from hil.core.placement_reasons import PlacementReason
from hil.core.results import Part
from hil.errors import ProtocolBroken
from hil.protocol.v1 import agent_pb2 as pb


def make_reply(*reasons: pb.PlacementReason) -> pb.InvokeReply:
    part = pb.Part(device="CPUExecutionProvider", nodes=2, names=["a", "b"], elsewhere=True, reasons=reasons)
    return pb.InvokeReply(done=pb.InvokeDone(placement=pb.Placement(parts=[part])))


def test_parse_placement_returns_reasons():
    reply = make_reply(pb.PlacementReason(text="no kernel", nodes=2, names=["a", "b"]))
    reasons = (PlacementReason("no kernel", 2, ("a", "b")),)
    done = call_of(reply, 0, None, 1 << 20)
    assert parse_placement(done) == (Part("CPUExecutionProvider", 2, ("a", "b"), True, reasons),)
    assert parse_placement(pb.InvokeDone()) is None


@pytest.mark.parametrize(
    ("reasons", "problem"),
    [
        ([pb.PlacementReason(text="x")] * 21, "21 reasons of a part"),
        ([pb.PlacementReason(text="x" * 301)], "more than 300 characters"),
        ([pb.PlacementReason(text="x", names=["n"] * 101)] * 2, "more than 200 node names"),
    ],
)
def test_call_of_rejects_too_many_reasons(reasons, problem):
    with pytest.raises(ProtocolBroken, match=problem):
        call_of(make_reply(*reasons), 0, None, 1 << 20)
