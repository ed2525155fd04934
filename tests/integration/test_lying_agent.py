"""A lying agent: the controller ends in time, within memory limits, and blames the agent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from support.lying_agent import LyingAgent, artifact, attack, impatient, many_lies

EXAMPLES = 50


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LyingAgent]:
    with impatient(), LyingAgent(f"unix:{tmp_path_factory.mktemp('liar')}/a.sock") as made:
        yield made


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory):
    return artifact(tmp_path_factory.mktemp("program"))


def test_honest_agent_passes_attack_checks(agent, program):
    assert attack(agent.address, agent, program, {}, 30) == []


@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # shrinking takes longer than reading the example
    suppress_health_check=list(HealthCheck),
)
@given(lies=many_lies)
def test_lying_agent_causes_only_board_errors(agent, program, lies):
    attack(agent.address, agent, program, lies, 60)
