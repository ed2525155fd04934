"""Test who may submit commands, and which boards run them, on a real database."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.farm_desks import ADMIN, ANNA, Desk

from hil.controller.farm.messages import JobResult, JobSpec, Kind, Right
from hil.errors import AccessRefused, NoSuchBoard, UsageError

MAY = replace(ANNA, rights=frozenset({Right.COMMANDS}))
COMMAND = JobSpec(Kind.COMMAND, {"command": ["true"]})


@pytest.fixture
def farm(desk: Desk) -> Desk:
    desk.online("closed", labels={"chip": "a53"})
    desk.online("open", labels={"chip": "a72", "commands": True})
    return desk


def test_commands_need_right(farm: Desk) -> None:
    with pytest.raises(AccessRefused, match="lacks the right commands"):
        farm.submit(specs=(COMMAND,))
    assert farm.submit(specs=(COMMAND,), who=MAY) and farm.submit(specs=(COMMAND,), who=ADMIN)


def test_commands_run_only_on_hosts_that_allow_them(farm: Desk) -> None:
    farm.submit(specs=(COMMAND,), who=MAY)
    farm.submit(specs=(COMMAND,), who=MAY, selector="chip=a72 or chip=a53")
    assert [(one.board, one.spec.kind) for one in farm.grants()] == [("open", Kind.COMMAND)]
    farm.report(farm.grant("open"))
    farm.report(farm.grant("open"))  # the check after the command
    assert [(one.board, one.spec.kind) for one in farm.grants()] == [("open", Kind.COMMAND)]
    with pytest.raises(NoSuchBoard, match="no board matches"):
        farm.submit(specs=(COMMAND,), who=MAY, selector="chip=a53, commands=false")


def test_commands_without_such_host_are_refused(desk: Desk) -> None:
    desk.online("closed")
    with pytest.raises(NoSuchBoard, match="no host of the farm allows commands") as refused:
        desk.submit(specs=(COMMAND,), who=MAY)
    assert "--allow-commands" in refused.value.hint


def test_board_is_checked_after_command(farm: Desk) -> None:
    [name] = farm.submit(specs=(COMMAND,), who=MAY)
    farm.report(farm.grant("open"), JobResult(7, "FAIL", "the command ended with exit code 7", board_ns=(1, 2)))
    assert (farm.jobs()[name], farm.result(name)["exit_code"]) == ("done", 7)
    assert farm.grant("open").spec.kind is Kind.HEALTH


def test_board_is_checked_after_cancelled_command(farm: Desk) -> None:
    [name] = farm.submit(specs=(COMMAND,), who=MAY)
    farm.grant("open")
    farm.cancel(name, who=MAY)
    assert farm.jobs()[name] == "cancelled" and farm.grant("open").spec.kind is Kind.HEALTH


def test_commands_cannot_be_mixed_with_other_jobs(farm: Desk) -> None:
    with pytest.raises(UsageError, match="with other jobs"):
        farm.submit(specs=(JobSpec(Kind.RUN), COMMAND), who=MAY)
