"""Outputs of all distinct answers together have the size limit of one call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hil.controller.devices.agent_client import answers
from hil.controller.devices.agent_client.client import AgentClient
from hil.core.repetition import Answer, Repetition

OUTPUTS = {"y": np.zeros(10, np.float32)}  # 40 bytes
ANSWERS = Repetition((Answer(1, 0, OUTPUTS), *(Answer(1, number) for number in range(1, 5))))


@pytest.mark.parametrize(("limit", "known", "fetched", "limits"), [(130, None, 3, [90, 50]), (130, 45, 3, [45, 45])])
def test_answers_are_fetched_within_limit_of_one_call(
    limit: int, known: int | None, fetched: int, limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def call(start: Any, inputs: Any, into: Any, names: Any, most: int) -> SimpleNamespace:
        asked.append(most)
        return SimpleNamespace(outputs=OUTPUTS)

    client = AgentClient.__new__(AgentClient)
    monkeypatch.setattr(client, "_call", call)
    monkeypatch.setattr(answers, "max_output_bytes", lambda: limit)
    found = client._fetch_recalled("program", ANSWERS, None, known)
    assert [one.outputs is not None for one in found.answers] == [number < fetched for number in range(5)]
    assert asked == limits
