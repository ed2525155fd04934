"""The reported repetition must match the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hil.controller.devices.agent_client.answers import parse_repetition
from hil.errors import ProtocolBroken
from hil.protocol.v1 import agent_pb2 as pb

OUTPUTS = {"y": np.zeros(1, np.float32)}
START = pb.InvokeStart(warmup=1, iterations=3)


def answer(runs: int, first: int, *, kept: bool = True) -> pb.RepeatedAnswer:
    return pb.RepeatedAnswer(runs=runs, first=first, kept=kept)


def done(*answers: pb.RepeatedAnswer, **more: Any) -> pb.InvokeDone:
    return pb.InvokeDone(repetition=pb.Repetition(answers=answers, **more))


def test_repetition_of_older_agent_returns_none():
    assert parse_repetition(pb.InvokeDone(), START, OUTPUTS) is None


def test_repetition_lists_answers_and_differing_outputs():
    found = parse_repetition(done(answer(3, 0), answer(1, 2, kept=False), differing=[0], sampled=True), START, OUTPUTS)
    assert found is not None and found.differing == ("y",) and found.is_sampled
    assert [(one.iterations, one.first, one.outputs, one.is_kept) for one in found.answers] == [
        (3, 0, OUTPUTS, True),
        (1, 2, None, False),
    ]


def test_repetition_of_profile_lacks_outputs():
    start = pb.InvokeStart(warmup=1, iterations=3, profile=pb.ProfilePass())
    assert parse_repetition(done(), start, OUTPUTS) is None
    found = parse_repetition(done(answer(4, 0)), start, OUTPUTS)
    assert found is not None and found.answers[0].outputs is None


@pytest.mark.parametrize(
    "message",
    [
        done(),
        done(answer(3, 0)),
        done(answer(5, 0)),
        done(answer(4, 1)),
        done(answer(4, 0, kept=False)),
        done(answer(3, 0), answer(1, 0)),
        done(answer(4, 0), others=1),
        done(answer(4, 0), answer(0, 1)),
        done(answer(3, 0), answer(1, 2), differing=[1]),
    ],
)
def test_repetition_rejects_answers_not_matching_runs(message: pb.InvokeDone):
    with pytest.raises(ProtocolBroken):
        parse_repetition(message, START, OUTPUTS)


def test_repetition_rejects_too_many_cached_answers():
    start = pb.InvokeStart(iterations=5)
    with pytest.raises(ProtocolBroken):
        parse_repetition(done(*(answer(1, number) for number in range(5))), start, OUTPUTS)
