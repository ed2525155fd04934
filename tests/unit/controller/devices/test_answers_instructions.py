"""The reported instructions must match the call."""

from __future__ import annotations

from typing import Any

import pytest

from hil.controller.devices.agent_client.answers import instructions_of
from hil.core.instructions import InstructionCounts
from hil.errors import ProtocolBroken
from hil.protocol.v1 import agent_pb2 as pb


def done(**values: Any) -> pb.InvokeDone:
    return pb.InvokeDone(instructions=pb.Instructions(**values))


def test_instructions_of_older_agent_are_unknown() -> None:
    assert instructions_of(pb.InvokeDone(), 2) is None


def test_instructions_have_a_count_per_iteration() -> None:
    assert instructions_of(done(counter="runtime", counts=[5, 6]), 2) == InstructionCounts("runtime", (5, 6))


def test_reason_for_missing_instructions_is_one_printable_line() -> None:
    assert instructions_of(done(problem="no\x1b\ncounter"), 2) == InstructionCounts(problem="no  counter")


@pytest.mark.parametrize(
    "message",
    [
        done(),
        done(counter="icount", counts=[5, 6]),
        done(counter="perf_event", counts=[5]),
        done(counter="perf_event", counts=[5, 0]),
        done(counter="perf_event", counts=[5, 1 << 63]),
        done(problem="no counter", counts=[5, 6]),
        done(problem="x" * 1001),
    ],
)
def test_invalid_instructions_are_rejected(message: pb.InvokeDone) -> None:
    with pytest.raises(ProtocolBroken):
        instructions_of(message, 2)
